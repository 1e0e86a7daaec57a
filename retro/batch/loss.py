"""Cross-entropy of the next token from the last activations, without the logits of a whole batch in memory.

With a 128k vocabulary, 16,384 tokens have 8 GB of float32 logits, and their gradient is as large. So the loss processes
a block of rows at a time. In training, the forward pass also computes the gradient of the block (softmax minus label),
so logits are neither kept nor recomputed.

With a copy head the probability of a label is that of a mixture (`CopyHead.losses`), which trains the copy head, and
the plain cross-entropy trains the vocabulary, as without a copy head. So the mixture needs a few numbers of each token
(`TokenLosses`). With the mixture's gradient the vocabulary would learn little from tokens that can be copied, and be
worse with and without copying (docs/explanation/copy-head.md).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""Label of positions without a loss: padding, and the last token of a document."""

_FLOAT16_SCALE = 2.0**15
"""Scale of float16 gradients of logits. They are between -1 and 1, most of them about 1 / vocabulary, which underflows
in float16. The loss scale cannot prevent it: gradients of logits are computed in the forward pass, and the loss scale
applies to what `backward` returns, which is float32. A power of two below the largest float16."""


class TokenLosses(NamedTuple):
    """What a mixture needs to know of the vocabulary's predictions, without gradients.

    Attributes:
        nats: cross-entropy of each label, float32 [B, T]; 0 for ignored labels.
        log_top: log-probability of the likeliest token, float32 [B, T]: how sure the prediction is.
        log_best: log-probability of the best candidate of each source of copying, float32 [B, T, C].
    """

    nats: Tensor
    log_top: Tensor
    log_best: Tensor


class Evidence(NamedTuple):
    """What C sources of copying say about the next tokens (`retro/copying/head.py`), without gradients.

    Attributes:
        votes: `LengthVotes` of each source, float32 [B, T, C, L, 4]; 0 for an absent source.
        best: the best candidate of each source: a token that follows its longest match, int64 [B, T, C].
    """

    votes: Tensor
    best: Tensor

    def of(self, tokens: Any) -> "Evidence":
        """The evidence about some tokens, from an index of [B, T]."""
        return Evidence(self.votes[tokens], self.best[tokens])


@torch.no_grad()
def token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    best: Tensor | None = None,
    product: Callable[[Tensor], Tensor] | None = None,
) -> TokenLosses:
    """`TokenLosses` of labels with the vocabulary alone. Without gradients.

    Under autocast, logits are rounded to its dtype, as in generation and `scoring`. In bfloat16 this changes the loss
    of a token by a few thousandths of a nat, and the mean of many tokens by less than 0.01%.

    Args:
        hidden: [B, T, D], from `Retro.hidden`.
        weight: [V, D], `Retro.output_weight`.
        labels: int64 [B, T], the next token at each position, or `IGNORED_LABEL`.
        best: the best candidates of the sources of copying, int64 [B, T, C]; None = C is 0.
        product: a faster product of rows [n, D] and the weight.
    """
    if product is None:
        x, narrow, y = _flat(hidden, weight, labels)
    else:
        x, y = hidden.flatten(0, -2), labels.flatten()
    b = _or_no_candidates(best, labels).flatten(0, -2)
    losses = [
        _losses(product(x[rows]) if product else x[rows] @ narrow.T, y[rows], b[rows])[:3]
        for rows in _blocks(x, len(weight))
    ]
    found = (torch.cat(parts) for parts in zip(*losses, strict=True))
    return TokenLosses(*(part.view(*labels.shape, *part.shape[1:]) for part in found))


def mixed_losses(nats: Tensor, log_keep: Tensor, copied: Tensor) -> Tensor:
    """Losses of labels with a mixture p = keep · softmax(logits) + copied, from those with the vocabulary alone; the
    shapes are equal."""
    return -torch.logaddexp(log_keep - nats, copied.clamp(min=torch.finfo(torch.float32).tiny).log())


def summed_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, best: Tensor | None = None, *, compiled: bool = False
) -> tuple[Tensor, TokenLosses]:
    """Sum of the cross-entropies with the vocabulary alone, with gradients, and its parts, which have none.

    Args:
        hidden: [B, T, D].
        weight: [V, D].
        labels: int64 [B, T], the next token at each position, or `IGNORED_LABEL`.
        best: as in `token_losses`.
        compiled: fuse the operations between matrix products with `torch.compile`.
    """
    total, *parts = _SummedLoss.apply(hidden, weight, labels, _or_no_candidates(best, labels), compiled)
    return total, TokenLosses(*parts)


def without_ignored(
    hidden: Tensor, labels: Tensor, evidence: Evidence | None = None
) -> tuple[Tensor, Tensor, Evidence | None]:
    """Drop positions with ignored labels, if they are more than half: activations [1, N, D], labels [1, N] and the copy
    head's evidence.

    In fine-tuning only answers have labels. The summed loss stays the same, for less work. N differs between batches,
    so this is unsuited to compiled code and to GPUs, where the host would wait for N.
    """
    counts = labels != IGNORED_LABEL
    if not 0 < 2 * int(counts.sum()) < labels.numel():
        return hidden, labels, evidence
    # [B, T, D] to [1, N, D]: rows lose their lengths, which a sum over tokens does not need.
    return hidden[counts][None], labels[counts][None], None if evidence is None else evidence.of(counts).of(None)


class _SummedLoss(torch.autograd.Function):
    """The sum of cross-entropies. The forward pass computes its gradients, block by block."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, best: Tensor, compiled: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, narrow, y = _flat(hidden, weight, labels)
        # A frozen output layer needs no gradient; with retrieval OFF, a frozen decoder needs none at all.
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        to_hidden = torch.empty(x.shape, dtype=torch.float32 if x.dtype == torch.float16 else x.dtype, device=x.device)
        to_weight = torch.zeros(weight.shape if needs_weight else (), device=x.device)  # float32: blocks are summed
        nats, log_top = torch.empty(2, len(x), device=x.device)
        b = best.flatten(0, -2)
        log_best = torch.empty(b.shape, device=x.device)
        kernel = _compiled_logit_gradients() if compiled else _logit_gradients
        # A block's logits [rows, V] and their gradient are freed before the next one's: only [B·T, D] and [V, D] stay.
        for rows in _blocks(x, len(weight)):
            nats[rows], log_top[rows], log_best[rows], gradients = kernel(x[rows] @ narrow.T, y[rows], b[rows])
            if needs_hidden:
                to_hidden[rows] = _product(gradients, narrow)
            if needs_weight:
                _add_product(to_weight, gradients.T, x[rows])
        ctx.save_for_backward(to_hidden.view(hidden.shape), to_weight)
        ctx.types = hidden.dtype, weight.dtype
        parts = nats.view(labels.shape), log_top.view(labels.shape), log_best.view(best.shape)
        ctx.mark_non_differentiable(*parts)
        return nats.sum(), *parts

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        gradients = zip(ctx.saved_tensors, ctx.types, ctx.needs_input_grad[:2], strict=True)
        return *((part * upstream).to(dtype) if needed else None for part, dtype, needed in gradients), None, None, None


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
    """Number of rows with 2 GiB of float32 logits on a GPU, or 32 MiB on a CPU, which stay near its cache.

    At least 512, since every block reads the whole weight, and reads and writes its gradient.
    """
    return max(512, (1 << 31 if device_type == "cuda" else 1 << 25) // (4 * vocab_size))


def _or_no_candidates(best: Tensor | None, labels: Tensor) -> Tensor:
    """The best candidates [B, T, C] of labels [B, T]; C is 0 if there are none."""
    return labels.new_empty((*labels.shape, 0)) if best is None else best


def _losses(logits: Tensor, labels: Tensor, best: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`TokenLosses` of rows of logits [rows, V], and the log-probabilities [rows, V]; in float32."""
    log_p = logits.float().log_softmax(-1)  # [rows, V]; in 16 bits the sum of a vocabulary's exponentials is too coarse
    # Ignored labels are negative: they take column 0, and their loss is set to 0.
    nats = -log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return nats.masked_fill(labels == IGNORED_LABEL, 0.0), log_p.amax(-1), log_p.gather(-1, best), log_p


def _logit_gradients(logits: Tensor, labels: Tensor, best: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`TokenLosses` of rows of logits [rows, V], and the gradient of the summed losses for every logit, [rows, V] in
    the logits' dtype.

    The gradient is softmax minus label. Float16 gradients are multiplied by `_FLOAT16_SCALE`; `_product` divides by it.
    """
    nats, log_top, log_best, log_p = _losses(logits, labels, best)
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    gradients = (log_p.exp() - is_label.float()).masked_fill((labels == IGNORED_LABEL)[:, None], 0.0)
    scaled = gradients * _FLOAT16_SCALE if logits.dtype == torch.float16 else gradients
    return nats, log_top, log_best, scaled.to(logits.dtype)


def _product(gradients: Tensor, other: Tensor) -> Tensor:
    """Gradients of logits times a matrix, in their dtype; in float32 if they are float16, where sums of many rows
    overflow."""
    if gradients.dtype != torch.float16:
        return gradients @ other
    with torch.autocast(gradients.device.type, enabled=False):
        if gradients.device.type == "cuda":
            return torch.mm(gradients, other, out_dtype=torch.float32).div_(_FLOAT16_SCALE)
        return (gradients.float() @ other.float()).div_(_FLOAT16_SCALE)


def _add_product(total: Tensor, gradients: Tensor, other: Tensor) -> None:
    """Add gradients of logits times a matrix to a float32 sum. On a GPU the product itself adds in float32."""
    if total.device.type != "cuda" or gradients.dtype == torch.float32:
        total += _product(gradients, other)
        return
    scale = _FLOAT16_SCALE if gradients.dtype == torch.float16 else 1.0
    with torch.autocast("cuda", enabled=False):
        torch.addmm(total, gradients, other, out_dtype=torch.float32, alpha=1 / scale, out=total)


@functools.cache
def _compiled_logit_gradients() -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    return torch.compile(_logit_gradients, fullgraph=True, dynamic=False)
