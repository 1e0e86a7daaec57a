"""Checkpoints: finished folders like every other artifact, of safetensors and JSON; nothing in them is ever unpickled.

    run/checkpoints/00000200/   model.safetensors  optimizer.safetensors  state.json  manifest.json
    run/checkpoints/best.json   step, metric and value of the best evaluation

Several processes write `model-00001-of-00004.safetensors` … instead, each its part, and read what they need of any of
them: a checkpoint does not know how its tensors will be shared out by those who go on from it.

Where a checkpoint is asked for, its folder may be named, or `RUN` for the newest one of a run, or `RUN@best`, or a file
that `export` has written: weights and metadata in one.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from indexing.store.artifact import MANIFEST, Recipe, create, read_manifest, remove, verify
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_json
from retro.checkpoints.tensor_files import fill, index, save_tensors
from retro.model.retro import Retro
from retro.model.settings import ModelSettings
from retro.parallel.coordination import on_first
from retro.tuning.adapters import add_adapter, merge, stored_name
from retro.tuning.settings import TuningSettings

FORMAT_VERSION = 2

TensorFiles = dict[str, dict[str, torch.Tensor]]
"""Tensors by the file that holds them, and by name: plain ones, or DTensors of which this process holds a shard."""

Model = nn.Module | Sequence[nn.Module]
"""A model, or the parts of one that this process holds; what stands in several parts has one name."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of itself.

    Attributes:
        path: its folder, or the exported file.
        weights: the files that hold its weights.
        training: the files that hold moments and random state; an exported checkpoint has none.
        fingerprint: to stand beside every result.
        step: optimizer steps done.
        tokens: tokens seen.
        model: the sizes of the model.
        settings: everything the run was told, section by section.
        datastores: fingerprints of what it was trained on; none of a model that `retro import` has brought.
        num_ids: ids of the tokenizer it was trained with, from 0 on; the rows of its tables beyond them stand for nothing.
        unlogged: sum of the `loss` and number of `steps` since the last line of metrics.
        best: `step`, `metric` and `value` of the best evaluation so far, or None.
        started_from: fingerprint of the checkpoint whose weights the run began with, or None.
        scaler: state of the loss scale; empty where there is none.
        skipped: `steps` that a loss scale has left out, and `batches` that were not finite.
        mesh_dims: number of processes along each dimension of the mesh; empty if there was one process.
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
    unlogged: dict[str, Any]
    best: dict[str, Any] | None
    started_from: str | None
    scaler: dict[str, Any]
    skipped: dict[str, int]
    mesh_dims: dict[str, int]

    @property
    def tuning(self) -> TuningSettings:
        """Which weights were trained, and the adapter that stands beside them in the files."""
        return TuningSettings(**_with_tuples(self.settings.get("tuning", {})))

    @property
    def folders(self) -> list[str]:
        """Of the datastores that it was trained on, or URLs.

        Raises:
            InputError: there is none, as of a model that `retro import` has brought.
        """
        folders: list[str] = self.settings["data"]["datastores"]
        if not folders:
            raise InputError(f"{self.path} was trained on no datastore: name one, built with its tokenizer.")
        return folders

    def reads(self, num_ids: int) -> bool:
        """Whether a tokenizer may be its own, by the number of its ids; an imported model has rows for no fewer."""
        return num_ids == self.num_ids or (not self.datastores and num_ids <= self.model.vocab_size)


# --- writing -------------------------------------------------------------------------------------------------------


def parts_of(model: Model) -> Sequence[nn.Module]:
    return [model] if isinstance(model, nn.Module) else model


def weights_of(part: nn.Module) -> dict[str, torch.Tensor]:
    """The live weights by the names of files."""
    return {stored_name(name): tensor for name, tensor in part.state_dict().items()}


def parameters_of(model: Model) -> list[tuple[str, nn.Parameter]]:
    return [(stored_name(name), each) for part in parts_of(model) for name, each in part.named_parameters()]


def write(run: Path, state: dict[str, Any], tensors: TensorFiles, group: dist.ProcessGroup | None = None) -> Path:
    """Write a checkpoint atomically and return its folder. Equal states and tensors give equal bytes.

    Args:
        run: folder of the run; where several processes write, on a file system that all of them share.
        state: what `Checkpoint` says, from `step` on and without `model`; that of the first process is written.
        tensors: from `tensors_of`, or copies of them.
        group: of the processes that write it together, used by nothing else meanwhile; None = this one writes it alone.

    Raises:
        OSError: no space left …; if one process fails, all of them raise and nothing stays.
    """
    folder = step_folder(run, state["step"])
    inputs = {str(number): fingerprint for number, fingerprint in enumerate(state["datastores"])}
    if state["started_from"]:
        inputs["init_from"] = state["started_from"]
    recipe = Recipe(
        stage="train",
        version=FORMAT_VERSION,
        settings={"step": state["step"], **state["settings"]},
        inputs=inputs,
    )
    with contextlib.ExitStack() as made:
        work, counts = on_first(group, lambda: made.enter_context(create(folder, recipe)))
        for file, values in tensors.items():
            if group is None:
                save_tensors(values, work / file)
            else:
                from retro.checkpoints.sharded_writer import save_parts

                save_parts(values, work / file, group)

        def finish() -> None:
            write_json(work / "state.json", state)
            counts.update({"step": state["step"], "tokens": state["tokens"]})
            made.close()

        on_first(group, finish)
    return folder


def publish(
    run: Path, state: dict[str, Any], tensors: TensorFiles, *, keep: int, group: dist.ProcessGroup | None = None
) -> None:
    """`write`, name the best checkpoint, and remove all others but the newest `keep`, and what kills have left."""
    write(run, state, tensors, group)
    on_first(group, lambda: _rotate(run, state["best"], keep))


def _rotate(run: Path, best: dict[str, Any] | None, keep: int) -> None:
    name_best(run, best)
    kept = finished(run)[-keep:]
    if best:
        kept.append(step_folder(run, best["step"]))
    for folder in (run / "checkpoints").iterdir():
        if re.fullmatch(r"\d{8,}|\.\d{8,}(\.[0-9a-f]{8})?\.tmp", folder.name) and folder not in kept:
            remove(folder)


def name_best(run: Path, best: dict[str, Any] | None) -> None:
    """Let `checkpoints/best.json` say which evaluated checkpoint is the best; without one there is no such file."""
    file = run / "checkpoints" / "best.json"
    if best:
        write_json(file, best)
    else:
        file.unlink(missing_ok=True)


# --- reading -------------------------------------------------------------------------------------------------------


def load_weights(checkpoint: Checkpoint, model: Model) -> None:
    """Load the weights into a model of the checkpoint's sizes; each process reads what it holds.

    Raises:
        InputError: a tensor has another name or shape.
    """
    stored = index(checkpoint.weights)
    for part in parts_of(model):
        fill(weights_of(part), stored)


def locate(path: Path) -> Path | None:
    """Where a checkpoint lies: `path` itself, the newest one of the run `path`, or the best one of `RUN@best`."""
    if (path / "state.json").exists() or (path.suffix == ".safetensors" and path.is_file()):
        return path
    if path.name.endswith("@best"):
        return best(path.with_name(path.name.removesuffix("@best")))
    return latest(path)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, which `locate` finds, after a look at every byte of it.

    Raises:
        InputError: there is none, or a file of it is missing, cut short or changed.
    """
    found = locate(path)
    if found is None:
        raise InputError(
            f"{path} is neither a checkpoint, nor a run with one (RUN), nor one that was evaluated (RUN@best), nor a file "
            "that `retro export` has written; `retro train CONFIG` makes them."
        )
    if found.is_file():
        return _read_exported(found)
    problems = verify(found)
    if problems:
        raise InputError(f"{problems[0]}. Remove {found}, or name another checkpoint.")
    return read(found)


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint's metadata without verifying its files.

    Raises:
        InputError: the checkpoint has another format version.
    """
    manifest = read_manifest(folder)
    _check_version(folder, manifest["recipe"]["version"])
    weights, training = (
        tuple(folder / name for name in sorted(manifest["files"]) if name.startswith(stem))
        for stem in ("model", "optimizer")
    )
    return _checkpoint(folder, weights, training, manifest["fingerprint"], read_json(folder / "state.json"))


def _checkpoint(
    path: Path, weights: tuple[Path, ...], training: tuple[Path, ...], fingerprint: str, state: dict[str, Any]
) -> Checkpoint:
    return Checkpoint(
        path=path,
        weights=weights,
        training=training,
        fingerprint=fingerprint,
        step=state["step"],
        tokens=state["tokens"],
        model=model_settings(state["settings"]["model"]),
        settings=state["settings"],
        datastores=state["datastores"],
        num_ids=state.get("num_ids", state["settings"]["model"]["vocab_size"]),
        unlogged=state.get("unlogged", {}),
        best=state.get("best"),
        started_from=state.get("started_from"),
        scaler=state.get("scaler", {}),
        skipped=state.get("skipped", {"steps": 0, "batches": 0}),
        mesh_dims=state.get("mesh_dims", {}),
    )


def _with_tuples(settings: dict[str, Any]) -> dict[str, Any]:
    """A section as its dataclass takes it: JSON has lists alone."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def model_settings(section: dict[str, Any]) -> ModelSettings:
    """The sizes of a model as `settings.json` and checkpoints hold them."""
    return ModelSettings(**_with_tuples(section))


def load_model(checkpoint: Checkpoint, device: torch.device) -> Retro:
    """The model of a checkpoint, ready to evaluate: with its prefix or prompt, and with LoRA merged into its weights.

    Raises:
        InputError: it has an adapter, and peft is not installed.
    """
    with torch.device("meta"):
        model = Retro(checkpoint.model)
        add_adapter(model, checkpoint.tuning)
    model.to_empty(device=device)
    load_weights(checkpoint, model)
    return (merge(model) if checkpoint.tuning.adapter == "lora" else model).eval()


# --- the checkpoints of a run --------------------------------------------------------------------------------------


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / "checkpoints" / f"{step:08d}"


def finished(run: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first; what was being written when a run was killed is not one."""
    return sorted(path.parent for path in (run / "checkpoints").glob(f"[0-9]*/{MANIFEST}"))


def latest(run: Path) -> Path | None:
    """The newest finished checkpoint of a run."""
    folders = finished(run)
    return folders[-1] if folders else None


def best(run: Path) -> Path | None:
    """The checkpoint with the lowest held-out bits per byte of a run, as `checkpoints/best.json` has it."""
    file = run / "checkpoints" / "best.json"
    return step_folder(run, read_json(file)["step"]) if file.exists() else None


# --- one file ------------------------------------------------------------------------------------------------------


def _read_exported(file: Path) -> Checkpoint:
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
    except SafetensorError as error:
        raise InputError(
            f"{file} is not a whole safetensors file ({error}). Export it again, or copy it again."
        ) from error
    if "retro" not in metadata:
        raise InputError(f"{file} holds tensors but not what model they are of: `retro export` has not written it.")
    try:
        state = json.loads(metadata["retro"])
        whole = state.pop("checksum") == checksum(state, file)
    except (ValueError, KeyError):
        whole = False
    if not whole:
        raise InputError(f"{file} has changed since it was written (checksum). Export it again, or copy it again.")
    _check_version(file, state["format_version"])
    return _checkpoint(file, (file,), (), state["fingerprint"], state)


def _check_version(path: Path, version: int) -> None:
    if version != FORMAT_VERSION:
        raise InputError(
            f"{path} has format version {version}, but this program reads version {FORMAT_VERSION}. Use the release of retro "
            "that wrote it."
        )


def checksum(state: dict[str, Any], file: Path) -> str:
    """BLAKE2b-128 of the state and of the tensors of a safetensors file, names and shapes included, metadata not.

    Such a file is 8 bytes of length, a header of so many bytes of JSON, and the tensors' bytes.
    """
    with open(file, "rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        header.pop("__metadata__", None)
        digest = hashlib.blake2b(json.dumps([state, header], sort_keys=True).encode(), digest_size=16)
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
