"""Checkpoints: artifacts of safetensors and JSON files. Nothing in them is ever unpickled.

    run/checkpoints/00000200/   model.safetensors  optimizer.safetensors  state.json  manifest.json
    run/checkpoints/best.json   step, metric and value of the best evaluation

Several processes each write a part, `model-00001-of-00004.safetensors` …, and read what they need from any part: a
checkpoint can be resumed with another number of processes.

Arguments that name a checkpoint accept its folder, `RUN` (the newest checkpoint of a run), `RUN@best`, or a file
written by `retro export`, which has weights and metadata in one.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired  # pydantic needs these before Python 3.12

import torch
import torch.distributed as dist
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import nn
from typing_extensions import TypedDict

from indexing.machine import Precision
from indexing.progress import during
from indexing.store.artifact import MANIFEST, Recipe, create, read_manifest, remove, verify
from indexing.store.errors import InputError
from indexing.store.files import parse_json, read_json, write_json
from indexing.store.schemas import parsed
from retro.adapters.adapters import add_adapter, merge, stored_name
from retro.adapters.settings import LoraSettings
from retro.checkpoints.tensor_files import check_shapes, check_size, fill, index, save_tensors
from retro.copying.network_file import has_networks
from retro.model.datastore_fit import ADVICE, check_fits
from retro.model.retro import Retro
from retro.model.shapes import shapes_only
from retro.model_settings import ModelSettings, from_json
from retro.parallel.coordination import on_first

FORMAT_VERSION = 3
TRANSFORMERS = "transformers"
"""Section of the settings that names a decoder that transformers computes (`any_model.py`)."""

TensorFiles = dict[str, dict[str, torch.Tensor]]
"""File name → tensor name → tensor: plain tensors, or DTensors with a shard in this process."""

Model = nn.Module | Sequence[nn.Module]
"""A model, or the parts of it that this process holds. A weight in several parts has the same name in each."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's files and metadata.

    Attributes:
        path: the folder, or the exported file.
        weights: files of the weights; for a decoder of transformers the file with networks that were fitted to it, if
            there is one.
        training: files of moments and random states; an exported checkpoint has none.
        fingerprint: identifies the checkpoint in results.
        step: optimizer steps done.
        tokens: tokens trained on.
        model: settings of the model.
        settings: the run's settings by section, as JSON.
        datastores: fingerprints of the datastores it was trained on; empty for an imported model.
        num_ids: number of ids of its tokenizer; rows of the embedding tables beyond them are unused.
        tokenizer: fingerprint of its tokenizer; empty = not recorded, as for an imported model.
        unlogged: sum of the `loss` and number of `steps` since the last line of metrics.
        best: `step`, `metric` and `value` of the best evaluation before the checkpoint was saved, or None. The
            evaluation of its own step usually comes later; it is in `metrics.jsonl`.
        started_from: fingerprint of the checkpoint of `train.init_from`, or None.
        scaler: state of the loss scaler; empty if there was none.
        skipped: number of `steps` skipped because of an overflow, and of `batches` that were not finite.
        mesh_dims: number of processes along each dimension of the mesh; empty if there was one process.
        precision: of the products of its training, not `auto`; None if not recorded.
    """

    path: Path
    weights: tuple[Path, ...]
    training: tuple[Path, ...]
    fingerprint: str
    step: int
    tokens: int
    model: ModelSettings
    settings: dict[str, Any]
    datastores: list[str]
    num_ids: int
    tokenizer: str
    unlogged: dict[str, Any]
    best: dict[str, Any] | None
    started_from: str | None
    scaler: dict[str, Any]
    skipped: dict[str, int]
    mesh_dims: dict[str, int]
    precision: Precision | None

    @property
    def lora(self) -> LoraSettings:
        """The adapter that the files contain."""
        return LoraSettings(**self.settings.get("lora", {}))

    @property
    def of_transformers(self) -> dict[str, str]:
        """`path` and `family` of the decoder that transformers computes; empty for a model of this project."""
        found: dict[str, str] = self.settings.get(TRANSFORMERS, {})
        return found

    @property
    def neighbor_rules(self) -> dict[str, Any]:
        """The settings of [data] that decide which neighbors the run read; without those that its version did not
        have."""
        data = self.settings["data"]
        return {key: data[key] for key in ("neighbor_source", "max_overlap", "seed") if key in data}

    @property
    def folders(self) -> list[str]:
        """Folders or URLs of the datastores that it was trained on.

        Raises:
            InputError: there are none: the model was imported.
        """
        folders: list[str] = self.settings["data"]["datastores"]
        if not folders:
            raise InputError(f"{self.path} was trained on no datastore: name one, built with its tokenizer.")
        return folders

    def check_fits(self, datastore: Mapping[str, Any], source: object, *, tokenizer: str, advice: str = ADVICE) -> None:
        """As `datastore_fit.check_fits`, with the fingerprint of the datastore's tokenizer; an imported model may have
        more rows."""
        num_ids = self.num_ids if self.datastores else 0
        properties = {**datastore, "tokenizer": tokenizer}
        check_fits(self.model, properties, source, num_ids=num_ids, tokenizer=self.tokenizer, advice=advice)

    def reads(self, num_ids: int) -> bool:
        """Whether a tokenizer with this number of ids can be the model's. An imported model may have more rows than
        ids."""
        return num_ids == self.num_ids or (not self.datastores and num_ids <= self.model.vocab_size)


# --- writing -------------------------------------------------------------------------------------------------------


def parts_of(model: Model) -> Sequence[nn.Module]:
    return [model] if isinstance(model, nn.Module) else model


def weights_of(part: nn.Module) -> dict[str, torch.Tensor]:
    """The live weights by their names in files."""
    return {stored_name(name): tensor for name, tensor in part.state_dict().items()}


def parameters_of(model: Model) -> list[tuple[str, nn.Parameter]]:
    return [(stored_name(name), parameter) for part in parts_of(model) for name, parameter in part.named_parameters()]


def write(run: Path, state: dict[str, Any], tensors: TensorFiles, group: dist.ProcessGroup | None = None) -> Path:
    """Write a checkpoint atomically and return its folder. Equal states and tensors give equal bytes.

    Args:
        run: folder of the run; several processes need a shared file system.
        state: the attributes of `Checkpoint` from `step` on, without `model`. The first process writes its own.
        tensors: those of `training_state.tensors_of`, or copies.
        group: the processes that write together; nothing else may use it meanwhile. None = one process.

    Raises:
        OSError: no space left on the device, for example. If one process fails, all raise and nothing remains.
    """
    folder = step_folder(run, state["step"])
    inputs = {str(index): fingerprint for index, fingerprint in enumerate(state["datastores"])}
    if state["started_from"]:
        inputs["init_from"] = state["started_from"]
    recipe = Recipe(
        stage="train",
        version=FORMAT_VERSION,
        settings={"step": state["step"], **state["settings"]},
        inputs=inputs,
    )
    with contextlib.ExitStack() as stack:
        work, counts = on_first(group, lambda: stack.enter_context(create(folder, recipe)))
        for file, values in tensors.items():
            if group is None:
                save_tensors(values, work / file)
            else:
                from retro.checkpoints.sharded_writer import save_parts

                save_parts(values, work / file, group)

        def finish() -> None:
            write_json(work / "state.json", state)
            counts.update({"step": state["step"], "tokens": state["tokens"]})
            stack.close()

        on_first(group, finish)
    return folder


def publish(
    run: Path, state: dict[str, Any], tensors: TensorFiles, *, keep: int, group: dist.ProcessGroup | None = None
) -> None:
    """Write a checkpoint, and `rotate`."""
    write(run, state, tensors, group)
    on_first(group, lambda: rotate(run, state["best"], keep))


def rotate(run: Path, best: dict[str, Any] | None, keep: int) -> None:
    """Name the best checkpoint, and remove all others except the newest `keep`, and leftovers of kills."""
    name_best(run, best)
    remaining = finished(run)[-keep:]
    if best:
        remaining.append(step_folder(run, best["step"]))
    for folder in (run / "checkpoints").iterdir():
        if re.fullmatch(r"\d{8,}|\.\d{8,}(\.[0-9a-f]{8})?\.tmp", folder.name) and folder not in remaining:
            remove(folder)


def name_best(run: Path, best: dict[str, Any] | None) -> None:
    """Write the best evaluation to `checkpoints/best.json`, or remove the file if there is none."""
    file = run / "checkpoints" / "best.json"
    if best:
        write_json(file, best)
    else:
        file.unlink(missing_ok=True)


# --- what is stored in JSON ----------------------------------------------------------------------------------------

_Count = Annotated[int, Field(ge=0, lt=1 << 53)]


class _Data(TypedDict):
    sequence_length: _Count
    datastores: list[Any]


class RunSections(TypedDict):
    """The settings of a run by section: `settings.json`, and `settings` of a checkpoint. The dataclasses of the
    sections check the rest."""

    model: dict[str, Any]
    train: dict[str, Any]
    data: _Data
    lora: NotRequired[dict[str, Any]]
    parallel: NotRequired[dict[str, Any]]


class _Skipped(TypedDict):
    steps: _Count
    batches: _Count


class _Unlogged(TypedDict):
    loss: float
    steps: _Count


class _Best(TypedDict):
    """Also `checkpoints/best.json`."""

    step: _Count
    metric: str
    value: float


class _State(TypedDict):
    """`state.json`. An exported file leaves out what is at its default, and has nothing of the training."""

    step: _Count
    tokens: _Count
    datastores: list[str]
    settings: RunSections
    num_ids: NotRequired[_Count]
    tokenizer: NotRequired[str]
    unlogged: NotRequired[_Unlogged]
    best: NotRequired[_Best | None]
    started_from: NotRequired[str | None]
    scaler: NotRequired[dict[str, float]]
    skipped: NotRequired[_Skipped]
    mesh_dims: NotRequired[dict[str, _Count]]
    precision: NotRequired[Precision]


# --- reading -------------------------------------------------------------------------------------------------------


def load_weights(checkpoint: Checkpoint, model: Model) -> None:
    """Load the weights into a model of the same sizes. Each process reads only its shards.

    Raises:
        InputError: a tensor is missing or has another shape.
    """
    stored = index(checkpoint.weights)
    for part in parts_of(model):
        fill(weights_of(part), stored)


def locate(path: Path) -> Path | None:
    """The path of a checkpoint: `path` itself, the newest one of the run `path`, or the best one for `RUN@best`."""
    if (path / "state.json").exists() or (path.suffix == ".safetensors" and path.is_file()):
        return path
    if path.name.endswith("@best"):
        return best(path.with_name(path.name.removesuffix("@best")))
    return latest(path)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's metadata and verify the checksum of every file.

    Raises:
        InputError: there is none, a file is missing, truncated or changed, or transformers computes the model.
    """
    located = locate(path)
    if has_networks(path):
        raise scores_only(path)
    if located is None:
        raise InputError(
            f"{path} is neither a checkpoint nor a run with one: `retro train CONFIG` makes both. Name the folder of a run (its "
            "newest checkpoint), RUN@best (its best evaluated one), the folder of one checkpoint, or a file written by `retro export` or "
            "`retro add-retrieval`."
        )
    with during("opening %s", located):
        if located.is_file():
            return _read_exported(located)
        problems = verify(located)
        if problems:
            raise InputError(f"{problems[0]}. Remove {located}, or name another checkpoint.")
        return read(located)


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint's metadata without verifying its files.

    Raises:
        InputError: the checkpoint has another format version.
    """
    manifest = read_manifest(folder)
    check_version(folder, manifest["recipe"]["version"])
    weights, training = (
        tuple(folder / name for name in sorted(manifest["files"]) if name.startswith(stem))
        for stem in ("model", "optimizer")
    )
    return of_state(folder, weights, training, manifest["fingerprint"], read_json(folder / "state.json"))


def of_state(
    path: Path, weights: tuple[Path, ...], training: tuple[Path, ...], fingerprint: str, state: dict[str, Any]
) -> Checkpoint:
    """A checkpoint from its metadata, which `write` describes.

    Raises:
        InputError: they are not complete, or do not fit the weights.
    """
    state = dict(parsed(_State, state, path))
    try:
        model, settings = from_json(state["settings"]["model"]), state["settings"]
        LoraSettings(**settings.get("lora", {}))
    except (InputError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: {error}") from error
    stored = index(weights)
    if TRANSFORMERS not in settings:
        check_size(model, len(stored), sum(one.shape.numel() for one in stored.values()), path)
    return Checkpoint(
        path=path,
        weights=weights,
        training=training,
        fingerprint=fingerprint,
        step=state["step"],
        tokens=state["tokens"],
        model=model,
        settings=settings,
        datastores=state["datastores"],
        num_ids=state.get("num_ids", state["settings"]["model"]["vocab_size"]),
        tokenizer=state.get("tokenizer", ""),
        unlogged=state.get("unlogged", {}),
        best=state.get("best"),
        started_from=state.get("started_from"),
        scaler=state.get("scaler", {}),
        skipped=state.get("skipped", {"steps": 0, "batches": 0}),
        mesh_dims=state.get("mesh_dims", {}),
        precision=state.get("precision"),
    )


def load_model(checkpoint: Checkpoint, device: torch.device) -> Retro:
    """The model of a checkpoint in evaluation mode, with LoRA merged into the weights.

    Raises:
        InputError: it has an adapter and peft is not installed.
    """
    with during("loading the weights of %s", checkpoint.path):
        with shapes_only():
            model = Retro(checkpoint.model)
            add_adapter(model, checkpoint.lora)
        check_shapes(weights_of(model), index(checkpoint.weights))  # before memory is allocated for them
        model.to_empty(device=device)
        load_weights(checkpoint, model)
        return (merge(model) if checkpoint.lora.rank else model).eval()


def scores_only(path: Path, family: str = "") -> InputError:
    """The error of what a decoder of transformers, or a file with networks for one, cannot do here."""
    named = f" ({family})" if family else ""
    return InputError(
        f"{path} names a decoder that transformers computes{named}, so it can only score text here. `retro import` reads the families that "
        "this project computes itself; transformers generates with DatastoreLogitsProcessor (docs/how-to/any-model.md)."
    )


# --- the checkpoints of a run --------------------------------------------------------------------------------------


def step_folder(run: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return run / "checkpoints" / f"{step:08d}"


def finished(run: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first. Partly written ones are left out."""
    return sorted(path.parent for path in (run / "checkpoints").glob(f"[0-9]*/{MANIFEST}"))


def latest(run: Path) -> Path | None:
    """The newest finished checkpoint of a run."""
    folders = finished(run)
    return folders[-1] if folders else None


def best(run: Path) -> Path | None:
    """The checkpoint with the lowest held-out bits per byte of a run, as `checkpoints/best.json` has it."""
    file = run / "checkpoints" / "best.json"
    return step_folder(run, parsed(_Best, read_json(file), file)["step"]) if file.exists() else None


# --- one file ------------------------------------------------------------------------------------------------------


def _read_exported(file: Path) -> Checkpoint:
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
    except SafetensorError as error:
        raise InputError(f"{file} is not a complete safetensors file ({error}). Export or copy it again.") from error
    if "retro" not in metadata:
        raise InputError(
            f"{file} has tensors, but not the metadata that `retro export` writes. Export it with `retro export`, or import the model."
        )
    try:
        state = parse_json(metadata["retro"])
        whole = state.pop("checksum") == checksum(state, file)
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise InputError(f"{file} has changed since it was written (checksum). Export or copy it again.")
    check_version(file, state.get("format_version"))
    return of_state(file, (file,), (), str(state.get("fingerprint", "")), state)


def check_version(path: Path, version: Any) -> None:
    """Raise InputError if a checkpoint, an exported file or an exported folder has another format version."""
    if version != FORMAT_VERSION:
        raise InputError(
            f"{path} has format version {version}, but this program reads version {FORMAT_VERSION}. Make it again with the command that "
            "wrote it: `retro train CONFIG` with another `run`, `retro import`, `retro export` or `retro add-retrieval` "
            "(docs/reference/versions.md)."
        )


def checksum(state: dict[str, Any], file: Path) -> str:
    """BLAKE2b-128 of the state and of the tensors of a safetensors file, names and shapes included, metadata not.

    A safetensors file is the length of its header in 8 bytes, the header as JSON, and the tensors' bytes.
    """
    with open(file, "rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        header.pop("__metadata__", None)
        digest = hashlib.blake2b(json.dumps([state, header], sort_keys=True).encode(), digest_size=16)
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
