"""The decoder reads neighbors with its own self-attention, in place of an encoder and cross-attention. Not in the
paper.

    neighbors of chunk u, each alone ─ the decoder's layers ─ keys and values of every layer
                                                                       │ one softmax with the text's keys
    text ──────────────────────────────── self-attention ◄─────────────┘ from the last token of chunk u on

A window is that of chunked cross-attention (`retro.py`): the last token of chunk u and the first m - 1 of chunk u + 1
read the neighbors of chunk u. A trained decoder can read already, so this has no parameters. Neighbors and text are
packed into one stream of B·T + N·R tokens, so every block runs once.

    positions      -R . . . . . . -1 │ 0 . . . . . . . .      The neighbors of a chunk are at the same positions, right before
    keys            neighbor (each)  │ text of the document   the document's first token in the row.

RoPE depends on differences of positions only. So the keys of a neighbor keep the rotations of positions 0 … R - 1 that
its own attention needs, and queries are rotated by R more tokens to read them. The first token of a neighbor is
encoded, but not read: trained decoders give it attention that they have no other use for, and its values mean nothing
to the text.

Letters of the shape comments as in `reads.py`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from retro.batch.inputs import Inputs
from retro.batch.masks import document_positions, neighbor_mask, some_key, visible
from retro.copying.matches import Windows
from retro.model.attention import Attention, by_head
from retro.model.kernels import Bounds, dot_product_attention, dot_product_attention_with_lse
from retro.model.positions import RopePositions, rotate, waves
from retro.model.reads import CachedNeighbors, PackedNeighbors, ReadNeighbors, Reads
from retro.model_settings import ModelSettings


@dataclass
class StoredKeysValues:
    """A `LayerCache` that keeps the keys and values of a pass, [N, S, G, C] each, and has no earlier ones."""

    distance_keys: Tensor | None = None
    keys_values: tuple[Tensor, Tensor] = field(init=False)

    def before(self, q: Tensor, k: Tensor) -> tuple[None, None]:
        """None: no token precedes the first one."""
        return None, None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values."""
        self.keys_values = k, v
        return k, v


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
    """True for tokens of the neighbors that the text reads: bool [B', U, K, R]. See `neighbor_mask`; all but the first
    token."""
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
    """Mask of a neighbor's own attention, bool [R, R], where the sliding window is shorter; None = all preceding
    tokens."""
    at = torch.arange(r, device=device)
    return visible(at, at, settings.attention.sliding_window) if 0 < settings.attention.sliding_window < r else None


class ReadingAttention(Attention):
    """Self-attention that can read neighbors; the parameters are those of `Attention`."""

    def forward(self, x: Tensor, reads: Reads) -> Tensor:
        """As `Attention.forward`. With packed neighbors to read, the input and the output are streams [S, D]."""
        neighbors = reads.neighbors
        if neighbors is None:
            return super().forward(x, reads)
        if isinstance(neighbors, PackedNeighbors):
            return self.forward_packed(x, reads, neighbors)
        # Settings refuse smeared tokens with this reader, so starts of documents have no effect.
        q, k, v = self.queries_keys_values(x, reads)
        return self.project_output(self.attend_to_both(q, k, v, reads, neighbors))

    def forward_packed(self, x: Tensor, reads: Reads, packed: PackedNeighbors) -> Tensor:
        """Attend from the text to itself and to neighbors, and from each neighbor to itself: [S, D] to [S, D].

        Args:
            x: stream.
            reads: of the text's self-attention, with a mask bool [1 or B, 1, T, T] or [T, T]; None = all preceding
                tokens.
            packed: the neighbors.
        """
        # One product for text and neighbors; then [B, T, H or G, C] of the text and [N, R, H or G, C] of the neighbors.
        (q, near_q), (k, near_k), (v, near_v) = map(packed.unpack, self.project(x))
        k, near_k = reads.positions.finish_keys(k), packed.positions.finish_keys(near_k)
        # Each neighbor is a row of its own, so that it reads no other neighbor.
        encoded_q, encoded_k, encoded_v = by_head(packed.positions.finish_queries(near_q), near_k, near_v)
        encoded = dot_product_attention(
            encoded_q, *self.with_prefix(encoded_k, encoded_v, packed.mask, True), self.scale
        )
        # The K neighbors of a window become one row of keys for its queries: [N, R, G, C] to [W, K·R, G, C].
        keys, values = (part.reshape(len(packed.readable), -1, *part.shape[2:]) for part in (near_k, near_v))
        neighbors = ReadNeighbors(keys, values, packed.readable, packed.rotation, packed.windows)
        y = self.attend_to_both(q, k, v, reads, neighbors)
        return self.project_output(packed.pack(y, encoded.transpose(1, 2)))

    def project_output(self, y: Tensor) -> Tensor:
        """Project sums of values [..., H, C] to the stream, [..., D]."""
        projected: Tensor = self.o_proj(y.flatten(-2))
        return projected

    def attend_to_both(self, q: Tensor, k: Tensor, v: Tensor, reads: Reads, neighbors: ReadNeighbors) -> Tensor:
        """One softmax over the text's keys [B, S, G, C] and those of neighbors, before the output's projection:
        [B, T, H, C].

        Two attentions are merged by the logs of their sums of exponentials. Without a readable neighbor, the result is
        that of the text to the bit.

        Args:
            q: projected queries [B, T, H, C].
            k: finished keys.
            v: values.
            reads: positions and mask of the text.
            neighbors: what the queries read.
        """
        assert not isinstance(reads.mask, Bounds), "kernels that take bounds return no sums of exponentials"
        # The same queries twice, since their distances to neighbors are R more than those to the text.
        text_q, near_q, windows = reads.positions.finish_queries(q), rotate(q, neighbors.rotation), neighbors.windows
        if windows is not None:
            near_q = windows.split(near_q)  # [W, M, H, C]: the queries that read the same neighbors are a row
        text_q, k, v = by_head(text_q, k, v)
        of_text = self.with_prefix(k, v, reads.mask, reads.causal)
        text, text_lse = dot_product_attention_with_lse(text_q, *of_text, self.scale)
        readable = neighbors.readable[:, None, None]  # [W, 1, 1, K·R]
        near = by_head(near_q, neighbors.keys, neighbors.values)
        read, lse = dot_product_attention_with_lse(*near, mask=some_key(readable), causal=False, scale=self.scale)
        # `some_key` shows something to windows without a readable neighbor: a sum of 0 takes it out of the merged
        # softmax.
        lse = lse.masked_fill(~readable.any(-1), -torch.inf)
        text, text_lse, read, lse = (part.transpose(1, 2) for part in (text, text_lse, read, lse))  # [B or W, T, H, …]
        if windows is not None:  # back to [B, T, H, …]; -inf where no window is: the sum of no exponentials
            read, lse = windows.join(read, q.shape[1]), windows.join(lse, q.shape[1], -torch.inf)
        share = torch.sigmoid(lse - text_lse)[..., None].to(text.dtype)  # of the neighbors in the sum of exponentials
        return text + share * (read.to(text.dtype) - text)
