"""What each verb on models and runs does with its settings: a few lines of calls into the layers below."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import write_json
from pipelines.config import Config
from pipelines.datastore_verbs import inspect_datastore
from pipelines.progress import human_bytes, print_rows, progress
from retro.evaluation import EvaluationSettings
from retro.generation import GenerationSettings
from retro.loggers import as_line

log = logging.getLogger("retro")


def train(config: Config) -> int:
    """`retro train CONFIG`."""
    from pipelines.run_report import write_run_report

    outcome = run_training(config, "train")
    print(as_line(outcome.metrics[-1]))
    print(f"checkpoint: {outcome.checkpoint}")
    write_run_report([config.run], config.run / "report.html")
    print(f"report: {config.run / 'report.html'}")
    return 0


def run_training(config: Config, name: str) -> Any:
    """Train with a progress bar; see `retro.trainer.train`."""
    from retro import trainer

    folders = list(config.data.datastores) or [config.datastore]
    per_step = config.train.batch_size * config.train.accumulation * config.data.sequence_length
    with progress(name, total=config.train.steps * per_step, unit="tokens") as advance:
        return trainer.train(
            config.run, folders, config.model, config.data, config.train, config.evaluation, advance=advance
        )


@dataclass(frozen=True)
class EvalOptions:
    """Bits-per-byte of held-out documents, retrieval OFF and ON."""

    against: str = ""
    """Another checkpoint or run, say the baseline: scored on the same sets and windows, and compared."""
    datastore: str = ""
    """Datastore in place of those of the training run: its held-out documents are scored."""
    leakage_from: str = ""
    """Datastore of the same chunks whose nearest neighbors say what leaks; empty: that of each set."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` …"""
    json: str = ""
    """File to write the results to, with the fingerprints of checkpoints and datastores."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)


def evaluate(checkpoint: str, options: EvalOptions) -> int:
    """`retro eval CHECKPOINT`."""
    from pipelines.eval_report import (
        as_json,
        change_lines,
        leakage_table,
        levels_of,
        measure_checkpoints,
        results_table,
    )
    from retro.checkpoint import open_checkpoint
    from retro.evaluation_sets import open_sets

    settings = options.evaluation
    opened = [open_checkpoint(Path(path)) for path in (checkpoint, options.against) if path]
    folders = [options.datastore] if options.datastore else opened[0].settings["data"]["datastores"]
    k = max(settings.k, default=0) if any(each.model.cca_layers for each in opened) else 0
    sets = open_sets(settings.sets, [Path(folder) for folder in folders], opened[0].model, k)
    if not sets:
        raise InputError(f"{checkpoint}: its datastores hold nothing out; name documents with --evaluation.sets.")
    source = Datastore.open(options.leakage_from) if options.leakage_from else None
    measured = measure_checkpoints(opened, sets, settings, options.device, source)
    levels = [
        level for each, rows in zip(sets, measured, strict=True) for level in levels_of(each, rows, settings, source)
    ]
    table = results_table([each for rows in measured for each in rows])
    print_rows([table.header, *table.rows])
    print("\n".join(change_lines(levels)))
    if any(level.leakage_at_most is not None for level in levels):
        table = leakage_table(levels, [each.label for each in measured[0]])
        print_rows([[], table.header, *table.rows])
    if options.json:
        prints = dict(zip(("checkpoint", "against"), (each.fingerprint for each in opened), strict=False))
        datastores = {each.name: each.datastore.fingerprint for each in sets}
        write_json(Path(options.json), {"fingerprints": prints | {"datastores": datastores}} | as_json(levels))
    return 0


@dataclass(frozen=True)
class ReportOptions:
    """What training runs did, on one page: curves, held-out figures, settings. Also of a run that still goes on."""

    out: str = ""
    """HTML file to write; empty: `report.html` in the run's folder, for several runs `comparison.html` in the first one's."""


def report(runs: list[str], options: ReportOptions) -> int:
    """`retro report RUN [RUN2 …]`."""
    from pipelines.run_report import write_run_report

    folders = [Path(run) for run in runs]
    path = Path(options.out) if options.out else folders[0] / ("comparison.html" if folders[1:] else "report.html")
    print_rows(write_run_report(folders, path))
    print(f"report: {path}")
    return 0


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a prompt, with retrieval at every chunk boundary."""

    prompt: str = ""
    """Text to continue; empty: from the beginning of a document."""
    retrieval: bool = True
    """Whether finished chunks ask the datastore for neighbors."""
    k: int = 2
    """Neighbors of each chunk."""
    datastore: str = ""
    """Datastore to search; empty: the one of the training run."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` …"""
    generation: GenerationSettings = field(default_factory=GenerationSettings)


def generate(checkpoint: str, options: GenerateOptions) -> int:
    """`retro generate CHECKPOINT`."""
    from retro.language_model import LanguageModel

    language_model = LanguageModel.open(
        checkpoint, options.datastore or None, options.device, retrieval=options.retrieval
    )
    print(options.prompt + generate_text(language_model, options))
    return 0


def generate_text(language_model: Any, options: GenerateOptions) -> str:
    """The continuation of a prompt as text."""
    tokenizer = language_model.tokenizer
    prompt = np.concatenate([[tokenizer.bos_id], tokenizer.encode(options.prompt)]).astype(np.int64)
    k = options.k if language_model.retriever is not None else 0
    text = ""
    with progress("generate", total=options.generation.max_tokens, unit="tokens") as advance:
        for (piece,) in language_model.generate([prompt], options.generation, k):
            text += piece.text
            advance(1)
    return text


@dataclass(frozen=True)
class InspectOptions:
    """What a datastore or a checkpoint holds."""


def inspect(path: str, options: InspectOptions) -> int:
    """`retro inspect DATASTORE|CHECKPOINT`."""
    from retro.checkpoint import locate

    if locate(Path(path)) is not None:
        return inspect_checkpoint(Path(path))
    return inspect_datastore(Path(path))


def inspect_checkpoint(path: Path) -> int:
    """Step, sizes, parameters and settings."""
    import torch

    from retro.checkpoint import open_checkpoint
    from retro.model import Retro
    from retro.presets import count_parameters

    opened = open_checkpoint(path)
    with torch.device("meta"):
        model = Retro(opened.model)
    rows = [["checkpoint", str(opened.path)], ["fingerprint", opened.fingerprint]]
    rows += [["step", f"{opened.step:,}"], ["tokens", f"{opened.tokens:,}"]]
    rows.append(
        ["parameters", f"{count_parameters(model):,} and {count_parameters(model, embeddings=True):,} with embeddings"]
    )
    rows.append(["datastores", ", ".join(opened.settings["data"]["datastores"])])
    rows += [
        [f"{section}.{key}", str(value)] for section, values in opened.settings.items() for key, value in values.items()
    ]
    print_rows(rows)
    return 0


@dataclass(frozen=True)
class ExportOptions:
    """Write a checkpoint's weights, settings and fingerprints as one file, which then serves as CHECKPOINT too."""

    to: Path
    """The file, `NAME.safetensors`."""


def export(checkpoint: str, options: ExportOptions) -> int:
    """`retro export CHECKPOINT --to FILE.safetensors`."""
    from retro.checkpoint import export as write
    from retro.checkpoint import open_checkpoint

    opened = open_checkpoint(Path(checkpoint))
    write(opened, options.to)
    print(f"{options.to}: {human_bytes(options.to.stat().st_size)}, step {opened.step:,} of {opened.path}")
    return 0
