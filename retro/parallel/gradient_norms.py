"""Gradient norm and clipping for tensors that may be sharded across processes.

    tensors ─ local shards, grouped by the mesh dimensions that shard them ─ measure ─ one all-reduce per group ─ sum

A plain tensor is whole. For a `DTensor`, every process measures its local shard, and results are summed over the mesh
dimensions that shard the tensor, not over those that replicate it. So the result is equal in all processes and
independent of their number.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def squared_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of all entries, float32 [], equal in all processes.

    Args:
        tensors: plain tensors, or DTensors on any meshes, in the same order in every process.
    """
    return totals([list(tensors)], _squares)[0, 0]


@torch.no_grad()
def clip_(parameters: Iterable[Tensor], max_norm: float, norm: Tensor | None = None) -> Tensor:
    """Scale gradients down to a total norm of at most `max_norm`, in place; returns the norm before, [].

    For plain tensors on one device the result is bit-identical to `torch.nn.utils.clip_grad_norm_`, which does not
    support several meshes.

    Args:
        parameters: those without a gradient are skipped.
        max_norm: infinity leaves gradients unchanged.
        norm: norm of the gradients, if known or if other processes hold other parameters; None = compute it.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if norm is None:
        norm = squared_norm(gradients).sqrt()
    if math.isfinite(max_norm) and gradients:
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        parts = [local(gradient) for gradient in gradients]
        for device in dict.fromkeys(part.device for part in parts):
            torch._foreach_mul_([part for part in parts if part.device == device], coefficient.to(device))
    return norm


@torch.no_grad()
def totals(groups: Sequence[Sequence[Tensor]], measure: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Sum a measurement over the whole tensors of each group: [groups, values] in its dtype.

    Args:
        groups: groups of tensors, in the same order in every process. The number of all-reduces does not depend on it.
        measure: function from local shards to values [values] that are additive over shards.
    """
    shards: dict[tuple, dict[int, list[Tensor]]] = {}
    for row, tensors in enumerate(groups):
        for tensor in map(_without_pending_sums, tensors):
            shards.setdefault(_sharded_by(tensor), {}).setdefault(row, []).append(local(tensor))
    sums = [_reduced(sharded_by, rows, len(groups), measure) for sharded_by, rows in shards.items()]
    if not sums:
        return torch.zeros(len(groups), 1)
    return sum((total.to(sums[0].device) for total in sums[1:]), start=sums[0])


def local(tensor: Tensor) -> Tensor:
    """The local shard of a tensor; a plain tensor itself."""
    return tensor.to_local() if _is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def _reduced(
    sharded_by: tuple, rows: dict[int, list[Tensor]], num_rows: int, measure: Callable[[list[Tensor]], Tensor]
) -> Tensor:
    measured = {row: measure(parts) for row, parts in rows.items()}
    zeros = torch.zeros_like(next(iter(measured.values())))
    out = torch.stack([measured.get(row, zeros) for row in range(num_rows)])
    if sharded_by:
        mesh, dimensions = sharded_by
        for dimension in dimensions:
            torch.distributed.all_reduce(out, group=mesh.get_group(dimension))
    return out


def _squares(parts: list[Tensor]) -> Tensor:
    # Norm of norms, as in torch's clipping. The root of a square is bit-identical to what was squared.
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts))).square()[None].float()


def _sharded_by(tensor: Tensor) -> tuple:
    """A DTensor's mesh and the mesh dimensions that shard it; () if this process holds the whole tensor."""
    if not _is_distributed(tensor):
        return ()
    placements = tensor.placements  # type: ignore[attr-defined]
    dimensions = tuple(dimension for dimension, placement in enumerate(placements) if not placement.is_replicate())
    return (tensor.device_mesh, dimensions) if dimensions else ()  # type: ignore[attr-defined]


def _without_pending_sums(tensor: Tensor) -> Tensor:
    """Reduce pending partial sums first: the square of a sum is not the sum of squares."""
    if not _is_distributed(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    placements = tensor.placements  # type: ignore[attr-defined]
    if not any(placement.is_partial() for placement in placements):
        return tensor
    whole = [Replicate() if placement.is_partial() else placement for placement in placements]
    return tensor.redistribute(placements=whole)  # type: ignore[attr-defined]


def _is_distributed(tensor: Tensor) -> bool:
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
