"""The texts of a split, by position: what the sorted prefixes of `order.py` are prefixes of.

The position of a token is (id of its chunk) · m + (its place in the chunk). Only the last chunk of a document is
padded, so the tokens of a document have consecutive positions, and the prefix that ends at a position is all of its
document up to there.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from indexing.store.datastore import Split


@dataclass(frozen=True)
class ShardText:
    """The text of one shard of a split. Positions are counted from its first one.

    Attributes:
        tokens: [chunks · m].
        lengths: [chunks], real tokens of each chunk.
        offsets: first chunk of every document, then the number of chunks, [documents + 1] int64.
        chunk_length: m.
        first_document: number of the first document in the split.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    chunk_length: int
    first_document: int

    def positions(self, step: int = 1) -> np.ndarray:
        """The positions of every `step`-th token, without padding: [n] int64."""
        if step == 1:
            return np.flatnonzero(np.arange(self.chunk_length) < np.asarray(self.lengths)[:, None])
        stops = np.cumsum(self.lengths, dtype=np.int64)
        tokens = np.arange(0, stops[-1], step)
        chunks = np.searchsorted(stops, tokens, side="right")
        return chunks * self.chunk_length + tokens - stops[chunks] + self.lengths[chunks]

    def documents(self, positions: np.ndarray) -> np.ndarray:
        """The documents of positions, counted from the first one of the shard."""
        return np.searchsorted(self.offsets, positions // self.chunk_length, side="right") - 1

    def available(self, positions: np.ndarray) -> np.ndarray:
        """The tokens of prefixes: [n] → [n] int64."""
        return positions + 1 - np.asarray(self.offsets)[self.documents(positions)] * self.chunk_length

    def windows(self, positions: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
        """The last `count` tokens of prefixes, backwards and plus 1: [n] → [n, count] of dtype, 0 before a document
        begins."""
        available, window = self.available(positions), np.zeros((len(positions), count), dtype)
        whole = positions >= count - 1  # the others are at the begin of the shard
        if whole.any():
            runs = np.lib.stride_tricks.sliding_window_view(self.tokens, count)
            window[whole] = runs[positions[whole] - count + 1, ::-1]
        for row in np.flatnonzero(~whole):
            window[row, : positions[row] + 1] = self.tokens[positions[row] :: -1]
        window += dtype.type(1)
        window *= np.arange(count) < available[:, None]
        return window

    def read_rows(self, positions: np.ndarray, rows: "_Rows", out: np.ndarray) -> None:
        """Read the token after prefixes and their last ones, see `Texts.rows`, into rows [n] of `out`."""
        from indexing.suffixes.compiled_order import read_rows  # numba, which takes half a second

        self._check(positions)
        places = np.arange(len(positions)) if isinstance(rows, slice) else rows
        read_rows(self.tokens, self.lengths, self.begins, self.chunk_length, positions, places, out)

    def heads(self, positions: np.ndarray, width: int) -> np.ndarray:
        """The last `width` tokens plus 1 of prefixes as numbers, 0 before a document begins: [n] → [n] uint64."""
        from indexing.suffixes.compiled_order import read_heads

        self._check(positions)
        out = np.empty(len(positions), np.uint64)
        read_heads(self.tokens, self.begins, self.chunk_length, positions, width, out)
        return out

    @cached_property
    def begins(self) -> np.ndarray:
        """Whether a document begins with each chunk: [chunks] bool."""
        begins = np.zeros(len(self.tokens) // self.chunk_length, bool)
        begins[self.offsets[self.offsets < len(begins)]] = True
        return begins

    def _check(self, positions: np.ndarray) -> None:
        """Raise IndexError for positions outside of the text, which would end the process."""
        if len(positions) and not 0 <= positions.min() <= positions.max() < len(self.tokens):
            raise IndexError(f"positions {positions.min()} to {positions.max()} of {len(self.tokens)}")

    def following(self, positions: np.ndarray) -> np.ndarray:
        """The next token of the same document, [n] int64; -1 = none."""
        after = np.minimum(positions + 1, len(self.tokens) - 1)
        chunks, places = np.divmod(after, self.chunk_length)
        none = (places >= self.lengths[chunks]) | (after == positions)
        if len(first := np.flatnonzero(places == 0)):  # of a chunk, and perhaps of the next document
            none[first] |= self.offsets[np.searchsorted(self.offsets, chunks[first])] == chunks[first]
        following = self.tokens[after].astype(np.int64)
        following[none] = -1
        return following


_Rows = np.ndarray | slice
_Read = Callable[[ShardText, np.ndarray, _Rows], np.ndarray]
"""The text of a shard, positions [r] in it, and their rows among all that are read → [r, ...]."""


class Texts:
    """The texts of all shards of a split. A shard is opened when it is first read."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.starts = np.asarray(split.tokens.starts) * split.chunk_length
        """First position of every shard, then the number of positions: [shards + 1] int64."""
        self._first_documents = [0, *itertools.accumulate(split.document_rows)]
        self._open: dict[int, ShardText] = {}

    @cached_property
    def dtype(self) -> np.dtype:
        """The type of a token plus 1."""
        return np.dtype(np.uint16 if self.split.vocab_size < 2**16 else np.uint32)

    @cached_property
    def head_tokens(self) -> int:
        """Tokens of a head: as many as have 64 bits."""
        return 8 // self.dtype.itemsize

    def shard(self, number: int) -> ShardText:
        """The text of one shard."""
        if number not in self._open:
            split = self.split
            self._open[number] = ShardText(
                tokens=np.asarray(split.tokens.shard(number)).reshape(-1),
                lengths=np.asarray(split.lengths.shard(number)),
                offsets=np.asarray(split.document_offsets.shard(number)),
                chunk_length=split.chunk_length,
                first_document=self._first_documents[number],
            )
        return self._open[number]

    def _by_shard(self, positions: np.ndarray) -> Iterator[tuple[int, _Rows]]:
        """The shards of positions [n], in order, each with the rows of those in it."""
        if not len(positions):
            return
        if len(self.starts) == 2:
            yield 0, slice(None)
            return
        first, last = np.searchsorted(self.starts, (positions.min(), positions.max()), side="right") - 1
        if first == last:
            yield int(first), slice(None)
            return
        # Small unsigned integers are sorted in linear time.
        shards = (np.searchsorted(self.starts, positions, side="right") - 1).astype(
            np.min_scalar_type(len(self.starts))
        )
        order = np.argsort(shards, kind="stable")
        present, first = np.unique(shards[order], return_index=True)
        yield from zip(present.tolist(), np.split(order, first[1:]), strict=True)

    def _read(self, out: np.ndarray, positions: np.ndarray, read: _Read) -> np.ndarray:
        """Fill `out` [n, ...] with what is read for positions [n], shard by shard."""
        for shard, rows in self._by_shard(positions):
            out[rows] = read(self.shard(shard), positions[rows] - self.starts[shard], rows)
        return out

    def rows(self, positions: np.ndarray, count: int) -> np.ndarray:
        """The token after prefixes, then their last `count` ones backwards, all plus 1, 0 = none: [n] int64 → [n, 1 +
        count] of `dtype`."""
        out = np.empty((len(positions), 1 + count), self.dtype)
        for shard, rows in self._by_shard(positions):
            self.shard(shard).read_rows(positions[rows] - self.starts[shard], rows, out)
        return out

    def windows(self, positions: np.ndarray, count: int) -> np.ndarray:
        """`rows` without the token after each prefix, for a few prefixes: [n] int64 → [n, count] of `dtype`. It reads
        little of a shard, where `rows` reads the beginnings of all documents."""
        out = np.empty((len(positions), count), self.dtype)
        return self._read(out, positions, lambda text, own, _: text.windows(own, count, self.dtype))

    def available(self, positions: np.ndarray) -> np.ndarray:
        """The tokens of prefixes, by the positions of their last ones: [n] int64 → [n] int64."""
        out = np.empty(len(positions), np.int64)
        return self._read(out, positions, lambda text, own, _: text.available(own))

    def following(self, positions: np.ndarray) -> np.ndarray:
        """`ShardText.following` of positions of all shards: [n] int64 → [n] int64."""
        out = np.empty(len(positions), np.int64)
        return self._read(out, positions, lambda text, own, _: text.following(own))

    def documents(self, positions: np.ndarray) -> np.ndarray:
        """The numbers of the documents of positions: [n] int64 → [n] int64."""
        out = np.empty(len(positions), np.int64)
        return self._read(out, positions, lambda text, own, _: text.documents(own) + text.first_document)

    def heads(self, positions: np.ndarray) -> np.ndarray:
        """The last 8 bytes of tokens of prefixes, as numbers that compare like them: [n] int64 → [n] uint64."""
        out = np.empty(len(positions), np.uint64)
        return self._read(out, positions, lambda text, own, _: text.heads(own, self.head_tokens))


def numbers(window: np.ndarray) -> np.ndarray:
    """Windows [n, w] as numbers that compare in the same order, [n, w · bytes of a token / 8] uint64."""
    return window.astype(window.dtype.newbyteorder(">")).view(">u8").astype(np.uint64)


def view(array: np.ndarray) -> memoryview:
    """An array as a memory view, from which Python reads a single number several times as fast."""
    untyped: Any = np.asarray(array)
    return memoryview(untyped)
