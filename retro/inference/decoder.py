"""Next-token logits of several growing rows, with retrieval at every chunk boundary and a cache of keys and values.

    tokens of each row ─ (complete chunks → neighbors) ─ a pass through the layers of the model ─ logits of the next one
                                                          │                    ▲
                                                          ▼                    │
                    cache: keys and values of the tokens so far, and of the encoded neighbors of the last complete chunk

A pass reads tokens of one window (`ChunkedCrossAttention`), which attend to the neighbors of one chunk. The first token
of a window is the last token of this chunk. The pass that reads it also encodes the chunk's neighbors, because the
encoder needs the chunk's activations. Prompts are read window by window; after that, a pass reads one token per row.
Rows can be at different positions, and each has its own mask. The letters of the shape comments are those of
`model/retro.py`. In addition, N is the number of rows in a pass, B the number of rows in the cache, and n the number of
tokens per row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retro.device import Placement
from retro.inference.sources import CopiedFrom, Neighbors, ReadChunk
from retro.model.attention import Attention
from retro.model.copy_head import CopySource, Found
from retro.model.copy_matches import Matches, context_matches_of_last, neighbor_matches_of_last
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
"""Self-attention reads a multiple of this number of keys, and a mask hides those after the last token. Kernels that are
prepared for one shape (compiled code, cuDNN's plans) then see few shapes instead of a new one with every token."""

RetrieveNeighbors = Callable[[np.ndarray], tuple[np.ndarray, ...]]
"""Chunks [n, m] → the fields of `Neighbors` in order; ids and distances are optional."""

GivenNeighbors = Sequence[tuple[np.ndarray, np.ndarray]]
"""For each row the neighbors [K, R] int64, and their lengths [K] int64, that all its chunks read. K and R are equal for
all rows."""


class Cache(NamedTuple):
    """Tensors kept from the tokens that the rows have read. S and K·R grow on demand."""

    keys: Tensor  # [B, L, G, S, C] of every layer, with positions applied
    values: Tensor  # same shape
    last_keys: Tensor  # [B, L, W, G, C], projected keys of the last W tokens: smeared keys mix them into the next keys
    last_queries: Tensor  # [B, L, W - 1, H, C], projected queries of the last tokens
    last_cross_queries: Tensor  # [B, P, W - 1, H, C], the same for cross-attention
    chunk: Tensor  # [B, M, D], input of the encoder: activations of token t of the current chunk are at t % m
    neighbor_keys: Tensor  # [B, P, G, K·R, C] of every layer with cross-attention, for the last complete chunk
    neighbor_values: Tensor  # same shape
    readable: Tensor  # bool [B, K, R], False for padding of the neighbors


@dataclass
class _Row:
    """A row on the host."""

    given: tuple[np.ndarray, np.ndarray] | None = None  # neighbors of every chunk; None = they are searched
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # tokens in the context
    found: list[Neighbors] = field(default_factory=list)  # neighbors of its complete chunks
    dropped: int = 0  # chunks before the context
    num_read: int = 0  # tokens in the cache
    keys: tuple[int, Tensor] | None = None  # of the copy head, with the number of complete chunks that they belong to


class _Votes(NamedTuple):
    """What the copy head found for the last tokens of the rows."""

    hidden: Tensor  # [N, D]
    found: list[Found]

    def of_rows(self, rows: list[int]) -> "_Votes":
        found = []
        for each in self.found:
            matches = Matches(each.matches.lengths[rows], each.matches.following[rows])
            found.append(each._replace(matches=matches, keys=None if each.keys is None else each.keys[rows]))
        return _Votes(self.hidden[rows], found)


class _Pass(NamedTuple):
    """Positions of the tokens of one pass. A row of the cache begins with the virtual tokens, if the model has any."""

    at: Tensor  # [N], rows of the cache
    rows: slice | Tensor  # the same rows; a slice if it is all of them, which avoids a copy
    positions: Tensor  # [N, n]
    last: Tensor  # [N], index of each row's last token; tokens after it are padding, and later passes overwrite them
    begins: bool  # True if the tokens are the first of their rows
    slots: Tensor  # [N, n], slots of the cache
    stop: int  # the last slot + 1
    mask: Tensor  # bool [N, 1, n, stop]


class Decoder:
    """Reads the prompts, then one token per row in each call of `read`; `keep` drops finished rows.

    If a row exceeds the context, the decoder drops its oldest tokens, a quarter of the context in whole chunks, and
    reads the others again. Dropping one chunk at a time would spend most of the time on rereading.
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
        """Create a decoder without rows.

        Args:
            model: in evaluation mode.
            placement: device and precision.
            context: largest number of tokens that the model reads, a multiple of the chunk length.
            retrieve: finds the neighbors of complete chunks; None = retrieval OFF.
            given: neighbors of each row; all its chunks read them, and `retrieve` is not called.
            check: called before each window of the prompts is read; its exceptions end `read`.

        Raises:
            InputError: the model's learned positions end before the context.
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
        self.context_positions = positions_of(
            *model.self_scheme, range(context), keys, placement.device, rope=model.settings.rope
        )
        self.window_positions: Positions | None = None  # None until the size of the neighbors is known
        attentions: list[Any] = list(model.attention.values())
        self.crosses: list[Any] = [model.cross[str(layer)] for layer in model.settings.retrieval.cca_layers]
        self.distance_keys = self._distance_keys(self.context_positions, [each.block for each in attentions])
        self.cross_distance_keys: Sequence[Tensor | None] = ()
        self.layers: list[tuple[Any, Any]] = list(zip(attentions, model.feed_forward.values(), strict=True))
        self.rows: list[_Row] = []
        self.votes: _Votes | None = None  # of the last tokens, with a copy head

    @torch.inference_mode()
    def read(self, tokens: Sequence[np.ndarray]) -> Tensor:
        """Append the prompts, or later one token per row; return the logits of the next token, [rows, V] float32."""
        if not self.rows:
            self.rows = [_Row(each) for each in self.given] if self.given is not None else [_Row() for _ in tokens]
            self.cache = self._empty_cache(len(tokens))
        for row, new in zip(self.rows, tokens, strict=True):
            row.tokens = np.concatenate((row.tokens, new))
            self._drop(row)
        self._find_neighbors()
        hidden = torch.empty(len(tokens), self.model.settings.d_model, device=self.placement.device)
        with self.placement.autocast():
            # Rows with a cache read one token, at any position. The others start at position 0 and are read together.
            reading = [number for number, row in enumerate(self.rows) if row.num_read]
            if reading:
                hidden[reading] = self._read(reading)
            while reading := [number for number, row in enumerate(self.rows) if row.num_read < len(row.tokens)]:
                self.check()
                hidden[reading] = self._read(reading)
            hidden = self.model.finish(hidden)
            logits = F.linear(hidden, self.output_weight).float()
            return self._mixed(logits, hidden) if self.model.copy_head else logits

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows except these. A row that is named several times is copied."""
        self.rows = [replace(self.rows[row], found=[*self.rows[row].found]) for row in rows]
        self.cache = Cache(*(tensor[list(rows)] for tensor in self.cache))
        self.votes = self.votes and self.votes.of_rows(list(rows))

    def _drop(self, row: _Row) -> None:
        """Drop the oldest tokens of a row that exceeds the context."""
        surplus, block = len(row.tokens) - self.context, self.dropped_at_once
        if surplus > 0:
            dropped = -(-surplus // block) * block
            row.tokens, row.found, row.num_read = row.tokens[dropped:], row.found[dropped // self.m :], 0
            row.dropped += dropped // self.m

    def _find_neighbors(self) -> None:
        """Find the neighbors of all chunks that are complete now in one search, or use the given ones."""
        for row in self.rows:
            if row.given is not None:
                row.found += [Neighbors(*row.given)] * (len(row.tokens) // self.m - len(row.found))
        if self.retrieve is None:
            return
        searching = [row for row in self.rows for _ in range(len(row.found), len(row.tokens) // self.m)]
        if searching:
            chunks = [
                row.tokens[: len(row.tokens) // self.m * self.m].reshape(-1, self.m)[len(row.found) :]
                for row in self.rows
            ]
            found = Neighbors(*self.retrieve(np.concatenate(chunks)))
            for row, each in zip(searching, found.of_chunks(), strict=True):
                row.found.append(each)

    def _mixed(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Mix logits [rows, V] with what the copy head votes for, given activations [rows, D] of the last tokens."""
        head = self.model.copy_head
        assert head is not None
        width = max(len(row.tokens) for row in self.rows)
        tokens = self._put(
            np.stack([np.pad(r.tokens, (width - len(r.tokens), 0), constant_values=-1) for r in self.rows])
        )
        found = [] if head.context is None else [Found(head.context, context_matches_of_last(tokens))]
        read = [row.found[-1] if row.found else None for row in self.rows]
        if head.neighbors is not None and (sample := next(filter(None, read), None)) is not None:
            none = Neighbors(np.zeros_like(sample.tokens), np.zeros_like(sample.lengths))  # no complete chunk yet
            neighbors = self._put(np.stack([(each or none).tokens for each in read]))
            lengths = self._put(np.stack([(each or none).lengths for each in read]))
            matches = neighbor_matches_of_last(tokens, neighbors, lengths, self.m)
            found.append(Found(head.neighbors, matches, keys=self._content_keys(head.neighbors, neighbors, lengths)))
        self.votes = _Votes(hidden, found)
        return head.mixed(logits[:, None], hidden[:, None], found)[:, 0] if found else logits

    def _content_keys(self, source: CopySource, neighbors: Tensor, lengths: Tensor) -> Tensor | None:
        """Keys [rows, S, C] of the neighbors [rows, K, R] of the last complete chunks; they are computed once for each chunk."""
        if source.content is None:
            return None
        new = [n for n, row in enumerate(self.rows) if row.keys is None or row.keys[0] != len(row.found)]
        if new:
            ends = [(self.rows[n].tokens, len(self.rows[n].found) * self.m) for n in new]
            # Zeros for a row without a complete chunk, which has no neighbors.
            chunks = [np.resize(tokens[:end][-self.m :], self.m) for tokens, end in ends]
            real = neighbor_mask(neighbors[:, None], lengths[:, None], None)[new, 0]
            keys = source.content.keys(neighbors[new], real, self._put(np.stack(chunks)), self.model.embedding.weight)
            for n, each in zip(new, keys, strict=True):
                self.rows[n].keys = len(self.rows[n].found), each
        return torch.stack([row.keys[1] for row in self.rows if row.keys is not None])

    @torch.inference_mode()
    def copied_from(self, tokens: Sequence[int], log_probabilities: Sequence[float]) -> list[CopiedFrom | None]:
        """Find which tokens of neighbors the next tokens were copied from.

        Args:
            tokens: the next token of each row, chosen by the logits of the last `read`.
            log_probabilities: of these tokens, in nats.

        Returns:
            the source of each token; None for a token that no neighbor votes for, or without a copy head.
        """
        head, read = self.model.copy_head, next((row.found[-1] for row in self.rows if row.found), None)
        if head is None or self.votes is None or read is None:
            return [None] * len(tokens)
        losses = -torch.tensor(log_probabilities, device=self.placement.device)[:, None]
        origins = head.origins(
            self.votes.hidden[:, None],
            self._put(np.array(tokens))[:, None],
            losses,
            self.votes.found,
            read.tokens.shape[1],
        )
        columns = zip(self.rows, *(each[:, 0].tolist() for each in origins), strict=True)
        return [
            CopiedFrom(share, row.dropped + len(row.found) - 1, neighbor, position) if neighbor >= 0 else None
            for row, share, _, neighbor, position in columns
        ]

    def chunks_read(self, row: int, since: int) -> list[ReadChunk]:
        """Return the chunks of a row whose neighbors were read, from the chunk with the number `since` on."""
        kept, m = self.rows[row], self.m
        return [
            ReadChunk(number, kept.tokens[(number - kept.dropped) * m :][:m], kept.found[number - kept.dropped])
            for number in range(max(since, kept.dropped), kept.dropped + len(kept.found))
        ]

    # --- a pass -------------------------------------------------------------------------------------------------------

    def _read(self, numbers: list[int]) -> Tensor:
        """Read the tokens of rows up to the end of a window; return [N, D] of the last token that each row has read."""
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
        self_positions, cross_positions = self._self_positions(span), None
        for layer, (attention, feed_forward) in enumerate(self.layers, start=1):
            reads = h if model.settings.parallel_residual else None
            h = h + self._attend(layer - 1, attention.block, attention.norm(h), self_positions, span)
            if layer == min(cca_layers, default=0):
                self._encode(rows, starts, h, span)
                cross_positions = self._cross_positions(span)
            if layer in cca_layers and (cross_positions is not None or model.settings.cross_smeared_tokens > 1):
                h = h + self._cross_attend(cca_layers.index(layer), h, cross_positions, span)
            h = feed_forward(h, reads=reads)
            if layer in expert_layers:  # in evaluation, experts have no capacity limit: rows do not affect each other
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
        """Return the positions of the first slots of the cache; those of virtual tokens are negative."""
        return torch.arange(-self.num_virtual, stop - self.num_virtual, device=self.placement.device)

    def _attend(self, layer: int, attention: Attention, x: Tensor, positions: Positions, span: _Pass) -> Tensor:
        """Self-attention of the new tokens x [N, n, D] to all tokens of their rows. Caches their keys and values."""
        keys, values = self.cache.keys, self.cache.values
        k, v = attention.project_keys_values(x)
        placed = attention.finish_keys(k, positions, before=self._before(self.cache.last_keys, layer, k, span))
        keys[span.at[:, None], layer, :, span.slots] = placed.to(keys.dtype)
        values[span.at[:, None], layer, :, span.slots] = v.to(values.dtype)
        q = attention.project_queries(x)
        q = attention.smear_queries(q, before=self._before(self.cache.last_queries, layer, q, span))
        k, v = (kept[span.rows, layer, :, : span.stop].transpose(1, 2) for kept in (keys, values))
        return attention.attend(q, positions, k, v, mask=span.mask, distance_keys=self.distance_keys[layer])

    def _before(self, kept: Tensor, layer: int, new: Tensor, span: _Pass) -> Tensor | None:
        """Return the keys or queries [N, W, H, C] before the new ones [N, n, H, C] of a layer; None at the beginning.

        Stores the last W of both in `kept` [B, L, W, H, C].
        """
        if not (width := kept.shape[2]):
            return None
        before = kept[span.at, layer].to(new.dtype)
        if span.begins:
            before = torch.zeros_like(before)
        rows, places = torch.arange(len(new), device=new.device)[:, None], torch.arange(width, device=new.device)
        kept[span.at, layer] = torch.cat((before, new), dim=1)[rows, span.last[:, None] + 1 + places].to(kept.dtype)
        return None if span.begins else before

    def _cross_attend(self, number: int, h: Tensor, positions: Positions | None, span: _Pass) -> Tensor:
        """Cross-attention of the new tokens h [N, n, D] to the neighbors of the last complete chunk; 0 without one."""
        cross = self.crosses[number]
        attention = cross.block.attention
        q = attention.project_queries(cross.norm(h))
        q = attention.smear_queries(q, before=self._before(self.cache.last_cross_queries, number, q, span))
        if positions is None:
            return torch.zeros_like(h)
        k, v = (
            kept[span.rows, number].transpose(1, 2) for kept in (self.cache.neighbor_keys, self.cache.neighbor_values)
        )
        readable, distance_keys = self.cache.readable[span.rows], self.cross_distance_keys[number]
        read: Tensor = cross.block.attend(q, positions, k, v, readable, distance_keys)
        return read

    def _encode(self, rows: list[_Row], starts: np.ndarray, h: Tensor, span: _Pass) -> None:
        """Store the activations h [N, n, D] for the encoder, and encode the neighbors of complete chunks.

        The first token of the pass is the last of its chunk. The tokens after it belong to the next chunk and overwrite
        this one.
        """
        chunk, at, places = self.cache.chunk, span.at[:, None], span.positions % self.m
        chunk[at, places[:, :1]] = h[:, :1]
        completing = np.flatnonzero((starts + 1) % self.m == 0)
        if len(completing):
            found = [rows[place].found[starts[place] // self.m] for place in completing]
            tokens, lengths = (
                np.stack(each) for each in zip(*((each.tokens, each.lengths) for each in found), strict=True)
            )
            self._encode_neighbors(span.at[self._put(completing)], tokens, lengths)
        chunk[at, places[:, 1:]] = h[:, 1:]

    def _encode_neighbors(self, at: Tensor, neighbors: np.ndarray, lengths: np.ndarray) -> None:
        """Encode neighbors [A, K, R] with lengths [A, K] of the current chunks in the rows `at` [A] of the cache."""
        model, tokens = self.model, self._put(neighbors)[:, None]  # [A, U = 1, K, R]
        real = neighbor_mask(tokens, self._put(lengths)[:, None], None)
        encoded = model.encoder(tokens, real, self.cache.chunk[at], model.embedding)[:, 0]  # [A, K, R, E]
        if self.window_positions is None:
            self._prepare_for_neighbors(*neighbors.shape[1:])
        kept, readable = (self.cache.neighbor_keys, self.cache.neighbor_values), self.cache.readable
        readable[at] = real[:, 0]
        for number, cross in enumerate(self.crosses):
            for cached, new in zip(kept, cross.block.keys_values(encoded, self.window_positions), strict=True):
                cached[at, number] = new.transpose(1, 2).to(cached.dtype)

    # --- positions ----------------------------------------------------------------------------------------------------

    def _self_positions(self, span: _Pass) -> Positions:
        """Return the positions of self-attention in a pass."""
        if isinstance(self.context_positions, RopePositions):
            rotations = self.context_positions.query[:, span.positions]  # [2, N, n, 1, C/2]
            return RopePositions(rotations, rotations)
        if isinstance(self.context_positions, NoPositions):
            return self.context_positions
        distances = span.positions[:, :, None] - self._keys_at(span.stop)
        distances = distances.clamp(min=0)[:, None]  # [N, 1, n, stop]; later keys are masked
        if isinstance(self.context_positions, AlibiPositions):
            return AlibiPositions(distances)
        return TransformerXLPositions(self.context_positions.waves, distances)

    def _cross_positions(self, span: _Pass) -> Positions | None:
        """Return the positions of cross-attention in a pass. The last token of a chunk is the first of its window."""
        places = (span.positions + 1) % self.m
        if isinstance(self.window_positions, RopePositions):
            return RopePositions(self.window_positions.query[:, places], self.window_positions.key)
        if isinstance(self.window_positions, AlibiPositions):
            return AlibiPositions(self.window_positions.distances[0, 0, places][:, None])
        if isinstance(self.window_positions, TransformerXLPositions):
            return TransformerXLPositions(self.window_positions.waves, self.window_positions.lookup[places][:, None])
        return self.window_positions

    def _distance_keys(self, places: Positions, attentions: Sequence[Attention]) -> Sequence[Tensor | None]:
        """Return each attention's keys of distances, the same in every pass; None except for Transformer-XL."""
        if not isinstance(places, TransformerXLPositions):
            return [None] * len(attentions)
        with torch.inference_mode(), self.placement.autocast():
            return [attention.distance_keys(places.waves.to(self.dtype)) for attention in attentions]

    # --- memory -------------------------------------------------------------------------------------------------------

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.placement.device)

    def _empty_cache(self, num_rows: int) -> Cache:
        """Return a cache of zeros. Uninitialized memory could hold NaN, and masked values are multiplied by 0."""
        s = self.model.settings
        # On a CPU a single query takes six times as long with bfloat16 keys.
        dtype = torch.float32 if self.placement.device.type == "cpu" else self.dtype

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=self.placement.device)

        layers, cca_layers, heads = s.num_layers, len(s.retrieval.cca_layers), s.attention.kv_heads
        own, cross = s.self_smeared_tokens, s.cross_smeared_tokens
        queries, cross_queries = (
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
            last_queries=zeros(layers, *queries),
            last_cross_queries=zeros(cca_layers, *cross_queries),
            chunk=zeros(s.chunk_length, s.d_model).float(),
            neighbor_keys=zeros(cca_layers, heads, 0, s.attention.head_dim),
            neighbor_values=zeros(cca_layers, heads, 0, s.attention.head_dim),
            readable=zeros(0, 0).bool(),
        )

    def _make_room(self, num_tokens: int) -> int:
        """Enlarge the cache for `num_tokens` tokens, virtual ones included; return the number of slots to read.

        The cache at least doubles, so copies are rare.
        """
        size, largest = self.cache.keys.shape[3], max(self.num_virtual + self.context, num_tokens)
        stop = min(-(-num_tokens // KEY_STEP) * KEY_STEP, largest)
        if stop > size:
            more = min(max(stop, 2 * size), largest) - size
            keys, values = (F.pad(tensor, (0, 0, 0, more)) for tensor in (self.cache.keys, self.cache.values))
            self.cache = self.cache._replace(keys=keys, values=values)
        return stop

    def _prepare_for_neighbors(self, k: int, r: int) -> None:
        """Prepare positions and cache for neighbors of this size, which is known from the first search."""
        self.window_positions = positions_of(
            *self.model.cross_scheme, range(self.m - 1, 2 * self.m - 1), range(r), self.placement.device, (1, k)
        )
        self.cross_distance_keys = self._distance_keys(
            self.window_positions, [each.block.attention for each in self.crosses]
        )
        keys, values = (F.pad(t, (0, 0, 0, k * r)) for t in (self.cache.neighbor_keys, self.cache.neighbor_values))
        readable = self.cache.readable.new_zeros(len(self.rows), k, r)
        self.cache = self.cache._replace(neighbor_keys=keys, neighbor_values=values, readable=readable)
