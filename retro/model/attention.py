"""Attention with relative positions (Borgeaud et al. 2022, section 2.4). One class implements every attention of the
model.

Letters of the shape comments as in `retro.py`; in addition, G heads of keys and values, each shared by H / G heads of
queries (grouped-query attention, Ainslie et al. 2023).
"""

import math
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retro.model.kernels import Bounds, dot_product_attention
from retro.model.positions import Positions, scheme_of
from retro.model.reads import Reads

Bias = TypeVar("Bias", bound=Tensor | Bounds | None)


class PerHead(nn.Module):
    """Parameters with one row per head: a module, so that tensor parallelism can divide the rows."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self) -> Tensor:
        """[H, …]"""
        return self.weight


class Prefix(nn.Module):
    """Learned keys and values that every query reads in addition to those of the text (prefix tuning, Li & Liang 2021).

    They are finished: no position is applied to them. With RoPE they can equal P tokens at the positions -P … -1; the
    other schemes add nothing to their scores.
    """

    def __init__(self, num_tokens: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.keys, self.values = (PerHead(num_kv_heads, num_tokens, head_dim) for _ in range(2))

    def forward(
        self, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """Put P keys and values before those of the text [N, G, S, C].

        Args:
            k: keys.
            v: values.
            bias: as in `kernels.dot_product_attention`, for the text.
            causal: as there.

        Returns:
            keys and values [N, G, P + S, C], and bias and causal for them.
        """
        keys, values = (part().to(k.dtype).expand(len(k), -1, -1, -1) for part in (self.keys, self.values))
        if causal and bias is None:
            bias = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=k.device).tril()
        if bias is not None:
            bias = F.pad(bias, (keys.shape[2], 0), value=bias.dtype == torch.bool)  # visible, or nothing is added
        return torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2), bias, False

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw keys and values as large as those of tokens. Equal ones would stay equal in training."""
        for part in (self.keys, self.values):
            nn.init.normal_(part.weight)


class Attention(nn.Module):
    """Multi-head self- or cross-attention with relative positions (section 2.4), for decoder and encoder.

    In the order of the data: `project`, preceding tokens mixed in (`weighted_sums`),
    positions, one softmax (`attend`), and the projection of the output.

    Attributes:
        first_head: index of this process's first head among all H heads. Tensor parallelism sets it.
    """

    def __init__(
        self,
        query_width: int,
        key_width: int,
        num_heads: int,
        head_dim: int,
        scheme: str,
        *,
        num_kv_heads: int = 0,
        smeared_tokens: int = 0,
        prefix_tokens: int = 0,
        qk_norm: bool = False,
        scale: float | None = None,
        bias: str = "none",
        norm_eps: float = 1e-6,
    ) -> None:
        """Create the projections.

        Args:
            query_width: D, features of the queries' input and of the output.
            key_width: E, features of the source of keys and values.
            num_heads: H.
            head_dim: C.
            scheme: one of `settings.PositionScheme`.
            num_kv_heads: G; 0 = H.
            smeared_tokens: W, preceding tokens mixed into each key. Queries mix in as many, including their own.
            prefix_tokens: P, learned keys and values that all queries read.
            qk_norm: apply RMSNorm to queries and keys before positions (Henry et al. 2020; Dehghani et al. 2023).
            scale: factor of the products of queries and keys; None = 1/sqrt(C).
            bias: one of `settings.Biases`.
            norm_eps: epsilon of the norms of queries and keys.

        Raises:
            NotImplementedError: the scheme lacks a method of `Positions`.
        """
        super().__init__()
        scheme_of(scheme)  # a scheme that generation cannot use is an error here, before any training
        self.head_dim, self.num_heads, self.first_head, self.scale = head_dim, num_heads, 0, scale
        width, num_kv_heads = num_heads * head_dim, num_kv_heads or num_heads
        self.q_proj = nn.Linear(query_width, width, bias=bias != "none")
        self.k_proj = nn.Linear(key_width, num_kv_heads * head_dim, bias=bias != "none")
        self.v_proj = nn.Linear(key_width, num_kv_heads * head_dim, bias=bias != "none")
        self.o_proj = nn.Linear(width, query_width, bias=bias == "all")
        # All three in one product with the same input, from `inference/packed_weights.py`, which then removes them.
        self.qkv_proj: nn.Module | None = None
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else None
        self.key_taps = PerHead(num_kv_heads, smeared_tokens + 1) if smeared_tokens else None
        self.query_taps = PerHead(num_heads, smeared_tokens) if smeared_tokens else None
        self.prefix = Prefix(prefix_tokens, num_kv_heads, head_dim) if prefix_tokens else None
        if scheme == "transformer-xl":
            self.distance_proj = nn.Linear(query_width, width, bias=False)  # W_kR
            self.content_bias = PerHead(num_heads, 1, head_dim)  # u
            self.distance_bias = PerHead(num_heads, 1, head_dim)  # v

    def forward(self, x: Tensor, reads: Reads) -> Tensor:
        """Attend from x [N, Q, D] to the source [N, S, E], x itself in self-attention: [N, Q, D]."""
        q, k, v = self.queries_keys_values(x, reads)
        distance_keys = None if reads.cache is None else reads.cache.distance_keys
        return self.attend(q, reads.positions, k, v, reads.mask, reads.causal, distance_keys)

    def queries_keys_values(self, x: Tensor, reads: Reads) -> tuple[Tensor, Tensor, Tensor]:
        """Smeared queries [N, Q, H, C], and finished keys and values [N, S, G, C], as `attend` reads them."""
        q, k, v = self.project(x, reads.source)
        if self.query_taps is not None and self.key_taps is not None:
            q_before, k_before = (None, None) if reads.cache is None else reads.cache.before(q, k)
            q = weighted_sums(q, self.query_taps().to(q.dtype), reads.starts, q_before)
            k = weighted_sums(k, self.key_taps().to(k.dtype), reads.starts, k_before)
        # Keys are stored with their positions: those of a cached key never change, so they are applied once.
        k = reads.positions.finish_keys(k)
        return (
            (q, k, v) if reads.cache is None else (q, *reads.cache.extend(k, v))
        )  # with a cache, S keys from the first token on

    def project(self, x: Tensor, source: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [N, Q, D] to queries [N, Q, H, C], and a source [N, S, E] to keys and values [N, S, G, C]; None =
        x."""
        if self.qkv_proj is None or source is not None:
            return self.project_queries(x), *self.project_keys_values(x if source is None else source)
        joined = self._split_heads(self.qkv_proj(x))
        groups = (joined.shape[-2] - self.num_heads) // 2  # one process has all heads: inference
        q, k, v = joined.split((self.num_heads, groups, groups), dim=-2)
        return _normalized(q, self.q_norm), _normalized(k, self.k_norm), v

    def project_queries(self, x: Tensor) -> Tensor:
        """Project x [N, Q, D] to queries [N, Q, H, C], normalized with `qk_norm`."""
        return _normalized(self._split_heads(self.q_proj(x)), self.q_norm)

    def project_keys_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Project the source [N, S, E] to keys, normalized with `qk_norm`, and values: [N, S, G, C] each."""
        k, v = self._split_heads(self.k_proj(source)), self._split_heads(self.v_proj(source))
        return _normalized(k, self.k_norm), v

    def _split_heads(self, x: Tensor) -> Tensor:
        """Reshape [..., H·C] to [..., H, C], for the heads of this process."""
        return x.unflatten(-1, (-1, self.head_dim))

    def attend(
        self,
        q: Tensor,
        positions: Positions,
        k: Tensor,
        v: Tensor,
        mask: Tensor | Bounds | None = None,
        causal: bool = False,
        distance_keys: Tensor | None = None,
    ) -> Tensor:
        """Attend from smeared queries [N, Q, H, C] to finished keys and values [N, S, G, C], and project: [N, Q, D].

        Mask and causal are those of `Reads`. A caller that attends repeatedly can pass the `distance_keys` of the same
        positions, which are computed otherwise.
        """
        q = positions.finish_queries(q)
        q, k, v = by_head(q, k, v)
        q, scores = positions.score_terms(q, self, distance_keys)
        # A bool mask stays as it is, for kernels that take one. Scores that are added hide keys by -inf.
        bias = mask if scores is None else masked_bias(scores, mask, causal)
        y = dot_product_attention(q, *self.with_prefix(k, v, bias, causal), self.scale)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # [N, H, Q, C] to [N, Q, H·C], and to [N, Q, D]

    def with_prefix(
        self, k: Tensor, v: Tensor, bias: Bias, causal: bool
    ) -> tuple[Tensor, Tensor, Bias | Tensor | None, bool]:
        """Keys, values, bias and causal of `dot_product_attention`, with the prefix if there is one: see
        `Prefix.forward`."""
        if self.prefix is None:
            return k, v, bias, causal
        assert not isinstance(bias, Bounds), "kernels that take bounds read no keys before the text"
        keys, values, bias, causal = self.prefix(k, v, bias, causal)
        return keys, values, bias, causal

    @torch.no_grad()
    def initialize_copying(self) -> None:
        """Initialize smeared self-attention to copy: queries match keys of the same content, and the output repeats the
        value.

        The weights are tied only at initialization and keep their standard deviations. Trockman & Kolter (2023) found
        this structure in trained attentions.
        """
        assert self.key_taps is not None
        assert self.query_taps is not None
        queries_per_key = len(self.q_proj.weight) // len(self.k_proj.weight)
        key, value = (  # [H·C, D] each
            weight.unflatten(0, (-1, self.head_dim)).repeat_interleave(queries_per_key, dim=0).flatten(0, 1)
            for weight in (self.k_proj.weight, self.v_proj.weight)
        )
        for weight, tied in ((self.q_proj.weight, key), (self.o_proj.weight, value.T)):
            weight.copy_(tied * (weight.std() / tied.std()))
        self.key_taps.weight.copy_(initial_taps(*self.key_taps.weight.shape, of_queries=False))
        self.query_taps.weight.copy_(initial_taps(*self.query_taps.weight.shape, of_queries=True))


def _normalized(x: Tensor, norm: nn.Module | None) -> Tensor:
    """Queries or keys with `qk_norm`. Norms in float32, as everywhere: a sum of squares in 16 bits is too coarse."""
    return x if norm is None else norm(x.float()).to(x.dtype)


def by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, S, H, C] with heads first, as products of attention need them: [N, H, S, C]."""
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def masked_bias(scores: Tensor, mask: Tensor | Bounds | None, causal: bool) -> Tensor:
    """The bias added to attention scores, [1 or N, H, Q, S], with -inf where the mask (or causality) hides a key."""
    assert not isinstance(mask, Bounds), "kernels that take bounds add no bias to scores"
    if causal and mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def weighted_sums(x: Tensor, taps: Tensor, starts: Tensor | None = None, before: Tensor | None = None) -> Tensor:
    """Replace each vector by a weighted sum of itself and the preceding ones: a causal depthwise convolution over
    tokens.

    So one head can find what followed several tokens, and one layer can form induction heads (Olsson et al. 2022).
    Depthwise convolutions of queries and keys are from So et al. (2021, Primer).

    Args:
        x: [N, S, H, C].
        taps: weights [H, W + 1], by how many tokens earlier.
        starts: bool [1 or N, S], True for the first tokens of documents: sums do not cross them.
        before: [N, W, H, C], the vectors that precede the first one; without it, they are zeros.
    """
    num_tokens, width = x.shape[1], taps.shape[1] - 1
    padded = torch.cat((x.new_zeros(len(x), width, *x.shape[2:]) if before is None else before, x), dim=1)
    out, crossed = x * taps[:, :1], starts
    # One product for each tap, not a convolution: W is about 3, and the weights differ by head, not by feature.
    for back in range(1, width + 1):
        earlier = padded[:, width - back : width - back + num_tokens]
        if starts is not None and crossed is not None:  # a document starts among the last `back` tokens
            earlier = earlier.masked_fill(crossed[:, :, None, None], 0)
            crossed = crossed | F.pad(starts, (back, 0))[:, :num_tokens]
        out = out + earlier * taps[:, back : back + 1]
    return out


def initial_taps(num_heads: int, width: int, *, of_queries: bool) -> Tensor:
    """Initial taps [num_heads, width], of norm 1: from heads that combine several tokens to heads that use one.

    Args:
        num_heads: H.
        width: taps of a head.
        of_queries: whether the first heads weight the token itself most (queries) or almost only preceding tokens
            (keys). A query then matches the keys of tokens that followed the same tokens.
    """
    several = [0.7**back for back in range(width)] if of_queries else [0.1, *(0.7**back for back in range(width - 1))]
    alone = [1.0] + [0.0] * (width - 1)
    fractions = [1 - head / max(1, num_heads - 1) for head in range(num_heads)]  # of `several` in a head
    taps = torch.tensor([[f * a + (1 - f) * b for a, b in zip(several, alone, strict=True)] for f in fractions])
    return taps / taps.norm(dim=1, keepdim=True)
