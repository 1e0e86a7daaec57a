"""Checkpoints: finished folders like every other artefact, of safetensors and JSON; nothing in them is ever unpickled.

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
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from indexing.store.artefact import MANIFEST, Recipe, create, read_manifest, remove, verify
from indexing.store.errors import InputError
from indexing.store.files import read_json, sync_folder, write_json
from retro.model import Retro
from retro.model_settings import ModelSettings
from retro.processes import on_all, on_first, rank_in
from retro.tensor_files import Stored, fill, index, read_tensors, save_tensors

FORMAT_VERSION = 1

Tensors = dict[str, dict[str, torch.Tensor]]
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
        datastores: fingerprints of what it was trained on.
        unlogged: sum of the `loss` and number of `steps` since the last line of metrics.
        best: `step`, `metric` and `value` of the best evaluation so far, or None.
        started_from: fingerprint of the checkpoint whose weights the run began with, or None.
        scaler: state of the loss scale; empty where there is none.
        skipped: `steps` that a loss scale has left out, and `batches` that were not finite.
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
    unlogged: dict[str, Any]
    best: dict[str, Any] | None
    started_from: str | None
    scaler: dict[str, Any]
    skipped: dict[str, int]


# --- writing -------------------------------------------------------------------------------------------------------


def tensors_of(model: Model, optimizer: torch.optim.Optimizer, rank: int = 0) -> Tensors:
    """Weights, the optimizer's moments and the random state. All but the random state are the live tensors.

    Args:
        model: the whole or parts of it.
        optimizer: of its parameters.
        rank: number of this process: each has a random state of its own.
    """
    # FSDP gives shards for whole parameters when it is asked for a state: before parameters are asked for by name.
    weights = {name: tensor for part in _parts(model) for name, tensor in part.state_dict().items()}
    parameters = _parameters(model)
    device = parameters[0][1].device
    training = {_random_state("cpu", rank): torch.get_rng_state()}
    if device.type == "cuda":
        training[_random_state("cuda", rank)] = torch.cuda.get_rng_state(device)
    for name, parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            training[f"{key}/{name}"] = value
    return {"model.safetensors": weights, "optimizer.safetensors": training}


def _parts(model: Model) -> Sequence[nn.Module]:
    return [model] if isinstance(model, nn.Module) else model


def _parameters(model: Model) -> list[tuple[str, nn.Parameter]]:
    return [named for part in _parts(model) for named in part.named_parameters()]


def _random_state(kind: str, rank: int) -> str:
    """The name of a process's random state."""
    return f"rng.{kind}.{rank}" if rank else f"rng.{kind}"


def write(run: Path, state: dict[str, Any], tensors: Tensors, group: dist.ProcessGroup | None = None) -> Path:
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
        inputs["start_from"] = state["started_from"]
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
                from retro.parts import save_parts

                save_parts(values, work / file, group)

        def finish() -> None:
            write_json(work / "state.json", state)
            counts.update({"step": state["step"], "tokens": state["tokens"]})
            made.close()

        on_first(group, finish)
    return folder


def publish(
    run: Path, state: dict[str, Any], tensors: Tensors, *, keep: int, group: dist.ProcessGroup | None = None
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


def restore(
    checkpoint: Checkpoint, model: Model, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> None:
    """Put weights, optimizer state and random state back, to the bit, whoever wrote them.

    Args:
        checkpoint: of one process or of several, however they shared out the tensors.
        model: of its sizes, plain or sharded, the whole or parts of it.
        optimizer: of its parameters; it need not have done a step.
        group: of the processes that go on together; each reads what it needs.

    Random states are those of as many processes as wrote. A process beyond them is seeded from seed, step and its number;
    which states fit which shards of data only matters for dropout.
    """
    on_all(group, lambda: _restore(checkpoint, model, optimizer, rank_in(group)))


def _restore(checkpoint: Checkpoint, model: Model, optimizer: torch.optim.Optimizer, rank: int) -> None:
    load_weights(checkpoint, model)
    stored = index(checkpoint.training)
    for part in _parts(model):
        named = dict(part.named_parameters())
        fill(_optimizer_state(optimizer, named, stored), stored)
    device = _parameters(model)[0][1].device
    seed = np.random.SeedSequence([checkpoint.settings["train"]["seed"], checkpoint.step, rank])
    torch.manual_seed(int(seed.generate_state(1, np.uint64)[0]))
    names = [_random_state(kind, rank) for kind in ("cpu", "cuda")]
    cpu, cuda = (read_tensors({name: stored[name]})[name] if name in stored else None for name in names)
    if cpu is not None:
        torch.set_rng_state(cpu)
    if cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(cuda, device)


def _optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], stored: dict[str, Stored]
) -> dict[str, torch.Tensor]:
    """The optimizer's live state of parameters by the names of files; what is stored and not yet there is made first."""
    state = {}
    for full_name, one in stored.items():
        key, _, name = full_name.partition("/")
        if name not in parameters:
            continue
        parameter = parameters[name]
        values = optimizer.state[parameter]
        if key not in values and one.shape == parameter.shape:
            values[key] = torch.zeros_like(parameter, dtype=one.dtype, requires_grad=False)
        elif key not in values:  # `step`
            on = parameter.device if optimizer.defaults.get("fused") or optimizer.defaults.get("capturable") else "cpu"
            values[key] = torch.zeros(one.shape, dtype=one.dtype, device=on)
        state[full_name] = values[key]
    return state


def load_weights(checkpoint: Checkpoint, model: Model) -> None:
    """Load the weights into a model of the checkpoint's sizes; each process reads what it holds.

    Raises:
        InputError: a tensor has another name or shape.
    """
    stored = index(checkpoint.weights)
    for part in _parts(model):
        fill(dict(part.state_dict()), stored)


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
    manifest = read_manifest(folder)
    weights, training = (
        tuple(folder / name for name in sorted(manifest["files"]) if name.startswith(stem))
        for stem in ("model", "optimizer")
    )
    return _checkpoint(folder, weights, training, manifest["fingerprint"], read_json(folder / "state.json"))


def _checkpoint(
    path: Path, weights: tuple[Path, ...], training: tuple[Path, ...], fingerprint: str, state: dict[str, Any]
) -> Checkpoint:
    settings = {**state["settings"]["model"]}
    settings |= {key: tuple(value) for key, value in settings.items() if isinstance(value, list)}
    return Checkpoint(
        path=path,
        weights=weights,
        training=training,
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
    tensors = read_tensors(index(checkpoint.weights))
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        save_tensors(tensors, temporary)
        state["checksum"] = _checksum(state, temporary)
        # One entry: safetensors writes several in any order.
        save_tensors(tensors, temporary, {"retro": json.dumps(state, sort_keys=True)})
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
    return _checkpoint(file, (file,), (), state["fingerprint"], state)


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
