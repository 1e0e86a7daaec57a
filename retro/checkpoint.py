"""Checkpoints: finished folders like every other artefact, of safetensors and JSON; nothing in them is ever unpickled.

    run/checkpoints/00000200/   model.safetensors  optimizer.safetensors  state.json  manifest.json
    run/checkpoints/best.json   step, metric and value of the best evaluation

Where a checkpoint is asked for, its folder may be named, or `RUN` for the newest one of a run, or `RUN@best`, or a file
that `export` has written: weights and metadata in one.
"""

import errno
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from indexing.store.artefact import MANIFEST, Recipe, create, read_manifest, remove, verify
from indexing.store.errors import InputError
from indexing.store.files import read_json, sync_folder, write_json
from retro.model import ModelSettings, Retro

FORMAT_VERSION = 1

Tensors = dict[str, dict[str, torch.Tensor]]
"""Tensors by the file that holds them, and by name."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of itself.

    Attributes:
        path: its folder, or the exported file.
        weights: the file that holds its weights.
        fingerprint: to stand beside every result.
        step: optimizer steps done.
        tokens: tokens seen.
        model: the sizes of the model.
        settings: everything the run was told, section by section.
        datastores: fingerprints of what it was trained on.
        unlogged: sum of the `loss` and number of `steps` since the last line of metrics.
        best: `step`, `metric` and `value` of the best evaluation so far, or None.
        started_from: fingerprint of the checkpoint whose weights the run began with, or None.
        scaler: state of the loss scale; empty where there is none.
        skipped: `steps` that a loss scale has left out, and `batches` that were not finite.
    """

    path: Path
    weights: Path
    fingerprint: str
    step: int
    tokens: int
    model: ModelSettings
    settings: dict[str, Any]
    datastores: list[str]
    unlogged: dict[str, Any]
    best: dict[str, Any] | None
    started_from: str | None
    scaler: dict[str, Any]
    skipped: dict[str, int]


# --- writing -------------------------------------------------------------------------------------------------------


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Weights, the optimizer's moments and the random state. All but the random state are the live tensors."""
    device = next(model.parameters()).device
    training = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        training["rng.cuda"] = torch.cuda.get_rng_state(device)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            training[f"{key}/{name}"] = value
    return {"model.safetensors": dict(model.state_dict()), "optimizer.safetensors": training}


def write(run: Path, state: dict[str, Any], tensors: Tensors) -> Path:
    """Write a checkpoint atomically and return its folder. Equal states and tensors give equal bytes.

    Args:
        run: folder of the run.
        state: what `Checkpoint` says, from `step` on and without `model`.
        tensors: from `tensors_of`, or copies of them.
    """
    folder = step_folder(run, state["step"])
    inputs = {str(number): fingerprint for number, fingerprint in enumerate(state["datastores"])}
    if state["started_from"]:
        inputs["start_from"] = state["started_from"]
    recipe = Recipe(
        stage="train",
        version=FORMAT_VERSION,
        settings={"step": state["step"], **state["settings"]},
        inputs=inputs,
    )
    with create(folder, recipe) as (work, counts):
        for file, values in tensors.items():
            save_tensors(values, work / file)
        write_json(work / "state.json", state)
        counts |= {"step": state["step"], "tokens": state["tokens"]}
    return folder


def save_tensors(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """`safetensors.torch.save_file`, with the permissions of any new file instead of the owner's alone.

    Raises:
        OSError: a full disk, a folder that is not there …
    """
    file.touch()
    permissions = file.stat().st_mode
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(file)) from error
    file.chmod(permissions)


def publish(run: Path, state: dict[str, Any], tensors: Tensors, *, keep: int) -> None:
    """`write`, name the best checkpoint, and remove all others but the newest `keep`, and what kills have left."""
    write(run, state, tensors)
    name_best(run, state["best"])
    kept = finished(run)[-keep:]
    if state["best"]:
        kept.append(step_folder(run, state["best"]["step"]))
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


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put weights, optimizer state and random state back, to the bit."""
    load_weights(checkpoint, model)
    tensors = read_tensors(checkpoint.path / "optimizer.safetensors")
    torch.set_rng_state(tensors["rng.cpu"])
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    if device.type == "cuda" and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)
    for full_name, tensor in tensors.items():
        key, _, name = full_name.partition("/")
        if name:
            on_cpu = key == "step" and not optimizer.defaults.get("fused")
            optimizer.state[parameters[name]][key] = tensor if on_cpu else tensor.to(device)


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Load the weights into a model of the checkpoint's sizes."""
    model.load_state_dict(read_tensors(checkpoint.weights))


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by today's names.

    Attentions once had one matrix for keys and values, keys first, and their parameters by head had shorter names.
    """
    out: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        if name.endswith(".key_value.weight"):
            halves = tensor.chunk(2) if tensor.ndim else (tensor, tensor)  # the optimizer's `step` is one number
            out |= {name.replace("key_value", part): half for part, half in zip(("key", "value"), halves, strict=True)}
        elif name.endswith((".smear", ".content_bias", ".distance_bias")):
            out[f"{name}.weight"] = tensor
        else:
            out[name] = tensor
    return out


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
    """What a checkpoint says of itself, taken on trust."""
    fingerprint = read_manifest(folder)["fingerprint"]
    return _checkpoint(folder, folder / "model.safetensors", fingerprint, read_json(folder / "state.json"))


def _checkpoint(path: Path, weights: Path, fingerprint: str, state: dict[str, Any]) -> Checkpoint:
    settings = {**state["settings"]["model"]}
    settings |= {key: tuple(value) for key, value in settings.items() if isinstance(value, list)}
    return Checkpoint(
        path=path,
        weights=weights,
        fingerprint=fingerprint,
        step=state["step"],
        tokens=state["tokens"],
        model=ModelSettings(**settings),
        settings=state["settings"],
        datastores=state["datastores"],
        unlogged=state.get("unlogged", {}),
        best=state.get("best"),
        started_from=state.get("started_from"),
        scaler=state.get("scaler", {}),
        skipped=state.get("skipped", {"steps": 0, "batches": 0}),
    )


def load_model(checkpoint: Checkpoint, device: torch.device) -> Retro:
    """The model of a checkpoint, ready to evaluate."""
    with torch.device("meta"):
        model = Retro(checkpoint.model)
    model.to_empty(device=device)
    load_weights(checkpoint, model)
    return model.eval()


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


def export(checkpoint: Checkpoint, file: Path) -> None:
    """Write the weights as one safetensors file, atomically, that `open_checkpoint` takes; an older one is replaced.

    Its header's metadata hold, under `retro`, JSON: `format_version`, `step`, `tokens`, `settings` (the model's among them),
    fingerprints of the `datastores` and of the checkpoint (`fingerprint`), and a `checksum` of all that and of the tensors.
    Equal checkpoints give equal bytes.

    Raises:
        InputError: the file has another ending than `.safetensors`.
    """
    if file.suffix != ".safetensors":
        raise InputError(f"to = {str(file)!r}: the name must end in .safetensors, by which such a file is known.")
    state = {key: getattr(checkpoint, key) for key in ("step", "tokens", "settings", "datastores", "fingerprint")}
    state["format_version"] = FORMAT_VERSION
    state["checksum"] = _checksum(state, checkpoint.weights)
    metadata = {"retro": json.dumps(state, sort_keys=True)}  # one entry: safetensors writes several in any order
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        save_tensors(load_file(checkpoint.weights), temporary, metadata)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(file.parent)


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
        whole = state.pop("checksum") == _checksum(state, file)
    except (ValueError, KeyError):
        whole = False
    if not whole:
        raise InputError(f"{file} has changed since it was written (checksum). Export it again, or copy it again.")
    if state["format_version"] != FORMAT_VERSION:
        raise InputError(
            f"{file} has format version {state['format_version']}, this program reads {FORMAT_VERSION}: use its version."
        )
    return _checkpoint(file, file, state["fingerprint"], state)


def _checksum(state: dict[str, Any], file: Path) -> str:
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
