"""Muon (Jordan et al. 2024; at scale Liu et al. 2025, arXiv 2502.16982) for the matrices of layers, and AdamW for all
other parameters.

    matrices of layers ─────────── momentum ─ whole matrix ─ orthogonalized ─ own shard ─► update
    embeddings, output layer,
    norms, gates, positions … ──── AdamW ────────────────────────────────────────────────► update

An orthogonal update moves all directions of a matrix by the same amount, also those with small gradients. The products
need whole matrices: where processes hold shards, each gathers one matrix at a time.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from retro.model.mixture_of_experts import ExpertLinear
from retro.parallel.gradient_norms import local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of a x + b (x xᵀ) x + c (x xᵀ)² x, which moves singular values between 0 and 1 to between 0.7 and 1.2 in five steps
(Jordan et al.)."""
STEPS = 5
_TINY = 1e-7
_LONG = 1.5  # columns for a row, from which products of x xᵀ alone are fewer
_SMALL, _BATCH = 1 << 20, 1 << 22  # elements of a matrix, and of all matrices of a batch
_EXCLUDED = ("router", "distance_proj", "lora_A", "lora_B")
"""Modules whose matrices AdamW updates: gates of experts, relative positions, and adapters, whose factors are thin."""


def layer_matrices(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model that Muon updates, by name: [out, in], and those of experts [E, out, in].

    Embeddings are no products of matrices, and the output layer learns rows of rare tokens better with AdamW (Jordan et
    al.).
    """
    return {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | ExpertLinear)
        and name != "head"
        and not any(part in name.split(".") for part in _EXCLUDED)
    }


class Muon(torch.optim.AdamW):
    """AdamW, and Muon for parameter groups whose `orthogonal` is True.

    It is one optimizer, so loss scale, checkpoints and schedules handle both kinds of groups alike. `torch.optim.Muon`
    takes matrices only, neither those of experts nor shards, and multiplies in bfloat16 on every device: on a CPU
    without it a hundred times slower than float32.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], dtype: torch.dtype, **options: Any) -> None:
        """Make the optimizer.

        Args:
            groups: parameter groups with `lr`, `weight_decay` and `orthogonal`, and for Muon `momentum`.
            dtype: of the products that orthogonalize.
            options: of AdamW.
        """
        super().__init__(groups, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> None:  # type: ignore[override]
        """Update all parameters. With `found_inf` of the loss scale nothing changes, without a wait for the device."""
        assert closure is None, "gradients are computed before"
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            matrices = [one for one in group["params"] if one.grad is not None] if group["orthogonal"] else []
            for alike in _batches(matrices):
                self._move(alike, group)

    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update parameters of one shape, all of this group."""
        lr, momentum, skip = group["lr"], group["momentum"], getattr(self, "found_inf", None)
        ahead = [self._ahead(parameter, momentum) for parameter in parameters]
        wholes = [_whole(one, parameter) for one, parameter in zip(ahead, parameters, strict=True)]
        orthogonals = orthogonal(torch.stack(wholes) if len(wholes) > 1 else wholes[0][None], self.dtype)
        kept: float | Tensor = 1 - lr * group["weight_decay"]
        if skip is not None:
            kept = torch.where(skip.bool(), 1.0, kept)
        for parameter, whole in zip(parameters, orthogonals, strict=True):
            update = _shard(whole, parameter)
            update = update.mul_(lr * math.sqrt(max(1.0, parameter.shape[-2] / parameter.shape[-1])))
            if skip is not None:
                update = update.masked_fill_(skip.bool(), 0.0)
            local(parameter).mul_(kept).sub_(update)

    def _ahead(self, parameter: Tensor, momentum: float) -> Tensor:
        """Add the gradient to its running average, and look one step ahead (Nesterov). Of a shard, this process's part."""
        state, skip = self.state[parameter], getattr(self, "found_inf", None)
        assert parameter.grad is not None
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter, requires_grad=False)
        average, gradient = local(state["momentum"]), local(parameter.grad)
        if skip is not None:  # the average moves to itself: it stays
            gradient = average.where(skip.bool(), gradient)
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)


def _batches(matrices: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices of one shape, some at a time: many small products are slower than few large ones. Those that are
    gathered, and large ones, come one at a time, for the memory."""
    alike = defaultdict[torch.Size, list[Tensor]](list)
    for matrix in matrices:
        if _gathers(matrix) or matrix.numel() > _SMALL:
            yield [matrix]
        else:
            alike[matrix.shape].append(matrix)
    for group in alike.values():
        size = max(1, _BATCH // group[0].numel())
        yield from (group[first : first + size] for first in range(0, len(group), size))


def orthogonal(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The orthogonal matrices nearest to some, about: [..., rows, columns], with singular values between 0.7 and 1.2.
    Zeros stay zeros.

    Args:
        matrices: float32 [..., rows, columns].
        dtype: of the products.
    """
    x = matrices.to(dtype).view(-1, *matrices.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the products of the shorter side are smaller
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_TINY)
    if dtype == torch.float32 and x.shape[-1] > _LONG * x.shape[-2]:
        x = _polynomial(x @ x.mT) @ x
    else:
        a, b, c = COEFFICIENTS
        for _ in range(STEPS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype, copy=True).view(matrices.shape)


def _polynomial(gram: Tensor) -> Tensor:
    """What all steps multiply x with, from x xᵀ [..., rows, rows]: 25 instead of 45 products of its size where x is four
    times as long. Squares of small singular values need the digits of float32."""
    a, b, c = COEFFICIENTS
    product: Tensor | None = None
    for step in range(STEPS):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
        if step < STEPS - 1:
            gram = factor @ gram @ factor
    assert product is not None
    return product


def _gathers(parameter: Tensor) -> bool:
    """Whether a process lacks a part of the matrices that it updates. Experts that are whole need no other process."""
    if local(parameter) is parameter:
        return False
    placements = parameter.placements  # type: ignore[attr-defined]
    return any(not each.is_replicate() and (parameter.ndim == 2 or each.dim != 0) for each in placements)


def _whole(shard: Tensor, parameter: Tensor) -> Tensor:
    """The whole matrix from this process's shard and those of the others, on the device of the parameter's mesh."""
    if not _gathers(parameter):
        return shard
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    placed = shard.to(mesh.device_type)  # an offloaded one is in the host's memory
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(placed, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()


def _shard(whole: Tensor, parameter: Tensor) -> Tensor:
    """This process's shard of a whole matrix, as of a parameter."""
    if not _gathers(parameter):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    shard = replicated.redistribute(placements=parameter.placements).to_local()  # type: ignore[attr-defined]
    return shard.to(local(parameter).device)
