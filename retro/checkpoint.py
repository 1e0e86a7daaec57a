"""Checkpoints: finished folders like every other artefact, of safetensors and JSON; nothing in them is ever unpickled.

    run/checkpoints/00000200/   model.safetensors  optimizer.safetensors  state.json  manifest.json
    run/checkpoints/best.json   step, metric and value of the best evaluation

Where a checkpoint is asked for, its folder may be named, or `RUN` for the newest one of a run, or `RUN@best`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from indexing.store.artefact import MANIFEST, Recipe, create, read_manifest, remove, verify
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_json
from retro.model import ModelSettings, Retro

FORMAT_VERSION = 1

Tensors = dict[str, dict[str, torch.Tensor]]
"""Tensors by the file that holds them, and by name."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of itself.

    Attributes:
        folder: where it lies.
        step: optimizer steps done.
        tokens: tokens seen.
        model: the sizes of the model.
        settings: everything the run was told, section by section.
        datastores: fingerprints of what it was trained on.
        unlogged: sum of the `loss` and number of `steps` since the last line of metrics.
        best: `step`, `metric` and `value` of the best evaluation so far, or None.
    """

    folder: Path
    step: int
    tokens: int
    model: ModelSettings
    settings: dict[str, Any]
    datastores: list[str]
    unlogged: dict[str, Any]
    best: dict[str, Any] | None


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
        state: step, tokens, settings, datastores, unlogged and best, as in `Checkpoint`.
        tensors: from `tensors_of`, or copies of them.
    """
    folder = step_folder(run, state["step"])
    recipe = Recipe(
        stage="train",
        version=FORMAT_VERSION,
        settings={"step": state["step"], **state["settings"]},
        inputs={str(number): made_of for number, made_of in enumerate(state["datastores"])},
    )
    with create(folder, recipe) as (work, counts):
        for file, values in tensors.items():
            save_file({name: tensor.contiguous() for name, tensor in values.items()}, work / file)
        write_json(work / "state.json", state)
        counts |= {"step": state["step"], "tokens": state["tokens"]}
    return folder


def publish(run: Path, state: dict[str, Any], tensors: Tensors, *, keep: int) -> None:
    """`write`, name the best checkpoint, and remove all others but the newest `keep`."""
    write(run, state, tensors)
    name_best(run, state["best"])
    for folder in finished(run)[:-keep]:
        if not state["best"] or folder != step_folder(run, state["best"]["step"]):
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
    tensors = load_file(checkpoint.folder / "optimizer.safetensors")
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
    model.load_state_dict(load_file(checkpoint.folder / "model.safetensors"))


def locate(path: Path) -> Path | None:
    """Where a checkpoint lies: `path` itself, the newest one of the run `path`, or the best one of `RUN@best`."""
    if (path / "state.json").exists():
        return path
    if path.name.endswith("@best"):
        return best(path.with_name(path.name.removesuffix("@best")))
    return latest(path)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, which `locate` finds.

    Raises:
        InputError: there is none, or a file in it is missing, cut short or changed.
    """
    folder = locate(path)
    if folder is None:
        raise InputError(
            f"{path} is neither a checkpoint nor a run with one (RUN), or with one that was evaluated (RUN@best); "
            "`retro train CONFIG` makes them."
        )
    problems = verify(folder)
    if problems:
        raise InputError(f"{problems[0]}. Remove {folder}, or name another checkpoint.")
    return read(folder)


def read(folder: Path) -> Checkpoint:
    """What a checkpoint says of itself, taken on trust."""
    state = read_json(folder / "state.json")
    settings = {**state["settings"]["model"]}
    settings |= {key: tuple(value) for key, value in settings.items() if isinstance(value, list)}
    return Checkpoint(
        folder=folder,
        step=state["step"],
        tokens=state["tokens"],
        model=ModelSettings(**settings),
        settings=state["settings"],
        datastores=state["datastores"],
        unlogged=state.get("unlogged", {}),
        best=state.get("best"),
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


def fingerprint_of(checkpoint: Checkpoint) -> str:
    """The checkpoint's fingerprint, to stand beside every result."""
    return str(read_manifest(checkpoint.folder)["fingerprint"])
