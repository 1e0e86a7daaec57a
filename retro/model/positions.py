"""Positions of queries and keys (Borgeaud et al. 2022, section 2.4), computed once for each kind of attention by `place`.

Rotary ones (ours), Transformer-XL's (the paper's) or ALiBi's; learned positions stand in what is read, and are nothing here. Letters
of the shape comments as in `retro.py`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """RoPE: the rotations of every query and key. A score then depends on the difference of the two angles alone."""

    query: Tensor  # [2, Q, 1, C/2], cosines and sines
    key: Tensor  # [2, S, 1, C/2]


class Relative(NamedTuple):
    """Transformer-XL: sinusoids of every distance that occurs, and which of them lies between query and key."""

    waves: Tensor  # [X, width of the queries]
    lookup: Tensor  # [Q, S]


class Distances(NamedTuple):
    """ALiBi (Press et al. 2022): scores fall with the distance of query and key, more or less steeply by head."""

    apart: Tensor  # [1 or N, 1, Q, S], not negative


class Nowhere(NamedTuple):
    """Nothing: what is read says itself where it stands (learned positions)."""


class Rope(NamedTuple):
    """How RoPE turns the features of a head; see `ModelSettings` for what the numbers mean.

    Attributes:
        turning: features that turn, the first ones of a head; 0 = all.
    """

    turning: int = 0
    theta: float = 10_000
    scaling: str = "none"
    factor: float = 1
    low_factor: float = 1
    high_factor: float = 4
    original_length: int = 8192


PLAIN_ROPE = Rope()


def frequencies(number: int, rope: Rope, device: torch.device) -> Tensor:
    """Radians by which each pair of features turns from token to token, falling geometrically: [number] float32.

    `llama3` is the scaling of Llama 3.1 (Dubey et al. 2024, section 3.4.3), as its authors have published it in code.
    """
    steps = torch.arange(number, device=device, dtype=torch.float32)
    radians = rope.theta ** (-steps / number)
    if rope.scaling == "linear":
        return radians / rope.factor
    if rope.scaling == "llama3":
        turns = rope.original_length * radians / (2 * math.pi)
        kept = ((turns - rope.low_factor) / (rope.high_factor - rope.low_factor)).clamp(0, 1)
        return radians * (kept + (1 - kept) / rope.factor)
    return radians


def waves(positions: Tensor, num_frequencies: int, rope: Rope = PLAIN_ROPE) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [S] at geometrically falling frequencies, both [S, num_frequencies] float32."""
    angles = positions[:, None] * frequencies(num_frequencies, rope, positions.device)
    return angles.cos(), angles.sin()


Places = Rotary | Relative | Distances | Nowhere


def place(
    scheme: str,
    width: int,
    head_dim: int,
    query: range,
    key: range,
    device: torch.device,
    copies: tuple[int, int] = (1, 1),
    rope: Rope = PLAIN_ROPE,
) -> Places:
    """What the attentions of a stack have to know of positions, where a query at i and a key at j are i - j apart.

    `scheme` is `ModelSettings.positions`, `width` that of what asks, `rope` how the features of heads turn, if they do. The
    copies are the K neighbors side by side, which stand at the same r positions.
    """
    if scheme == "learned":
        return Nowhere()
    query_at = torch.arange(query.start, query.stop, device=device).repeat(copies[0])  # [Q]
    key_at = torch.arange(key.start, key.stop, device=device).repeat(copies[1])  # [S]
    if scheme == "rope":
        pairs = (rope.turning or head_dim) // 2
        return Rotary(*(torch.stack(waves(at, pairs, rope))[:, :, None] for at in (query_at, key_at)))
    if scheme == "alibi":
        return Distances((query_at[:, None] - key_at).abs()[None, None])
    lowest = query.start - key.stop + 1
    distances = torch.arange(lowest, query.stop - key.start, device=device)  # [X]
    return Relative(torch.cat(waves(distances, width // 2), dim=-1), query_at[:, None] - key_at - lowest)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn the feature pairs (c, c + C/2) of x [N, S, H, C] by the rotation [2, S, 1, C/2] of each position.

    A rotation of fewer features, [2, S, 1, F/2], turns the first F, and leaves the others as they are.
    """
    if (turning := 2 * rotation.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :turning], rotation), x[..., turning:]), dim=-1)
    cos, sin = rotation.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
