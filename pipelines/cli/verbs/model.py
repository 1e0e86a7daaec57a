"""Verbs that train, run, check and export models."""

import logging
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from indexing.store.errors import InputError
from indexing.store.files import MANIFEST
from indexing.store.remote import url_of
from indexing.store.settings import settings
from pipelines.cli.results import Format, print_result
from pipelines.cli.verbs import datastore as datastore_verbs
from pipelines.cli.verbs.datastore import VerifyOptions
from pipelines.config import Config
from pipelines.launch.in_process import Learning, finetune_quietly, run_training, train_quietly
from pipelines.terminal.output import echo, grouped
from pipelines.terminal.progress import progress
from pipelines.terminal.units import human_bytes
from retro.model_settings import SourceName

log = logging.getLogger("retro")
_WEIGHTS = {".bin", ".ckpt", ".gguf", ".onnx", ".pt", ".pth"}  # formats of other programs


def train(config: Config) -> int:
    """`retro train CONFIG`."""
    return _learn(config, "train", train_quietly)


def finetune(config: Config) -> int:
    """`retro finetune CONFIG`."""
    return _learn(config, "finetune", finetune_quietly)


def _learn(config: Config, name: str, learning: Learning) -> int:
    """Train on Ray, in this process, or in the processes of torchrun. Only rank 0 prints."""
    from pipelines.cli.reports.training_runs import plot_runs
    from pipelines.stages.agreement import check_agreement
    from retro.checkpoints.checkpoint import latest
    from retro.parallel.coordination import joined
    from retro.training.loggers import as_line, readable
    from retro.training.run_folder import read_metrics

    check_agreement(config)
    if config.executor.kind == "ray":
        from pipelines.launch.ray_train import train_on_ray

        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError(
                "executor.kind = 'ray': torchrun or Slurm has started this process as one of several. "
                "Start one process, or set --executor.kind local."
            )
        train_on_ray(config, name, learning)
    else:
        with joined() as rank:
            run_training(config, name, learning) if rank == 0 else learning(config)
        if rank:
            return 0
    echo(as_line(next(filter(None, map(readable, reversed(read_metrics(config.run)))))))
    echo(f"checkpoint: {latest(config.run)}")
    plot_runs([config.run], config.run / "curves.svg")
    echo(f"curves: {config.run / 'curves.svg'}")
    return 0


@settings
class AddRetrievalOptions:
    """Add retrieval to a trained model without training. The model gets a copy head that reads a datastore, fitted with
    a few forward passes over training text. With `--reader decoder`, its self-attention reads neighbors too. All its
    other weights stay the same, so retrieval OFF is the model as it was. The output is one file, which other verbs
    accept as CHECKPOINT.

    MODEL is any decoder of transformers: a folder, a name on the Hugging Face Hub, a `.gguf` file. Then the file has
    the networks of the copy head alone, and names the model."""

    output: Path
    """The file, `NAME.safetensors`."""
    datastore: str = ""
    """Datastore with the stages of the sources, built with the model's tokenizer; the file names it as its own. Empty:
    the datastore of the training run."""
    reader: Literal["", "decoder"] = ""
    """`decoder`: `model.retrieval.reader` of the file, for decoders with RoPE and without cross-attention. Reading k
    neighbors adds about k times the time of the text, until they are cached (docs/how-to/retrofit.md). Empty: as the
    model."""
    k: PositiveInt = 4
    """Neighbors of each chunk in these passes. The file can be used with any number."""
    tokens: PositiveInt = 20_000
    """Number of tokens of training text to read."""
    sources: tuple[SourceName, ...] = ()
    """Sources of the copy head: `neighbors`, the whole `datastore` (its stage `suffixes`), and the own `context`, which
    is copied from with retrieval OFF too, as far as a text earns trust in it. Empty: neighbors and the whole datastore,
    as far as the datastore has them. Without embeddings, neighbors are searched in the sorted prefixes."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` …"""
    overwrite: bool = False
    """Replace an existing file."""


def add_retrieval(path: str, options: AddRetrievalOptions) -> int:
    """`retro add-retrieval CHECKPOINT|MODEL --output FILE.safetensors`."""
    from retro.checkpoints.any_model import open_model
    from retro.data.settings import DataSettings
    from retro.device import choose_inference_placement
    from retro.training import fitted_copy_head

    check_target(options.output, options.overwrite)
    checkpoint = open_model(Path(path))
    if options.output.suffix != ".safetensors":
        raise InputError(f"output = {str(options.output)!r}: the file name must end in .safetensors.")
    folder = options.datastore or checkpoint.folders[0]
    placement = choose_inference_placement(options.device, checkpoint.settings["train"]["precision"])
    with progress("add-retrieval", total=options.tokens, unit="tokens") as advance:
        fit = fitted_copy_head.add_retrieval(
            checkpoint,
            folder,
            options.output,
            placement,
            k=options.k,
            num_tokens=options.tokens,
            names=options.sources,
            reader=options.reader,
            advance=advance,
        )
    reads_neighbors = open_model(options.output).model.retrieves
    if fit.num_tokens:
        echo(
            f"loss on {fit.num_tokens:,} tokens of training text: {fit.off:.3f} OFF, {fit.after:.3f} ON"
            f"{f' with {options.k} neighbors' * reads_neighbors}; `retro eval perplexity` measures held-out text"
        )
    if reads_neighbors:
        echo(f"neighbors: {DataSettings(**checkpoint.neighbor_rules).neighbor_use.rule}")
    echo(f"{options.output}: {human_bytes(options.output.stat().st_size)}, datastore {folder}")
    return 0


@settings
class ReportOptions:
    """Plot loss and held-out bits per byte of one or more runs, finished or running, in one SVG."""

    output: str = ""
    """File to write, `NAME.svg`; empty: `curves.svg` in the run's folder, or for several runs `comparison.svg` in the
    first one."""

    def __post_init__(self) -> None:
        if self.output and Path(self.output).suffix != ".svg":
            raise InputError(f"output = {self.output!r}: must be a file name that ends in .svg.")


def report(runs: list[str], options: ReportOptions) -> int:
    """`retro report RUN [RUN2 …]`."""
    from pipelines.cli.reports.training_runs import plot_runs

    folders = [Path(run) for run in runs]
    path = Path(options.output) if options.output else folders[0] / ("comparison.svg" if folders[1:] else "curves.svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    echo(plot_runs(folders, path).text)
    echo(f"curves: {path}")
    return 0


@settings
class InspectOptions:
    """Print what a datastore or a checkpoint contains."""

    format: Format = "text"
    """Print `text` or `json`."""


def inspect(path: str, options: InspectOptions) -> int:
    """`retro inspect DATASTORE|CHECKPOINT`."""
    if is_checkpoint(Path(path)):
        return inspect_checkpoint(Path(path), options.format)
    if not url_of(path) and not (Path(path) / MANIFEST).exists():
        raise InputError(
            f"{path} is neither a datastore ({MANIFEST} is missing; `retro index CONFIG` builds one) nor a run with a "
            "checkpoint (`retro train CONFIG` makes one)."
        )
    return datastore_verbs.inspect_datastore(Path(path), options.format)


def is_checkpoint(path: Path) -> bool:
    """Whether a path names a checkpoint (complete or not), a run, `RUN@best`, an exported file or networks, and not a
    datastore."""
    named = path.suffix in {".safetensors", ".json"} or path.name.endswith("@best")
    return named or (path / "state.json").exists() or (path / "checkpoints").is_dir()


def inspect_checkpoint(path: Path, form: Format) -> int:
    """Print step, sizes and parameters, then the settings by section."""
    from retro.checkpoints.checkpoint import open_checkpoint
    from retro.model.presets import count_active_parameters, count_parameters
    from retro.model.retro import Retro
    from retro.model.shapes import shapes_only

    opened = open_checkpoint(path)
    with shapes_only():
        model = Retro(opened.model)
    metadata = {
        "path": str(opened.path),
        "fingerprint": opened.fingerprint,
        "step": opened.step,
        "tokens": opened.tokens,
        "parameters": count_parameters(model),
        "parameters_with_embeddings": count_parameters(model, embeddings=True),
        "active_parameters": count_active_parameters(model),
        "datastores": opened.settings["data"]["datastores"],
        "settings": opened.settings,
    }
    print_result(metadata, grouped(_checkpoint_groups(metadata)), form)
    return 0


def _checkpoint_groups(metadata: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The rows of `retro inspect CHECKPOINT` under their headings."""
    rows = [
        ["fingerprint", metadata["fingerprint"]],
        ["step", f"{metadata['step']:,}"],
        ["tokens", f"{metadata['tokens']:,}"],
    ]
    rows.append(
        ["parameters", f"{metadata['parameters']:,} and {metadata['parameters_with_embeddings']:,} with embeddings"]
    )
    if metadata["active_parameters"] != metadata["parameters"]:
        rows.append(["parameters of a token", f"{metadata['active_parameters']:,}"])
    rows.append(["datastores", ", ".join(metadata["datastores"])])
    groups = {metadata["path"]: rows}
    for section, values in metadata["settings"].items():
        groups |= _section_groups(section, values)
    return groups


def _section_groups(path: str, section: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The keys of a section and of the sections in it, under headings as in a TOML file."""
    leaves = [[key, str(value)] for key, value in section.items() if not isinstance(value, dict)]
    groups = {f"[{path}]": leaves} if leaves else {}
    for key, value in section.items():
        if isinstance(value, dict):
            groups |= _section_groups(f"{path}.{key}", value)
    return groups


def verify(path: str, options: VerifyOptions) -> int:
    """`retro verify DATASTORE|CHECKPOINT`: 0 = no errors, 1 = errors."""
    if not is_checkpoint(Path(path)):
        return datastore_verbs.verify(path, options)
    if options.repair:
        raise InputError(
            f"--repair applies only to datastores, and {path} is not one. Remove a broken checkpoint by hand."
        )
    return verify_checkpoints(Path(path))


def verify_checkpoints(path: Path) -> int:
    """Compare the files of a checkpoint, or of all checkpoints of a run, with their sizes and checksums."""
    from retro.checkpoints.any_model import open_model
    from retro.checkpoints.checkpoint import best, finished, locate

    of_run = {*finished(path), best(path)} - {None}
    checkpoints = sorted(filter(None, of_run)) or [locate(path) or (path if path.is_file() else open_model(path).path)]
    broken, size = 0, 0
    for checkpoint in checkpoints:  # the files of each are read on all cores
        size += sum(file.stat().st_size for file in (checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]))
        try:
            open_model(checkpoint)
        except InputError as error:
            broken += 1
            echo(error)
    checked = f"{path}: {len(checkpoints):,} checkpoints, {human_bytes(size)}"
    echo(f"{checked}: {broken:,} broken" if broken else f"{checked}: no errors")
    return int(broken > 0)


@settings
class ExportOptions:
    """Write weights, settings and fingerprints of a checkpoint as one file, which other verbs accept as CHECKPOINT, or
    as a folder for Hugging Face transformers."""

    output: Path
    """A file, `NAME.safetensors`, or a folder in Hugging Face format, any other name."""
    datastore: str = ""
    """Only for a folder: datastore whose tokenizer is copied; empty: the datastore of the training run."""
    tokenizer: str = ""
    """Only for a folder: a Hugging Face tokenizer's folder to copy instead of the datastore's tokenizer."""
    max_shard_size: str = "5GB"
    """Only for a folder: maximum size of a file of weights."""
    peft: bool = False
    """Only for a folder: write only the prefix (`model.attention.prefix_tokens`), as an adapter of peft for the
    imported model."""
    overwrite: bool = False
    """Replace an existing file. A folder must be new or empty."""


def export(checkpoint: str, options: ExportOptions) -> int:
    """`retro export CHECKPOINT --output FILE.safetensors|FOLDER`."""
    from retro.checkpoints.checkpoint import open_checkpoint
    from retro.checkpoints.single_file import export as write_file

    if options.output.suffix in _WEIGHTS:
        raise InputError(
            f"output = {str(options.output)!r}: a file name must end in .safetensors, and a folder name must not end in {options.output.suffix}."
        )
    check_target(options.output, options.overwrite)
    opened = open_checkpoint(Path(checkpoint))
    if options.output.suffix == ".safetensors":
        write_file(opened, options.output)
        size = options.output.stat().st_size
    elif options.peft:
        from retro.huggingface.peft_prefix import write_prefix

        write_prefix(opened, options.output)
        size = sum(file.stat().st_size for file in options.output.iterdir())
    else:
        from retro.huggingface.export import export_folder

        names = {"datastore": options.datastore, "tokenizer": options.tokenizer}
        export_folder(opened, options.output, **names, max_shard_size=options.max_shard_size)
        size = sum(file.stat().st_size for file in options.output.iterdir())
    echo(f"{options.output}: {human_bytes(size)}, step {opened.step:,} of {opened.path}")
    return 0


def check_target(file: Path, overwrite: bool) -> None:
    """Check that a file may be written.

    Raises:
        InputError: the file exists, and `overwrite` is false.
    """
    if file.is_file() and not overwrite:
        raise InputError(f"output = {str(file)!r} exists already. Name another file, or set --overwrite.")
