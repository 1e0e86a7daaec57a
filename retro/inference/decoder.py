"""Next-token logits of several rows that grow, with retrieval at every chunk boundary: nothing is computed twice.

    tokens of each row ─ (complete chunks → neighbors) ─ a pass through the layers of the model ─ logits of the next token
                                                          │                    ▲
                                                          ▼                    │
                    cache: keys and values of the tokens so far, and of the encoded neighbors of the last complete chunk

A pass reads tokens of one window (`ChunkedCrossAttention`): they see the neighbors of one chunk. The first token of a window is
the last of its chunk; with it the chunk's neighbors are encoded, in the midst of the pass, for the encoder wants the chunk's
activations. A prompt is read window by window, then a pass is one token; rows are at different positions, each with a
mask of its own. Letters of the shape comments as in `model/retro.py`; here N rows read, of B in the cache, n tokens each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retro.device import Placement
from retro.model.attention import Attention
from retro.model.masks import neighbor_mask, visible
from retro.model.positions import (
    AlibiPositions,
    NoPositions,
    Positions,
    RopePositions,
    TransformerXLPositions,
    positions_of,
)
from retro.model.retro import Retro

KEY_STEP = 128
"""Self-attention reads a multiple of so many keys, masked beyond the last token: kernels that are prepared for a shape (compiled
code, cuDNN's plans) then meet a few shapes, not a new one with every token."""

RetrieveNeighbors = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Chunks [n, m] → neighbors [n, K, R] int64 and their lengths [n, K] int64."""

GivenNeighbors = Sequence[tuple[np.ndarray, np.ndarray]]
"""For each row the neighbors [K, R] int64 and their lengths [K] int64 that all its chunks read; K and R are the same for all."""


class Cache(NamedTuple):
    """What is kept of the tokens that rows have read. S and K·R grow when more is needed."""

    keys: Tensor  # [B, L, G, S, C] of every layer, as attention reads them
    values: Tensor  # the same
    last_keys: Tensor  # [B, L, W, G, C], the last tokens' as projected: smeared keys mix them into the next ones
    last_queries: Tensor  # [B, L, W - 1, H, C], the same of queries
    last_cross_queries: Tensor  # [B, P, W - 1, H, C], and of cross-attention
    chunk: Tensor  # [B, M, D], what the encoder is given: activations of token t of the current chunk at t % m
    neighbor_keys: Tensor  # [B, P, G, K·R, C] of every layer with cross-attention, for the last complete chunk
    neighbor_values: Tensor  # the same
    readable: Tensor  # bool [B, K, R], which tokens of its neighbors are real


@dataclass
class _Row:
    """A row on the host."""

    given: tuple[np.ndarray, np.ndarray] | None = None  # neighbors of every chunk, where none are looked for
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # in sight
    found: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # neighbors of its complete chunks
    num_read: int = 0  # tokens in the cache


class _Pass(NamedTuple):
    """Where the tokens of one pass stand. A row of the cache begins with the virtual tokens, if there are any."""

    at: Tensor  # [N], rows of the cache
    rows: slice | Tensor  # the same, all of them as a slice: that copies nothing
    positions: Tensor  # [N, n]
    last: Tensor  # [N], place of each row's last token; what follows it is padding, and is written over later
    begins: bool  # whether no token stands before the tokens
    slots: Tensor  # [N, n], of the cache
    stop: int  # beyond the last slot
    mask: Tensor  # bool [N, 1, n, stop]


class Decoder:
    """`read` the prompts, then a token for every row at a time; `keep` drops rows that are finished.

    When a row is longer than the context, a quarter of the context is dropped at once, in whole chunks, and what is left is
    read again: with a chunk at a time most of the work would be reading again.
    """

    def __init__(
        self,
        model: Retro,
        placement: Placement,
        context: int,
        retrieve: RetrieveNeighbors | None = None,
        given: GivenNeighbors | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """A decoder without rows.

        Args:
            model: in evaluation mode.
            placement: device and precision.
            context: tokens that the model sees at most, a multiple of the chunk length.
            retrieve: finds and reads the neighbors of full chunks; None = retrieval OFF.
            given: neighbors of each row, read by all its chunks in place of what `retrieve` finds.
            check: called before each window of the prompts is read; what it raises ends `read`.

        Raises:
            InputError: the model has learned positions for fewer tokens than the context.
        """
        model.settings.check_length(context)
        self.model, self.placement, self.context = model, placement, context
        self.retrieve = retrieve if given is None else None
        self.given, self.check = given, check
        self.m = model.settings.chunk_length
        self.dropped_at_once = max(self.m, context // 4 // self.m * self.m)
        self.dtype = placement.dtype
        self.output_weight = model.output_weight.to(self.dtype)
        with torch.inference_mode(), placement.autocast():
            self.virtual, self.num_virtual = model.virtual()
        keys = range(-self.num_virtual, 1)
        self.here = positions_of(*model.self_scheme, range(context), keys, placement.device, rope=model.settings.rope)
        self.there: Positions | None = None  # once the size of neighbors is known
        attentions: list[Any] = list(model.attention.values())
        self.crosses: list[Any] = [model.cross[str(layer)] for layer in model.settings.retrieval.cca_layers]
        self.distance_keys = self._distance_keys(self.here, [each.block for each in attentions])
        self.cross_distance_keys: Sequence[Tensor | None] = ()
        self.layers: list[tuple[Any, Any]] = list(zip(attentions, model.feed_forward.values(), strict=True))
        self.rows: list[_Row] = []

    @torch.inference_mode()
    def read(self, tokens: Sequence[np.ndarray]) -> Tensor:
        """Go on by the prompts, then by one token of each row → logits of the next one, [rows, V] float32."""
        if not self.rows:
            self.rows = [_Row(each) for each in self.given] if self.given is not None else [_Row() for _ in tokens]
            self.cache = self._empty_cache(len(tokens))
        for row, new in zip(self.rows, tokens, strict=True):
            row.tokens = np.concatenate((row.tokens, new))
            self._drop(row)
        self._find_neighbors()
        hidden = torch.empty(len(tokens), self.model.settings.d_model, device=self.placement.device)
        with self.placement.autocast():
            # Rows that go on read one token, wherever they stand; the others all begin, and read side by side.
            reading = [number for number, row in enumerate(self.rows) if row.num_read]
            if reading:
                hidden[reading] = self._read(reading)
            while reading := [number for number, row in enumerate(self.rows) if row.num_read < len(row.tokens)]:
                self.check()
                hidden[reading] = self._read(reading)
            return F.linear(self.model.finish(hidden), self.output_weight).float()

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all but these rows."""
        self.rows = [self.rows[row] for row in rows]
        self.cache = Cache(*(tensor[list(rows)] for tensor in self.cache))

    def _drop(self, row: _Row) -> None:
        """Drop the oldest tokens, if there are more than the context."""
        surplus, block = len(row.tokens) - self.context, self.dropped_at_once
        if surplus > 0:
            dropped = -(-surplus // block) * block
            row.tokens, row.found, row.num_read = row.tokens[dropped:], row.found[dropped // self.m :], 0

    def _find_neighbors(self) -> None:
        """Ask for the neighbors of all chunks that are complete now, in one search, unless they are given."""
        for row in self.rows:
            if row.given is not None:
                row.found += [row.given] * (len(row.tokens) // self.m - len(row.found))
        if self.retrieve is None:
            return
        asking = [row for row in self.rows for _ in range(len(row.found), len(row.tokens) // self.m)]
        if asking:
            chunks = [
                row.tokens[: len(row.tokens) // self.m * self.m].reshape(-1, self.m)[len(row.found) :]
                for row in self.rows
            ]
            for row, *found in zip(asking, *self.retrieve(np.concatenate(chunks)), strict=True):
                row.found.append((found[0], found[1]))

    # ------------------------------------------------------------------------------------------------------- a pass

    def _read(self, numbers: list[int]) -> Tensor:
        """Let rows read their tokens up to the end of a window; [N, D] of the last token that each has read."""
        model, rows = self.model, [self.rows[number] for number in numbers]
        starts = np.array([row.num_read for row in rows])
        counts = [min(len(row.tokens) - row.num_read, self.m - (row.num_read + 1) % self.m) for row in rows]
        tokens = np.zeros((len(rows), max(counts)), dtype=np.int64)
        for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
            tokens[number, :count] = row.tokens[row.num_read : row.num_read + count]
            row.num_read += count
        span = self._span(numbers, starts, np.array(counts))
        cca_layers = model.settings.retrieval.cca_layers if self.retrieve or self.given is not None else ()
        expert_layers = model.settings.expert_layers

        h = model.embed_at(self._put(tokens), span.positions)
        here, there = self._here(span), None
        for layer, (attention, feed_forward) in enumerate(self.layers, start=1):
            reads = h if model.settings.parallel_residual else None
            h = h + self._attend(layer - 1, attention.block, attention.norm(h), here, span)
            if layer == min(cca_layers, default=0):
                self._encode(rows, starts, h, span)
                there = self._there(span)
            if layer in cca_layers and (there is not None or model.settings.cross_smeared_tokens > 1):
                h = h + self._cross_attend(cca_layers.index(layer), h, there, span)
            h = feed_forward(h, reads=reads)
            if layer in expert_layers:  # in evaluation they take every token for itself
                h, _ = h
        return h[torch.arange(len(rows), device=h.device), span.last]

    def _span(self, numbers: list[int], starts: np.ndarray, counts: np.ndarray) -> _Pass:
        width, begins = int(counts.max()), int(starts.max()) == 0
        stop = self._make_room(self.num_virtual + int(starts.max()) + width)
        positions, at = self._put(starts[:, None] + np.arange(width)), self._put(np.array(numbers))
        if begins:
            self.cache.readable[at] = False
        keys_at = self._keys_at(stop)
        mask = (visible(positions, keys_at, self.model.settings.attention.sliding_window) | (keys_at < 0))[:, None]
        rows = slice(None) if len(numbers) == len(self.rows) else at
        slots = positions + self.num_virtual
        return _Pass(at, rows, positions, self._put(counts - 1), begins, slots, stop, mask)

    def _keys_at(self, stop: int) -> Tensor:
        """The positions of the first slots of the cache; virtual tokens stand before 0."""
        return torch.arange(-self.num_virtual, stop - self.num_virtual, device=self.placement.device)

    def _attend(self, layer: int, attention: Attention, x: Tensor, here: Positions, span: _Pass) -> Tensor:
        """Self-attention of the new tokens x [N, n, D] to all that their rows have read; their keys and values are kept."""
        keys, values = self.cache.keys, self.cache.values
        k, v = attention.project_keys_values(x)
        placed = attention.finish_keys(k, here, before=self._before(self.cache.last_keys, layer, k, span))
        keys[span.at[:, None], layer, :, span.slots] = placed.to(keys.dtype)
        values[span.at[:, None], layer, :, span.slots] = v.to(values.dtype)
        q = attention.project_queries(x)
        q = attention.smear_queries(q, before=self._before(self.cache.last_queries, layer, q, span))
        k, v = (kept[span.rows, layer, :, : span.stop].transpose(1, 2) for kept in (keys, values))
        return attention.attend(q, here, k, v, mask=span.mask, distance_keys=self.distance_keys[layer])

    def _before(self, kept: Tensor, layer: int, new: Tensor, span: _Pass) -> Tensor | None:
        """What stands before the new keys or queries [N, n, H, C] of a layer, [N, W, H, C]; None at the beginning.

        The last W of all take its place in what is kept of them, [B, L, W, H, C].
        """
        if not (width := kept.shape[2]):
            return None
        before = kept[span.at, layer].to(new.dtype)
        if span.begins:
            before = torch.zeros_like(before)
        rows, places = torch.arange(len(new), device=new.device)[:, None], torch.arange(width, device=new.device)
        kept[span.at, layer] = torch.cat((before, new), dim=1)[rows, span.last[:, None] + 1 + places].to(kept.dtype)
        return None if span.begins else before

    def _cross_attend(self, number: int, h: Tensor, there: Positions | None, span: _Pass) -> Tensor:
        """The new tokens h [N, n, D] read the neighbors of the last complete chunk; before there is one their queries are kept."""
        cross = self.crosses[number]
        attention = cross.block.attention
        q = attention.project_queries(cross.norm(h))
        q = attention.smear_queries(q, before=self._before(self.cache.last_cross_queries, number, q, span))
        if there is None:
            return torch.zeros_like(h)
        k, v = (
            kept[span.rows, number].transpose(1, 2) for kept in (self.cache.neighbor_keys, self.cache.neighbor_values)
        )
        readable, distance_keys = self.cache.readable[span.rows], self.cross_distance_keys[number]
        read: Tensor = cross.block.attend(q, there, k, v, readable, distance_keys)
        return read

    def _encode(self, rows: list[_Row], starts: np.ndarray, h: Tensor, span: _Pass) -> None:
        """Keep what the encoder wants of h [N, n, D], and encode the neighbors of chunks that are complete.

        Their last token is the first of the pass; what follows it belongs to the next chunk and takes the places of this one's.
        """
        chunk, at, places = self.cache.chunk, span.at[:, None], span.positions % self.m
        chunk[at, places[:, :1]] = h[:, :1]
        completing = np.flatnonzero((starts + 1) % self.m == 0)
        if len(completing):
            found = [rows[place].found[starts[place] // self.m] for place in completing]
            self._encode_neighbors(span.at[self._put(completing)], *map(np.stack, zip(*found, strict=True)))
        chunk[at, places[:, 1:]] = h[:, 1:]

    def _encode_neighbors(self, at: Tensor, neighbors: np.ndarray, lengths: np.ndarray) -> None:
        """Neighbors [A, K, R] and lengths [A, K] of chunks whose activations are in the rows `at` [A] of the cache."""
        model, tokens = self.model, self._put(neighbors)[:, None]  # [A, U = 1, K, R]
        real = neighbor_mask(tokens, self._put(lengths)[:, None], None)
        encoded = model.encoder(tokens, real, self.cache.chunk[at], model.embedding)[:, 0]  # [A, K, R, E]
        if self.there is None:
            self._learn_size_of_neighbors(*neighbors.shape[1:])
        kept, readable = (self.cache.neighbor_keys, self.cache.neighbor_values), self.cache.readable
        readable[at] = real[:, 0]
        for number, cross in enumerate(self.crosses):
            for cached, new in zip(kept, cross.block.keys_values(encoded, self.there), strict=True):
                cached[at, number] = new.transpose(1, 2).to(cached.dtype)

    # ---------------------------------------------------------------------------------------------------- positions

    def _here(self, span: _Pass) -> Positions:
        """Positions of self-attention."""
        if isinstance(self.here, RopePositions):
            turned = self.here.query[:, span.positions]  # [2, N, n, 1, C/2]
            return RopePositions(turned, turned)
        if isinstance(self.here, NoPositions):
            return self.here
        apart = (span.positions[:, :, None] - self._keys_at(span.stop)).clamp(min=0)[
            :, None
        ]  # [N, 1, n, stop]; later keys are masked
        return (
            AlibiPositions(apart)
            if isinstance(self.here, AlibiPositions)
            else TransformerXLPositions(self.here.waves, apart)
        )

    def _there(self, span: _Pass) -> Positions | None:
        """Positions of cross-attention: the last token of a chunk is the first of its window."""
        places = (span.positions + 1) % self.m
        if isinstance(self.there, RopePositions):
            return RopePositions(self.there.query[:, places], self.there.key)
        if isinstance(self.there, AlibiPositions):
            return AlibiPositions(self.there.distances[0, 0, places][:, None])
        if isinstance(self.there, TransformerXLPositions):
            return TransformerXLPositions(self.there.waves, self.there.lookup[places][:, None])
        return self.there

    def _distance_keys(self, places: Positions, attentions: Sequence[Attention]) -> Sequence[Tensor | None]:
        """What each attention makes of the distances, which are the same at every step; Transformer-XL's alone does."""
        if not isinstance(places, TransformerXLPositions):
            return [None] * len(attentions)
        with torch.inference_mode(), self.placement.autocast():
            return [attention.distance_keys(places.waves.to(self.dtype)) for attention in attentions]

    # ------------------------------------------------------------------------------------------------------- memory

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.placement.device)

    def _empty_cache(self, num_rows: int) -> Cache:
        """Zeros, not whatever memory holds: what a mask hides is multiplied by 0, and must be finite."""
        s = self.model.settings
        # On a CPU a single query takes six times as long with bfloat16 keys.
        dtype = torch.float32 if self.placement.device.type == "cpu" else self.dtype

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=self.placement.device)

        layers, cca_layers, heads = s.num_layers, len(s.retrieval.cca_layers), s.attention.kv_heads
        own, cross = s.self_smeared_tokens, s.cross_smeared_tokens
        asking, asking_neighbors = (
            (max(0, width - 1), s.attention.num_heads, s.attention.head_dim) for width in (own, cross)
        )
        keys, values = zeros(2, layers, heads, self.num_virtual, s.attention.head_dim).unbind(1)
        for layer, virtual in enumerate(self.virtual.values()):
            for cached, new in zip((keys, values), virtual, strict=True):
                cached[:, layer] = new.transpose(1, 2)  # [1, G, P, C]
        return Cache(
            keys=keys,
            values=values,
            last_keys=zeros(layers, own, heads, s.attention.head_dim),
            last_queries=zeros(layers, *asking),
            last_cross_queries=zeros(cca_layers, *asking_neighbors),
            chunk=zeros(s.chunk_length, s.d_model).float(),
            neighbor_keys=zeros(cca_layers, heads, 0, s.attention.head_dim),
            neighbor_values=zeros(cca_layers, heads, 0, s.attention.head_dim),
            readable=zeros(0, 0).bool(),
        )

    def _make_room(self, num_tokens: int) -> int:
        """Make keys and values of `num_tokens` tokens fit, virtual ones included, and return how many of them to read.

        The cache at least doubles, so that copying is rare.
        """
        size, largest = self.cache.keys.shape[3], max(self.num_virtual + self.context, num_tokens)
        stop = min(-(-num_tokens // KEY_STEP) * KEY_STEP, largest)
        if stop > size:
            more = min(max(stop, 2 * size), largest) - size
            keys, values = (F.pad(tensor, (0, 0, 0, more)) for tensor in (self.cache.keys, self.cache.values))
            self.cache = self.cache._replace(keys=keys, values=values)
        return stop

    def _learn_size_of_neighbors(self, k: int, r: int) -> None:
        """What has waited for the first neighbors to come."""
        self.there = positions_of(
            *self.model.cross_scheme, range(self.m - 1, 2 * self.m - 1), range(r), self.placement.device, (1, k)
        )
        self.cross_distance_keys = self._distance_keys(self.there, [each.block.attention for each in self.crosses])
        keys, values = (F.pad(t, (0, 0, 0, k * r)) for t in (self.cache.neighbor_keys, self.cache.neighbor_values))
        readable = self.cache.readable.new_zeros(len(self.rows), k, r)
        self.cache = self.cache._replace(neighbor_keys=keys, neighbor_values=values, readable=readable)
