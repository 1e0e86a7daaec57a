"""Products of attention, and the choice of their kernel by device, dtype and mask.

    mask                      GPU, 16 bits             GPU, 32 bits        CPU
    none, or causal           flash                    memory-efficient    flash; in bfloat16 by measurement
    documents, window         flash, by `Bounds`       memory-efficient    as above
    padding, score bias       memory-efficient         memory-efficient    as above

`scaled_dot_product_attention` chooses among the kernels that `device.choose_attention_kernels` leaves enabled. Letters
of the shape comments as in `attention.py`.
"""

import math
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from indexing.machine import onednn_has_bfloat16
from indexing.measured import Question, Ways, fastest, random_numbers
from retro.batch.masks import document_mask, document_starts, visible
from retro.model_settings import AttentionSettings

# --- which tokens of packed documents a query may read ---------------------------------------------------------------


class Bounds(NamedTuple):
    """Documents that are packed into rows, in place of a mask [B, 1, T, T]: no score between two documents is computed.

    Attributes:
        ends: where the documents of all rows begin, one row after another, and the end: int32 [B·U + 1], from 0 to B·T.
            The size does not depend on the number of documents, so the host reads nothing; documents left over are
            empty, at the end.
        window: tokens that a token sees, including itself; 0 = all preceding tokens of its document.
    """

    ends: Tensor
    window: int


def self_attention_mask(
    h: Tensor,
    documents: Tensor | None,
    chunk_length: int,
    settings: AttentionSettings,
    *,
    bounds: bool = True,
) -> Tensor | Bounds | None:
    """What the queries of self-attention may read: `Bounds` where a kernel takes them, else a mask; None = all
    preceding tokens.

    Args:
        h: residual stream [B, T, D].
        documents: as in `Inputs`.
        chunk_length: m.
        settings: with the sliding window.
        bounds: whether the caller's kernel takes `Bounds`.

    Returns:
        A mask is bool [B, 1, T, T], or [T, T] without documents.
    """
    num_tokens = h.shape[1]
    window = settings.sliding_window if settings.sliding_window < num_tokens else 0
    if documents is None and not window:
        return None
    if bounds and fits_bounds(settings, product_dtype(h)) and _has_flash_for_bounds(h.device.type):
        if documents is None:
            documents = torch.zeros(len(h), -(-num_tokens // chunk_length), dtype=torch.int64, device=h.device)
        return document_bounds(documents, chunk_length, num_tokens, window)
    mask = None if documents is None else document_mask(documents, chunk_length, num_tokens)
    if window:
        at = torch.arange(num_tokens, device=h.device)
        seen = visible(at, at, window)  # [T, T]
        mask = seen if mask is None else mask & seen
    return mask


def fits_bounds(settings: AttentionSettings, dtype: torch.dtype) -> bool:
    """True if flash attention can compute self-attention in this dtype: it multiplies in 16 bits, and adds no bias to
    scores."""
    head_dim = settings.head_dim % 8 == 0 and settings.head_dim <= 256
    return head_dim and settings.positions in ("rope", "learned") and dtype in (torch.bfloat16, torch.float16)


def _has_flash_for_bounds(device: str) -> bool:
    """True on NVIDIA GPUs since Ampere."""
    if device != "cuda" or torch.version.hip is not None:
        return False
    built = torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.is_bf16_supported(including_emulation=False)


# All that `torch.compiler.assume_constant_result` does, but it imports torch._dynamo, which takes longer than the rest
# of this package.
_has_flash_for_bounds._dynamo_marked_constant = True  # type: ignore[attr-defined]


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of x: autocast's, or that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def document_bounds(documents: Tensor, chunk_length: int, num_tokens: int, window: int = 0) -> Bounds:
    """Bounds of packed documents: [B, ceil(T/m)], as in `Inputs`, to `Bounds`."""
    rows, chunks = (torch.arange(size, device=documents.device) for size in documents.shape)
    firsts = rows[:, None] * num_tokens + chunks * chunk_length  # [B, U]
    starts = document_starts(documents, chunk_length, num_tokens)[:, ::chunk_length]  # documents begin with chunks
    total = len(documents) * num_tokens
    ends = torch.where(starts, firsts, total).flatten().sort().values
    return Bounds(F.pad(ends, (0, 1), value=total).int(), window)


# --- products --------------------------------------------------------------------------------------------------------


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | Bounds | None, causal: bool, scale: float | None = None
) -> Tensor:
    """softmax(scale q·k + bias) v, by the fastest kernel for device and dtype: [N, H, Q, C].

    Keys in float32 are multiplied in float32, whatever the dtype of the queries.

    Args:
        q: queries [N, H, Q, C].
        k: keys [N, G, S, C].
        v: values [N, G, S, C].
        bias: broadcastable to [N, H, Q, S]; a bool bias is True where the query may look. Or `Bounds` (Q = S), which
            hide later keys.
        causal: hide later keys (Q = S). A bias must hide them too; without one the triangular mask is added.
        scale: None = 1/sqrt(C).
    """
    if isinstance(bias, Bounds):
        return _within_bounds(q, k, v, bias, scale)
    if k.dtype != product_dtype(q):
        with torch.autocast(q.device.type, enabled=False):
            bias = bias if bias is None or bias.dtype == torch.bool else bias.to(k.dtype)
            return dot_product_attention(q.to(k.dtype), k, v, bias, causal, scale)
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and (block := block_of_queries(q.requires_grad)):
        return _unfused(q, k, v, bias, causal, scale, block)
    shares, causal = k.shape[1] < q.shape[1], causal and bias is None
    if bias is not None and _is_generation(q, k, bias):
        return _few_queries(q, k, v, bias, scale)
    if shares and (q.shape[2] == 1 or (bias is not None and q.device.type != "cpu")):
        # GPUs have no fused kernel that takes both a bias and shared keys.
        if bias is None or bias.shape[-2] == 1 or (bias.ndim == 4 and bias.shape[1] > 1):
            return _heads_as_queries(q, k, v, bias, scale)
        # A mask of its own for each query would have to be repeated, which takes more memory than keys and values do.
        k, v, shares = *(x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v)), False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=shares)


def dot_product_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """As `dot_product_attention`, and the log of the sum of exp(scores) of each query: [N, H, Q, C] and float32
    [N, H, Q].

    With it, attentions to two sets of keys can be merged. Without gradients a CPU takes the kernel of
    `dot_product_attention`. Otherwise these are own products, since autograd has no derivative of a fused kernel's log.

    Args:
        q: queries [N, H, Q, C].
        k: keys [N, G, S, C].
        v: values [N, G, S, C].
        mask: bool, broadcastable to [N, 1, Q, S], True where the query may look. Every query needs a visible key.
        causal: hide later keys (Q = S). A mask must hide them too.
        scale: None = 1/sqrt(C).
    """
    if k.dtype != product_dtype(q):
        with torch.autocast(q.device.type, enabled=False):
            return dot_product_attention_with_lse(q.to(k.dtype), k, v, mask, causal, scale)
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if q.device.type == "cpu" and not trains and q.dtype == torch.bfloat16 and (block := block_of_queries(trains)):
        logs = list[Tensor]()
        return _unfused(q, k, v, mask, causal, scale, block, logs), torch.cat(logs, dim=2)
    if q.device.type == "cpu" and not trains:
        bias = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -math.inf)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        y, lse = flash(q, k, v, 0.0, causal and mask is None, attn_mask=bias, scale=scale)
        return y, lse
    if causal and mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = _scores(q, k, mask, scale).float()
    lse = scores.logsumexp(-1)
    return _sums((scores - lse[..., None]).exp().to(v.dtype), v), lse


_VARLEN_SHARES_KEYS = torch.__version__ >= "2.12"
"""Whether PyTorch's attention of variable length takes heads that share keys."""


def _within_bounds(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float | None) -> Tensor:
    """Causal attention within documents, [N, H, T, C]: flash attention over sequences of variable length."""
    from torch.nn.attention.varlen import varlen_attn  # imports torch._dynamo

    num_rows, _, num_tokens, _ = q.shape
    sharing: dict[str, Any] = {}
    if k.shape[1] < q.shape[1] and _VARLEN_SHARES_KEYS:
        sharing = {"enable_gqa": True}
    elif k.shape[1] < q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    # Documents of variable length follow each other in one row, so rows of the batch do too: [N·T, H, C], [N·T, G, C]
    # twice.
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    y = varlen_attn(
        q,
        k,
        v,
        bounds.ends,
        bounds.ends,
        num_tokens,
        num_tokens,
        scale=scale,
        window_size=(bounds.window - 1 if bounds.window else -1, 0),
        **sharing,
    )
    assert isinstance(y, Tensor)
    return y.unflatten(0, (num_rows, num_tokens)).transpose(1, 2)


_FEW_QUERIES = 16
_LEAST_QUERIES = 4


def _is_generation(q: Tensor, k: Tensor, bias: Tensor) -> bool:
    """True for the last tokens of one text that is generated on a CPU: few queries, many keys, and a mask for each
    query."""
    alone = q.device.type == "cpu" and len(q) == 1 and q.dtype == torch.float32 and not q.requires_grad
    return alone and q.shape[2] <= _FEW_QUERIES < k.shape[2] and bias.shape[:3] == (1, 1, q.shape[2])


def _few_queries(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None) -> Tensor:
    """Attention of few queries of one text, without the blocks of the fused kernels, which are made for many.

    BLAS sums products of less than `_LEAST_QUERIES` rows in another order, so they are repeated. A token then gets the
    same bits alone and in a draft.
    """
    num_groups, num_queries = k.shape[1], q.shape[2]
    queries = q[0].unflatten(0, (num_groups, -1)).flatten(1, 2)  # [G, (H / G)·Q, C]
    copies = -(-_LEAST_QUERIES // queries.shape[1])
    scores = torch.bmm(torch.cat([queries] * copies, dim=1) if copies > 1 else queries, k[0].transpose(1, 2))
    scores = scores.mul_(scale or q.shape[3] ** -0.5).unflatten(1, (-1, num_queries))  # [G, H / G, Q, S]
    scores = scores.masked_fill_(~bias[0], -math.inf) if bias.dtype == torch.bool else scores.add_(bias[0])
    y = torch.bmm(scores.softmax(-1).flatten(1, 2), v[0])[:, : queries.shape[1]]
    return y.unflatten(1, (-1, num_queries)).flatten(0, 1)[None]


def _heads_as_queries(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    """Attention without repeating keys [N, G, S, C] that several heads share: these H / G heads become more queries.

    A bias [N, H, Q, S] becomes [N, G, (H / G)·Q, S]; one for all queries and heads, [N, 1, 1, S], stays.
    """
    num_groups, num_queries = k.shape[1], q.shape[2]
    if bias is not None and bias.ndim == 4 and bias.shape[1] > 1:
        bias = bias.expand(-1, -1, num_queries, -1).unflatten(1, (num_groups, -1)).flatten(2, 3)
    queries = q.unflatten(1, (num_groups, -1)).flatten(2, 3)  # [N, G, (H / G)·Q, C]
    y = F.scaled_dot_product_attention(queries, k, v, attn_mask=bias, scale=scale)
    return y.unflatten(2, (-1, num_queries)).flatten(1, 2)


_BLOCKS = {"blocks of 64": 64, "blocks of 32": 32, "blocks of 128": 128, "blocks of 256": 256, "fused": 0}


def block_of_queries(trains: bool) -> int:
    """Queries whose scores are in memory at a time, in bfloat16 on a CPU; 0 = the fused kernel.

    The scores of a block stay in the CPU's cache. Measured for inference, where the CPU has products in bfloat16: on
    some, the fused kernel takes two to three times as long.
    """
    return 64 if trains else _measured_block()


block_of_queries._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _measured_block() -> int:
    return _BLOCKS[fastest(BFLOAT16_ATTENTION) if onednn_has_bfloat16() else BFLOAT16_ATTENTION.ways[0]]


def _attention_ways() -> Ways:
    """Attention of a sequence of the preset `small`, with heads that share keys."""
    q, k, v = (random_numbers(1, heads, 512, 64).bfloat16() for heads in (8, 4, 4))

    def way(block: int) -> Tensor:
        with torch.inference_mode():
            if block:
                return _unfused(q, k, v, None, True, None, block)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return {name: partial(way, block) for name, block in _BLOCKS.items()}


BFLOAT16_ATTENTION = Question("attention in bfloat16", tuple(_BLOCKS), _attention_ways)
"""How a CPU computes attention in bfloat16."""


def _unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    block: int,
    logs: list[Tensor] | None = None,
) -> Tensor:
    """Attention of one block of queries after another. With `causal`, the scores of keys after the block are skipped.

    The backward pass is faster with larger blocks. `logs` receives the log of the sum of exp(scores) of each block,
    float32 [N, H, block].
    """
    num_queries = q.shape[2]
    if q.requires_grad:
        block = max(block, -(-num_queries // 4) if causal else num_queries)
    later = torch.ones(block, block, dtype=torch.bool, device=q.device).triu(1)
    out = []
    for start in range(0, num_queries, block):
        rows = slice(start, min(start + block, num_queries))
        keys = slice(rows.stop if causal else k.shape[2])
        seen = None if bias is None else bias[..., rows if bias.shape[-2] > 1 else slice(None), keys]
        scores = _scores(q[:, :, rows], k[:, :, keys], seen, scale)
        if causal and bias is None:
            size = rows.stop - start
            scores[..., start:].masked_fill_(later[:size, :size], -math.inf)
        weights = scores.softmax(-1)
        if logs is not None:  # the largest weight is exp(largest score) / sum
            logs.append(scores.amax(-1).float() - weights.amax(-1).float().log())
        out.append(_sums(weights, v[:, :, keys]))
    return torch.cat(out, dim=2) if len(out) > 1 else out[0]


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    """Scores [N, H, Q, S], with the bias."""
    shape, num_groups = q.shape, k.shape[1]
    q = q * (scale or shape[-1] ** -0.5)
    if num_groups < shape[1]:  # shared keys: heads become queries
        q = q.unflatten(1, (num_groups, -1)).flatten(2, 3)  # [N, G, (H / G)·Q, C]
    scores = (q @ k.transpose(-1, -2)).view(*shape[:3], -1)
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    return scores


def _sums(weights: Tensor, v: Tensor) -> Tensor:
    """Sums of values [N, G, S, C] with weights [N, H, Q, S]: [N, H, Q, C]."""
    num_rows, num_heads, num_queries, num_keys = weights.shape
    y = weights.view(num_rows, v.shape[1], -1, num_keys) @ v
    return y.view(num_rows, num_heads, num_queries, -1)
