"""Find the longest end of a text that occurs in a datastore, everywhere that it occurs, and what follows there."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from indexing.store.datastore import Datastore, Split
from indexing.store.deletions import inside, with_range
from indexing.suffixes.order import LONGEST, ROWS_OF_HEAD, Prefixes, blocks, stored_orders
from indexing.suffixes.order_build import write_chosen
from indexing.suffixes.rows import spread
from indexing.suffixes.texts import Texts
from indexing.suffixes.votes import COLUMNS, within_limit

_SCANNED = 4096
"""What follows a match, and its documents, are read at no more than this many of its occurrences, spread evenly."""
SHORTEST_RUN = 8
"""Tokens of the shortest run that a trace returns, unless told otherwise."""
_TOGETHER = 256
"""Texts whose votes are counted together."""
_ALL = 1 << 48


@dataclass(frozen=True)
class Match:
    """The longest end of a text that occurs in the datastore.

    Attributes:
        length: tokens; 0 if even the last token occurs nowhere.
        ranges: for each order the rows [first, stop) of the prefixes that end in these tokens, or in the last 64 of
            them.
        ends: of a match of more than 64 tokens the positions where it ends, outside of documents that were deleted
            then.
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


class SuffixIndex:
    """The sorted prefixes of all training documents of a datastore, memory-mapped.

    A match costs two or three binary searches, in a datastore that has grown as often in each of a few orders.
    Documents that are deleted do not occur, also if they were deleted after the index was opened.

    Every search raises DatastoreChanged if the datastore was built again.
    """

    def __init__(self, split: Split) -> None:
        self.split, self._texts, self._own = split, Texts(split), (0, 0)
        self._search([Prefixes(self._texts, parts) for _, parts in stored_orders(split)])

    def _search(self, orders: Sequence[Prefixes]) -> None:
        """Search these orders from now on."""
        from indexing.suffixes import compiled_search  # numba, which takes half a second
        from indexing.suffixes.mapped_files import MappedFiles

        self._loops, self._files = compiled_search, MappedFiles(self._texts, orders, scattered=True)

    @classmethod
    def open(cls, folder: Path) -> "SuffixIndex":
        """Open the index of a datastore.

        Raises:
            InputError: it has none, or a file is damaged.
        """
        return cls(Datastore.open(folder).train)

    def of_documents(self, chosen: np.ndarray, folder: Path) -> "SuffixIndex":
        """The index of some of the documents, [documents] bool. Writes 8 to 10 bytes for each of their tokens to a
        folder."""
        part = copy.copy(self)
        part._search(
            [write_chosen(folder / str(number), order, chosen) for number, order in enumerate(self._files.orders)]
        )
        return part

    def without(self, first: int, stop: int) -> "SuffixIndex":
        """The same index without one document: that with the chunks [first, stop). Nothing is copied."""
        part = copy.copy(self)
        part._own = (first, stop)
        return part

    @property
    def _left_out(self) -> np.ndarray:
        """The ranges of chunks in which nothing occurs, [n, 2], sorted and disjoint."""
        first, stop = self._own
        return with_range(self.split.deleted, first, stop) if first < stop else self.split.deleted

    @property
    def everything(self) -> Match:
        """The match of an empty text, which ends at every token."""
        return Match(0, tuple((0, len(order)) for order in self._files.orders))

    def match(self, text: Sequence[int] | np.ndarray) -> Match | None:
        """The match of a whole text (token ids); None if it occurs nowhere outside of deleted documents."""
        match = self.longest_match(text) if len(text) else self.everything
        return match if match.length == len(text) else None

    def position(self, order: int, row: int) -> int:
        """Where the prefix in a row of an order ends: (id of the chunk) · m + (place in the chunk). Its document can be
        deleted."""
        (position,) = self._files.call(self._loops.positions_of, np.array([order]), np.array([row]))
        return int(position)

    def longest_match(self, text: Sequence[int] | np.ndarray) -> Match:
        """The longest end of `text` (token ids) that occurs in one of the documents that are not deleted."""
        ending, deleted = _backwards(text), self._left_out
        if not len(ending):
            return Match(0, ())
        length, *found = self._files.call(self._loops.find_match, ending, len(ending), deleted)
        if not length:
            return Match(0, ())
        ranges = self._files.call(self._loops.match_rows, ending, length, *found).tolist()
        match = Match(length, tuple((first, stop) for first, stop in ranges))
        return self._extended(match, np.asarray(text, np.int64)) if len(text) > length == LONGEST else match

    def _extended(self, match: Match, text: np.ndarray) -> Match:
        """The longest match of a text, from the match of its last 64 tokens: those of its places that share most of the
        text before."""
        ends, length = self._ends_of(match).positions(), LONGEST
        while length < len(text):
            # Up to 64 tokens before the match, backwards and plus 1, as `Texts.windows` has them for each place [n,
            # 64].
            wanted = text[max(0, len(text) - length - LONGEST) : len(text) - length][::-1] + 1
            available = self._texts.available(ends) - length
            inside = np.flatnonzero(available > 0)
            shared = np.zeros(len(ends), np.int64)
            windows = self._texts.windows(ends[inside] - length, LONGEST)[:, : len(wanted)]
            # The product is 1 up to the first token that differs, so the sum counts the equal ones before it.
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
        if match.ends is None and not len(self._left_out):
            return match.count
        return self._ends_of(match).occurrences

    def places(self, match: Match, most: int) -> list[Place]:
        """One occurrence in each of the first `most` documents that a match occurs in, among some of its
        occurrences."""
        ends = self.occurrences(match, _SCANNED)
        documents = self.split.documents_of(ends[:, 0])[0].tolist()
        chosen = dict(zip(reversed(documents), reversed(ends.tolist()), strict=True))  # the first one of each document
        numbers = list(dict.fromkeys(documents))[:most]
        m, places = self.split.chunk_length, list[Place]()
        for number, document in zip(numbers, self.split.metadata(numbers), strict=True):
            chunk, place = chosen[number]
            places.append(Place(document, divmod(chunk * m + place + 1 - match.length, m), (chunk, place)))
        return places

    def next_tokens(self, match: Match, most: int = _SCANNED) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that follow a match, most frequent first, and how often: [n] and [n] int64. Nothing follows the
        end of a document.

        Args:
            match: the match. Every token follows the empty text, so those at its ends are counted.
            most: if there are more occurrences, this many are counted, spread evenly.
        """
        ends = self._ends_of(match, most)
        following = ends.following() if match.length else self._tokens_at(ends.positions())
        best = _most_frequent(Counter(following[following >= 0].tolist()))
        tokens, counts = np.array(best, np.int64).reshape(-1, 2).T
        return tokens, counts

    def token_counts(self) -> np.ndarray:
        """How often each token occurs, deleted documents included: [vocabulary] int64. Estimated from about a million
        of the heads, one of 256 rows, in order."""
        parts = [np.asarray(stored) for order in self._files.orders for stored in order.stored_heads]
        step = max(1, sum(map(len, parts)) >> 20)
        behind, vocabulary = np.uint64(64 - 64 // self._texts.head_tokens), self.split.vocab_size
        counts = np.zeros(vocabulary, np.int64)
        for heads in parts:
            tokens = (heads[::step] >> behind).astype(np.int64) - 1  # the last one of each prefix
            counts += np.bincount(tokens[(tokens >= 0) & (tokens < vocabulary)], minlength=vocabulary)
        return step * ROWS_OF_HEAD * counts

    def votes(self, text: np.ndarray, first: int = 0) -> np.ndarray:
        """The tokens that follow the matches of the text up to each token, by their length, from the token `first` on.

        The same as the stored votes of a held-out document, if no document was deleted. If there are several orders, or
        a match of one to three tokens is in two parts of one, the stage `votes` may have counted other 32 of its
        occurrences.

        Args:
            text: [t] token ids of one document, from its beginning or later.
            first: index of the first token with votes.

        Returns:
            [t - first, 32] int64, as `votes.as_columns`.
        """
        # Every token gets a window of 64 tokens that ends with it, backwards. `sizes` says how many of them are of the
        # text.
        padded = np.concatenate([np.zeros(LONGEST - 1, np.int64), text])
        votes, windows = (
            np.empty((len(text) - first, COLUMNS), np.int64),
            sliding_window_view(padded, LONGEST)[first:, ::-1],
        )
        sizes = np.minimum(np.arange(first, len(text)) + 1, LONGEST)
        # The windows overlap in memory, so only those of a block are copied.
        for some in blocks(len(votes), _TOGETHER):
            votes[some] = self._votes(np.ascontiguousarray(windows[some]), sizes[some])
        return votes

    def last_votes(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        """The votes for the token after each of N texts, see `votes`: [N, 32] int64."""
        windows, sizes = np.zeros((len(texts), LONGEST), np.int64), np.zeros(len(texts), np.int64)
        for row, text in enumerate(map(_backwards, texts)):
            windows[row, : len(text)], sizes[row] = text, len(text)
        return self._votes(windows, sizes)

    def _votes(self, texts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """The votes for the tokens after texts: the last 64 tokens [N, 64], backwards, at least one, and how many [N] →
        [N, 32] int64."""
        return within_limit(self._files.call(self._loops.find_votes, texts, sizes, self._left_out), self.split)

    def next_token(self, position: int) -> int:
        """The token after a position in the same document; -1 = none."""
        token: int = self._files.call(self._loops.next_token, position)
        return token

    def ends(self, match: Match) -> list[int]:
        """Every position where a match ends outside of deleted documents."""
        ends: list[int] = self._ends_of(match).positions().tolist()
        return ends

    def _tokens_at(self, positions: np.ndarray) -> np.ndarray:
        return self._texts.windows(positions, 1)[:, 0].astype(np.int64) - 1

    def _ends_of(self, match: Match, most: int = _ALL) -> _Ends:
        """Where a match ends outside of deleted documents: at most `most` places, spread evenly. If there are more and
        some are deleted, their number is estimated."""
        files, loops, deleted = self._files, self._loops, self._left_out
        if match.ends is None:
            ranges = np.array(match.ranges or [(0, 0)] * len(files.orders), np.int64)
            occurrences, *places, step = files.call(loops.some_ends, ranges, most, deleted)
            return _Ends(
                occurrences,
                lambda: files.call(loops.positions_of, *places),
                lambda: files.call(loops.following_rows, *places, step),
            )
        ends = np.array(match.ends, np.int64)
        living = ends[~inside(ends // self.split.chunk_length, deleted)]
        chosen = living[spread(len(living), most)]
        return _Ends(len(living), lambda: chosen, lambda: self._texts.following(chosen))


def _backwards(text: Sequence[int] | np.ndarray) -> np.ndarray:
    """The last 64 tokens of a text, backwards: [n] int64."""
    return np.ascontiguousarray(np.asarray(text[-LONGEST:], np.int64)[::-1])


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
    """Finds the runs of a growing text: the longest ones that occur verbatim in the datastore and have at least `least`
    tokens.

    Runs may overlap; none contains another (OLMoTrace: Liu et al. 2025, arXiv 2504.07096). A match is at most one token
    longer than that of the token before. So a token costs a search for its match and one token more, or, in a long run,
    a look at what follows the places where the run occurs.
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
