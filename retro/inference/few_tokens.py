"""Blocks of a decoder over few tokens on a CPU: products with packed weights, and one compiled loop between two of them.

    x ─ norm ─ [q, k, v] ─ rotate, keep, attend ─ [output] ─ + x
    x ─ norm ─ [gate, up] ─ SiLU(gate) · up ──── [down] ──── + x

A generated token is one row. What is done to it between the products would be a hundred operations of torch in each
layer, and each takes longer than its numbers need. A pass over more rows, and blocks with parts that these loops do not
have, run as in training. Letters of the shape comments as in `decoder.py`; in addition P, rotated pairs of a head.
"""

import math
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from indexing.machine import compiled
from retro.inference.cached_layers import TokensOfLayer
from retro.inference.packed_kernels import FEW_ROWS, Kernel, PackedLinear
from retro.model.attention import Attention
from retro.model.feed_forward import GatedFeedForward
from retro.model.positions import NoPositions, RopePositions
from retro.model.reads import Reads
from retro.model.residual_block import Residual
from retro.model.retro import Retro

_NONE = np.zeros(0, np.float32)


def with_loops(model: Retro) -> None:
    """Let the blocks of a packed model use compiled loops for few tokens."""
    for layer in model.layers:
        if _has_loops(layer.attention.block):
            model.attention[layer.name] = AttentionOfFew(layer.attention.norm, layer.attention.block, 0.0)
        if isinstance(layer.feed_forward, Residual):
            model.feed_forward[layer.name] = FeedForwardOfFew(layer.feed_forward.norm, layer.feed_forward.block, 0.0)


def _has_loops(block: Attention) -> bool:
    """Whether an attention has packed weights, and no part but norms, products and positions."""
    return block.qkv_proj is not None and block.key_taps is None and block.prefix is None


class AttentionOfFew(Residual[Attention]):
    """Self-attention with its residual connection."""

    def forward(self, x: Tensor, *reads: object, before: Tensor | None = None) -> Tensor:
        """As `Residual.forward`."""
        source, read = x if before is None else before, cast(Reads, reads[0])
        if not _is_few(source) or read.neighbors is not None or not isinstance(read.cache, TokensOfLayer):
            return super().forward(x, read, before=before)
        if isinstance(read.positions, RopePositions):
            rotation = read.positions.query.numpy().reshape(2, x.shape[0] * x.shape[1], -1)
        elif isinstance(read.positions, NoPositions):
            rotation = np.zeros((2, x.shape[0] * x.shape[1], 0), np.float32)
        else:
            return super().forward(x, read, before=before)
        return x + self._attended(source, rotation, read.cache).view(x.shape)

    def _attended(self, source: Tensor, rotation: np.ndarray, cache: TokensOfLayer) -> Tensor:
        """The output of the block, [N·n, D]. Rotations are [2, N·n, P]."""
        block, span = self.block, cache.span
        projected = _of_few(block.qkv_proj)(_normalized(source, self.norm))  # [N·n, (H + 2·G)·C]
        sums = projected.new_empty(len(projected), block.num_heads * block.head_dim)
        compiled(_attend, free_sums=True)(
            projected.numpy(),
            rotation,
            _weight(block.q_norm),
            _weight(block.k_norm),
            0.0 if block.q_norm is None else float(cast(float, block.q_norm.eps)),
            cache.cache.keys.numpy(),
            cache.cache.values.numpy(),
            cache.layer,
            span.places,
            span.starts,
            span.window,
            float(block.scale or block.head_dim**-0.5),
            sums.numpy(),
        )
        return _of_few(block.o_proj)(sums)


class FeedForwardOfFew(Residual[nn.Module]):
    """A feed-forward block with its residual connection."""

    def forward(self, x: Tensor, *reads: object, before: Tensor | None = None) -> Tensor:
        """As `Residual.forward`."""
        source, block = x if before is None else before, self.block
        if not _is_few(source):
            return super().forward(x, *reads, before=before)
        normed = _normalized(source, self.norm)  # [N·n, D]
        if isinstance(block, GatedFeedForward) and block.gate_up_proj is not None:
            joined = _of_few(block.gate_up_proj)(normed)  # [N·n, 2·F]
            inner = joined.new_empty(len(joined), joined.shape[1] // 2)
            compiled(_gate, free_sums=True)(joined.numpy(), inner.numpy())
            out = _of_few(block.down_proj)(inner)
        else:
            out = cast(Tensor, block(normed))
        return x + out.view(x.shape)


def _is_few(x: Tensor) -> bool:
    """Whether activations are those that the loops read: [N, n, D] of few tokens, in float32."""
    return x.ndim == 3 and x.shape[0] * x.shape[1] <= FEW_ROWS and x.dtype == torch.float32 and x.is_contiguous()


def _of_few(linear: nn.Module | None) -> Kernel:
    return cast(PackedLinear, linear).few


def _weight(norm: nn.Module | None) -> np.ndarray:
    """Weights of a norm; none if there is no norm."""
    return _NONE if norm is None else cast(Tensor, norm.weight).detach().numpy()


def _normalized(x: Tensor, norm: nn.Module) -> Tensor:
    """The norm of x [N, n, D], [N·n, D]."""
    rows = x.view(-1, x.shape[2])
    out = torch.empty_like(rows)
    bias = _NONE if (parameter := getattr(norm, "bias", None)) is None else parameter.detach().numpy()
    eps, centers = float(cast(float, norm.eps)), isinstance(norm, nn.LayerNorm)
    compiled(_normalize, free_sums=True)(rows.numpy(), _weight(norm), bias, eps, centers, out.numpy())
    return out


# --- compiled loops ---------------------------------------------------------------------------------------------------


def _normalize(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float, centers: bool, out: np.ndarray) -> None:
    """RMSNorm, or LayerNorm if it `centers`, of rows [n, D]."""
    width = x.shape[1]
    for row in range(len(x)):
        mean = np.float32(0)
        if centers:
            for d in range(width):
                mean += x[row, d]
            mean /= np.float32(width)
        squares = np.float32(0)
        for d in range(width):
            squares += (x[row, d] - mean) * (x[row, d] - mean)
        factor = np.float32(1 / math.sqrt(squares / np.float32(width) + eps))
        for d in range(width):
            out[row, d] = (x[row, d] - mean) * factor * weight[d]
        for d in range(len(bias)):
            out[row, d] += bias[d]


def _gate(joined: np.ndarray, out: np.ndarray) -> None:
    """SiLU(gate) · up of rows [n, 2·F]: [n, F]."""
    width = out.shape[1]
    for row in range(len(out)):
        for f in range(width):
            gate = joined[row, f]
            out[row, f] = gate * joined[row, width + f] / (np.float32(1) + math.exp(-gate))


def _attend(
    projected: np.ndarray,
    rotation: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    norm_eps: float,
    keys: np.ndarray,
    values: np.ndarray,
    layer: int,
    slots: np.ndarray,
    starts: np.ndarray,
    window: int,
    scale: float,
    out: np.ndarray,
) -> None:
    """Keep the keys and values of new tokens, and let each token attend to those up to itself.

    Args:
        projected: queries, keys and values of the tokens, row by row, [N·n, (H + 2·G)·C].
        rotation: cosines and sines of their positions, [2, N·n, P].
        q_norm: weights of the norm of queries [C]; none = no norm.
        k_norm: of keys.
        norm_eps: of both.
        keys: of the cache, [B, L, G, S, C].
        values: the same shape.
        layer: which one.
        slots: of the rows, [N].
        starts: position of each row's first token, [N].
        window: tokens that a token sees, with itself; 0 = all.
        scale: of the products of queries and keys.
        out: sums of values, [N·n, H·C].
    """
    num_groups, width = keys.shape[2], keys.shape[4]
    num_tokens, num_heads = len(projected) // len(slots), out.shape[1] // width
    shared, longest = num_heads // num_groups, 0
    for token in range(len(projected)):
        row, one = token // num_tokens, projected[token]
        at = starts[row] + token % num_tokens
        longest = max(longest, at + 1)
        for group in range(num_groups):
            key, value = keys[slots[row], layer, group, at], values[slots[row], layer, group, at]
            first = (num_heads + group) * width
            key[:] = one[first : first + width]
            _finish(key, k_norm, norm_eps, rotation[0, token], rotation[1, token])
            first += num_groups * width
            value[:] = one[first : first + width]
    query, weights = np.empty((shared, width), np.float32), np.empty((shared, longest), np.float32)
    for token in range(len(projected)):
        row = token // num_tokens
        stop = starts[row] + token % num_tokens + 1
        start = max(0, stop - window) if window else 0
        for group in range(num_groups):
            first = group * shared * width
            for head in range(shared):
                query[head] = projected[token, first + head * width : first + (head + 1) * width]
                _finish(query[head], q_norm, norm_eps, rotation[0, token], rotation[1, token])
            key, value = keys[slots[row], layer, group], values[slots[row], layer, group]
            for s in range(start, stop):
                for head in range(shared):
                    product = np.float32(0)
                    for c in range(width):
                        product += query[head, c] * key[s, c]
                    weights[head, s - start] = product * np.float32(scale)
            _softmax(weights, stop - start)
            sums = out[token, first : first + shared * width]
            sums[:] = 0
            for s in range(start, stop):
                for head in range(shared):
                    weight = weights[head, s - start]
                    for c in range(width):
                        sums[head * width + c] += weight * value[s, c]


@compiled
def _finish(x: np.ndarray, norm: np.ndarray, eps: float, cos: np.ndarray, sin: np.ndarray) -> None:
    """Normalize and rotate a query or a key [C]."""
    width, pairs = len(x), len(cos)
    if len(norm):
        squares = np.float32(0)
        for c in range(width):
            squares += x[c] * x[c]
        factor = np.float32(1 / math.sqrt(squares / np.float32(width) + eps))
        for c in range(width):
            x[c] *= factor * norm[c]
    for c in range(pairs):
        left, right = x[c], x[pairs + c]
        x[c], x[pairs + c] = left * cos[c] - right * sin[c], right * cos[c] + left * sin[c]


@compiled
def _softmax(scores: np.ndarray, count: int) -> None:
    """Softmax over the first `count` scores of each row."""
    for row in range(len(scores)):
        largest = scores[row, 0]
        for s in range(1, count):
            largest = max(largest, scores[row, s])
        total = np.float32(0)
        for s in range(count):
            scores[row, s] = math.exp(scores[row, s] - largest)
            total += scores[row, s]
        for s in range(count):
            scores[row, s] /= total
