"""The state of training: weights, the optimizer's moments and random states, collected and restored."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from retro.checkpoints.checkpoint import (
    Checkpoint,
    Model,
    TensorFiles,
    load_weights,
    parameters_of,
    parts_of,
    weights_of,
)
from retro.checkpoints.tensor_files import StoredTensor, fill, index, read_tensors
from retro.parallel.coordination import on_all, rank_in


def tensors_of(model: Model, optimizer: torch.optim.Optimizer, rank: int = 0) -> TensorFiles:
    """Collect weights, moments and random states. Weights and moments are the live tensors, not copies.

    Args:
        model: the model, or this process's parts of it.
        optimizer: of the model's parameters.
        rank: of this process; each has its own random state.
    """
    # `state_dict` makes FSDP reshard its parameters, so it comes before `parameters_of`.
    weights = {name: tensor for part in parts_of(model) for name, tensor in weights_of(part).items()}
    parameters = parameters_of(model)
    device = parameters[0][1].device
    training = {_random_state("cpu", rank): torch.get_rng_state()}
    if device.type == "cuda":
        training[_random_state("cuda", rank)] = torch.cuda.get_rng_state(device)
    for name, parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            training[f"{key}/{name}"] = value
    return {"model.safetensors": weights, "optimizer.safetensors": training}


def _random_state(kind: str, rank: int) -> str:
    """The name of a process's random state in the file."""
    return f"rng.{kind}.{rank}" if rank else f"rng.{kind}"


def restore(
    checkpoint: Checkpoint,
    model: Model,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup | None = None,
    *,
    mesh_dims: dict[str, int] | None = None,
    stream: int = 0,
) -> None:
    """Restore weights, optimizer state and random state, to the bit, whatever processes wrote them.

    Args:
        checkpoint: of any number of processes and any kind of parallelism.
        model: of the same sizes, plain or sharded; the whole model or this process's parts.
        optimizer: of the model's parameters; it may be new.
        group: the processes that resume together; each reads what it needs.
        mesh_dims: of these processes, as `Checkpoint.mesh_dims`; None = a single process.
        stream: number of this process's random stream; processes that must drop the same features share one.

    Every process gets its random state back. If the work is divided differently than before, each process is seeded
    from the run's seed, the step and `stream` instead, which affects only dropout.
    """
    on_all(group, lambda: _restore_tensors(checkpoint, model, optimizer))
    _restore_random_state(checkpoint, parameters_of(model)[0][1].device, rank_in(group), mesh_dims or {}, stream)


def _restore_tensors(checkpoint: Checkpoint, model: Model, optimizer: torch.optim.Optimizer) -> None:
    load_weights(checkpoint, model)
    stored = index(checkpoint.training)
    for part in parts_of(model):
        fill(_optimizer_state(optimizer, dict(parameters_of(part)), stored), stored)


def _restore_random_state(
    checkpoint: Checkpoint, device: torch.device, rank: int, mesh_dims: dict[str, int], stream: int
) -> None:
    seed = np.random.SeedSequence([checkpoint.settings["train"]["seed"], checkpoint.step, stream])
    torch.manual_seed(int(seed.generate_state(1, np.uint64)[0]))
    if mesh_dims != checkpoint.mesh_dims:
        return
    names = {_random_state(kind, rank) for kind in ("cpu", device.type)}
    states = read_tensors({name: one for name, one in index(checkpoint.training).items() if name in names})
    for name, state in states.items():
        if name == _random_state("cpu", rank):
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)


def _optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], stored: dict[str, StoredTensor]
) -> dict[str, torch.Tensor]:
    """The optimizer's live state by its names in files. Entries of a new optimizer are allocated first."""
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
