"""Find the longest end of a text that occurs in a datastore, everywhere that it occurs, and what follows there."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from indexing.store.artifact import require_finished
from indexing.store.datastore import Datastore, Split, shard_name
from indexing.store.sharded_array import open_array
from indexing.suffixes.build import FOLDER, document_starts
from indexing.suffixes.votes import LONGEST, SAMPLED, as_columns, votes_for

_SCANNED = 4096
"""What follows a match is counted at no more than this many of its occurrences, spread evenly."""
_LONGEST = 4096
"""Tokens of the longest run that `trace` looks for."""


@dataclass(frozen=True)
class Match:
    """The longest end of a text that occurs in the datastore.

    Attributes:
        length: tokens; 0 if even the last token occurs nowhere.
        ranges: for each shard the rows [first, stop) of its sorted prefixes that end in these tokens.
    """

    length: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """How often it occurs."""
        return sum(stop - first for first, stop in self.ranges)


@dataclass(frozen=True)
class _Shard:
    """Sorted prefixes of a shard (`positions`), its tokens by position, and the starts of its documents."""

    positions: np.ndarray
    tokens: np.ndarray
    starts: np.ndarray
    first_chunk: int

    def backwards(self, row: int, length: int) -> bytes:
        """The last `length` tokens of a sorted prefix in reverse, as bytes that compare as the tokens do."""
        end = int(self.positions[row]) + 1
        start = int(self.starts[self.starts.searchsorted(end, "left") - 1])
        return _key(self.tokens[max(start, end - length) : end])

    def longest(self, text: bytes, width: int) -> tuple[int, int]:
        """Length of the longest match of a text (`_key`), and a row at whose side the matches are."""
        length = len(text) // width
        rows = range(len(self.positions))
        row = bisect.bisect_left(rows, text, key=lambda at: self.backwards(at, length))
        sides = [self.backwards(at, length) for at in (row - 1, row) if 0 <= at < len(rows)]
        return max((_common(side, text) // width for side in sides), default=0), row

    def range_of(self, ending: bytes, width: int, row: int) -> tuple[int, int]:
        """Rows [first, stop) of the prefixes that end in `ending`, if it occurs: around or next to `row`. Most ranges are small, so the
        steps away from `row` double."""
        length, rows, first, stop, step = len(ending) // width, range(len(self.positions)), row, row, 1

        def key(at: int) -> bytes:
            return self.backwards(at, length)

        while first >= step and key(first - step) == ending:
            first, step = first - step, 2 * step
        first, step = bisect.bisect_left(rows, ending, max(0, first - step), first, key=key), 1
        while stop + step <= len(rows) and key(stop + step - 1) == ending:
            stop, step = stop + step, 2 * step
        return first, bisect.bisect_right(rows, ending, stop, min(len(rows), stop + step), key=key)


def _key(tokens: np.ndarray) -> bytes:
    return tokens[::-1].astype(tokens.dtype.newbyteorder(">")).tobytes()


def _common(one: bytes, other: bytes) -> int:
    """Length of the common start."""
    size = min(len(one), len(other))
    same = np.frombuffer(one[:size], np.uint8) == np.frombuffer(other[:size], np.uint8)
    return size if same.all() else int(same.argmin())


class SuffixIndex:
    """The sorted prefixes of all training documents of a datastore, memory-mapped.

    A match costs two or three binary searches in each shard. Deleted documents do not occur.
    """

    def __init__(self, split: Split) -> None:
        self.split, self.deleted = split, split.deleted
        self._shards = [self._open(shard) for shard in range(len(split.chunk_rows))]
        self._dtype = split.tokens.shard(0).dtype

    @classmethod
    def open(cls, folder: Path) -> "SuffixIndex":
        """Open the index of a datastore.

        Raises:
            InputError: it has none, or a file is damaged.
        """
        datastore = Datastore.open(folder)
        datastore.require(FOLDER)
        return cls(datastore.train)

    def _open(self, shard: int) -> _Shard:
        folder = self.split.folder / FOLDER / shard_name(shard)
        require_finished(folder)
        tokens = self.split.tokens.shard(shard)
        first = int(self.split.tokens.starts[shard])
        # Plain views: reading an element of a `memmap` takes three times as long.
        positions, tokens = np.asarray(open_array(folder / "positions.npy")), np.asarray(tokens).reshape(-1)
        return _Shard(positions, tokens, document_starts(self.split, shard), first)

    def longest_match(self, text: Sequence[int] | np.ndarray) -> Match:
        """The longest end of `text` (token ids) that occurs in one of the documents that are not deleted."""
        key, width = _key(np.asarray(text, dtype=self._dtype)), self._dtype.itemsize
        longest = [shard.longest(key, width) for shard in self._shards]
        for length in range(max((length for length, _ in longest), default=0), 0, -1):
            ending = key[: length * width]
            ranges = tuple(
                shard.range_of(ending, width, row) if reached >= length else (0, 0)
                for shard, (reached, row) in zip(self._shards, longest, strict=True)
            )
            match = Match(length, ranges)
            if not len(self.deleted) or len(self.occurrences(match)):
                return match
        return Match(0, ())

    def occurrences(self, match: Match, most: int = 2**62) -> np.ndarray:
        """Where a match ends, outside of deleted documents: chunk id and place in the chunk, [n, 2] int64.

        Args:
            match: the match.
            most: if there are more occurrences, this many are returned, spread evenly.
        """
        step = max(1, -(-match.count // most))
        ends = [
            shard.positions[first:stop:step].astype(np.int64) + shard.first_chunk * self.split.chunk_length
            for shard, (first, stop) in zip(self._shards, match.ranges, strict=False)
        ]
        chunks, places = np.divmod(np.concatenate([*ends, np.empty(0, np.int64)]), self.split.chunk_length)
        return np.stack([chunks, places], axis=1)[self.split.without_deleted(chunks) >= 0]

    def documents_of(self, match: Match, most: int) -> list[str]:
        """The ids of the first `most` documents that a match occurs in, among some of its occurrences."""
        chunks = self.occurrences(match, _SCANNED)[:, 0]
        numbers = list(dict.fromkeys(self.split.documents_of(chunks)[0].tolist()))[:most]
        return [str(row["id"]) for row in self.split.metadata(numbers)]

    def next_tokens(self, match: Match) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that follow a match, most frequent first, and how often: [n] and [n] int64. Nothing follows the end of a document."""
        tokens, counts = np.unique(self._following(match, _SCANNED), return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return tokens[order], counts[order]

    def votes(self, text: np.ndarray, first: int = 0) -> np.ndarray:
        """The tokens that follow the longest match of the text up to each token, from the token `first` on.

        The same as the stored votes of a held-out document. Of more than 32 occurrences in several shards, others may be counted.

        Args:
            text: [t] token ids of one document, from its beginning or later.
            first: index of the first token with votes.

        Returns:
            [t - first, 7] int64, as `votes.as_columns`.
        """
        matches = [self.longest_match(text[max(0, end - LONGEST) : end]) for end in range(first + 1, len(text) + 1)]
        following = np.full((len(matches), SAMPLED), -1)
        for row, match in zip(following, matches, strict=True):
            tokens = self._following(match, SAMPLED)[:SAMPLED]
            row[: len(tokens)] = tokens
        lengths = np.array([match.length for match in matches], np.int64)
        return as_columns(votes_for(lengths, following, self._dtype))

    def continuation(self, text: np.ndarray, most: int) -> tuple[int, np.ndarray]:
        """Up to `most` tokens that follow one occurrence of the longest match of a text in the same document, and its length.

        Of several occurrences, one that is followed by the most frequent next token is taken.

        Returns:
            the number of tokens of the match, and int64 [n].
        """
        match = self.longest_match(text[-LONGEST:])
        chunks, places = self.occurrences(match, SAMPLED).T
        following, _ = self.next_tokens(match)
        m = self.split.chunk_length
        for chunk, place in zip(chunks.tolist(), places.tolist(), strict=True):
            last = min(int(self.split.documents_of(np.array([chunk]))[2][0]), chunk + 2 + most // m)
            real = np.arange(m) < self.split.lengths.read(chunk, last)[:, None]
            after = self.split.tokens.read(chunk, last)[real][place + 1 :][:most].astype(np.int64)
            if len(after) and after[0] == following[0]:
                return match.length, after
        return match.length, np.empty(0, np.int64)

    def _following(self, match: Match, most: int) -> np.ndarray:
        """The tokens that follow occurrences of a match, see `occurrences`: [n] int64."""
        chunks, places = self.occurrences(match, most).T
        if not len(chunks):
            return np.empty(0, np.int64)
        m, last = self.split.chunk_length, self.split.documents_of(chunks)[2] - 1
        after = np.where(places + 1 < m, chunks, chunks + 1)
        rows, places = np.minimum(after, last), (places + 1) % m
        follows = (after <= last) & (places < self.split.lengths.gather(rows))
        following: np.ndarray = self.split.tokens.gather(rows)[follows, places[follows]].astype(np.int64)
        return following


@dataclass(frozen=True)
class Run:
    """Tokens [first, stop) of a text that occur in a row in the datastore, as many as possible to both sides."""

    first: int
    stop: int
    match: Match


def trace(index: SuffixIndex, tokens: np.ndarray, least: int) -> list[Run]:
    """The longest runs of a text [n] that occur verbatim in the datastore and have at least `least` tokens, in order.

    Runs may overlap; none contains another (OLMoTrace: Liu et al. 2025, arXiv 2504.07096).
    """
    matches = [index.longest_match(tokens[max(0, end - _LONGEST) : end]) for end in range(1, len(tokens) + 1)]
    lengths = [match.length for match in matches] + [0]
    return [
        Run(end - match.length, end, match)
        for end, match in enumerate(matches, start=1)
        if match.length >= least and lengths[end] <= match.length
    ]
