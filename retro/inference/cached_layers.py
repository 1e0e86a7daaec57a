"""The layers of a model over the next tokens of some rows, with the cache of what these rows read before.

    tokens of a pass ─ `Retro.run`, the loop of training ─ activations of the tokens
                           │                    ▲
                           ▼                    │
      cache: keys and values of the tokens so far, and of the encoded neighbors of the last complete chunk

Rows can be at different positions, and each has its own mask, so no row depends on the others. The tokens of a row in a
pass lie in one window if its activations depend on neighbors (`ChunkedCrossAttention`). The first token of a window is
the last token of its chunk. The pass that reads it also encodes the chunk's neighbors, because the encoder needs the
chunk's activations. Letters of the shape comments as in `decoder.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from retro.batch.masks import neighbor_mask, visible
from retro.copying.rows import Row
from retro.device import Placement
from retro.inference.cache import Cache
from retro.inference.neighbor_cache import NeighborCache
from retro.inference.span import Span
from retro.inference.step_graphs import StepGraphs
from retro.model.attention import Attention
from retro.model.encoder import Encoder
from retro.model.layer_pass import LayerPass
from retro.model.positions import Positions, positions_of
from retro.model.reader import readable_tokens, rotation_at
from retro.model.reads import CachedNeighbors, WindowNeighbors
from retro.model.retro import Retro


@dataclass
class TokensOfLayer:
    """The tokens that a layer's self-attention has read; a `LayerCache`."""

    cache: Cache
    layer: int
    span: Span
    distance_keys: Tensor | None

    def before(self, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """See `LayerCache`."""
        cache, before = self.cache, self.span.before
        return before(cache.last_queries, self.layer, q), before(cache.last_keys, self.layer, k)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerCache`."""
        span, both = self.span, (self.cache.keys, self.cache.values)
        for stored, new in zip(both, (k, v), strict=True):
            if len(span.rows) == 1:  # copies of slices are faster
                columns = slice(int(span.starts[0]), int(span.starts[0]) + new.shape[1])
                stored[span.rows[0].slot, self.layer, :, columns] = new[0].transpose(0, 1)
            else:
                stored[span.at[:, None], self.layer, :, span.columns] = new.to(stored.dtype)
        # [N, G, S, C] of the cache to [N, S, G, C]. Keys after a row's last token are those of other rows' lengths:
        # masked.
        k, v = (stored[span.slots, self.layer, :, : span.stop].transpose(1, 2) for stored in both)
        return k, v


class CachedLayers:
    """The layers, their cache, and what all passes share: rotations and keys of distances.

    Attributes:
        cache: of all rows.
    """

    def __init__(self, model: Retro, placement: Placement, context: int, neighbor_cache: NeighborCache) -> None:
        self.model, self.placement, self.context, self.neighbor_cache = model, placement, context, neighbor_cache
        self.m = model.settings.chunk_length
        self._positions = positions_of(
            *model.settings.self_scheme, range(context), range(1), placement.device, rope=model.settings.rope
        )
        self._window_positions: Positions | None = None  # None until the size of the neighbors is known
        self._reading_rotation: Tensor | None = None  # of queries that read them with self-attention, by position
        self._crosses = {layer.name: layer.cross.block for layer in model.layers if layer.cross is not None}
        self._distance_keys = self._keys_of_distances(
            self._positions, [layer.attention.block for layer in model.layers]
        )
        self._cross_distance_keys: Sequence[Tensor | None] = ()
        # Experts ask the device how many tokens each of them gets.
        self.graphs = (
            StepGraphs(self._run) if placement.device.type == "cuda" and not model.settings.expert_layers else None
        )
        self.cache = self._empty()

    def clear(self) -> None:
        """Free the memory of the cache."""
        self.cache = self._empty()
        if self.graphs is not None:
            self.graphs.clear()

    def _empty(self) -> Cache:
        with torch.inference_mode():
            return Cache.of(self.model, self.placement.dtype)

    def make_slots(self, num_rows: int) -> None:
        """Enlarge the cache for this number of rows."""
        # Graphs let rows that are missing work in the last slot.
        self.cache.make_slots(num_rows + (self.graphs is not None))

    def span(self, rows: list[Row], tokens: np.ndarray, starts: np.ndarray, counts: Sequence[int]) -> Span:
        """Place new tokens in the cache.

        Args:
            rows: in the order of their slots.
            tokens: new tokens of the rows, int64 [N, n], with any tokens after the last one.
            starts: position of each row's first token, int64 [N].
            counts: number of new tokens of each row.
        """
        width = tokens.shape[1]
        stop = self.cache.make_tokens(int(starts.max()) + width, self.context)
        # Rows with fewer new tokens are padded to n, as one pass needs one shape; the padding's columns follow the
        # tokens.
        columns, at = self._put(starts[:, None] + np.arange(width)), [row.slot for row in rows]
        begins = starts == 0
        self.cache.readable[self._put(np.array(at)[begins])] = False
        return Span(
            rows=rows,
            tokens=self._put(tokens),
            places=np.array(at),
            at=self._put(np.array(at)),
            slots=slice(at[0], at[-1] + 1) if at[-1] - at[0] + 1 == len(at) else self._put(np.array(at)),
            starts=starts,
            positions=columns.clamp(max=self.context - 1),  # padding can exceed the context
            last=self._put(np.array(counts) - 1),
            begins=self._put(begins).bool()[:, None, None, None],
            columns=columns,
            stop=stop,
            num_neighbors=max(row.num_neighbors for row in rows),
        )

    def run(self, span: Span) -> Tensor:
        """Run the layers over the tokens of a span: activations [N, n, D]."""
        settings = self.model.settings
        if settings.decoder_reads:
            self.encode_completed(span)
        crosses = bool(settings.retrieval.cca_layers) and any(row.retrieve for row in span.rows)
        completes = crosses and bool(self._completing(span))
        replays = span.tokens.shape[1] == 1 and span.slots == slice(0, len(span.rows)) and not completes
        if self.graphs is None or not replays:
            return self._run(span, crosses)
        return self.graphs.run(span, crosses, self.cache)

    def _run(self, span: Span, crosses: bool) -> Tensor:
        """As `run`; `crosses` says whether cross-attention reads neighbors of the rows."""
        settings = self.model.settings
        tokens = [
            TokensOfLayer(self.cache, layer, span, distance_keys)
            for layer, distance_keys in enumerate(self._distance_keys)
        ]
        # Rows have different positions, so each has its own mask over all keys that any row reads.
        mask = visible(span.positions, self._keys_at(span.stop), settings.attention.sliding_window)
        reads = LayerPass(
            positions=self._positions.in_text(span.positions, span.stop, self.cache.keys.dtype),
            mask=mask[:, None],  # [N, 1, n, stop]
            causal=False,  # the keys of a row begin before its queries, so the mask is not a triangle
            neighbors=self._neighbors_to_read(span),
            cross=_NeighborsOfSpan(self, span) if crosses else None,
            caches=tokens,
        )
        h, *_ = self.model.run(self.model.embed_at(span.tokens, span.positions), reads)
        return h

    def _neighbors_to_read(self, span: Span) -> CachedNeighbors | None:
        """The neighbors of the rows' last complete chunks for self-attention; None if there are none."""
        readable = self.cache.readable[span.slots, : span.num_neighbors].flatten(1)  # [N, K·R]
        if self._reading_rotation is None or not readable.shape[1]:
            return None
        keys, values = (
            stored[span.slots, :, :, : readable.shape[1]]
            for stored in (self.cache.neighbor_keys, self.cache.neighbor_values)
        )
        return CachedNeighbors(keys, values, readable, self._reading_rotation[:, span.positions])

    # --- neighbors ----------------------------------------------------------------------------------------------------

    def encode_completed(self, span: Span) -> None:
        """Encode the neighbors of chunks that end with the first token of the span."""
        neighbors = {
            index: span.rows[index].neighbors[span.starts[index] // self.m] for index in self._completing(span)
        }
        # Rows with as many neighbors are encoded together.
        for k in {len(of_row.tokens) for of_row in neighbors.values()}:
            part = {index: of_row for index, of_row in neighbors.items() if len(of_row.tokens) == k}
            tokens, lengths = (np.stack([of_row[field] for of_row in part.values()]) for field in range(2))
            self._encode(span.at[list(part)], tokens, lengths)

    def _completing(self, span: Span) -> list[int]:
        """The rows of a span whose first token completes a chunk with neighbors."""
        return [
            index for index, row in enumerate(span.rows) if row.neighbors and (span.starts[index] + 1) % self.m == 0
        ]

    def _encode(self, at: Tensor, neighbors: np.ndarray, lengths: np.ndarray) -> None:
        """Encode neighbors [A, K, R] with lengths [A, K] of the current chunks in the slots `at` [A]."""
        model, tokens, cache, (_, k, r) = self.model, self._put(neighbors)[:, None], self.cache, neighbors.shape
        of_neighbors = readable_tokens if model.settings.decoder_reads else neighbor_mask
        readable = of_neighbors(tokens, self._put(lengths)[:, None], None)  # [A, U = 1, K, R]
        self._prepare_for(k, r)
        cache.readable[at] = False  # the chunk before may have had more neighbors
        cache.readable[at, :k] = readable[:, 0]
        if model.settings.decoder_reads:
            new = self.neighbor_cache.encode(neighbors, lengths)  # [A, L, G, K·R, C]
            for cached, rows in zip((cache.neighbor_keys, cache.neighbor_values), new, strict=True):
                cached[at, :, :, : rows.shape[3]] = rows.to(cached.dtype)
            return
        assert self._window_positions is not None
        encoded = model.encoder(tokens, readable, cache.chunk[at], model.embedding)[:, 0]  # [A, K, R, E]
        for layer, cross in enumerate(self._crosses.values()):
            new = cross.keys_values(encoded, self._window_positions)
            for cached, rows in zip((cache.neighbor_keys, cache.neighbor_values), new, strict=True):
                cached[at, layer, :, : rows.shape[1]] = rows.transpose(1, 2).to(cached.dtype)

    def _prepare_for(self, k: int, r: int) -> None:
        """Prepare positions and cache for K neighbors of R tokens, unless they are prepared for more."""
        if k <= self.cache.readable.shape[1]:
            return
        self.cache.make_neighbors(k, r)
        if self.model.settings.decoder_reads:
            at = torch.arange(r, self.context + r, device=self.placement.device)
            self._reading_rotation = rotation_at(self.model.settings, at)
            return
        window, scheme = range(self.m - 1, 2 * self.m - 1), self.model.settings.cross_scheme
        self._window_positions = positions_of(*scheme, window, range(r), self.placement.device, (1, k))
        self._cross_distance_keys = self._keys_of_distances(
            self._window_positions, [cross.attention for cross in self._crosses.values()]
        )

    def store_chunk(self, h: Tensor, span: Span) -> None:
        """Store the activations h [N, n, D] for the encoder, and encode the neighbors of complete chunks.

        The first token of the span is the last of its chunk. The tokens after it belong to the next chunk and overwrite
        this one.
        """
        # Padding repeats the last token: it must not overwrite the beginning of the chunk.
        tokens = torch.arange(h.shape[1], device=h.device).minimum(span.last[:, None])  # [N, n]
        offsets, h = span.positions.gather(1, tokens) % self.m, h.take_along_dim(tokens[..., None], 1)
        chunk, at = self.cache.chunk, span.at[:, None]
        chunk[at, offsets[:, :1]] = h[:, :1]
        self.encode_completed(span)
        chunk[at, offsets[:, 1:]] = h[:, 1:]

    def of_cross(self, name: str, span: Span) -> WindowNeighbors | None:
        """What the cross-attention of a layer reads, by its name; None if there is nothing to read."""
        layer, mask = (
            list(self._crosses).index(name),
            self.cache.readable[span.slots, : span.num_neighbors],
        )  # [N, K, R]
        num_keys = mask[0].numel()
        if not num_keys:
            return None
        assert self._window_positions is not None
        # The last token of a chunk is the first of its window.
        positions = self._window_positions.in_window((span.positions + 1) % self.m, num_keys)
        # A slot has room for the most neighbors of any row so far; those of this pass are the first ones.
        # [N, K·R, G, C]
        keys, values = (
            stored[span.slots, layer, :, :num_keys].transpose(1, 2)
            for stored in (self.cache.neighbor_keys, self.cache.neighbor_values)
        )
        return WindowNeighbors(positions, keys, values, mask, self._cross_distance_keys[layer])

    # --- positions ----------------------------------------------------------------------------------------------------

    def _keys_of_distances(self, positions: Positions, attentions: Sequence[Attention]) -> Sequence[Tensor | None]:
        """Each attention's `Positions.distance_keys`, the same in every pass."""
        with torch.inference_mode(), self.placement.autocast():
            return [positions.distance_keys(attention, self.placement.dtype) for attention in attentions]

    def _keys_at(self, stop: int) -> Tensor:
        """Positions of the first keys of the cache."""
        return torch.arange(stop, device=self.placement.device)

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.placement.device)


class _NeighborsOfSpan(NamedTuple):
    """What cross-attention reads in a pass; a `CrossReads`."""

    layers: CachedLayers
    span: Span

    def encode(self, encoder: Encoder, table: nn.Embedding, h: Tensor) -> None:
        """See `CrossReads`: neighbors are encoded when their chunk is complete, and the cache keeps their keys and
        values."""
        self.layers.store_chunk(h, self.span)

    def of_layer(self, name: str, encoded: Tensor | None) -> WindowNeighbors | None:
        """See `CrossReads`."""
        return self.layers.of_cross(name, self.span)
