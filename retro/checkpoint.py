"""Checkpoints: finished folders like every other artefact, of safetensors and JSON; nothing in them is ever unpickled.

run/checkpoints/00000200/  model.safetensors  optimizer.safetensors  state.json  manifest.json
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
    """

    folder: Path
    step: int
    tokens: int
    model: ModelSettings
    settings: dict[str, Any]
    datastores: list[str]


def save(run: Path, state: dict[str, Any], model: Retro, optimizer: torch.optim.Optimizer) -> Path:
    """Write a checkpoint atomically and return its folder.

    Args:
        run: folder of the run.
        state: step, tokens, settings and datastores, as in `Checkpoint`.
        model: its weights are saved.
        optimizer: its moments are saved, and the random state with them.
    """
    folder = run / "checkpoints" / f"{state['step']:08d}"
    recipe = Recipe(
        stage="train",
        version=FORMAT_VERSION,
        settings={"step": state["step"], **state["settings"]},
        inputs={str(number): fingerprint for number, fingerprint in enumerate(state["datastores"])},
    )
    with create(folder, recipe) as (work, counts):
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, work / "model.safetensors")
        save_file(_optimizer_tensors(model, optimizer), work / "optimizer.safetensors")
        write_json(work / "state.json", state)
        counts |= {"step": state["step"], "tokens": state["tokens"]}
    return folder


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value
    return tensors


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put weights, optimizer state and random state back, to the bit."""
    load_weights(checkpoint, model)
    tensors = load_file(checkpoint.folder / "optimizer.safetensors")
    torch.set_rng_state(tensors["rng.cpu"])
    if torch.cuda.is_available() and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"])
    parameters = dict(model.named_parameters())
    for full_name, tensor in tensors.items():
        key, _, name = full_name.partition("/")
        if name:
            device = "cpu" if key == "step" and not optimizer.defaults.get("fused") else parameters[name].device
            optimizer.state[parameters[name]][key] = tensor.to(device)


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Load the weights into a model of the checkpoint's sizes."""
    model.load_state_dict(load_file(checkpoint.folder / "model.safetensors"))


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint: its folder, or a run's folder, which stands for the run's last one.

    Raises:
        InputError: there is none, or a file in it is missing, cut short or changed.
    """
    folder = path if (path / "state.json").exists() else latest(path)
    if folder is None:
        raise InputError(f"{path} is neither a checkpoint nor a run with one; `retro train CONFIG` makes them.")
    problems = verify(folder)
    if problems:
        raise InputError(f"{problems[0]}. Remove {folder}: an earlier checkpoint of the run is then used.")
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
    )


def load_model(checkpoint: Checkpoint, device: torch.device) -> Retro:
    """The model of a checkpoint, ready to evaluate."""
    with torch.device("meta"):
        model = Retro(checkpoint.model)
    model.to_empty(device=device)
    load_weights(checkpoint, model)
    return model.eval()


def finished(run: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first; what was being written when a run was killed is not one."""
    return sorted(path.parent for path in (run / "checkpoints").glob(f"[0-9]*/{MANIFEST}"))


def latest(run: Path) -> Path | None:
    """The newest finished checkpoint of a run."""
    folders = finished(run)
    return folders[-1] if folders else None


def keep_last(run: Path, count: int) -> None:
    """Remove all but the last `count` checkpoints."""
    for folder in finished(run)[:-count]:
        remove(folder)


def fingerprint_of(checkpoint: Checkpoint) -> str:
    """The checkpoint's fingerprint, to stand beside every result."""
    return str(read_manifest(checkpoint.folder)["fingerprint"])
