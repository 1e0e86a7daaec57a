"""Sums over whole tensors, of which a process may hold only parts, and clipping by the norm that comes of them.

    tensors ─ local parts, by the mesh dimensions over which they are cut ─ measure ─ one all-reduce each ─ sum

A plain tensor is whole. Of a `DTensor` every process measures its own part, and parts are added over those dimensions of
its mesh that cut it, never over those that hold copies: so the same figure comes out in every process, and with any
number of them.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def squared_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of the squares of all entries, float32 []: of whole tensors, in every process.

    Args:
        tensors: plain ones, or DTensors on one mesh or several, in the same order in every process.
    """
    return totals([list(tensors)], _squares)[0, 0]


@torch.no_grad()
def clip_(parameters: Iterable[Tensor], max_norm: float, norm: Tensor | None = None) -> Tensor:
    """Scale all gradients down together to a norm of `max_norm` where theirs is larger; returns what theirs was, [].

    For plain tensors on one device this is `torch.nn.utils.clip_grad_norm_` to the bit, which refuses several meshes.

    Args:
        parameters: those without a gradient are passed over.
        max_norm: infinity changes nothing.
        norm: of the gradients, where it is known, or where other processes hold other parameters; None: it is taken here.
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
    """What `measure` finds in the whole tensors of each group: [groups, figures] in its type.

    Args:
        groups: of tensors, in the same order in every process. Several cost no more all-reduces than one.
        measure: local parts, one or more, to figures [figures] that add up over parts.
    """
    found: dict[tuple, dict[int, list[Tensor]]] = {}
    for row, tensors in enumerate(groups):
        for tensor in map(_without_pending_sums, tensors):
            found.setdefault(_cut_by(tensor), {}).setdefault(row, []).append(local(tensor))
    sums = [_reduced(cut_by, rows, len(groups), measure) for cut_by, rows in found.items()]
    if not sums:
        return torch.zeros(len(groups), 1)
    return sum((each.to(sums[0].device) for each in sums[1:]), start=sums[0])


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: all of a plain one."""
    return tensor.to_local() if _is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def _reduced(
    cut_by: tuple, rows: dict[int, list[Tensor]], num_rows: int, measure: Callable[[list[Tensor]], Tensor]
) -> Tensor:
    measured = {row: measure(parts) for row, parts in rows.items()}
    zeros = torch.zeros_like(next(iter(measured.values())))
    out = torch.stack([measured.get(row, zeros) for row in range(num_rows)])
    if cut_by:
        mesh, dimensions = cut_by
        for dimension in dimensions:
            torch.distributed.all_reduce(out, group=mesh.get_group(dimension))
    return out


def _squares(parts: list[Tensor]) -> Tensor:
    # The norm of norms, as torch's own clipping takes it; the root of a square is what was squared, to the bit.
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts))).square()[None].float()


def _cut_by(tensor: Tensor) -> tuple:
    """A DTensor's mesh and the dimensions of it that cut the tensor; () where this process holds all of it."""
    if not _is_distributed(tensor):
        return ()
    placements = tensor.placements  # type: ignore[attr-defined]
    dimensions = tuple(number for number, placement in enumerate(placements) if not placement.is_replicate())
    return (tensor.device_mesh, dimensions) if dimensions else ()  # type: ignore[attr-defined]


def _without_pending_sums(tensor: Tensor) -> Tensor:
    """Squares of summands are not those of their sum: what is still to be added up is added up first."""
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
