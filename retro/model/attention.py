"""Attention with relative positions (Borgeaud et al. 2022, section 2.4): one class is every attention of the model.

Letters of the shape comments as in `retro.py`; G heads of keys and values, each of which H / G heads of queries read (Ainslie et
al. 2023).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retro.model.positions import Distances, Places, Relative, Rotary, rotate


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None = None) -> Tensor:
    """softmax(scale q·k + bias) v of [N, H, Q, C] and twice [N, G, S, C]; a bool bias is True where q may look.

    If it is causal (Q = S), a bias must say so too; without one the triangle is added. The scale is 1/sqrt(C) where none is
    given. Keys that were kept in float32 are read in float32, whatever the queries are.
    """
    if k.dtype != q.dtype:
        with torch.autocast(q.device.type, enabled=False):
            bias = bias if bias is None or bias.dtype == torch.bool else bias.to(k.dtype)
            return attend(q.to(k.dtype), k, v, bias, causal, scale)
    if (
        q.shape[2] == 1 and k.shape[1] < q.shape[1]
    ):  # decoding: heads with the same keys become queries, no key is repeated
        num_groups = k.shape[1]
        if bias is not None and bias.shape[1] > 1:
            bias = bias.reshape(len(bias), num_groups, -1, bias.shape[-1])
        queries = q.reshape(len(q), num_groups, -1, q.shape[-1])  # [N, G, H / G, C]
        return attend(queries, k, v, bias, False, scale).reshape(q.shape)
    on_cpu = q.device.type == "cpu"
    # Training in bfloat16 on a CPU: the backward pass of the fused kernel takes two to three times as long as this.
    plainly = on_cpu and q.dtype == torch.bfloat16 and q.requires_grad
    if k.shape[1] < q.shape[1] and (plainly or (bias is not None and not on_cpu)):
        # Of a GPU's kernels, the one that takes a bias wants keys for every head.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if not plainly:
        grouped = k.shape[1] < q.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=causal and bias is None, scale=scale, enable_gqa=grouped
        )
    if not causal:
        return _attend_plainly(q, k, v, bias, scale)
    num_tokens = q.shape[2]
    if bias is None:
        bias = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q.device).tril()
    out, block = [], -(-num_tokens // 4)  # quarters of the queries: three eighths of the scores are never made
    for start in range(0, num_tokens, block):
        stop = min(start + block, num_tokens)
        visible = bias[..., start:stop, :stop]
        out.append(_attend_plainly(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], visible, scale))
    return torch.cat(out, dim=2)


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    scores = q * (scale or q.shape[-1] ** -0.5) @ k.transpose(-1, -2)  # [N, H, Q, S]
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    return scores.softmax(-1) @ v


class PerHead(nn.Module):
    """A row of parameters for each head: a module, so that a device that holds some of the heads can hold their rows."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self) -> Tensor:
        """[H, …]"""
        return self.weight


class Attention(nn.Module):
    """Multi-head attention with relative positions (section 2.4): self- and cross-, in decoder and encoder.

    With Transformer-XL positions the score of query i and key j is (q_i + u)·k_j + (q_i + v)·W_kR R_{i-j}; with ALiBi's it is
    q_i·k_j - s |i - j|, the slopes s being 2^(-8/H), 2^(-16/H) … 2^-8 (its formula where H is a power of 2, here for any H).

    Attributes:
        first_head: which of all heads the first one here is: not 0 where a device holds later ones.
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
        smeared: int = 0,
        normed: bool = False,
        scale: float | None = None,
        bias: str = "none",
        norm_eps: float = 1e-6,
    ) -> None:
        """An attention.

        Args:
            query_width: features of what asks.
            key_width: features of what is read.
            num_heads: H.
            head_dim: C.
            scheme: `ModelSettings.positions`.
            num_kv_heads: G; 0 = H.
            smeared: tokens before of which a key holds something; from 2 on, queries hold so many too, their own included.
            normed: give queries and keys the same size, before positions (Henry et al. 2020; Dehghani et al. 2023).
            scale: of the products of queries and keys; None = 1/sqrt(C).
            bias: `ModelSettings.attention_bias`.
            norm_eps: what the norms of queries and keys add to the variance.
        """
        super().__init__()
        self.head_dim, self.num_heads, self.first_head, self.scale = head_dim, num_heads, 0, scale
        width, num_kv_heads = num_heads * head_dim, num_kv_heads or num_heads
        self.query = nn.Linear(query_width, width, bias=bias != "none")
        self.key = nn.Linear(key_width, num_kv_heads * head_dim, bias=bias != "none")
        self.value = nn.Linear(key_width, num_kv_heads * head_dim, bias=bias != "none")
        self.out = nn.Linear(width, query_width, bias=bias == "all")
        if normed:
            self.query_norm = nn.RMSNorm(head_dim, eps=norm_eps)
            self.key_norm = nn.RMSNorm(head_dim, eps=norm_eps)
        self.smeared = int(smeared)
        if smeared == 1:
            self.smear = PerHead(num_kv_heads, 1)
        elif smeared:
            self.key_taps = PerHead(num_kv_heads, smeared + 1)
            self.query_taps = PerHead(num_heads, smeared)
        if scheme == "transformer-xl":
            self.distance = nn.Linear(query_width, width, bias=False)  # W_kR
            self.content_bias = PerHead(num_heads, 1, head_dim)  # u
            self.distance_bias = PerHead(num_heads, 1, head_dim)  # v

    def forward(
        self,
        x: Tensor,
        places: Places,
        source: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        starts: Tensor | None = None,
        virtual: tuple[Tensor, Tensor] | None = None,
        keeping: bool = False,
    ) -> Any:
        """Attend from x [N, Q, D] to source [N, S, E], and return [N, Q, D].

        Args:
            x: what asks.
            places: from `place`, for Q and S, the virtual tokens before them included.
            source: what is read; x itself by default.
            mask: bool, broadcastable to [N, 1, Q, S], True where the query may look. It must leave every query one
                key at least: a softmax over nothing is NaN.
            causal: look at nothing later, which a mask must say too: without one the kernels have a short cut.
            starts: bool [1 or N, S], True where smeared keys must not reach back; by default the first alone. Of queries too,
                where x is read itself.
            virtual: placed keys and values of virtual tokens, [1, P, G, C] twice, that stand before the source. The mask
                covers them.
            keeping: return placed keys and values of the source too.
        """
        k, v = self.project(x if source is None else source)
        k = self.placed(k, places, starts)
        own = k, v
        if virtual is not None:
            k, v = (
                torch.cat((a.to(b.dtype).expand(len(b), -1, -1, -1), b), dim=1)
                for a, b in zip(virtual, own, strict=True)
            )
        q = self.smeared_queries(self.ask(x), starts if source is None else None)
        read = self.read(q, places, k, v, mask, causal)
        return (read, *own) if keeping else read

    def ask(self, x: Tensor) -> Tensor:
        """Queries of what asks [N, Q, D]: [N, Q, H, C]."""
        q = self._heads(self.query(x))
        return self.query_norm(q.float()).to(q.dtype) if hasattr(self, "query_norm") else q

    def smeared_queries(self, q: Tensor, starts: Tensor | None = None, before: Tensor | None = None) -> Tensor:
        """Queries [N, Q, H, C] as `read` wants them; `before` [N, W - 1, H, C] are those before the first."""
        return tapped(q, self.query_taps().to(q.dtype), starts, before) if hasattr(self, "query_taps") else q

    def project(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of what is read [N, S, E], wherever it stands: [N, S, G, C] twice."""
        k = self._heads(self.key(source))
        if hasattr(self, "key_norm"):
            k = self.key_norm(k.float()).to(k.dtype)
        return k, self._heads(self.value(source))

    def _heads(self, x: Tensor) -> Tensor:
        """[..., H·C] to [..., H, C], for as many heads as this device holds."""
        return x.unflatten(-1, (-1, self.head_dim))

    def placed(self, k: Tensor, places: Places, starts: Tensor | None = None, before: Tensor | None = None) -> Tensor:
        """Projected keys [N, S, G, C] as `read` wants them; `before` [N, W, G, C] are the projected keys before the first."""
        if hasattr(self, "key_taps"):
            k = tapped(k, self.key_taps().to(k.dtype), starts, before)
        elif hasattr(self, "smear"):
            k = smear(k, self.smear().sigmoid().to(k.dtype), starts, before)
        # Places may begin with virtual tokens, whose keys are placed already.
        return rotate(k, places.key[..., -k.shape[1] :, :, :]) if isinstance(places, Rotary) else k

    def read(
        self,
        q: Tensor,
        places: Places,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        distance_keys: Tensor | None = None,
    ) -> Tensor:
        """Let smeared queries [N, Q, H, C] attend to placed keys and their values [N, S, G, C]: [N, Q, D]; the rest as in `forward`.

        Whoever reads again and again gives the `distance_keys` of the same places too.
        """
        bias = mask
        if isinstance(places, Rotary):
            q = rotate(q, places.query)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [N, H, Q, C], [N, G, S, C] twice
        if isinstance(places, Relative):
            if distance_keys is None:
                distance_keys = self.distance_keys(places.waves.to(q.dtype))
            bias = hidden_from(self.distance_scores(q, distance_keys, places.lookup), mask, causal)
            q = q + self.content_bias().to(q.dtype)
        elif isinstance(places, Distances):
            bias = hidden_from((places.apart * -self.slopes(q)).to(q.dtype), mask, causal)
        return self.out(attend(q, k, v, bias, causal, self.scale).transpose(1, 2).flatten(2))

    @torch.no_grad()
    def begin_copying(self, projection: Tensor | None = None) -> None:
        """Let queries find keys of the same content, and the output say what was read: weights tied at the start only.

        Trockman & Kolter (2023) found this structure in trained attentions. Sizes stay as they were drawn.

        Args:
            projection: [E, D], how the source's stream was made of the asking one's; None where they are one.
        """
        queries_of_key = len(self.query.weight) // len(self.key.weight)
        key, value = (  # [H·C, E] twice
            weight.unflatten(0, (-1, self.head_dim)).repeat_interleave(queries_of_key, dim=0).flatten(0, 1)
            for weight in (self.key.weight, self.value.weight)
        )
        if projection is not None:
            key, value = key @ projection, value @ projection
        for weight, tied in ((self.query.weight, key), (self.out.weight, value.T)):
            weight.copy_(tied * (weight.std() / tied.std()))

    def slopes(self, q: Tensor) -> Tensor:
        """How much the scores fall with every token of distance, by head of q [N, H, Q, C]: [H, 1, 1]."""
        number = torch.arange(self.first_head + 1, self.first_head + 1 + q.shape[1], device=q.device)
        return (number * (-8 / self.num_heads)).exp2()[:, None, None]

    def distance_keys(self, waves: Tensor) -> Tensor:
        """W_kR R of the sinusoids [X, D] of all distances: [H, C, X]."""
        return self._heads(self.distance(waves)).permute(1, 2, 0)

    def distance_scores(self, q: Tensor, keys: Tensor, lookup: Tensor) -> Tensor:
        """The part (q_i + v)·W_kR R_{i-j} of the scores of q [N, H, Q, C], scaled: [N, H, Q, S].

        The lookup [Q, S], or [N, 1, Q, S], says which of the keys [H, C, X] lies between query and key.
        """
        scores = (q + self.distance_bias().to(q.dtype)) @ keys * (self.scale or self.head_dim**-0.5)  # [N, H, Q, X]
        return scores.gather(-1, lookup.expand(*scores.shape[:2], -1, -1))


def hidden_from(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """What is added to scores, [1 or N, H, Q, S], with -inf where the query may not look; mask and causal as in `attend`."""
    if causal and mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def smear(k: Tensor, share: Tensor, starts: Tensor | None = None, before: Tensor | None = None) -> Tensor:
    """Each key of k [N, S, G, C] moved by a share [G, 1] towards the one before it, unless it starts something new.

    Smeared keys are of Olsson et al. (2022), who found that with them one layer forms induction heads. What stands before
    the first is `before` [N, 1, G, C]; without it the first stays as it is.
    """
    earlier = torch.cat((k[:, :1] if before is None else before, k[:, :-1]), dim=1)
    if starts is not None:
        share = share.masked_fill(starts[:, :, None, None], 0)  # [1 or N, S, G, 1]
    return torch.lerp(k, earlier, share)


def tapped(x: Tensor, taps: Tensor, starts: Tensor | None = None, before: Tensor | None = None) -> Tensor:
    """Each of x [N, S, H, C] and those before it, times taps [H, W + 1] by how far before, summed: nothing from before a start.

    So a head may look for what followed several tokens, and not just one. Depthwise convolutions of queries and keys are of So
    et al. (2021, Primer). What stands before the first is `before` [N, W, H, C]; without it there is nothing.
    """
    num_tokens, width = x.shape[1], taps.shape[1] - 1
    line = torch.cat((x.new_zeros(len(x), width, *x.shape[2:]) if before is None else before, x), dim=1)
    out, fresh = x * taps[:, :1], starts
    for back in range(1, width + 1):
        earlier = line[:, width - back : width - back + num_tokens]
        if starts is not None and fresh is not None:  # a start among the last `back` tokens, this one included
            earlier = earlier.masked_fill(fresh[:, :, None, None], 0)
            fresh = fresh | F.pad(starts, (back, 0))[:, :num_tokens]
        out = out + earlier * taps[:, back : back + 1]
    return out


def first_taps(num_heads: int, width: int, *, own: bool) -> Tensor:
    """Where taps begin, [num_heads, width] of length 1: from heads that look for several tokens to heads that look for one.

    Args:
        num_heads: H.
        width: taps of a head.
        own: whether the first heads hold the token itself too (queries), or what stands before it almost alone (keys): so
            they meet at what followed.
    """
    several = [0.7**back for back in range(width)] if own else [0.1, *(0.7**back for back in range(width - 1))]
    alone = [1.0] + [0.0] * (width - 1)
    shares = [1 - head / max(1, num_heads - 1) for head in range(num_heads)]  # of `several` in a head
    taps = torch.tensor([[s * a + (1 - s) * b for a, b in zip(several, alone, strict=True)] for s in shares])
    return taps / taps.norm(dim=1, keepdim=True)
