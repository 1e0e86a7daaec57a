"""Cross-entropy of the next token from the last activations, without the logits of a whole batch in memory.

The output layer is the widest of all: 16,384 tokens of a 128k vocabulary are 8 GB of float32 logits, and as much again for
their gradient. So rows are taken a block at a time, and training makes the gradient of a block while its logits are there
(a softmax minus the label), instead of keeping or recomputing them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retro.batches import IGNORED_LABEL


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each label, in nats: float32 [B, T], 0 where the label is ignored. Not for training.

    Args:
        hidden: [B, T, D], from `Retro.hidden`.
        weight: [V, D], `Retro.output_weight`.
        labels: int64 [B, T], the token that follows each; `IGNORED_LABEL` where none counts.
    """
    x, narrow, y = _flat(hidden, weight, labels)
    losses = [_losses(x[rows] @ narrow.T, y[rows])[0] for rows in _blocks(x, len(weight))]
    return torch.cat(losses).view(labels.shape)


def loss(hidden: Tensor, weight: Tensor, labels: Tensor, *, compiled: bool = False) -> Tensor:
    """The mean of the losses over the labels that count; 0, not NaN, where none does.

    Args:
        hidden: [B, T, D]; gradients reach it and the weight.
        weight: [V, D].
        labels: int64 [B, T].
        compiled: fuse the work between the matrix products with `torch.compile`.
    """
    total = _SummedLoss.apply(hidden, weight, labels, compiled)
    return total / (labels != IGNORED_LABEL).sum().clamp(min=1)


class _SummedLoss(torch.autograd.Function):
    """The sum of all losses. Its gradients are made in the forward pass, block by block."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, compiled: bool) -> Tensor:
        x, narrow, y = _flat(hidden, weight, labels)
        total = torch.zeros((), device=x.device)
        to_hidden = torch.empty_like(x)
        to_weight = torch.zeros(weight.shape, device=x.device)  # float32, as blocks add up
        kernel = _compiled_slopes() if compiled else _slopes
        for rows in _blocks(x, len(weight)):
            losses, slopes = kernel(x[rows] @ narrow.T, y[rows])
            total += losses
            torch.mm(slopes, narrow, out=to_hidden[rows])
            to_weight += slopes.T @ x[rows]
        ctx.save_for_backward(to_hidden.view(hidden.shape), to_weight)
        ctx.types = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight = ctx.saved_tensors
        return (to_hidden * upstream[0]).to(ctx.types[0]), (to_weight * upstream[0]).to(ctx.types[1]), None, None


def _flat(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [B·T, D] and the weight [V, D] in the type that autocast multiplies in, and the labels [B·T]."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return hidden.flatten(0, -2).to(dtype), weight.to(dtype), labels.flatten()


def _blocks(x: Tensor, vocab_size: int) -> list[slice]:
    """Equal blocks of rows, so that they compile once."""
    count = -(-len(x) // block_rows(x.device.type, vocab_size))
    size = -(-len(x) // count)
    return [slice(start, start + size) for start in range(0, len(x), size)]


def block_rows(device_type: str, vocab_size: int) -> int:
    """Rows whose float32 logits take 1 GiB of a GPU, or 32 MiB on a CPU, where they stay near its cache.

    But 512 at least: every block reads the whole weight, which must be worth its while.
    """
    return max(512, (1 << 30 if device_type == "cuda" else 1 << 25) // (4 * vocab_size))


def _losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [rows] in float32 and log-probabilities [rows, V] of logits [rows, V]."""
    log_p = logits.float().log_softmax(-1)
    losses = -log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return losses.masked_fill(labels == IGNORED_LABEL, 0.0), log_p


def _slopes(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and its slope by every logit, softmax minus label: [rows, V] of the logits' type."""
    losses, log_p = _losses(logits, labels)
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    slopes = (log_p.exp() - is_label.float()).masked_fill((labels == IGNORED_LABEL)[:, None], 0.0)
    return losses.sum(), slopes.to(logits.dtype)


@functools.cache
def _compiled_slopes() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return torch.compile(_slopes, fullgraph=True, dynamic=False)
