"""Find the longest end of a text that occurs in a datastore, everywhere that it occurs, and what follows there."""

import bisect
import copy
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from indexing.store.datastore import Datastore, Split, shard_name
from indexing.store.deletions import inside
from indexing.store.files import NpyWriter
from indexing.store.sharded_array import open_array
from indexing.suffixes.build import FOLDER, ROWS_OF_HEAD, document_starts, first_positions, head, stored_groups
from indexing.suffixes.votes import COLUMNS, KEPT, LARGEST_SIZE, LENGTHS, LONGEST, SAMPLED, SHARES, spread, within_limit

_SCANNED = 4096
"""What follows a match, and its documents, are read at no more than this many of its occurrences, spread evenly."""
SHORTEST_RUN = 8
"""Tokens of the shortest run that a trace returns, unless told otherwise."""
_LOOKED_AT = 8
"""If some of many occurrences are wanted, whether they are deleted is read at this many times as many of them, spread evenly."""
_ALL = 2**62
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Match:
    """The longest end of a text that occurs in the datastore.

    Attributes:
        length: tokens; 0 if even the last token occurs nowhere.
        ranges: for each group of shards the rows [first, stop) of its sorted prefixes that end in these tokens.
    """

    length: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """How often it occurs, some deleted documents included."""
        return sum(stop - first for first, stop in self.ranges)


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


@dataclass(frozen=True)
class _Group:
    """Sorted prefixes of a group of shards (`positions`) with their heads, the starts of its documents and shards, and of each shard its
    tokens and the lengths of its chunks.

    Memory views and lists: Python reads a single number from them several times as fast as from an array. Texts are lists of token ids,
    backwards and not empty.
    """

    positions: memoryview
    heads: memoryview
    starts: list[int]
    shard_starts: list[int]
    tokens: list[memoryview]
    lengths: list[memoryview]
    first_chunk: int
    chunk_length: int

    def backwards(self, row: int, text: list[int]) -> list[int]:
        """The last tokens of a sorted prefix backwards, as many as `text` has or the document allows."""
        end = self.positions[row]
        start = self.starts[bisect.bisect_right(self.starts, end) - 1]
        shard = bisect.bisect_right(self.shard_starts, end) - 1
        base = self.shard_starts[shard]
        return self.tokens[shard][max(start, end + 1 - len(text)) - base : end + 1 - base].tolist()[::-1]

    def of_documents(self, chosen: np.ndarray, file: Path) -> "_Group":
        """The prefixes of some of the documents, [documents] bool, which stay in order; their positions are written to a file."""
        with NpyWriter(file, np.uint32) as positions:
            for first in range(0, len(self.positions), _BLOCK):
                block = np.asarray(self.positions[first : first + _BLOCK])
                positions.append(block[chosen[np.searchsorted(self.starts, block, side="right") - 1]])
        part = replace(self, positions=_view(open_array(file)))
        width = 8 // self.tokens[0].itemsize
        heads = [head(part.backwards(row, [0] * width), width) for row in range(0, len(part.positions), ROWS_OF_HEAD)]
        return replace(part, heads=_view(np.array(heads, np.uint64)))

    def living(self, positions: np.ndarray, deleted: np.ndarray) -> np.ndarray:
        """Which of some positions [n] are outside of deleted ranges of chunks [n, 2]: [n] bool."""
        living = np.empty(len(positions), bool)
        for start in range(0, len(positions), _BLOCK):
            block = slice(start, start + _BLOCK)
            chunks = positions[block].astype(np.int64) // self.chunk_length + self.first_chunk
            living[block] = ~inside(chunks, deleted)
        return living

    def neighbors_of(self, row: int, deleted: np.ndarray) -> Iterator[int]:
        """The last row before a place in the order, and the first one from it on, that are outside of deleted ranges of chunks [n, 2]."""
        rows, stop, size = len(self.positions), row, 1
        while stop > 0:  # most neighbors are alive, so the steps double
            first = max(0, stop - size)
            if len(alive := np.flatnonzero(self.living(self.sorted_positions[first:stop], deleted))):
                yield first + int(alive[-1])
                break
            stop, size = first, min(2 * size, _BLOCK)
        first, size = row, 1
        while first < rows:
            stop = min(rows, first + size)
            if len(alive := np.flatnonzero(self.living(self.sorted_positions[first:stop], deleted))):
                yield first + int(alive[0])
                break
            first, size = stop, min(2 * size, _BLOCK)

    def longest(self, text: list[int], deleted: np.ndarray) -> tuple[int, int]:
        """Length of the longest match of a text outside of deleted ranges of chunks [n, 2], and a row at whose side the matches are."""
        rows, wanted = range(len(self.positions)), head(text, 8 // self.tokens[0].itemsize)
        first = max(0, bisect.bisect_left(self.heads, wanted) - 1) * ROWS_OF_HEAD
        stop = min(len(rows), bisect.bisect_right(self.heads, wanted) * ROWS_OF_HEAD)
        row = bisect.bisect_left(rows, text, first, stop, key=lambda at: self.backwards(at, text))
        near = self.neighbors_of(row, deleted) if len(deleted) else (at for at in (row - 1, row) if 0 <= at < len(rows))
        return max((_common(self.backwards(at, text), text) for at in near), default=0), row

    @cached_property
    def sorted_positions(self) -> np.ndarray:
        """`positions` as an array, to read many at once."""
        return np.asarray(self.positions)

    @cached_property
    def _tokens(self) -> list[np.ndarray]:
        return [np.asarray(tokens) for tokens in self.tokens]

    @cached_property
    def _last_tokens(self) -> np.ndarray:
        """The positions of the last tokens of the documents, [documents] int64."""
        last_chunks = np.array(self.starts[1:], np.int64) // self.chunk_length - 1
        lengths = np.concatenate([np.asarray(lengths, np.int64) for lengths in self.lengths])
        return last_chunks * self.chunk_length + lengths[last_chunks] - 1

    def ranges_of(self, text: list[int], length: int, row: int) -> list[tuple[int, int]]:
        """For each of `LENGTHS` the rows [first, stop) of the prefixes whose last tokens, of this number, are those of the text.

        From the longest to the shortest, every range is looked for around the one before. Lengths above that of the longest match have none.

        Args:
            text: its first `length` tokens occur.
            length: of the longest match.
            row: its row, see `longest`.
        """
        ranges, found, longest = [(row, row)] * len(LENGTHS), (row, row), min(length, LENGTHS[-1])
        ending = self.ending(text[:longest])
        for level, size in reversed([*enumerate(LENGTHS)]):
            if size <= length:
                ranges[level] = found = self.range_around(ending[longest - size :], *found)
        return ranges

    def ending(self, text: list[int]) -> memoryview:
        """The last tokens of a text, forwards, as `range_around` compares them."""
        return _view(np.array(text[::-1], self.tokens[0].format))

    def range_around(self, ending: memoryview, first: int, stop: int) -> tuple[int, int]:
        """The rows [first, stop) of the prefixes that have an ending: all around some of these rows, or next to a row if none is known."""
        before = first > 0 and self.ends_in(first - 1, ending)
        after = stop < len(self.positions) and self.ends_in(stop, ending)
        width = 8 // self.tokens[0].itemsize
        smallest = above = None  # the heads of these rows, if the ending is not longer than a head
        if len(ending) <= width and (before or after):
            smallest = head(ending.tolist()[::-1], width)
            above = smallest + (1 << 64 // width * (width - len(ending)))
        if before:
            first = self._first(ending, first - 1, smallest)
        if after:
            stop = self._stop(ending, stop + 1, above)
        return first, stop

    def _first(self, ending: memoryview, known: int, smallest: int | None) -> int:
        """The first row that ends in some tokens, as the row `known` does; `smallest` is the smallest head of such a row, if known."""
        least, step = 0, 1
        if smallest is not None:
            least = max(0, (bisect.bisect_left(self.heads, smallest) - 1) * ROWS_OF_HEAD + 1)
            nearer = bisect.bisect_right(self.heads, smallest) * ROWS_OF_HEAD
            if nearer < known:
                known, step = nearer, known
        while known - step >= least and self.ends_in(known - step, ending):
            known, step = known - step, 2 * step
        least = max(least, known - step + 1)
        while least < known:
            middle = (least + known) // 2
            if self.ends_in(middle, ending):
                known = middle
            else:
                least = middle + 1
        return known

    def _stop(self, ending: memoryview, known: int, above: int | None) -> int:
        """The row behind the last one that ends in some tokens, as the row before `known` does; the heads of such rows are below `above`,
        if known."""
        most, step = len(self.positions), 1
        if above is not None:
            head_row = bisect.bisect_left(self.heads, above) * ROWS_OF_HEAD
            most, nearer = min(most, head_row), head_row - ROWS_OF_HEAD + 1
            if nearer > known:
                known, step = nearer, most
        while known + step <= most and self.ends_in(known + step - 1, ending):
            known, step = known + step, 2 * step
        most = min(most, known + step - 1)
        while known < most:
            middle = (known + most) // 2
            if self.ends_in(middle, ending):
                known = middle + 1
            else:
                most = middle
        return known

    def ends_in(self, row: int, ending: memoryview) -> bool:
        """Whether a sorted prefix ends in some tokens."""
        end = self.positions[row]
        shard = bisect.bisect_right(self.shard_starts, end) - 1 if len(self.shard_starts) > 1 else 0
        base, first = self.shard_starts[shard], end + 1 - len(ending)
        if first < base or self.tokens[shard][first - base : end + 1 - base] != ending:
            return False
        return first >= self.starts[bisect.bisect_right(self.starts, end) - 1]

    def next_tokens(self, positions: np.ndarray) -> np.ndarray:
        """The tokens after positions [n] in the same documents, [n] int64; -1 = none."""
        following, last = np.full(len(positions), -1), self._last_tokens
        inner = np.flatnonzero(last[last.searchsorted(positions)] != positions)
        after = positions[inner].astype(np.int64) + 1
        if len(self._tokens) == 1:
            following[inner] = self._tokens[0][after]
            return following
        shards = np.searchsorted(self.shard_starts, after, side="right") - 1
        for shard in np.unique(shards):
            own = shards == shard
            following[inner[own]] = self._tokens[shard][after[own] - self.shard_starts[shard]]
        return following

    def next_token(self, position: int) -> int:
        """The token after a position in the same document; -1 = none."""
        after = position + 1
        if after >= self.starts[bisect.bisect_right(self.starts, position)]:  # where the next document starts
            return -1
        shard = bisect.bisect_right(self.shard_starts, after) - 1
        chunk, place = divmod(after - self.shard_starts[shard], self.chunk_length)
        return self.tokens[shard][after - self.shard_starts[shard]] if place < self.lengths[shard][chunk] else -1


class _Ends(NamedTuple):
    """Where a match ends: how often, and positions of all or some in each group."""

    occurrences: int
    positions: list[np.ndarray]

    @property
    def drawn(self) -> int:
        return sum(map(len, self.positions))


def _view(array: np.ndarray) -> memoryview:
    view: Any = np.asarray(array)
    return memoryview(view)


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common start."""
    size = min(len(one), len(other))
    return next((at for at in range(size) if one[at] != other[at]), size)


class SuffixIndex:
    """The sorted prefixes of all training documents of a datastore, memory-mapped.

    A match costs two or three binary searches in each group of shards. Documents that are deleted do not occur, also if they were
    deleted after the index was opened.

    Every search raises DatastoreChanged if the datastore was built again.
    """

    def __init__(self, split: Split) -> None:
        self.split = split
        self._groups = [self._open(shards) for shards in stored_groups(split)]

    @classmethod
    def open(cls, folder: Path) -> "SuffixIndex":
        """Open the index of a datastore.

        Raises:
            InputError: it has none, or a file is damaged.
        """
        datastore = Datastore.open(folder)
        datastore.require(FOLDER)
        return cls(datastore.train)

    def _open(self, shards: range) -> _Group:
        split, folder = self.split, self.split.folder / FOLDER / shard_name(shards.start)
        first_of_shard = first_positions(split, shards)
        pairs = list(zip(shards, first_of_shard.tolist(), strict=False))
        starts = [document_starts(split, shard)[:-1] + first for shard, first in pairs]
        return _Group(
            positions=_view(open_array(folder / "positions.npy")),
            heads=_view(open_array(folder / "heads.npy")),
            starts=np.concatenate([*starts, first_of_shard[-1:]]).tolist(),
            shard_starts=[first for _, first in pairs],
            tokens=[_view(split.tokens.shard(shard).reshape(-1)) for shard in shards],
            lengths=[_view(split.lengths.shard(shard)) for shard in shards],
            first_chunk=int(split.tokens.starts[shards.start]),
            chunk_length=split.chunk_length,
        )

    def of_documents(self, chosen: np.ndarray, folder: Path) -> "SuffixIndex":
        """The index of some of the documents, [documents] bool. Writes 4 bytes for each of their tokens to a folder."""
        part, first, groups = copy.copy(self), 0, []
        for number, group in enumerate(self._groups):
            stop = first + len(group.starts) - 1
            groups.append(group.of_documents(chosen[first:stop], folder / f"{number}.npy"))
            first = stop
        part._groups = groups
        return part

    def longest_match(self, text: Sequence[int] | np.ndarray) -> Match:
        """The longest end of `text` (token ids) that occurs in one of the documents that are not deleted."""
        backwards, deleted = np.asarray(text).tolist()[::-1], self.split.deleted
        longest = [group.longest(backwards, deleted) for group in self._groups] if backwards else []
        length = max((length for length, _ in longest), default=0)
        if not length:
            return Match(0, ())
        ranges = (
            group.range_around(group.ending(backwards[:length]), row, row) if reached >= length else (0, 0)
            for group, (reached, row) in zip(self._groups, longest, strict=True)
        )
        return Match(length, tuple(ranges))

    def occurrences(self, match: Match, most: int = _ALL) -> np.ndarray:
        """Where a match ends, outside of deleted documents: chunk id and place in the chunk, [n, 2] int64.

        Args:
            match: the match.
            most: if there are more occurrences, this many are returned, spread evenly.
        """
        m = self.split.chunk_length
        ends = zip(
            self._groups, self._ends(match.ranges, self.split.deleted, most).positions, strict=False
        )  # of no match there are none
        places = [own.astype(np.int64) + group.first_chunk * m for group, own in ends]
        return np.stack(np.divmod(np.concatenate([*places, np.empty(0, np.int64)]), m), axis=1)

    def count(self, match: Match) -> int:
        """How often a match occurs outside of deleted documents."""
        return self._ends(match.ranges, self.split.deleted).occurrences

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
        best = _most_frequent(Counter(self._following(match, _SCANNED)))
        tokens, counts = np.array(best, np.int64).reshape(-1, 2).T
        return tokens, counts

    def votes(self, text: np.ndarray, first: int = 0) -> np.ndarray:
        """The tokens that follow the matches of the text up to each token, by their length, from the token `first` on.

        The same as the stored votes of a held-out document. Of more than 32 occurrences others may be counted: the stage `votes` orders
        prefixes with equal ends of 64 tokens by shard, this index by the tokens before, and one group of shards after the other.

        Args:
            text: [t] token ids of one document, from its beginning or later.
            first: index of the first token with votes.

        Returns:
            [t - first, 32] int64, as `votes.as_columns`.
        """
        backwards, deleted = text[max(0, first + 1 - LONGEST) :][::-1].tolist(), self.split.deleted
        votes = np.zeros((len(text) - first, COLUMNS), np.int64)
        for begin, row in enumerate(reversed(votes)):
            row[:] = self._votes(backwards[begin : begin + LONGEST], deleted)
        return within_limit(votes, self.split)

    def _votes(self, text: list[int], deleted: np.ndarray) -> list[int]:
        """The votes for the token after a text, which is backwards and not empty: the numbers of one row of `votes`."""
        longest = [group.longest(text, deleted) for group in self._groups]
        length = max((reached for reached, _ in longest), default=0)
        of_groups = [group.ranges_of(text, *found) for group, found in zip(self._groups, longest, strict=True)]
        matches, samples, of_level = [*zip(*of_groups, strict=True)], list[_Ends](), [0] * len(LENGTHS)
        for level in reversed(range(bisect.bisect_right(LENGTHS, length))):
            if not samples or matches[level] != matches[level + 1]:
                samples.append(self._ends(matches[level], deleted, SAMPLED))
            of_level[level] = len(samples)
        candidates, numbers = list[int](), [[0] * (1 + KEPT)]
        for sample, following in zip(samples, self._read(samples), strict=True):
            tokens = [token for token in following if token >= 0]
            counts, counted = Counter(tokens), len(tokens)
            if len(candidates) < KEPT:
                best = [token for token, _ in _most_frequent(counts) if token not in candidates]
                candidates += best[: KEPT - len(candidates)]
            size = min(LARGEST_SIZE, (sample.occurrences * counted // sample.drawn).bit_length())
            shares = [SHARES * counts.get(token, 0) // (counted or 1) for token in candidates]
            numbers.append([size, *shares, *[0] * (KEPT - len(shares))])
        if not candidates:
            return [0] * COLUMNS
        levels = itertools.chain.from_iterable(numbers[number] for number in of_level)
        return [length, *candidates, *[0] * (KEPT - len(candidates)), *levels]

    def _read(self, samples: Sequence[_Ends]) -> list[list[int]]:
        """The tokens after the positions of each sample, in one read of each group; -1 = none."""
        following = [list[int]() for _ in samples]
        for group, of_samples in zip(
            self._groups, zip(*(sample.positions for sample in samples), strict=True), strict=False
        ):
            tokens = iter(group.next_tokens(np.concatenate(of_samples)).tolist())
            for own, positions in zip(following, of_samples, strict=True):
                own += itertools.islice(tokens, len(positions))
        return following

    def continuation(self, text: np.ndarray, most: int) -> tuple[int, np.ndarray]:
        """Up to `most` tokens that follow one occurrence of the longest match of a text in the same document, and its length.

        Of several occurrences, at most 32 spread evenly, one that is followed by their most frequent next token is taken.

        Returns:
            the number of tokens of the match, and int64 [n].
        """
        match = self.longest_match(text[-LONGEST:])
        if not (best := _most_frequent(Counter(self._following(match, SAMPLED)))):
            return match.length, np.empty(0, np.int64)
        wanted = best[0][0]
        groups = zip(self._groups, self._ends(match.ranges, self.split.deleted, SAMPLED).positions, strict=True)
        ends = ((group, end) for group, own in groups for end in own.tolist())
        group, end = next(pair for pair in ends if pair[0].next_token(pair[1]) == wanted)
        tokens = itertools.takewhile(lambda token: token >= 0, (group.next_token(end + n) for n in range(most)))
        return match.length, np.array(list(tokens), np.int64)

    def _ends(self, ranges: Sequence[tuple[int, int]], deleted: np.ndarray, most: int = _ALL) -> _Ends:
        """Where a match ends outside of deleted documents: at most `most` places, spread evenly.

        Args:
            ranges: its rows [first, stop) in each group.
            deleted: ranges of chunks [n, 2].
            most: if there are more occurrences and some are deleted, their number is estimated.
        """
        sizes = [stop - first for first, stop in ranges]
        total = sum(sizes)
        if not len(deleted) or not total:
            return _Ends(total, self._positions(ranges, spread(sizes, most)))
        for looked_at in dict.fromkeys((min(_LOOKED_AT * most, total), total)):  # all if too few of those are left
            positions = self._positions(ranges, spread(sizes, looked_at))
            groups = zip(self._groups, positions, strict=False)
            living = [own[group.living(own, deleted)] for group, own in groups]
            if sum(map(len, living)) >= most:
                break
        left = [*map(len, living)]
        occurrences = total * sum(left) // sum(map(len, positions))
        return _Ends(occurrences, [own[_slice(at)] for own, at in zip(living, spread(left, most), strict=True)])

    def _positions(self, ranges: Sequence[tuple[int, int]], places: Sequence[range]) -> list[np.ndarray]:
        """The positions at some places of the rows of each group."""
        groups = zip(self._groups, ranges, places, strict=False)
        return [group.sorted_positions[slice(*rows)][_slice(at)] for group, rows, at in groups]

    def _following(self, match: Match, most: int) -> list[int]:
        """The tokens that follow occurrences of a match."""
        pairs = zip(self._groups, self._ends(match.ranges, self.split.deleted, most).positions, strict=False)
        return [token for group, own in pairs for token in group.next_tokens(own).tolist() if token >= 0]

    def ends(self, match: Match) -> list[tuple[_Group, int]]:
        """Every place where a match ends outside of deleted documents: group and position."""
        groups = zip(self._groups, self._ends(match.ranges, self.split.deleted).positions, strict=False)
        return [(group, end) for group, own in groups for end in own.tolist()]


def _slice(places: range) -> slice:
    return slice(places.start, places.stop, places.step)


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
        if places := [(group, end + 1) for group, end in self._places if group.next_token(end) == token]:
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
