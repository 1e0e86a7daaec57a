"""Positions of queries and keys (Borgeaud et al. 2022, section 2.4), computed once per pass by `positions_of`.

RoPE (our default), Transformer-XL (the paper's) or ALiBi. Learned positions are added to the stream and need nothing
here.

A scheme is one class with the methods of `Positions`, and one line in `SCHEMES`. Attention and the cache of generation
call these methods and know no scheme by name. A class without one of them is refused when a model is built
(`scheme_of`).

    whole sequences      `positions_of` ─ all queries, all keys ───────────────────────────────────────┐
    cached text          `positions_of` ─ all positions of a context ─ `in_text` ─ those of a pass ────┼─► `Attention.attend`
    cached neighbors     `positions_of` ─ a window and its neighbors ─ `in_window` ─ those of a pass ──┘

Letters of the shape comments as in `retro.py`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from retro.model_settings import RopeSettings

DEFAULT_ROPE = RopeSettings()


class Places(NamedTuple):
    """Where the queries and keys of an attention are. A query at position i and a key at position j have distance i -
    j.

    Attributes:
        query: positions of the queries.
        key: positions of the keys.
        device: where tensors are created.
        copies: how often queries and keys repeat: K neighbors that are concatenated have the same r positions.
    """

    query: range
    key: range
    device: torch.device
    copies: tuple[int, int] = (1, 1)

    def queries(self) -> Tensor:
        """Positions of the queries, int64 [Q]."""
        return torch.arange(self.query.start, self.query.stop, device=self.device).repeat(self.copies[0])

    def keys(self) -> Tensor:
        """Positions of the keys, int64 [S]."""
        return torch.arange(self.key.start, self.key.stop, device=self.device).repeat(self.copies[1])

    def distances(self) -> Tensor:
        """Distances of every query and key, int64 [Q, S]."""
        return self.queries()[:, None] - self.keys()


class Heads(Protocol):
    """What a scheme uses of the `Attention` whose scores it changes: sizes, and the parameters that it has there."""

    num_heads: int
    first_head: int
    head_dim: int
    scale: float | None

    @property
    def distance_proj(self) -> Callable[[Tensor], Tensor]:
        """W_kR of Transformer-XL, [..., D] to [..., H·C]."""

    @property
    def content_bias(self) -> Callable[[], Tensor]:
        """The vector u of Transformer-XL, [H, 1, C]."""

    @property
    def distance_bias(self) -> Callable[[], Tensor]:
        """The vector v of Transformer-XL, [H, 1, C]."""


class Positions(Protocol):
    """The positions of queries and keys in one pass, by some scheme. None of the methods has a default: every scheme
    decides."""

    @classmethod
    def of(cls, places: Places, width: int, head_dim: int, rope: RopeSettings) -> "Positions":
        """Positions of whole sequences. Arguments as in `positions_of`."""

    def finish_queries(self, q: Tensor) -> Tensor:
        """Put positions into queries [N, Q, H, C], where the scheme does."""

    def finish_keys(self, k: Tensor) -> Tensor:
        """Put positions into keys [N, S, G, C], where the scheme does. Caches hold finished keys."""

    def score_terms(self, q: Tensor, heads: Heads, distance_keys: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The part of the scores that depends on distances.

        Args:
            q: finished queries [N, H, Q, C].
            heads: the attention.
            distance_keys: from the method of this name, if the caller has them.

        Returns:
            The queries [N, H, Q, C] as they multiply keys, and what is added to the scores, [1 or N, H, Q, S]; None =
            nothing.
        """

    def distance_keys(self, heads: Heads, dtype: torch.dtype) -> Tensor | None:
        """What `score_terms` computes of these positions and the weights alone, so that generation computes it once;
        None = nothing."""

    def in_text(self, at: Tensor, num_keys: int, dtype: torch.dtype) -> "Positions":
        """Positions of cached text.

        Called on positions of all queries of a context, and of one key.

        Args:
            at: positions of the queries in each row, int64 [N, Q]. Keys that are new in this pass have these too.
            num_keys: S; the cache has keys at 0, 1 … S - 1. A mask hides those after a query.
            dtype: of the keys in the cache.
        """

    def in_window(self, at: Tensor, num_keys: int) -> "Positions":
        """Positions of cached neighbors.

        Called on positions of a window's m queries, and of the most neighbors that any row has.

        Args:
            at: places of the queries in the window, int64 [N, Q].
            num_keys: S = K·R, of the neighbors that this pass reads. Their keys are finished.
        """


class RopePositions(NamedTuple):
    """RoPE: the rotation of every query and key. Scores depend only on the difference of the two angles."""

    query: Tensor  # [2, Q, 1, C/2], cosines and sines; [2, N, Q, 1, C/2] if rows differ
    key: Tensor  # [2, S, 1, C/2]

    @classmethod
    def of(cls, places: Places, width: int, head_dim: int, rope: RopeSettings) -> "RopePositions":
        """See `Positions`."""
        pairs = round(head_dim * rope.partial_rotary_factor) // 2
        # One axis for heads, which all rotate alike.
        query, key = (torch.stack(waves(at, pairs, rope))[:, :, None] for at in (places.queries(), places.keys()))
        return cls(query, key)

    def finish_queries(self, q: Tensor) -> Tensor:
        """See `Positions`."""
        return rotate(q, self.query)

    def finish_keys(self, k: Tensor) -> Tensor:
        """See `Positions`."""
        # A decoder prepares the positions of cross-attention for the most neighbors of a batch; each has the same ones.
        return rotate(k, self.key[..., : k.shape[1], :, :])

    def score_terms(self, q: Tensor, heads: Heads, distance_keys: Tensor | None) -> tuple[Tensor, None]:
        """See `Positions`: products of rotated queries and keys hold the distances."""
        return q, None

    def distance_keys(self, heads: Heads, dtype: torch.dtype) -> None:
        """See `Positions`."""

    def in_text(self, at: Tensor, num_keys: int, dtype: torch.dtype) -> "RopePositions":
        """See `Positions`: keys of earlier passes are rotated already, so the new ones are all there are."""
        rotations = self.query[:, at].to(dtype)  # [2, N, Q, 1, C/2]
        return RopePositions(rotations, rotations)

    def in_window(self, at: Tensor, num_keys: int) -> "RopePositions":
        """See `Positions`."""
        return RopePositions(self.query[:, at], self.key)


class TransformerXLPositions(NamedTuple):
    """Transformer-XL: sinusoids of every distance that occurs, and the index of the distance of each query and key.

    The score of query i and key j is (q_i + u)·k_j + (q_i + v)·W_kR R_{i-j}.
    """

    waves: Tensor  # [X, D]
    lookup: Tensor  # [Q, S]; [N, 1, Q, S] if rows differ

    @classmethod
    def of(cls, places: Places, width: int, head_dim: int, rope: RopeSettings) -> "TransformerXLPositions":
        """See `Positions`."""
        lowest, past = places.query.start - places.key.stop + 1, places.query.stop - places.key.start
        distances = torch.arange(lowest, past, device=places.device)  # [X]
        # A sinusoid for each distance, not for each of the Q·S pairs.
        return cls(torch.cat(waves(distances, width // 2), dim=-1), places.distances() - lowest)

    def finish_queries(self, q: Tensor) -> Tensor:
        """See `Positions`."""
        return q

    def finish_keys(self, k: Tensor) -> Tensor:
        """See `Positions`."""
        return k

    def score_terms(self, q: Tensor, heads: Heads, distance_keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Positions`: q + u, and the scaled term (q + v)·W_kR R_{i-j}."""
        keys = self.distance_keys(heads, q.dtype) if distance_keys is None else distance_keys
        scale = heads.scale or heads.head_dim**-0.5
        by_distance = (q + heads.distance_bias().to(q.dtype)) @ keys * scale  # [N, H, Q, X]
        # Products with all X distances, then one for each key: X is Q + S - 1, far below Q·S.
        scores = by_distance.gather(-1, self.lookup.expand(*by_distance.shape[:2], -1, -1))  # [N, H, Q, S]
        return q + heads.content_bias().to(q.dtype), scores

    def distance_keys(self, heads: Heads, dtype: torch.dtype) -> Tensor:
        """See `Positions`: W_kR R of all distances, [H, C, X]."""
        return heads.distance_proj(self.waves.to(dtype)).unflatten(-1, (-1, heads.head_dim)).permute(1, 2, 0)

    def in_text(self, at: Tensor, num_keys: int, dtype: torch.dtype) -> "TransformerXLPositions":
        """See `Positions`: with one key at 0, the index of a distance is the distance."""
        return TransformerXLPositions(self.waves, distances_in_text(at, num_keys))

    def in_window(self, at: Tensor, num_keys: int) -> "TransformerXLPositions":
        """See `Positions`."""
        return TransformerXLPositions(self.waves, self.lookup[at, :num_keys][:, None])


class AlibiPositions(NamedTuple):
    """ALiBi (Press et al. 2022): scores fall linearly with the distance of query and key, with a slope per head.

    The score of query i and key j is q_i·k_j - s |i - j|, where the slopes s are 2^(-8/H), 2^(-16/H) … 2^-8 (ALiBi's
    formula for powers of 2, here for any H).
    """

    distances: Tensor  # [1 or N, 1, Q, S], not negative

    @classmethod
    def of(cls, places: Places, width: int, head_dim: int, rope: RopeSettings) -> "AlibiPositions":
        """See `Positions`."""
        return cls(places.distances().abs()[None, None])

    def finish_queries(self, q: Tensor) -> Tensor:
        """See `Positions`."""
        return q

    def finish_keys(self, k: Tensor) -> Tensor:
        """See `Positions`."""
        return k

    def score_terms(self, q: Tensor, heads: Heads, distance_keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Positions`."""
        return q, (self.distances * -slopes(q, heads)).to(q.dtype)

    def distance_keys(self, heads: Heads, dtype: torch.dtype) -> None:
        """See `Positions`."""

    def in_text(self, at: Tensor, num_keys: int, dtype: torch.dtype) -> "AlibiPositions":
        """See `Positions`."""
        return AlibiPositions(distances_in_text(at, num_keys))

    def in_window(self, at: Tensor, num_keys: int) -> "AlibiPositions":
        """See `Positions`."""
        return AlibiPositions(self.distances[0, 0, at, :num_keys][:, None])


class NoPositions(NamedTuple):
    """Attention without position terms: learned positions are part of its input."""

    @classmethod
    def of(cls, places: Places, width: int, head_dim: int, rope: RopeSettings) -> "NoPositions":
        """See `Positions`."""
        return cls()

    def finish_queries(self, q: Tensor) -> Tensor:
        """See `Positions`."""
        return q

    def finish_keys(self, k: Tensor) -> Tensor:
        """See `Positions`."""
        return k

    def score_terms(self, q: Tensor, heads: Heads, distance_keys: Tensor | None) -> tuple[Tensor, None]:
        """See `Positions`."""
        return q, None

    def distance_keys(self, heads: Heads, dtype: torch.dtype) -> None:
        """See `Positions`."""

    def in_text(self, at: Tensor, num_keys: int, dtype: torch.dtype) -> "NoPositions":
        """See `Positions`."""
        return self

    def in_window(self, at: Tensor, num_keys: int) -> "NoPositions":
        """See `Positions`."""
        return self


SCHEMES: dict[str, type[Positions]] = {
    "rope": RopePositions,
    "transformer-xl": TransformerXLPositions,
    "alibi": AlibiPositions,
    "learned": NoPositions,
}
"""Classes by `settings.PositionScheme`."""


def scheme_of(name: str) -> type[Positions]:
    """The class of a scheme, as `Attention` checks it when a model is built.

    Raises:
        NotImplementedError: the scheme has no class, or the class lacks a method of `Positions`.
    """
    if name not in SCHEMES:
        raise NotImplementedError(f"positions {name!r} have no class: add it to `SCHEMES` in retro/model/positions.py.")
    scheme = SCHEMES[name]
    needed = [method for method in vars(Positions) if not method.startswith("_")]
    if missing := [method for method in needed if not callable(getattr(scheme, method, None))]:
        raise NotImplementedError(
            f"positions {name!r}: {scheme.__name__} has no {', '.join(missing)}, as `Positions` in retro/model/positions.py "
            "describes. Without them, training or generation would ignore the positions."
        )
    return scheme


def positions_of(
    scheme: str,
    width: int,
    head_dim: int,
    query: range,
    key: range,
    device: torch.device,
    copies: tuple[int, int] = (1, 1),
    rope: RopeSettings = DEFAULT_ROPE,
) -> Positions:
    """Positions for the attentions of a stack.

    Args:
        scheme: one of `settings.PositionScheme`.
        width: D of the queries' input.
        head_dim: C.
        query: as in `Places`.
        key: as in `Places`.
        device: as in `Places`.
        copies: as in `Places`.
        rope: parameters of RoPE, if that is the scheme; by default it rotates whole heads.
    """
    return SCHEMES[scheme].of(Places(query, key, device, copies), width, head_dim, rope)


# --- formulas of the schemes ------------------------------------------------------------------------------------------


def distances_in_text(at: Tensor, num_keys: int) -> Tensor:
    """Distances of queries at positions [N, Q] and the first S keys of a cache, int64 [N, 1, Q, S]; 0 for later keys,
    which are masked."""
    return (at[:, :, None] - torch.arange(num_keys, device=at.device)).clamp(min=0)[:, None]


def slopes(q: Tensor, heads: Heads) -> Tensor:
    """ALiBi's decrease of the scores per token of distance, for each head of q [N, H, Q, C]: [H, 1, 1]."""
    # With tensor parallelism a process has some of the heads, which keep their numbers among all.
    numbers = torch.arange(heads.first_head + 1, heads.first_head + 1 + q.shape[1], device=q.device)
    return (numbers * (-8 / heads.num_heads)).exp2()[:, None, None]


def frequencies(num_frequencies: int, rope: RopeSettings, device: torch.device) -> Tensor:
    """Radians by which each pair of features rotates per token, in geometric progression: [num_frequencies] float32.

    `llama3` is the scaling of Llama 3.1 (Dubey et al. 2024, section 3.4.3), as in Meta's published code.
    """
    steps = torch.arange(num_frequencies, device=device, dtype=torch.float32)
    radians = rope.theta ** (-steps / num_frequencies)
    if rope.scaling == "linear":
        return radians / rope.factor
    if rope.scaling == "llama3":
        turns = rope.original_max_positions * radians / (2 * math.pi)
        unchanged = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return radians * (unchanged + (1 - unchanged) / rope.factor)
    return radians


def waves(positions: Tensor, num_frequencies: int, rope: RopeSettings = DEFAULT_ROPE) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [S], both [S, num_frequencies] float32."""
    angles = positions[:, None] * frequencies(num_frequencies, rope, positions.device)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the feature pairs (c, c + C/2) of x [N, S, H, C] by the rotation [2, S, 1, C/2] of each position.

    A rotation of fewer features, [2, S, 1, F/2], rotates the first F features and leaves the others unchanged.
    """
    if (rotary_dim := 2 * rotation.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], rotation), x[..., rotary_dim:]), dim=-1)
    cos, sin = rotation.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
