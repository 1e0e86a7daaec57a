"""Find the longest end of a text that occurs in a datastore, everywhere that it occurs, and what follows there."""

import bisect
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from indexing.machine import compiled
from indexing.store.datastore import Datastore, Split
from indexing.store.deletions import inside
from indexing.suffixes.order import LONGEST, ROWS_OF_HEAD, Prefixes, blocks, sampled_rows, stored_orders
from indexing.suffixes.order_build import write_chosen
from indexing.suffixes.rows import LONGEST_SHARED, Rows, spread, stride
from indexing.suffixes.texts import Texts, view
from indexing.suffixes.votes import COLUMNS, KEPT, LENGTHS, SAMPLED, count_votes, within_limit

_SCANNED = 4096
"""What follows a match, and its documents, are read at no more than this many of its occurrences, spread evenly."""
SHORTEST_RUN = 8
"""Tokens of the shortest run that a trace returns, unless told otherwise."""
_LOOKED_AT = 8
"""If some of many occurrences are wanted, whether they are deleted is read at this many times as many of them, spread evenly."""
_TOGETHER = 256
"""Texts whose votes are counted together."""
_ALL = 2**62
_BLOCK = 1 << 20
_ADJACENT = 4 * ROWS_OF_HEAD
"""Rows among which the one that shares most with a text is found without reading other texts."""
_LENGTHS = np.array(LENGTHS[::-1])


@dataclass(frozen=True)
class Match:
    """The longest end of a text that occurs in the datastore.

    Attributes:
        length: tokens; 0 if even the last token occurs nowhere.
        ranges: for each order the rows [first, stop) of the prefixes that end in these tokens, or in the last 64 of them.
        ends: of a match of more than 64 tokens the positions where it ends, outside of documents that were deleted then.
    """

    length: int
    ranges: tuple[tuple[int, int], ...]
    ends: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """How often it occurs, some deleted documents included."""
        return sum(stop - first for first, stop in self.ranges) if self.ends is None else len(self.ends)


@dataclass(frozen=True)
class Place:
    """An occurrence of a match.

    Attributes:
        document: metadata of its document.
        first: chunk id of its first token, and the place of the token in the chunk.
        last: the same of its last token.
    """

    document: dict[str, Any]
    first: tuple[int, int]
    last: tuple[int, int]


class _Tokens:
    """Reads single tokens of a split by position.

    Memory views and lists: Python reads a single number from them several times as fast as from an array. Texts are lists of token ids,
    backwards and not empty.
    """

    def __init__(self, split: Split) -> None:
        self._starts = (np.asarray(split.tokens.starts) * split.chunk_length).tolist()
        self._split, self._chunk_length = split, split.chunk_length
        self._open: dict[int, tuple[int, memoryview, memoryview, memoryview]] = {}
        self._several, self._format = len(self._starts) > 2, view(split.tokens.shard(0)).format

    def _shard(self, position: int) -> tuple[int, memoryview, memoryview, memoryview]:
        """The first position of the shard of a position, its tokens, lengths of chunks, and first chunks of documents."""
        number = bisect.bisect_right(self._starts, position) - 1 if self._several else 0
        return self._open.get(number) or self._opened(number)

    def _opened(self, number: int) -> tuple[int, memoryview, memoryview, memoryview]:
        split = self._split
        tokens, lengths = view(split.tokens.shard(number).reshape(-1)), view(split.lengths.shard(number))
        self._open[number] = self._starts[number], tokens, lengths, view(split.document_offsets.shard(number))
        return self._open[number]

    def _first(self, end: int, offsets: memoryview) -> int:
        """The first position of the document of a position, both counted from the first one of its shard."""
        return int(offsets[bisect.bisect_right(offsets, end // self._chunk_length) - 1]) * self._chunk_length

    def backwards(self, position: int, count: int) -> list[int]:
        """The last tokens up to a position backwards, as many as are asked for or the document allows."""
        base, tokens, _, offsets = self._shard(position)
        end = position - base
        return tokens[max(self._first(end, offsets), end + 1 - count) : end + 1].tolist()[::-1]

    def shared(self, position: int, text: list[int]) -> int:
        """How many last tokens the document up to a position has in common with a text. Where a document begins is read only if
        these are in more than one chunk, as it is one more read of the disk."""
        base, tokens, _, offsets = self._shard(position)
        end = position - base
        length = _common(tokens[max(0, end + 1 - len(text)) : end + 1].tolist()[::-1], text)
        return length if length <= end % self._chunk_length + 1 else min(length, end + 1 - self._first(end, offsets))

    def next_token(self, position: int) -> int:
        """The token after a position in the same document; -1 = none."""
        base, tokens, lengths, offsets = self._shard(position)
        after = position + 1 - base
        chunk, place = divmod(after, self._chunk_length)
        if place:
            return int(tokens[after]) if place < lengths[chunk] else -1
        # The token is the first one of a chunk, and the first one of another document if that begins with this chunk.
        begins = offsets[bisect.bisect_left(offsets, chunk)] == chunk
        return -1 if begins else int(tokens[after])


class _Order:
    """Searches an order. Rows are those of `prefixes`."""

    def __init__(self, prefixes: Prefixes, tokens: _Tokens) -> None:
        self.prefixes, self._tokens = prefixes, tokens
        sizes = [stop - start for start, stop in pairwise(prefixes.rows)]
        self._parts = [Rows(folder, size) for folder, size in zip(prefixes.folders, sizes, strict=True)]
        self._head_tokens, self._bits = prefixes.texts.head_tokens, 64 // prefixes.texts.head_tokens
        self._chunk_length = prefixes.texts.split.chunk_length

    def head(self, backwards: list[int]) -> int:
        """The head of a text: its last tokens, each plus 1, as one number; 0 before it begins."""
        number = 0
        for token in backwards[: self._head_tokens]:
            number = number << self._bits | token + 1
        return number << self._bits * max(0, self._head_tokens - len(backwards))

    def living(self, positions: np.ndarray, deleted: np.ndarray) -> np.ndarray:
        """Which of some positions [n] are outside of deleted ranges of chunks [n, 2]: [n] bool."""
        living = np.empty(len(positions), bool)
        for block in blocks(len(positions), _BLOCK):
            living[block] = ~inside(positions[block] // self._chunk_length, deleted)
        return living

    def neighbors_of(self, row: int, deleted: np.ndarray) -> Iterator[int]:
        """The last row before a place in the order, and the first one from it on, that are outside of deleted ranges of chunks [n, 2]."""
        rows, stop, size = len(self.prefixes), row, 1
        while stop > 0:  # most neighbors are alive, so the steps double
            first = max(0, stop - size)
            if len(alive := np.flatnonzero(self.living(self.prefixes.positions(first, stop), deleted))):
                yield first + int(alive[-1])
                break
            stop, size = first, min(2 * size, _BLOCK)
        first, size = row, 1
        while first < rows:
            stop = min(rows, first + size)
            if len(alive := np.flatnonzero(self.living(self.prefixes.positions(first, stop), deleted))):
                yield first + int(alive[0])
                break
            first, size = stop, min(2 * size, _BLOCK)

    def longest(self, text: list[int], deleted: np.ndarray) -> tuple[int, int]:
        """Length of the longest match of at most 64 tokens outside of deleted ranges of chunks [n, 2], and a row that shares these tokens.
        `text` has at most 64 tokens."""
        length, row = max((self._longest_in(*rows, text) for rows in self._rows_near(text)), default=(0, 0))
        if length and len(deleted):  # those nearest to such a row share as many as any that is left
            length = max((self._shared(at, text) for at in self.neighbors_of(row, deleted)), default=0)
        return length, row

    def _shared(self, row: int, text: list[int]) -> int:
        """How many last tokens a prefix has in common with a text."""
        return self._tokens.shared(self.prefixes.position(row), text)

    def _text(self, row: int) -> list[int]:
        """The last 64 tokens of a prefix, backwards."""
        return self._tokens.backwards(self.prefixes.position(row), LONGEST)

    def _rows_near(self, text: list[int]) -> Iterator[tuple[int, int]]:
        """In each part that has some, a few hundred rows [first, stop) at most. One of them shares most last tokens with the text."""
        wanted, prefixes = self.head(text), self.prefixes
        first, last = max(0, prefixes.head_before(wanted)), min(len(prefixes) - 1, prefixes.head_from(wanted + 1))
        while last - first > _ADJACENT:  # more rows than these have the same head
            middle = (first + last) // 2
            first, last = (middle, last) if self._text(middle) < text else (first, middle)
        for start, end in pairwise(prefixes.rows):
            if start <= last and first < end:
                yield max(start, first), min(end, last + 1)

    def _longest_in(self, first: int, stop: int, text: list[int]) -> tuple[int, int]:
        """Length of the longest match of a text in the rows [first, stop) of a part, and a row of it."""
        start, rows = self._part(first)
        near, followed = rows.deepest(first - start, stop - start, text)
        row = start + near
        length = self._shared(row, text)
        if length < LONGEST_SHARED and not followed >> length & 1:
            return length, row
        if length >= LONGEST_SHARED:
            first, stop = self.range_around(text[:LONGEST_SHARED], row)
        at = bisect.bisect_left(range(stop), text, first, stop, key=self._text)
        return max((self._shared(row, text), row) for row in (at - 1, at) if first <= row < stop)

    def ranges_of(self, text: list[int], length: int, row: int) -> list[tuple[int, int]]:
        """For each of `LENGTHS` the rows [first, stop) of the prefixes whose last tokens, of this number, are those of the text.

        Lengths above that of the longest match have none.

        Args:
            text: its first `length` tokens occur.
            length: of the longest match.
            row: its row, see `longest`.
        """
        reached = bisect.bisect_right(LENGTHS, length)
        ranges = self._around(row, text, _LENGTHS[len(LENGTHS) - reached :]) if reached else []
        return [*reversed(ranges), *[(row, row)] * (len(LENGTHS) - reached)]

    def range_around(self, text: list[int], row: int) -> tuple[int, int]:
        """The rows [first, stop) of the prefixes that end in a text, as a row does, see `longest`."""
        size = len(text)
        ((first, stop),) = self._around(row, text, np.array([min(size, LONGEST_SHARED)]))
        if size > LONGEST_SHARED:
            rows, ending = range(stop), {"key": lambda at: self._text(at)[:size]}
            first, stop = (
                bisect.bisect_left(rows, text, first, row, **ending),
                bisect.bisect_right(rows, text, row, stop, **ending),
            )
        return first, stop

    def _around(self, row: int, text: list[int], sizes: np.ndarray) -> list[tuple[int, int]]:
        """For numbers of tokens, at most 31, the largest first, the rows [first, stop) that share as many last tokens with a row.

        Args:
            row: the row.
            text: the tokens that it ends in, at least the largest number.
            sizes: [n] int64.
        """
        start, rows = self._part(row)
        ranges = [(start + first, start + stop) for first, stop in rows.around(row - start, sizes)]
        if len(self._parts) == 1:
            return ranges
        return [self._in_all_parts(*rows, text[:size]) for rows, size in zip(ranges, sizes.tolist(), strict=True)]

    def _in_all_parts(self, first: int, stop: int, text: list[int]) -> tuple[int, int]:
        """The rows of all parts around those of one part that end in a text. Such a text is shorter than a head."""
        starts, size = self.prefixes.rows, np.array([len(text)])
        while first in starts[1:-1] and self._text(first - 1)[: len(text)] == text:
            start, rows = self._part(first - 1)
            first = start + rows.around(first - 1 - start, size)[0][0]
        while stop in starts[1:-1] and self._text(stop)[: len(text)] == text:
            start, rows = self._part(stop)
            stop = start + rows.around(0, size)[0][1]
        return first, stop

    def _part(self, row: int) -> tuple[int, Rows]:
        """The first row of the part of a row, and its rows."""
        part = bisect.bisect_right(self.prefixes.rows, row) - 1 if len(self._parts) > 1 else 0
        return self.prefixes.rows[part], self._parts[part]

    def following(self, rows: np.ndarray, step: int) -> np.ndarray:
        """The tokens that follow the prefixes of rows [n] of `sampled_rows`: [n] int64; -1 = none."""
        if len(self._parts) == 1:
            return self._parts[0].following(rows, step)
        starts, tokens = self.prefixes.rows, np.empty(len(rows), np.int64)
        parts = np.searchsorted(starts, rows, side="right") - 1
        for part in np.unique(parts).tolist():
            tokens[parts == part] = self._parts[part].following(rows[parts == part] - starts[part], step)
        return tokens


@dataclass(frozen=True)
class _Ends:
    """Where a match ends, or some of these places.

    Attributes:
        occurrences: how often it occurs.
        positions: reads their positions: [n] int64, in each order by row.
        following: reads the tokens that follow them: [n] int64; -1 = none.
    """

    occurrences: int
    positions: Callable[[], np.ndarray]
    following: Callable[[], np.ndarray]


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common start."""
    size = min(len(one), len(other))
    return next((at for at in range(size) if one[at] != other[at]), size)


class SuffixIndex:
    """The sorted prefixes of all training documents of a datastore, memory-mapped.

    A match costs two or three binary searches, in a datastore that has grown as often in each of a few orders. Documents that are deleted
    do not occur, also if they were deleted after the index was opened.

    Every search raises DatastoreChanged if the datastore was built again.
    """

    def __init__(self, split: Split) -> None:
        self.split = split
        self._texts, self._tokens = Texts(split), _Tokens(split)
        self._orders = [_Order(Prefixes(self._texts, parts), self._tokens) for _, parts in stored_orders(split)]

    @classmethod
    def open(cls, folder: Path) -> "SuffixIndex":
        """Open the index of a datastore.

        Raises:
            InputError: it has none, or a file is damaged.
        """
        return cls(Datastore.open(folder).train)

    def of_documents(self, chosen: np.ndarray, folder: Path) -> "SuffixIndex":
        """The index of some of the documents, [documents] bool. Writes 8 to 10 bytes for each of their tokens to a folder."""
        part = copy.copy(self)
        part._orders = [
            _Order(write_chosen(folder / str(number), order.prefixes, chosen), self._tokens)
            for number, order in enumerate(self._orders)
        ]
        return part

    def longest_match(self, text: Sequence[int] | np.ndarray) -> Match:
        """The longest end of `text` (token ids) that occurs in one of the documents that are not deleted."""
        ending, deleted = np.asarray(text[-LONGEST:]).tolist()[::-1], self.split.deleted
        longest = [order.longest(ending, deleted) for order in self._orders] if ending else []
        length = max((length for length, _ in longest), default=0)
        if not length:
            return Match(0, ())
        ranges = (
            order.range_around(ending[:length], row) if reached >= length else (0, 0)
            for order, (reached, row) in zip(self._orders, longest, strict=True)
        )
        match = Match(length, tuple(ranges))
        return self._extended(match, np.asarray(text, np.int64)) if len(text) > length == LONGEST else match

    def _extended(self, match: Match, text: np.ndarray) -> Match:
        """The longest match of a text, from the match of its last 64 tokens: those of its places that share most of the text before."""
        ends, length = self._ends_of(match).positions(), LONGEST
        while length < len(text):
            wanted = text[max(0, len(text) - length - LONGEST) : len(text) - length][::-1] + 1
            available = self._texts.available(ends) - length
            inside = np.flatnonzero(available > 0)
            shared = np.zeros(len(ends), np.int64)
            windows = self._texts.windows(ends[inside] - length, LONGEST)[:, : len(wanted)]
            shared[inside] = np.cumprod(windows == wanted, axis=1).sum(axis=1)
            more = int(shared.max(initial=0))
            ends, length = ends[shared == more], length + more
            if more < LONGEST:
                break
        return Match(length, match.ranges, tuple(ends.tolist()))

    def occurrences(self, match: Match, most: int = _ALL) -> np.ndarray:
        """Where a match ends, outside of deleted documents: chunk id and place in the chunk, [n, 2] int64.

        Args:
            match: the match.
            most: if there are more occurrences, this many are returned, spread evenly.
        """
        return np.stack(np.divmod(self._ends_of(match, most).positions(), self.split.chunk_length), axis=1)

    def count(self, match: Match) -> int:
        """How often a match occurs outside of deleted documents."""
        return self._ends_of(match).occurrences

    def places(self, match: Match, most: int) -> list[Place]:
        """One occurrence in each of the first `most` documents that a match occurs in, among some of its occurrences."""
        ends = self.occurrences(match, _SCANNED)
        documents = self.split.documents_of(ends[:, 0])[0].tolist()
        chosen = dict(zip(reversed(documents), reversed(ends.tolist()), strict=True))  # the first one of each document
        numbers = list(dict.fromkeys(documents))[:most]
        m, places = self.split.chunk_length, list[Place]()
        for number, document in zip(numbers, self.split.metadata(numbers), strict=True):
            chunk, place = chosen[number]
            places.append(Place(document, divmod(chunk * m + place + 1 - match.length, m), (chunk, place)))
        return places

    def next_tokens(self, match: Match) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that follow a match, most frequent first, and how often: [n] and [n] int64. Nothing follows the end of a document."""
        following = self._ends_of(match, _SCANNED).following()
        best = _most_frequent(Counter(following[following >= 0].tolist()))
        tokens, counts = np.array(best, np.int64).reshape(-1, 2).T
        return tokens, counts

    def votes(self, text: np.ndarray, first: int = 0) -> np.ndarray:
        """The tokens that follow the matches of the text up to each token, by their length, from the token `first` on.

        The same as the stored votes of a held-out document, if no document was deleted. If there are several orders, or a match of one to
        three tokens is in two parts of one, the stage `votes` may have counted other 32 of its occurrences.

        Args:
            text: [t] token ids of one document, from its beginning or later.
            first: index of the first token with votes.

        Returns:
            [t - first, 32] int64, as `votes.as_columns`.
        """
        backwards = text[max(0, first + 1 - LONGEST) :][::-1].tolist()
        votes = np.empty((len(text) - first, COLUMNS), np.int64)
        begins = range(len(votes))[::-1]  # the first text begins last
        for some in blocks(len(votes), _TOGETHER):
            votes[some] = self._votes([backwards[begin : begin + LONGEST] for begin in begins[some]])
        return votes

    def last_votes(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        """The votes for the token after each of N texts, see `votes`: [N, 32] int64."""
        return self._votes([text[-LONGEST:][::-1].tolist() for text in texts])

    def _votes(self, texts: Sequence[list[int]]) -> np.ndarray:
        """The votes for the tokens after texts, which are backwards and not empty: [N, 32] int64."""
        deleted, samples, of_sample = self.split.deleted, list[_Ends](), list[int]()
        votes = np.zeros((len(texts), COLUMNS), np.int64)
        of_level = np.zeros((len(texts), len(LENGTHS)), np.intp)  # numbers of samples, from 1 on; 0 = none
        for row, text in enumerate(texts):
            longest = [order.longest(text, deleted) for order in self._orders]
            votes[row, 0] = length = max((reached for reached, _ in longest), default=0)
            of_orders = [order.ranges_of(text, *found) for order, found in zip(self._orders, longest, strict=True)]
            matches, longer = [*zip(*of_orders, strict=True)], None
            for level in reversed(range(bisect.bisect_right(LENGTHS, length))):
                if matches[level] != longer:
                    samples.append(self._ends(matches[level], deleted, SAMPLED))
                    of_sample.append(row)
                of_level[row, level], longer = len(samples), matches[level]
        if samples:
            candidates, numbers = self._counted(np.array(of_sample), samples, len(texts))
            votes[:, 1 : 1 + KEPT] = candidates
            votes[:, 1 + KEPT :] = numbers[of_level].reshape(len(texts), -1)
            votes[~numbers[of_level, 0].any(axis=1)] = 0
        return within_limit(votes, self.split)

    def _counted(self, rows: np.ndarray, samples: Sequence[_Ends], num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Candidates [rows, 3], and size code and shares of no sample and of each one, [samples + 1, 4] uint8, see `count_votes`."""
        of_samples = [sample.following() for sample in samples]
        following, stops = np.concatenate(of_samples).astype(np.int32), np.cumsum([*map(len, of_samples)])
        occurrences = np.array([sample.occurrences for sample in samples])
        candidates, numbers = np.full((num_rows, KEPT), -1, np.int32), np.zeros((len(samples) + 1, 1 + KEPT), np.uint8)
        # The texts are of no document of the datastore.
        documents, own = np.zeros(len(following), np.int64), np.full(num_rows, -1)
        poll = documents, following, own, own.astype(np.int32), candidates, numbers[1:]
        compiled(count_votes)(rows, np.append(0, stops[:-1]), stops, occurrences, 0, *poll)
        return candidates.clip(0), numbers

    def continuation(self, text: np.ndarray, most: int) -> tuple[int, np.ndarray]:
        """Up to `most` tokens that follow one occurrence of the longest match of a text in the same document, and its length.

        Of several occurrences, at most 32 spread evenly, one that is followed by their most frequent next token is taken.

        Returns:
            the number of tokens of the match, and int64 [n].
        """
        match = self.longest_match(text[-LONGEST:])
        ends = self._ends_of(match, SAMPLED)
        following = ends.following().tolist()
        if not (best := _most_frequent(Counter(token for token in following if token >= 0))):
            return match.length, np.empty(0, np.int64)
        next_token, end = self.next_token, int(ends.positions()[following.index(best[0][0])])
        tokens = itertools.takewhile(lambda token: token >= 0, (next_token(end + n) for n in range(most)))
        return match.length, np.array(list(tokens), np.int64)

    def next_token(self, position: int) -> int:
        """The token after a position in the same document; -1 = none."""
        return self._tokens.next_token(position)

    def ends(self, match: Match) -> list[int]:
        """Every position where a match ends outside of deleted documents."""
        ends: list[int] = self._ends_of(match).positions().tolist()
        return ends

    def _ends_of(self, match: Match, most: int = _ALL) -> _Ends:
        """Where a match ends outside of deleted documents: at most `most` places, spread evenly."""
        deleted = self.split.deleted
        if match.ends is None:
            return self._ends(match.ranges, deleted, most)
        ends = np.array(match.ends, np.int64)
        living = ends[self._orders[0].living(ends, deleted)]
        chosen = living[spread(len(living), most)]
        return _Ends(len(living), lambda: chosen, lambda: self._texts.following(chosen))

    def _ends(self, ranges: Sequence[tuple[int, int]], deleted: np.ndarray, most: int = _ALL) -> _Ends:
        """Where a match ends outside of deleted documents: at most `most` places, spread evenly.

        Args:
            ranges: its rows [first, stop) in each order.
            deleted: ranges of chunks [n, 2].
            most: if there are more occurrences and some are deleted, their number is estimated.
        """
        total, prefixes = sum(stop - first for first, stop in ranges), [order.prefixes for order in self._orders]
        if not len(deleted) or not total:
            step = stride(total, most)
            sampled = sampled_rows(prefixes, ranges, most, step)
            return _Ends(total, lambda: self._positions(sampled), lambda: self._following(sampled, step))
        for looked_at in dict.fromkeys((min(_LOOKED_AT * most, total), total)):  # all if too few of those are left
            step = stride(total, looked_at)
            sampled = sampled_rows(prefixes, ranges, looked_at, step)
            positions = self._positions(sampled)
            living = np.flatnonzero(self._orders[0].living(positions, deleted))
            if len(living) >= most:
                break
        chosen = living[spread(len(living), most)]
        occurrences = total * len(living) // len(positions)
        return _Ends(occurrences, lambda: positions[chosen], lambda: self._following(sampled, step)[chosen])

    def _positions(self, sampled: Sequence[np.ndarray]) -> np.ndarray:
        """The positions of rows [n] of each order."""
        read = [order.prefixes.take(rows) for order, rows in zip(self._orders, sampled, strict=False)]
        return read[0] if len(read) == 1 else np.concatenate([*read, np.empty(0, np.int64)])

    def _following(self, sampled: Sequence[np.ndarray], step: int) -> np.ndarray:
        """The tokens that follow rows [n] of each order, which are multiples of `step`."""
        read = [order.following(rows, step) for order, rows in zip(self._orders, sampled, strict=False)]
        return read[0] if len(read) == 1 else np.concatenate([*read, np.empty(0, np.int64)])


def _most_frequent(counts: Counter[int]) -> list[tuple[int, int]]:
    """Tokens and how often each occurs, most frequent first, then by id."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


@dataclass(frozen=True)
class Run:
    """Tokens [first, stop) of a text that occur in a row in the datastore, as many as possible to both sides."""

    first: int
    stop: int
    match: Match


class Tracer:
    """Finds the runs of a growing text: the longest ones that occur verbatim in the datastore and have at least `least` tokens.

    Runs may overlap; none contains another (OLMoTrace: Liu et al. 2025, arXiv 2504.07096). A match is at most one token longer than
    that of the token before. So a token costs a search for its match and one token more, or, in a long run, a look at what follows the
    places where the run occurs.
    """

    def __init__(self, index: SuffixIndex, least: int, text: Sequence[int] | np.ndarray = ()) -> None:
        """Begin after a text, of whose runs only the one at its end is returned."""
        self._index, self._least, self._length = index, least, len(text)
        self._search(np.asarray(text).tolist())

    def _search(self, text: list[int]) -> None:
        """Find the match at the end of a text."""
        self._match = self._index.longest_match(text)
        self._end = text[len(text) - self._match.length :]  # the tokens of the run so far
        self._places = self._index.ends(self._match) if self._match.length >= LONGEST else []

    def add(self, token: int) -> list[Run]:
        """Append a token; return the run that ends before it, or none."""
        if places := [end + 1 for end in self._places if self._index.next_token(end) == token]:
            self._places, self._length = places, self._length + 1
            self._end.append(token)
            return []
        before, match = self._end, self._match
        self._search([*before, token])
        run = self._run(before, match) if self._match.length <= len(before) else []
        self._length += 1
        return run

    def rest(self) -> list[Run]:
        """Return the run at the end of the text, or none."""
        return self._run(self._end, self._match)

    def _run(self, end: list[int], match: Match) -> list[Run]:
        """The run at the end of the text before the next token, whose last search found a match."""
        if len(end) < self._least:
            return []
        if match.length < len(end) or len(self._index.split.deleted):  # its document may have been deleted since
            match = self._index.longest_match(end)
        run = Run(self._length - match.length, self._length, match)
        return [run] if match.length >= self._least else []


def trace(index: SuffixIndex, tokens: np.ndarray, least: int) -> list[Run]:
    """The runs of a whole text [n] in order, see `Tracer`."""
    tracer = Tracer(index, least)
    runs = [run for token in tokens.tolist() for run in tracer.add(token)]
    return runs + tracer.rest()
