"""Cross-entropy of the next token from the last activations, without the logits of a whole batch in memory.

The output layer is the widest of all: 16,384 tokens of a 128k vocabulary are 8 GB of float32 logits, and as much again for
their gradient. So rows are taken a block at a time, and training makes the gradient of a block while its logits are there
(a softmax minus the label), instead of keeping or recomputing them.

The z-loss (Chowdhery et al. 2022, PaLM, section 5) is the square of log Z, the logarithm of the softmax's denominator, times
a weight. It holds logits near 0, which cross-entropy leaves free to drift together until they are too large for bfloat16.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""A label that no loss counts: padding, and the last token of a document."""

_LIFT = 2.0**15
"""Of float16 slopes. They lie between -1 and 1, most of them near 1 over the size of the vocabulary, which float16 does not
tell from 0 any more. The loss scale comes too late for them, as they are made in the forward pass: it is applied to what
`backward` returns, which is float32. A power of two, and below the largest float16."""


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each label, in nats: float32 [B, T], 0 where the label is ignored. Not for training.

    Under autocast the logits are rounded to its type, as generation and `scoring` have them. In bfloat16 that moves the loss of a
    token by a few thousandths of a nat, and the mean of many by less than 0.01%.

    Args:
        hidden: [B, T, D], from `Retro.hidden`.
        weight: [V, D], `Retro.output_weight`.
        labels: int64 [B, T], the token that follows each; `IGNORED_LABEL` where none counts.
    """
    x, narrow, y = _flat(hidden, weight, labels)
    losses = [_losses(x[rows] @ narrow.T, y[rows])[0] for rows in _blocks(x, len(weight))]
    return torch.cat(losses).view(labels.shape)


class Losses(NamedTuple):
    """Means over the labels that count; 0, not NaN, where none does."""

    objective: Tensor  # what training lowers, cross-entropy and z-loss: the only one with gradients
    cross_entropy: Tensor
    z_loss: Tensor  # with its weight


def loss(hidden: Tensor, weight: Tensor, labels: Tensor, *, compiled: bool = False) -> Tensor:
    """The mean cross-entropy, to be lowered by itself; the arguments are those of `losses`."""
    return losses(hidden, weight, labels, compiled=compiled).objective


def losses(hidden: Tensor, weight: Tensor, labels: Tensor, *, z_weight: float = 0.0, compiled: bool = False) -> Losses:
    """What a batch is worth.

    Args:
        hidden: [B, T, D]; gradients reach it and the weight.
        weight: [V, D].
        labels: int64 [B, T].
        z_weight: of the z-loss.
        compiled: fuse the work between the matrix products with `torch.compile`.
    """
    sums = summed_losses(hidden, weight, labels, z_weight=z_weight, compiled=compiled)
    return Losses(*(each / num_labels(labels) for each in sums))


def num_labels(labels: Tensor) -> Tensor:
    """How many labels count, 1 at least."""
    return (labels != IGNORED_LABEL).sum().clamp(min=1)


def summed_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, z_weight: float = 0.0, compiled: bool = False
) -> Losses:
    """`losses` as sums, for who knows the number of labels of the whole."""
    return Losses(*_SummedLosses.apply(hidden, weight, labels, z_weight, compiled))


def that_count(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [N, D] and labels [N] that count, where fewer than half do (fine-tuning has them on answers alone); else all.

    The sums of `summed_losses` are the same, for less work. Their number differs from batch to batch, so not for what is
    compiled; and a GPU waits for it.
    """
    counts = labels != IGNORED_LABEL
    return (hidden[counts], labels[counts]) if 0 < 2 * int(counts.sum()) < labels.numel() else (hidden, labels)


class _SummedLosses(torch.autograd.Function):
    """`Losses` as sums. The gradients of the objective are made in the forward pass, block by block."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, z_weight: float, compiled: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, narrow, y = _flat(hidden, weight, labels)
        cross_entropy, z_loss = torch.zeros((), device=x.device), torch.zeros((), device=x.device)
        # A frozen output layer wants no gradient, and with retrieval OFF a frozen decoder none at all.
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        to_hidden = torch.empty(x.shape, dtype=torch.float32 if x.dtype == torch.float16 else x.dtype, device=x.device)
        to_weight = torch.zeros(weight.shape if wants_weight else (), device=x.device)  # float32, as blocks add up
        kernel = _compiled_slopes() if compiled else _slopes
        for rows in _blocks(x, len(weight)):
            nats, z, slopes = kernel(x[rows] @ narrow.T, y[rows], z_weight)
            cross_entropy += nats
            z_loss += z
            if wants_hidden:
                to_hidden[rows] = _product(slopes, narrow)
            if wants_weight:
                to_weight += _product(slopes.T, x[rows])
        ctx.save_for_backward(to_hidden.view(hidden.shape), to_weight)
        ctx.types = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(cross_entropy, z_loss)
        return cross_entropy + z_loss, cross_entropy, z_loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight = ctx.saved_tensors
        found = zip((to_hidden, to_weight), ctx.types, ctx.needs_input_grad[:2], strict=True)
        return *((each * upstream[0]).to(dtype) if wanted else None for each, dtype, wanted in found), None, None, None


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


def _slopes(logits: Tensor, labels: Tensor, z_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the cross-entropies and of the z-losses, and the slope of both by every logit: [rows, V] of the logits' type.

    The slope of a cross-entropy is softmax minus label, that of log Z is the softmax. Slopes in float16 come `_LIFT` times as
    large; `_product` takes that back.
    """
    losses, log_p = _losses(logits, labels)
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    p, ignored = log_p.exp(), labels == IGNORED_LABEL
    slopes, z_loss = p - is_label.float(), torch.zeros((), device=logits.device)
    if z_weight:
        log_z = (logits[:, 0].float() - log_p[:, 0]).masked_fill(ignored, 0.0)
        slopes, z_loss = slopes + 2 * z_weight * log_z[:, None] * p, z_weight * log_z.square().sum()
    slopes = slopes.masked_fill(ignored[:, None], 0.0)
    return losses.sum(), z_loss, (slopes * _LIFT if logits.dtype == torch.float16 else slopes).to(logits.dtype)


def _product(slopes: Tensor, other: Tensor) -> Tensor:
    """Slopes times a matrix: of their type, but float32 where they are float16, in which sums over many rows overflow."""
    if slopes.dtype != torch.float16:
        return slopes @ other
    with torch.autocast(slopes.device.type, enabled=False):
        if slopes.device.type == "cuda":
            return torch.mm(slopes, other, out_dtype=torch.float32).div_(_LIFT)
        return (slopes.float() @ other.float()).div_(_LIFT)


@functools.cache
def _compiled_slopes() -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_slopes, fullgraph=True, dynamic=False)
