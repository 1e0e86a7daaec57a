"""Positions of queries and keys (Borgeaud et al. 2022, section 2.4), computed once per pass by `positions_of`.

RoPE (our default), Transformer-XL (the paper's) or ALiBi. Learned positions are added to the stream and need nothing here.
Letters of the shape comments as in `retro.py`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from retro.model_settings import RopeSettings


class RopePositions(NamedTuple):
    """RoPE: the rotation of every query and key. Scores depend only on the difference of the two angles."""

    query: Tensor  # [2, Q, 1, C/2], cosines and sines
    key: Tensor  # [2, S, 1, C/2]


class TransformerXLPositions(NamedTuple):
    """Transformer-XL: sinusoids of every distance that occurs, and the index of the distance of each query and key."""

    waves: Tensor  # [X, width of the queries]
    lookup: Tensor  # [Q, S]


class AlibiPositions(NamedTuple):
    """ALiBi (Press et al. 2022): scores fall linearly with the distance of query and key, with a slope per head."""

    distances: Tensor  # [1 or N, 1, Q, S], not negative


class NoPositions(NamedTuple):
    """Attention without position terms: learned positions are part of its input."""


DEFAULT_ROPE = RopeSettings()


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


Positions = RopePositions | TransformerXLPositions | AlibiPositions | NoPositions


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
    """Positions for the attentions of a stack. A query at position i and a key at position j have distance i - j.

    Args:
        scheme: one of `settings.PositionScheme`.
        width: D of the queries' input.
        head_dim: C.
        query: positions of the queries.
        key: positions of the keys.
        device: where tensors are created.
        copies: how often queries and keys repeat: K neighbors that are concatenated have the same r positions.
        rope: parameters of RoPE, if that is the scheme; by default it rotates whole heads.
    """
    if scheme == "learned":
        return NoPositions()
    query_at = torch.arange(query.start, query.stop, device=device).repeat(copies[0])  # [Q]
    key_at = torch.arange(key.start, key.stop, device=device).repeat(copies[1])  # [S]
    if scheme == "rope":
        pairs = round(head_dim * rope.partial_rotary_factor) // 2
        return RopePositions(*(torch.stack(waves(at, pairs, rope))[:, :, None] for at in (query_at, key_at)))
    if scheme == "alibi":
        return AlibiPositions((query_at[:, None] - key_at).abs()[None, None])
    lowest = query.start - key.stop + 1
    distances = torch.arange(lowest, query.stop - key.start, device=device)  # [X]
    return TransformerXLPositions(torch.cat(waves(distances, width // 2), dim=-1), query_at[:, None] - key_at - lowest)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the feature pairs (c, c + C/2) of x [N, S, H, C] by the rotation [2, S, 1, C/2] of each position.

    A rotation of fewer features, [2, S, 1, F/2], rotates the first F features and leaves the others unchanged.
    """
    if (rotary_dim := 2 * rotation.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], rotation), x[..., rotary_dim:]), dim=-1)
    cos, sin = rotation.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
