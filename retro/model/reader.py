"""The decoder reads neighbors with its own self-attention, in place of an encoder and cross-attention. Not in the paper.

    neighbors of chunk u, each alone ─ the decoder's layers ─ keys and values of every layer
                                                                       │ one softmax with the text's keys
    text ──────────────────────────────── self-attention ◄─────────────┘ from the last token of chunk u on

A window is that of chunked cross-attention (`retro.py`): the last token of chunk u and the first m - 1 of chunk u + 1 read the
neighbors of chunk u. A trained decoder can read already, so this has no parameters. Neighbors and text are packed into one stream
of B·T + N·R tokens, so every block runs once.

    positions      -R . . . . . . -1 │ 0 . . . . . . . .      The neighbors of a chunk are at the same positions, right before
    keys            neighbor (each)  │ text of the document   the document's first token in the row.

RoPE depends on differences of positions only. So the keys of a neighbor keep the rotations of positions 0 … R - 1 that its own
attention needs, and queries are rotated by R more tokens to read them. The first token of a neighbor is encoded, but not read:
trained decoders give it attention that they have no other use for, and its values mean nothing to the text.

Letters of the shape comments as in `retro.py`; in addition N = B'·U·K neighbors of a batch, S = B·T + N·R tokens of its stream,
W = B'·U windows, L layers, G heads of keys and values.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retro.batch.inputs import Inputs
from retro.batch.masks import document_positions, neighbor_mask, some_key, visible
from retro.copying.matches import Windows
from retro.model.attention import Attention
from retro.model.kernels import dot_product_attention, dot_product_attention_with_lse
from retro.model.positions import Positions, RopePositions, rotate, waves
from retro.model_settings import ModelSettings


class ReadNeighbors(NamedTuple):
    """What queries read in addition to the text.

    Attributes:
        keys: finished keys, [W, K·R, G, C].
        values: their values, [W, K·R, G, C].
        readable: bool [W, K·R].
        rotation: of the queries, [2, T, 1, C/2] or [2, B, T, 1, C/2]: positions in their documents plus R.
        windows: of the queries; the queries of window n read neighbors n. None = the queries of row n do.
    """

    keys: Tensor
    values: Tensor
    readable: Tensor
    rotation: Tensor
    windows: Windows | None = None


@dataclass
class StoredKeysValues:
    """A `LayerCache` that hands out the keys and values of a pass, [N, S, G, C] each, and has no earlier ones."""

    distance_keys: Tensor | None = None
    keys_values: tuple[Tensor, Tensor] = field(init=False)

    def before(self, q: Tensor, k: Tensor) -> tuple[None, None]:
        """None: no token precedes the first one."""
        return None, None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values."""
        self.keys_values = k, v
        return k, v


class CachedNeighbors(NamedTuple):
    """Neighbors with keys and values from a cache: only the text is in the stream.

    Attributes:
        keys: of all layers from `Retro.encode_neighbors`, [W, L, G, K·R, C].
        values: the same shape.
        readable: as in `ReadNeighbors`.
        rotation: as in `ReadNeighbors`.
        windows: as in `ReadNeighbors`.
    """

    keys: Tensor
    values: Tensor
    readable: Tensor
    rotation: Tensor
    windows: Windows | None = None

    def of_layer(self, index: int) -> ReadNeighbors:
        """What the attention of a layer reads."""
        keys, values = (part[:, index].transpose(1, 2) for part in (self.keys, self.values))
        return ReadNeighbors(keys, values, self.readable, self.rotation, self.windows)


class PackedNeighbors(NamedTuple):
    """The neighbors in the stream of a batch, after its text.

    Attributes:
        shape: B, T and R.
        positions: of the tokens of a neighbor in its own attention.
        mask: of its own attention, bool [R, R]; None = all preceding tokens.
        readable: see `readable_tokens`, bool [W, K·R].
        rotation: as in `ReadNeighbors`.
        windows: as in `ReadNeighbors`.
    """

    shape: tuple[int, int, int]
    positions: RopePositions
    mask: Tensor | None
    readable: Tensor
    rotation: Tensor
    windows: Windows

    def of_layer(self, index: int) -> "PackedNeighbors":
        """What the attention of a layer reads: it computes keys and values itself."""
        return self

    def pack(self, text: Tensor, neighbors: Tensor) -> Tensor:
        """The stream [S, ...] of a text [B, T, ...] and of neighbors [N, R, ...]."""
        return torch.cat((text.flatten(0, 1), neighbors.flatten(0, 1)))

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The text [B, T, ...] and the neighbors [N, R, ...] of a stream [S, ...]."""
        num_rows, num_tokens, r = self.shape
        text, neighbors = x.tensor_split((num_rows * num_tokens,))
        return text.unflatten(0, (num_rows, num_tokens)), neighbors.unflatten(0, (-1, r))


def neighbors_to_read(
    inputs: Inputs, settings: ModelSettings, cached: tuple[Tensor, Tensor] | None = None
) -> PackedNeighbors | CachedNeighbors:
    """The neighbors of a batch: packed with its text, or by cached keys and values (`Retro.encode_neighbors`)."""
    (num_rows, num_tokens), device = inputs.tokens.shape, inputs.tokens.device
    num_readers, num_chunks, _, r = inputs.neighbors.shape
    m, at = settings.chunk_length, torch.arange(num_tokens, device=device)
    if inputs.documents is not None:
        at = document_positions(inputs.documents, m, num_tokens)
    readable = readable_tokens(inputs.neighbors, inputs.neighbor_lengths, inputs.documents).flatten(0, 1).flatten(1)
    rotation, windows = rotation_at(settings, at + r), Windows(m, num_readers, num_chunks, num_rows)
    if cached is not None:
        return CachedNeighbors(*cached, readable, rotation, windows)
    positions, mask = neighbor_positions(settings, r, device), neighbor_window(settings, r, device)
    return PackedNeighbors((num_rows, num_tokens, r), positions, mask, readable, rotation, windows)


def readable_tokens(neighbors: Tensor, lengths: Tensor | None, documents: Tensor | None) -> Tensor:
    """True for tokens of the neighbors that the text reads: bool [B', U, K, R]. See `neighbor_mask`; all but the first token."""
    return neighbor_mask(neighbors, lengths, documents) & (
        torch.arange(neighbors.shape[3], device=neighbors.device) > 0
    )


def rotation_at(settings: ModelSettings, at: Tensor) -> Tensor:
    """Rotation of queries or keys at positions [T] or [B, T]: [2, T, 1, C/2] or [2, B, T, 1, C/2]."""
    rotation = torch.stack(waves(at.flatten(), settings.rotary_dim // 2, settings.rope))
    return rotation.unflatten(1, at.shape)[..., None, :]


def neighbor_positions(settings: ModelSettings, r: int, device: torch.device) -> RopePositions:
    """Positions of the tokens of a neighbor in its own attention."""
    rotation = rotation_at(settings, torch.arange(r, device=device))
    return RopePositions(rotation, rotation)


def neighbor_window(settings: ModelSettings, r: int, device: torch.device) -> Tensor | None:
    """Mask of a neighbor's own attention, bool [R, R], where the sliding window is shorter; None = all preceding tokens."""
    at = torch.arange(r, device=device)
    return visible(at, at, settings.attention.sliding_window) if 0 < settings.attention.sliding_window < r else None


class ReadingAttention(Attention):
    """Self-attention that can read neighbors; the parameters are those of `Attention`."""

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        *args: Any,
        reading: PackedNeighbors | ReadNeighbors | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As `Attention.forward`. With packed neighbors to read, the input and the output are streams [S, D]."""
        if reading is None:
            return super().forward(x, positions, *args, **kwargs)
        mask, causal = kwargs["mask"], kwargs["causal"]
        if isinstance(reading, PackedNeighbors):
            return self.forward_packed(x, positions, reading, mask, causal)
        q, k, v = self.queries_keys_values(x, positions, cache=kwargs.get("cache"))
        return self.project_output(self.attend_to_both(q, positions, k, v, mask, causal, reading))

    def forward_packed(
        self, x: Tensor, positions: Positions, reading: PackedNeighbors, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """Attend from the text to itself and to neighbors, and from each neighbor to itself: [S, D] to [S, D].

        Args:
            x: stream.
            positions: of the text.
            reading: the neighbors.
            mask: of the text's self-attention, bool [1 or B, 1, T, T] or [T, T]; None = all preceding tokens.
            causal: as in `Attention.forward`.
        """
        (k, near_k), (v, near_v) = map(reading.unpack, self.project_keys_values(x))
        q, near_q = reading.unpack(self.project_queries(x))
        near_k, num_windows = self.rotate_keys(near_k, reading.positions), len(reading.readable)
        encoded_q, encoded_k, encoded_v = _by_head(rotate(near_q, reading.positions.query), near_k, near_v)
        read = self.with_prefix(encoded_k, encoded_v, reading.mask, True)
        encoded = dot_product_attention(encoded_q, *read, self.scale)
        keys, values = (part.reshape(num_windows, -1, *part.shape[2:]) for part in (near_k, near_v))  # [W, K·R, G, C]
        neighbors = ReadNeighbors(keys, values, reading.readable, reading.rotation, reading.windows)
        y = self.attend_to_both(q, positions, self.rotate_keys(k, positions), v, mask, causal, neighbors)
        return self.project_output(reading.pack(y, encoded.transpose(1, 2)))

    def project_output(self, y: Tensor) -> Tensor:
        """Project sums of values [..., H, C] to the stream, [..., D]."""
        projected: Tensor = self.o_proj(y.flatten(-2))
        return projected

    def attend_to_both(
        self,
        q: Tensor,
        positions: Positions,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        neighbors: ReadNeighbors,
    ) -> Tensor:
        """One softmax over the text's keys [B, S, G, C] and those of neighbors, before the output's projection: [B, T, H, C].

        Two attentions are merged by the logs of their sums of exponentials. Without a readable neighbor, the result is that of
        the text to the bit.

        Args:
            q: projected queries [B, T, H, C].
            positions: of the text.
            k: finished keys.
            v: values.
            mask: as in `forward_packed`.
            causal: as in `Attention.forward`.
            neighbors: what the queries read.
        """
        assert isinstance(positions, RopePositions)
        text_q, reads, windows = rotate(q, positions.query), rotate(q, neighbors.rotation), neighbors.windows
        if windows is not None:
            reads = windows.split(reads)
        text_q, k, v = _by_head(text_q, k, v)
        text, text_lse = dot_product_attention_with_lse(text_q, *self.with_prefix(k, v, mask, causal), self.scale)
        readable = neighbors.readable[:, None, None]  # [W, 1, 1, K·R]
        near = _by_head(reads, neighbors.keys, neighbors.values)
        read, lse = dot_product_attention_with_lse(*near, mask=some_key(readable), causal=False, scale=self.scale)
        # `some_key` shows something to windows without a readable neighbor: a sum of 0 takes it out of the merged softmax.
        lse = lse.masked_fill(~readable.any(-1), -torch.inf)
        text, text_lse, read, lse = (part.transpose(1, 2) for part in (text, text_lse, read, lse))  # [B or W, T, H, …]
        if windows is not None:
            read, lse = windows.join(read, q.shape[1]), windows.join(lse, q.shape[1], -torch.inf)
        share = torch.sigmoid(lse - text_lse)[..., None].to(text.dtype)  # of the neighbors in the sum of exponentials
        return text + share * (read.to(text.dtype) - text)


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, S, H, C] with heads first: [N, H, S, C]."""
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
