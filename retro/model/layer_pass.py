"""What the layers get in one pass besides the residual stream: positions, masks, neighbors and caches.

    sequences (training, scoring) ─ `LayerPass.of` ────────────────┐
                                                                   ├─► `Retro.run`: one loop over the layers
    next tokens of cached texts ─ `inference/cached_layers.py` ────┘

Letters of the shape comments as in `retro.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from retro.batch.inputs import Inputs
from retro.batch.masks import document_positions, document_starts, neighbor_mask
from retro.model.encoder import Encoder
from retro.model.kernels import Bounds, self_attention_mask
from retro.model.mixture_of_experts import Queues, queues_of
from retro.model.positions import Positions, RopePositions, positions_of
from retro.model.reader import neighbors_to_read, rotation_at
from retro.model.reads import CachedNeighbors, EncodedNeighbors, LayerCache, PackedNeighbors, Reads, WindowNeighbors
from retro.model_settings import ModelSettings


class CrossReads(Protocol):
    """What the layers with chunked cross-attention read in a pass."""

    def encode(self, encoder: Encoder, table: nn.Embedding, h: Tensor) -> Tensor | None:
        """Encode the neighbors [B', U, K, R, E], given the stream [B, T, D] after self-attention of the first layer
        that reads them.

        A cache keeps what it encodes and returns None.
        """

    def of_layer(self, name: str, encoded: Tensor | None) -> EncodedNeighbors | WindowNeighbors | None:
        """What a layer reads, by its name and what `encode` returned; None = there are no neighbors."""


class NeighborsOfSequences(NamedTuple):
    """The neighbors of whole sequences.

    Attributes:
        neighbors: int64 [B', U, K, R].
        real: see `neighbor_mask`, bool [B', U, K, R]; None = all.
        encoded: bool [B', U, K, R], tokens that the encoder reads; None = all.
        positions: of cross-attention.
    """

    neighbors: Tensor
    real: Tensor | None
    encoded: Tensor | None
    positions: Positions

    @classmethod
    def of(cls, inputs: Inputs, settings: ModelSettings) -> "NeighborsOfSequences":
        """The neighbors of a batch that has some."""
        neighbors, lengths, documents = inputs.neighbors, inputs.neighbor_lengths, inputs.documents
        (k, r), m = (
            neighbors.shape[2:],
            settings.chunk_length,
        )  # [B', U, K, R]; windows begin at the last token of a chunk
        # Without a mask attention takes faster kernels. Without lengths the encoder needs none: cross-attention hides
        # neighbors that belong to another document.
        real = None if lengths is None and documents is None else neighbor_mask(neighbors, lengths, documents)
        positions = positions_of(*settings.cross_scheme, range(m - 1, 2 * m - 1), range(r), neighbors.device, (1, k))
        return cls(neighbors, real, None if lengths is None else real, positions)

    def encode(self, encoder: Encoder, table: nn.Embedding, h: Tensor) -> Tensor:
        """See `CrossReads`."""
        encoded: Tensor = encoder(self.neighbors, self.encoded, h, table)
        return encoded

    def of_layer(self, name: str, encoded: Tensor | None) -> EncodedNeighbors:
        """See `CrossReads`."""
        assert encoded is not None, "the first layer with cross-attention runs the encoder"
        return EncodedNeighbors(self.positions, encoded, self.real)


class LayerPass(NamedTuple):
    """One pass through the layers.

    Attributes:
        positions: of self-attention.
        mask: of self-attention, as in `Reads`.
        causal: as in `Reads`.
        starts: as in `Reads`.
        neighbors: that self-attention reads; None = none.
        cross: neighbors that cross-attention reads; None = none.
        queues: of the experts; None = every row is one document without padding.
        caches: of self-attention, one for each layer; empty = the stream holds whole sequences.
    """

    positions: Positions
    mask: Tensor | Bounds | None = None
    causal: bool = True
    starts: Tensor | None = None
    neighbors: PackedNeighbors | CachedNeighbors | None = None
    cross: CrossReads | None = None
    queues: Queues | None = None
    caches: Sequence[LayerCache] = ()

    @classmethod
    def of(
        cls, h: Tensor, inputs: Inputs, settings: ModelSettings, cached: tuple[Tensor, Tensor] | None = None
    ) -> "LayerPass":
        """The pass of whole sequences. Arguments as in `Retro.run_layers`."""
        num_tokens, m, documents = h.shape[1], settings.chunk_length, inputs.documents
        reads = inputs.retrieves and settings.decoder_reads
        crosses = inputs.retrieves and settings.retrieval.cca_layers
        return cls(
            positions=_positions(num_tokens, documents, settings, h.device),
            # Kernels that take bounds read no other keys than those of the text.
            mask=self_attention_mask(
                h, documents, m, settings.attention, bounds=not (reads or settings.attention.prefix_tokens)
            ),
            starts=None if documents is None else document_starts(documents, m, num_tokens),
            neighbors=neighbors_to_read(inputs, settings, cached) if reads else None,
            cross=NeighborsOfSequences.of(inputs, settings) if crosses else None,
            queues=queues_of(h, m, documents, inputs.lengths) if settings.expert_layers else None,
        )

    def of_attention(self, index: int) -> Reads:
        """What the self-attention of the layer with this index on this device reads."""
        return Reads(
            positions=self.positions,
            mask=self.mask,
            causal=self.causal,
            starts=self.starts,
            cache=self.caches[index] if self.caches else None,
            neighbors=None if self.neighbors is None else self.neighbors.of_layer(index),
        )


def _positions(num_tokens: int, documents: Tensor | None, settings: ModelSettings, device: torch.device) -> Positions:
    """Positions of self-attention in rows: from the beginning of the row, but of each document if a rotary prefix
    precedes it."""
    at = range(num_tokens)
    positions = positions_of(*settings.self_scheme, at, at, device, rope=settings.rope)
    if documents is None or not settings.attention.prefix_tokens or not isinstance(positions, RopePositions):
        return positions
    rotation = rotation_at(settings, document_positions(documents, settings.chunk_length, num_tokens))
    return RopePositions(rotation, rotation)
