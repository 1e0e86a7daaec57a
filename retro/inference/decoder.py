"""Next-token logits of a batch of growing rows, with retrieval at chunk boundaries and a cache of keys and values.

    tokens of a row ─ (complete chunks → neighbors) ─ a pass through the layers of the model ─ logits of the next token
                                                          │                    ▲
                                                          ▼                    │
                    cache: keys and values of the tokens so far, and of the encoded neighbors of the last complete chunk

Rows join with `add` and leave with `remove` between any two steps. A step has up to two passes. The first reads one token
of every row that has one left, the rows that generate, and the tokens of their drafts. The second reads up to `WINDOW_TOKENS` tokens of
rows that have more left: the prompts. So a long prompt delays the other rows by a part of it per step, not by its length. Where
activations depend on neighbors, the part of a row is one window (`ChunkedCrossAttention`).

The tokens of a window attend to the neighbors of one chunk. The first token of a window is the last token of this chunk. The
pass that reads it also encodes the chunk's neighbors, because the encoder needs the chunk's activations. Rows can be at
different positions, and each has its own mask, so no row depends on the others. The letters of the shape comments are those
of `model/retro.py`. In addition, N is the number of rows in a pass, B the number of slots in the cache, and n the number of
tokens per row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retro.device import Placement
from retro.inference.cache import Cache
from retro.inference.copy_votes import CopyVotes
from retro.inference.drafts import LONGEST_DRAFT
from retro.inference.neighbor_cache import NeighborCache
from retro.inference.rows import RetrieveNeighbors, Row, WholeDatastore
from retro.inference.sources import CopiedFrom, Neighbors
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
from retro.model.reader import ReadingAttention, ReadNeighbors, readable_tokens, rotation_at
from retro.model.retro import Retro

WINDOW_TOKENS = 512
"""Largest number of tokens of prompts that a step reads, unless a single window has more."""

INTERLEAVED_TOKENS = 128
"""Largest number of tokens of one prompt that a step reads while other rows generate, since these wait for it. On a CPU, passes over
more tokens are hardly faster per token."""

DRAFTED_TOKENS = 32
"""Largest number of tokens, drafts included, of the rows that generate: a pass over 32 tokens takes 1.6 times as long on a CPU as
over one, and wrong drafts save nothing."""


Propose = Callable[[Row, int], np.ndarray]
"""A row that has one token left, and a number of tokens → its draft of at most this number, int64."""


class _Pass(NamedTuple):
    """Tokens of one pass and their positions."""

    rows: list[Row]
    tokens: Tensor  # [N, n]
    at: Tensor  # [N], slots of the rows
    slots: slice | Tensor  # the same slots; a slice if they follow each other, which avoids a copy
    starts: np.ndarray  # [N], position of each row's first token
    positions: Tensor  # [N, n]
    last: Tensor  # [N], index of each row's last token; tokens after it are padding, and later passes overwrite them
    begins: Tensor  # bool [N, 1, 1, 1], True for rows that begin with this pass
    columns: Tensor  # [N, n], columns of the tokens in the cache
    stop: int  # number of keys to read
    mask: Tensor  # bool [N, 1, n, stop]
    num_neighbors: int  # the largest K of the rows


class Decoder:
    """Reads prompts and generated tokens: `add` rows, then `step`, `append` a token to each row that was read, `step` …

    A step can read a draft of next tokens too. `append` then takes as many of them as are right, and one more token; the others
    are removed from the cache.

    If a row exceeds the context, the decoder drops its oldest tokens, a quarter of the context in whole chunks, and
    reads the others again. Dropping one chunk at a time would spend most of the time on rereading.

    Attributes:
        rows: rows in the order in which they joined.
    """

    def __init__(
        self,
        model: Retro,
        placement: Placement,
        context: int,
        datastore: WholeDatastore | None = None,
        neighbor_cache: NeighborCache | None = None,
    ) -> None:
        """Create a decoder without rows.

        Args:
            model: in evaluation mode.
            placement: device and precision.
            context: largest number of tokens that the model reads, a multiple of the chunk length.
            datastore: finds the tokens that follow the text; None = the copy head and drafts do not use it.
            neighbor_cache: of a model whose decoder reads neighbors; None = a cache that keeps nothing.

        Raises:
            InputError: the model's learned positions end before the context.
        """
        model.settings.check_length(context)
        self.model, self.placement, self.context, self.datastore = model, placement, context, datastore
        self.neighbor_cache = neighbor_cache or NeighborCache(model, 0)
        self.m = model.settings.chunk_length
        self.dropped_at_once = max(1, context // 4 // self.m)  # chunks
        self.packed = model.packed_output is not None
        self.output = model.packed_output or partial(F.linear, weight=model.output_weight.to(placement.dtype))
        self.context_positions = positions_of(
            *model.self_scheme, range(context), range(1), placement.device, rope=model.settings.rope
        )
        self.window_positions: Positions | None = None  # None until the size of the neighbors is known
        self.reading_rotation: Tensor | None = None  # of queries that read them with self-attention, by position
        self.layers: list[Any] = model.layers
        self.crosses: list[Any] = [layer.cross for layer in self.layers if layer.cross is not None]
        self.distance_keys = self._distance_keys(
            self.context_positions, [layer.attention.block for layer in self.layers]
        )
        self.cross_distance_keys: Sequence[Tensor | None] = ()
        self.votes = None if model.copy_head is None else CopyVotes(model, model.copy_head, datastore)
        self.rows: list[Row] = []
        self.cache = self._empty_cache()

    def empty(self) -> "Decoder":
        """Return another decoder of the same model, without rows."""
        return Decoder(self.model, self.placement, self.context, self.datastore, self.neighbor_cache)

    # --- rows ---------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def add(self, tokens: np.ndarray, retrieve: RetrieveNeighbors | None = None) -> Row:
        """Add a row for a prompt [t], t ≥ 1. Rows with equal `retrieve` are searched together."""
        row = Row(np.array(tokens, np.int64), retrieve, slot=len(self.rows))
        self.cache.make_slots(len(self.rows) + 1)
        self.rows.append(row)
        self._drop(row)
        return row

    @torch.inference_mode()
    def append(self, row: Row, *tokens: int) -> None:
        """Append tokens to a row that was read: those tokens of its draft that are right, and one more."""
        wrong = len(row.draft) - (len(tokens) - 1)
        if wrong:
            row.num_read -= wrong
            self.cache.remove_last(row.slot, wrong)
        row.tokens, row.draft = np.append(row.tokens, tokens), row.draft[:0]
        self._drop(row)

    @torch.inference_mode()
    def copy(self, row: Row) -> Row:
        new = row.copy(slot=len(self.rows))
        self.cache.make_slots(len(self.rows) + 1)
        self.cache.copy(row.slot, new.slot, row.num_read)
        self.rows.append(new)
        return new

    @torch.inference_mode()
    def remove(self, row: Row) -> None:
        """Remove a row. The memory of the cache is freed with the last row."""
        self.rows.remove(row)
        if not self.rows:
            self.cache = self._empty_cache()
            return
        if row.slot < len(self.rows):  # the last slot moves into the gap
            moved = next(other for other in self.rows if other.slot == len(self.rows))
            self.cache.copy(moved.slot, row.slot, moved.num_read)
            moved.slot = row.slot

    def _drop(self, row: Row) -> None:
        surplus = len(row.tokens) - self.context
        if surplus > 0:
            block = self.dropped_at_once
            row.drop(-(-surplus // (block * self.m)) * block, self.m)

    # --- a step -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, propose: Propose | None = None) -> tuple[list[Row], Tensor]:
        """Read one token of each row that has one left, with its draft, and the next part of the first few others.

        Args:
            propose: returns the draft of a row, of at most the given number of tokens; None = no drafts.

        Returns:
            rows that were read to their end by this step, and the logits of their next tokens, [rows, V] float32: for a row
                with a draft of d tokens 1 + d of them, after its last token and after each token of the draft. With a copy
                head they are log-probabilities.
        """
        unread = [row for row in self.rows if row.num_unread]
        single = [row for row in unread if row.num_unread == 1]
        windows = [row for row in unread if row.num_unread > 1]
        if windows:  # those that read like the first one
            windows = [row for row in windows if self._reads_neighbors(row) == self._reads_neighbors(windows[0])]
            windows = windows[: max(1, WINDOW_TOKENS // self.m)]
        self._find_neighbors([*single, *windows])
        if propose is not None:
            for row in single:
                row.draft = propose(row, self._room_for_draft(row, len(single)))
        self._put_first(single)
        rows, hidden = list[Row](), list[Tensor]()
        with self.placement.autocast():
            for part in (single, windows):
                if part:
                    span = self._pass_of(part, INTERLEAVED_TOKENS if single else WINDOW_TOKENS)
                    h = self._run(span)
                    for row, read, last in zip(span.rows, h, span.last.tolist(), strict=True):
                        if not row.num_unread:
                            rows.append(row)
                            hidden.append(read[last - len(row.draft) : last + 1])
            if not rows:
                return rows, torch.empty(0, self.model.settings.vocab_size)
            read = self.model.finish(torch.cat(hidden).float())
            logits = self.output(read).float()
            return rows, logits if self.votes is None else self.votes.mixed(rows, logits, read)

    def read(self, rows: Sequence[Row]) -> Tensor:
        """Take steps until these rows are read; return the logits of their next tokens, [rows, V] float32."""
        logits: dict[Row, Tensor] = {}
        while any(row.num_unread for row in rows):
            logits.update(zip(*self.step(), strict=True))
        return torch.stack([logits[row] for row in rows])

    def _reads_neighbors(self, row: Row) -> bool:
        """Return whether the activations of a row depend on neighbors, so that a pass must end with a window."""
        return self.model.settings.activations_read and row.retrieve is not None

    def _room_for_draft(self, row: Row, num_rows: int) -> int:
        """Return the largest length of a draft: neighbors must not change in it, nor the context overflow."""
        until_border = self.m - 1 - len(row.tokens) % self.m if row.retrieve else LONGEST_DRAFT
        room = min(LONGEST_DRAFT, until_border, self.context - len(row.tokens), DRAFTED_TOKENS // num_rows - 1)
        return max(0, room)

    def _find_neighbors(self, rows: list[Row]) -> None:
        """Find the neighbors of all complete chunks of rows. Rows with equal `retrieve` share a search."""
        missing = [(row, chunks) for row in rows if row.retrieve and len(chunks := row.missing_chunks(self.m))]
        searches = list[RetrieveNeighbors]()
        for row, _ in missing:
            if row.retrieve is not None and row.retrieve not in searches:
                searches.append(row.retrieve)
        for retrieve in searches:
            searching = [(row, chunks) for row, chunks in missing if row.retrieve == retrieve]
            neighbors = iter(Neighbors(*retrieve(np.concatenate([chunks for _, chunks in searching]))).of_chunks())
            for row, chunks in searching:
                row.neighbors += islice(neighbors, len(chunks))

    def _put_first(self, rows: list[Row]) -> None:
        """Give rows the first slots, so that their keys and values are read without a copy."""
        gaps = sorted({*range(len(rows))} - {row.slot for row in rows})
        for row, gap in zip([row for row in rows if row.slot >= len(rows)], gaps, strict=True):
            other = next(row for row in self.rows if row.slot == gap)
            self.cache.swap(row.slot, gap, max(row.num_read, other.num_read))
            row.slot, other.slot = gap, row.slot

    def copied_from(
        self, rows: Sequence[Row], indices: list[int], tokens: Sequence[int], log_probabilities: Sequence[float]
    ) -> list[CopiedFrom | None]:
        """Find what the next tokens of rows of the last step were copied from; see `CopyVotes.copied_from`."""
        if self.votes is None:
            return [None] * len(tokens)
        return self.votes.copied_from(rows, indices, tokens, log_probabilities)

    # --- a pass -------------------------------------------------------------------------------------------------------

    def _pass_of(self, rows: list[Row], longest: int) -> _Pass:
        """Return the pass that reads the next part of rows, of at most `longest` tokens each where no window ends it.

        From here on, these tokens count as read.
        """
        rows = sorted(rows, key=lambda row: row.slot)
        starts = np.array([row.num_read for row in rows])
        share = max(self.m, min(longest, WINDOW_TOKENS // len(rows)))
        most = [self.m - (row.num_read + 1) % self.m if self._reads_neighbors(row) else share for row in rows]
        counts = [  # a draft is read at once
            min(row.num_unread, max(1 + len(row.draft), room)) for row, room in zip(rows, most, strict=True)
        ]
        # In bfloat16, oneDNN sums a product of one row in another order than one of several. Padding gives a token the same bits
        # alone and in a draft: rounded logits are often equal, and the likeliest token would differ.
        width = max(2 if self.packed and len(rows) == 1 else 1, *counts)
        tokens = np.zeros((len(rows), width), dtype=np.int64)
        for new, row, count in zip(tokens, rows, counts, strict=True):
            new[:count] = row.unread[:count]
            row.num_read += count
        stop = self.cache.make_tokens(int(starts.max()) + width, self.context)
        columns, at = self._put(starts[:, None] + np.arange(width)), [row.slot for row in rows]
        positions = columns.clamp(max=self.context - 1)  # padding can exceed the context
        mask = visible(positions, self._keys_at(stop), self.model.settings.attention.sliding_window)
        begins = starts == 0
        self.cache.readable[self._put(np.array(at)[begins])] = False
        return _Pass(
            rows=rows,
            tokens=self._put(tokens),
            at=self._put(np.array(at)),
            slots=slice(at[0], at[-1] + 1) if at[-1] - at[0] + 1 == len(at) else self._put(np.array(at)),
            starts=starts,
            positions=positions,
            last=self._put(np.array(counts) - 1),
            begins=self._put(begins).bool()[:, None, None, None],
            columns=columns,
            stop=stop,
            mask=mask[:, None],
            num_neighbors=max(row.num_neighbors for row in rows),
        )

    def _run(self, span: _Pass) -> Tensor:
        """Run the layers: [N, n, D]."""
        model = self.model
        cca_layers = model.settings.retrieval.cca_layers if any(row.retrieve for row in span.rows) else ()
        h = model.embed_at(span.tokens, span.positions)
        if model.settings.decoder_reads:
            self._encode_completed(span)
        self_positions, cross_positions = self._self_positions(span), None
        for layer, (_, attention, _, feed_forward) in enumerate(self.layers, start=1):
            reads = h if model.settings.parallel_residual else None
            x = attention.norm(h).to(self.placement.dtype)  # once for queries, keys and values
            h = h + self._attend(layer - 1, attention.block, x, self_positions, span)
            if layer == min(cca_layers, default=0):
                self._encode(h, span)
                cross_positions = self._cross_positions(span)
            if layer in cca_layers and (cross_positions is not None or model.settings.smeared_tokens > 1):
                h = h + self._cross_attend(cca_layers.index(layer), h, cross_positions, span)
            h = feed_forward(h, reads=reads)
            if isinstance(
                h, tuple
            ):  # from experts, which in evaluation have no capacity limit: rows do not affect each other
                h, _ = h
        return h

    def _keys_at(self, stop: int) -> Tensor:
        """Return the positions of the first keys of the cache."""
        return torch.arange(stop, device=self.placement.device)

    def _attend(self, layer: int, attention: Attention, x: Tensor, positions: Positions, span: _Pass) -> Tensor:
        """Self-attention of the new tokens x [N, n, D] to all tokens of their rows. Caches their keys and values."""
        keys, values = self.cache.keys, self.cache.values
        k, v = attention.project_keys_values(x)
        first = k[:, :1] if hasattr(attention, "smear") else None  # the first key is not mixed with another one
        placed = attention.finish_keys(k, positions, before=self._before(self.cache.last_keys, layer, k, span, first))
        if len(span.rows) == 1:  # copies of slices are faster
            slot, start = span.rows[0].slot, int(span.starts[0])
            columns = slice(start, start + x.shape[1])
            keys[slot, layer, :, columns], values[slot, layer, :, columns] = (
                placed[0].transpose(0, 1),
                v[0].transpose(0, 1),
            )
        else:
            keys[span.at[:, None], layer, :, span.columns] = placed.to(keys.dtype)
            values[span.at[:, None], layer, :, span.columns] = v.to(values.dtype)
        q = attention.project_queries(x)
        q = attention.smear_queries(q, before=self._before(self.cache.last_queries, layer, q, span))
        k, v = (kept[span.slots, layer, :, : span.stop].transpose(1, 2) for kept in (keys, values))
        if isinstance(attention, ReadingAttention) and (neighbors := self._neighbors_to_read(layer, span)):
            y = attention.attend_to_both(q, positions, k, v, span.mask, False, neighbors)
            return attention.project_output(y)
        return attention.attend(q, positions, k, v, mask=span.mask, distance_keys=self.distance_keys[layer])

    def _neighbors_to_read(self, layer: int, span: _Pass) -> ReadNeighbors | None:
        """Return the neighbors of the rows' last complete chunks for self-attention; None if there are none."""
        readable = self.cache.readable[span.slots, : span.num_neighbors].flatten(1)  # [N, K·R]
        if self.reading_rotation is None or not readable.shape[1]:
            return None
        keys, values = (
            kept[span.slots, layer, :, : readable.shape[1]].transpose(1, 2)
            for kept in (self.cache.neighbor_keys, self.cache.neighbor_values)
        )
        return ReadNeighbors(keys, values, readable, self.reading_rotation[:, span.positions])

    def _before(self, kept: Tensor, layer: int, new: Tensor, span: _Pass, first: Tensor | None = None) -> Tensor | None:
        """Return the W keys or queries [N, W, H, C] before the new ones [N, n, H, C] of a layer.

        Those before the beginning of a row are `first`, or zeros. Stores the last ones in `kept` [B, L, W + draft, H, C].
        """
        if not (width := kept.shape[2]):
            return None
        before = kept[span.at, layer].to(new.dtype)
        before = torch.where(span.begins, torch.zeros_like(before) if first is None else first, before)
        rows, offsets = torch.arange(len(new), device=new.device)[:, None], torch.arange(width, device=new.device)
        kept[span.at, layer] = torch.cat((before, new), dim=1)[rows, span.last[:, None] + 1 + offsets].to(kept.dtype)
        return before[:, LONGEST_DRAFT:]

    def _cross_attend(self, layer: int, h: Tensor, positions: Positions | None, span: _Pass) -> Tensor:
        """Cross-attention of the new tokens h [N, n, D] to the neighbors of the last complete chunk; 0 without one."""
        cross, cache = self.crosses[layer], self.cache
        attention = cross.block.attention
        q = attention.project_queries(cross.norm(h))
        q = attention.smear_queries(q, before=self._before(cache.last_cross_queries, layer, q, span))
        if positions is None:
            return torch.zeros_like(h)
        readable = cache.readable[span.slots, : span.num_neighbors]  # [N, K, R]
        k, v = (
            kept[span.slots, layer, :, : readable[0].numel()].transpose(1, 2)
            for kept in (cache.neighbor_keys, cache.neighbor_values)
        )
        read: Tensor = cross.block.attend(q, positions, k, v, readable, self.cross_distance_keys[layer])
        return read

    def _encode(self, h: Tensor, span: _Pass) -> None:
        """Store the activations h [N, n, D] for the encoder, and encode the neighbors of complete chunks.

        The first token of the pass is the last of its chunk. The tokens after it belong to the next chunk and overwrite
        this one.
        """
        # Padding repeats the last token: it must not overwrite the beginning of the chunk.
        tokens = torch.arange(h.shape[1], device=h.device).minimum(span.last[:, None])  # [N, n]
        offsets, h = span.positions.gather(1, tokens) % self.m, h.take_along_dim(tokens[..., None], 1)
        chunk, at = self.cache.chunk, span.at[:, None]
        chunk[at, offsets[:, :1]] = h[:, :1]
        self._encode_completed(span)
        chunk[at, offsets[:, 1:]] = h[:, 1:]

    def _encode_completed(self, span: _Pass) -> None:
        """Encode the neighbors of chunks that end with the first token of the pass."""
        completing = [
            index for index, row in enumerate(span.rows) if row.neighbors and (span.starts[index] + 1) % self.m == 0
        ]
        neighbors = {index: span.rows[index].neighbors[span.starts[index] // self.m] for index in completing}
        for k in {len(own.tokens) for own in neighbors.values()}:
            part = {index: own for index, own in neighbors.items() if len(own.tokens) == k}
            tokens, lengths = (np.stack([own[field] for own in part.values()]) for field in range(2))
            self._encode_neighbors(span.at[list(part)], tokens, lengths)

    def _encode_neighbors(self, at: Tensor, neighbors: np.ndarray, lengths: np.ndarray) -> None:
        """Encode neighbors [A, K, R] with lengths [A, K] of the current chunks in the slots `at` [A]."""
        model, tokens, cache, (_, k, r) = self.model, self._put(neighbors)[:, None], self.cache, neighbors.shape
        of_neighbors = readable_tokens if model.settings.decoder_reads else neighbor_mask
        readable = of_neighbors(tokens, self._put(lengths)[:, None], None)  # [A, U = 1, K, R]
        self._prepare_for_neighbors(k, r)
        cache.readable[at] = False
        cache.readable[at, :k] = readable[:, 0]
        if model.settings.decoder_reads:
            new = self.neighbor_cache.encode(neighbors, lengths)  # [A, L, G, K·R, C]
            for cached, rows in zip((cache.neighbor_keys, cache.neighbor_values), new, strict=True):
                cached[at, :, :, : rows.shape[3]] = rows.to(cached.dtype)
            return
        encoded = model.encoder(tokens, readable, cache.chunk[at], model.embedding)[:, 0]  # [A, K, R, E]
        for layer, cross in enumerate(self.crosses):
            new = cross.block.keys_values(encoded, self.window_positions)
            for cached, rows in zip((cache.neighbor_keys, cache.neighbor_values), new, strict=True):
                cached[at, layer, :, : rows.shape[1]] = rows.transpose(1, 2).to(cached.dtype)

    # --- positions ----------------------------------------------------------------------------------------------------

    def _self_positions(self, span: _Pass) -> Positions:
        if isinstance(self.context_positions, RopePositions):
            rotations = self.context_positions.query[:, span.positions].to(self.placement.dtype)  # [2, N, n, 1, C/2]
            return RopePositions(rotations, rotations)
        if isinstance(self.context_positions, NoPositions):
            return self.context_positions
        distances = span.positions[:, :, None] - self._keys_at(span.stop)
        distances = distances.clamp(min=0)[:, None]  # [N, 1, n, stop]; later keys are masked
        if isinstance(self.context_positions, AlibiPositions):
            return AlibiPositions(distances)
        return TransformerXLPositions(self.context_positions.waves, distances)

    def _cross_positions(self, span: _Pass) -> Positions | None:
        """Return the positions of cross-attention in a pass; None if there is nothing to read.

        The last token of a chunk is the first of its window.
        """
        num_keys = self.cache.readable[0, : span.num_neighbors].numel()
        if not num_keys:
            return None
        offsets = (span.positions + 1) % self.m
        if isinstance(self.window_positions, RopePositions):
            return RopePositions(self.window_positions.query[:, offsets], self.window_positions.key)
        if isinstance(self.window_positions, AlibiPositions):
            return AlibiPositions(self.window_positions.distances[0, 0, offsets, :num_keys][:, None])
        if isinstance(self.window_positions, TransformerXLPositions):
            lookup = self.window_positions.lookup[offsets, :num_keys][:, None]
            return TransformerXLPositions(self.window_positions.waves, lookup)
        return self.window_positions

    def _prepare_for_neighbors(self, k: int, r: int) -> None:
        """Prepare positions and cache for K neighbors of R tokens, unless they are prepared for more."""
        if k <= self.cache.readable.shape[1]:
            return
        self.cache.make_neighbors(k, r)
        if self.model.settings.decoder_reads:
            at = torch.arange(r, self.context + r, device=self.placement.device)
            self.reading_rotation = rotation_at(self.model.settings, at)
            return
        self.window_positions = positions_of(
            *self.model.cross_scheme, range(self.m - 1, 2 * self.m - 1), range(r), self.placement.device, (1, k)
        )
        self.cross_distance_keys = self._distance_keys(
            self.window_positions, [cross.block.attention for cross in self.crosses]
        )

    def _distance_keys(self, positions: Positions, attentions: Sequence[Attention]) -> Sequence[Tensor | None]:
        """Return each attention's keys of distances, the same in every pass; None except for Transformer-XL."""
        if not isinstance(positions, TransformerXLPositions):
            return [None] * len(attentions)
        with torch.inference_mode(), self.placement.autocast():
            return [attention.distance_keys(positions.waves.to(self.placement.dtype)) for attention in attentions]

    # --- memory -------------------------------------------------------------------------------------------------------

    def _empty_cache(self) -> Cache:
        with torch.inference_mode():
            return Cache.of(self.model, self.placement.dtype)

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.placement.device)
