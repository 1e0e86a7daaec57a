"""Blocks of a decoder over few tokens on a CPU: products with packed weights, and one compiled loop between two of them.

    x ─ norm ─ [q, k, v] ─ rotate, keep, attend ─ [output] ─ + x
    x ─ norm ─ [gate, up] ─ SiLU(gate) · up ──── [down] ──── + x

A generated token is one row. What is done to it between the products would be a hundred operations of torch in each
layer, and each takes longer than its numbers need. A pass over more rows, and blocks with parts that these loops do not
have, run as in training. Letters of the shape comments as in `decoder.py`; in addition P, rotated pairs of a head.
"""

from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from retro.inference.cached_layers import TokensOfLayer
from retro.inference.packed_kernels import FEW_ROWS, Float16, PackedLinear
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
            window = model.settings.attention.sliding_window
            model.attention[layer.name] = AttentionOfFew(layer.attention.norm, layer.attention.block, window)
        if isinstance(layer.feed_forward, Residual):
            model.feed_forward[layer.name] = FeedForwardOfFew(layer.feed_forward.norm, layer.feed_forward.block, 0.0)


def _has_loops(block: Attention) -> bool:
    """Whether an attention has packed weights, and no part but norms, products and positions."""
    return block.qkv_proj is not None and block.key_taps is None and block.prefix is None


class AttentionOfFew(Residual[Attention]):
    """Self-attention with its residual connection."""

    def __init__(self, norm: nn.Module, block: Attention, window: int) -> None:
        """`window`: tokens that a token sees, with itself; 0 = all before it."""
        super().__init__(norm, block, 0.0)
        self._window = window

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
        return _added(x, self._attended(_rows(source), rotation, read.cache))

    def _attended(self, rows: np.ndarray, rotation: np.ndarray, cache: TokensOfLayer) -> np.ndarray:
        """The output of the block for rows [N·n, D]. Rotations are [2, N·n, P]."""
        from retro.inference.compiled_blocks import attend  # numba, which takes half a second

        span, (scale, norms) = cache.span, self._constants
        projected = _few(self.block.qkv_proj).of_array(self._norm_of_few(rows))  # [N·n, (H + 2·G)·C]
        sums = np.empty((len(rows), self.block.num_heads * self.block.head_dim), np.float32)
        attend(
            projected,
            rotation,
            *norms,
            cache.cache.keys.numpy(),
            cache.cache.values.numpy(),
            cache.layer,
            span.places,
            span.starts,
            self._window,
            scale,
            sums,
        )
        return _few(self.block.o_proj).of_array(sums)

    @cached_property
    def _norm_of_few(self) -> "_Norm":
        return _Norm.of(self.norm)

    @cached_property
    def _constants(self) -> tuple[float, tuple[np.ndarray, np.ndarray, float]]:
        """The scale, and of the norms of queries and keys the weights and eps."""
        block = self.block
        eps = 0.0 if block.q_norm is None else float(cast(float, block.q_norm.eps))
        return float(block.scale or block.head_dim**-0.5), (_weight(block.q_norm), _weight(block.k_norm), eps)


class FeedForwardOfFew(Residual[nn.Module]):
    """A feed-forward block with its residual connection."""

    def forward(self, x: Tensor, *reads: object, before: Tensor | None = None) -> Tensor:
        """As `Residual.forward`."""
        source, block = x if before is None else before, self.block
        if not _is_few(source):
            return super().forward(x, *reads, before=before)
        normed = self._norm_of_few(_rows(source))  # [N·n, D]
        if not isinstance(block, GatedFeedForward) or block.gate_up_proj is None:
            return x + cast(Tensor, block(torch.from_numpy(normed))).view(x.shape)
        from retro.inference.compiled_blocks import gated

        joined = _few(block.gate_up_proj).of_array(normed)  # [N·n, 2·F]
        inner = np.empty((len(joined), joined.shape[1] // 2), np.float32)
        gated(joined, inner)
        return _added(x, _few(block.down_proj).of_array(inner))

    @cached_property
    def _norm_of_few(self) -> "_Norm":
        return _Norm.of(self.norm)


class _Norm(NamedTuple):
    """RMSNorm or LayerNorm of rows."""

    weight: np.ndarray
    bias: np.ndarray
    eps: float
    centers: bool

    @classmethod
    def of(cls, norm: nn.Module) -> "_Norm":
        bias = getattr(norm, "bias", None)
        array = _NONE if bias is None else bias.detach().numpy()
        return cls(_weight(norm), array, float(cast(float, norm.eps)), isinstance(norm, nn.LayerNorm))

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        from retro.inference.compiled_blocks import normalize

        out = np.empty_like(rows)
        normalize(rows, *self, out)
        return out


def _is_few(x: Tensor) -> bool:
    """Whether activations are those that the loops read: [N, n, D] of few tokens, in float32."""
    return x.ndim == 3 and x.shape[0] * x.shape[1] <= FEW_ROWS and x.dtype == torch.float32 and x.is_contiguous()


def _rows(x: Tensor) -> np.ndarray:
    """Activations [N, n, D] as rows [N·n, D]. Between two products there are arrays only: calls of torch would take
    longer than the loops."""
    rows: np.ndarray = x.view(-1, x.shape[2]).numpy()
    return rows


def _added(x: Tensor, rows: np.ndarray) -> Tensor:
    return torch.from_numpy(rows.reshape(x.shape)).add_(x)


def _few(linear: nn.Module | None) -> Float16:
    return cast(PackedLinear, linear).few


def _weight(norm: nn.Module | None) -> np.ndarray:
    """Weights of a norm; none if there is no norm."""
    return _NONE if norm is None else cast(Tensor, norm.weight).detach().numpy()
