"""Cross-entropy of the next token from the last activations, without the logits of a whole batch in memory.

With a 128k vocabulary, 16,384 tokens have 8 GB of float32 logits, and their gradient is as large. So the loss processes a
block of rows at a time. In training, the forward pass also computes the gradient of the block (softmax minus label), so logits
are neither kept nor recomputed.

With a copy head the probability of a label is that of a mixture (`Mixture`), which trains the copy head, and the plain
cross-entropy trains the vocabulary, as without a copy head. With the mixture's gradient the vocabulary would learn little from
tokens that can be copied, and be worse with and without copying (docs/explanation/copy-head.md).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""Label of positions without a loss: padding, and the last token of a document."""

_FLOAT16_SCALE = 2.0**15
"""Scale of float16 gradients of logits. They are between -1 and 1, most of them about 1 / vocabulary, which underflows in
float16. The loss scale cannot prevent it: gradients of logits are computed in the forward pass, and the loss scale applies to
what `backward` returns, which is float32. A power of two below the largest float16."""


class Mixture(NamedTuple):
    """The copied part of a mixture p = keep · softmax(logits) + copied, for each label.

    Attributes:
        log_keep: log of the share that the vocabulary keeps, float32 [B, T].
        copied: probability with which copying gives the label, times the share of copying, float32 [B, T].
    """

    log_keep: Tensor
    copied: Tensor


@torch.no_grad()
def token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, product: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Cross-entropy of each label with the vocabulary alone, in nats: float32 [B, T], 0 for ignored labels. Without gradients.

    Under autocast, logits are rounded to its dtype, as in generation and `scoring`. In bfloat16 this changes the loss of a token
    by a few thousandths of a nat, and the mean of many tokens by less than 0.01%.

    Args:
        hidden: [B, T, D], from `Retro.hidden`.
        weight: [V, D], `Retro.output_weight`.
        labels: int64 [B, T], the next token at each position, or `IGNORED_LABEL`.
        product: a faster product of rows [n, D] and the weight.
    """
    if product is None:
        x, narrow, y = _flat(hidden, weight, labels)
    else:
        x, y = hidden.flatten(0, -2), labels.flatten()
    losses = [
        _losses(product(x[rows]) if product else x[rows] @ narrow.T, y[rows], None)[0]
        for rows in _blocks(x, len(weight))
    ]
    return torch.cat(losses).view(labels.shape)


def mixed_losses(nats: Tensor, mixture: Mixture) -> Tensor:
    """Losses of labels with a mixture, from those with the vocabulary alone; the shapes are equal."""
    return -torch.logaddexp(mixture.log_keep - nats, mixture.copied.clamp(min=torch.finfo(torch.float32).tiny).log())


def loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, mixture: Mixture | None = None, *, compiled: bool = False
) -> Tensor:
    """Mean cross-entropy over labels that are not ignored, with gradients; 0 if all are ignored.

    With a mixture, the value is the cross-entropy of the mixture, and the gradients of `hidden` and `weight` are those of the
    vocabulary's cross-entropy.

    Args:
        hidden: [B, T, D].
        weight: [V, D].
        labels: int64 [B, T].
        mixture: from `Retro.mixture`; None = the vocabulary alone.
        compiled: fuse the operations between matrix products with `torch.compile`.
    """
    return summed_loss(hidden, weight, labels, mixture, compiled=compiled) / num_labels(labels)


def num_labels(labels: Tensor) -> Tensor:
    """Number of labels that are not ignored, at least 1."""
    return (labels != IGNORED_LABEL).sum().clamp(min=1)


def summed_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, mixture: Mixture | None = None, *, compiled: bool = False
) -> Tensor:
    """`loss` as a sum, for callers that divide by the number of labels in several batches."""
    total: Tensor = _SummedLoss.apply(hidden, weight, labels, compiled, *(mixture or (None, None)))
    return total


def without_ignored(
    hidden: Tensor, labels: Tensor, mixture: Mixture | None = None
) -> tuple[Tensor, Tensor, Mixture | None]:
    """Drop positions with ignored labels, if they are more than half: activations [N, D], labels [N] and the same of the mixture.

    In fine-tuning only answers have labels. `summed_loss` stays the same, for less work. N differs between batches,
    so this is unsuited to compiled code and to GPUs, where the host would wait for N.
    """
    counts = labels != IGNORED_LABEL
    if not 0 < 2 * int(counts.sum()) < labels.numel():
        return hidden, labels, mixture
    return hidden[counts], labels[counts], mixture and Mixture(*(values[counts] for values in mixture))


class _SummedLoss(torch.autograd.Function):
    """The sum of cross-entropies. The forward pass computes its gradients, block by block."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        compiled: bool,
        log_keep: Tensor | None,
        copied: Tensor | None,
    ) -> Tensor:
        x, narrow, y = _flat(hidden, weight, labels)
        mixture = None if log_keep is None or copied is None else Mixture(log_keep.detach(), copied.detach())
        total = torch.zeros((), device=x.device)
        # A frozen output layer needs no gradient; with retrieval OFF, a frozen decoder needs none at all.
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        to_hidden = torch.empty(x.shape, dtype=torch.float32 if x.dtype == torch.float16 else x.dtype, device=x.device)
        to_weight = torch.zeros(weight.shape if needs_weight else (), device=x.device)  # float32: blocks are summed
        to_mixture = torch.empty(2, len(x) if mixture else 0, device=x.device)
        kernel = _compiled_logit_gradients() if compiled else _logit_gradients
        for rows in _blocks(x, len(weight)):
            nats, gradients, of_mixture = kernel(x[rows] @ narrow.T, y[rows], _rows(mixture, rows))
            total += nats
            if needs_hidden:
                to_hidden[rows] = _product(gradients, narrow)
            if needs_weight:
                to_weight += _product(gradients.T, x[rows])
            if of_mixture is not None:
                to_mixture[:, rows] = of_mixture
        shape = labels.shape if mixture else (0,)
        ctx.save_for_backward(to_hidden.view(hidden.shape), to_weight, *(values.view(shape) for values in to_mixture))
        ctx.types = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = zip(ctx.saved_tensors, (*ctx.types, torch.float32, torch.float32), strict=True)
        to_hidden, to_weight, *to_mixture = ((gradient * upstream).to(dtype) for gradient, dtype in gradients)
        all_gradients = to_hidden, to_weight, None, None, *to_mixture
        return tuple(
            gradient if needed else None for gradient, needed in zip(all_gradients, ctx.needs_input_grad, strict=True)
        )


def _rows(mixture: Mixture | None, rows: slice) -> Mixture | None:
    """A block of rows."""
    return mixture and Mixture(*(values.flatten()[rows] for values in mixture))


def _flat(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [B·T, D] and the weight [V, D] in the dtype of autocast, and the labels [B·T]."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return hidden.flatten(0, -2).to(dtype), weight.to(dtype), labels.flatten()


def _blocks(x: Tensor, vocab_size: int) -> list[slice]:
    """Blocks of equal size, so the kernel compiles once."""
    count = -(-len(x) // block_rows(x.device.type, vocab_size))
    size = -(-len(x) // count)
    return [slice(start, start + size) for start in range(0, len(x), size)]


def block_rows(device_type: str, vocab_size: int) -> int:
    """Number of rows with 1 GiB of float32 logits on a GPU, or 32 MiB on a CPU, which stay near its cache.

    At least 512, since every block reads the whole weight.
    """
    return max(512, (1 << 30 if device_type == "cuda" else 1 << 25) // (4 * vocab_size))


def _losses(logits: Tensor, labels: Tensor, mixture: Mixture | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses of rows of logits [rows, V], in float32.

    Returns:
        The losses [rows], the vocabulary's log-probabilities [rows, V], and the log of its part in the probability of each label
        [rows], None without a mixture.
    """
    log_p = logits.float().log_softmax(-1)
    losses, kept = -log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0], None
    if mixture is not None:
        of_vocabulary = mixture.log_keep - losses
        losses = mixed_losses(losses, mixture)
        kept = of_vocabulary + losses
    return losses.masked_fill(labels == IGNORED_LABEL, 0.0), log_p, kept


def _logit_gradients(logits: Tensor, labels: Tensor, mixture: Mixture | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The sum of cross-entropies, its gradient for every logit [rows, V] in the logits' dtype, and that for the mixture [2, rows].

    The gradient is softmax minus label, that of the vocabulary's cross-entropy. Float16 gradients are multiplied by
    `_FLOAT16_SCALE`; `_product` divides by it.
    """
    losses, log_p, kept = _losses(logits, labels, mixture)
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    ignored, to_mixture = labels == IGNORED_LABEL, None
    gradients = log_p.exp() - is_label.float()
    if kept is not None:
        to_mixture = -torch.stack((kept.exp(), losses.exp())).masked_fill(ignored, 0.0)
    gradients = gradients.masked_fill(ignored[:, None], 0.0)
    scaled = gradients * _FLOAT16_SCALE if logits.dtype == torch.float16 else gradients
    return losses.sum(), scaled.to(logits.dtype), to_mixture


def _product(gradients: Tensor, other: Tensor) -> Tensor:
    """Gradients of logits times a matrix, in their dtype; in float32 if they are float16, where sums of many rows overflow."""
    if gradients.dtype != torch.float16:
        return gradients @ other
    with torch.autocast(gradients.device.type, enabled=False):
        if gradients.device.type == "cuda":
            return torch.mm(gradients, other, out_dtype=torch.float32).div_(_FLOAT16_SCALE)
        return (gradients.float() @ other.float()).div_(_FLOAT16_SCALE)


@functools.cache
def _compiled_logit_gradients() -> Callable[[Tensor, Tensor, Mixture | None], tuple[Tensor, Tensor, Tensor | None]]:
    return torch.compile(_logit_gradients, fullgraph=True, dynamic=False)
