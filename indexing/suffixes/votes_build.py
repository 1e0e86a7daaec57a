"""The tokens that follow every token's text in other documents, by the length of the match, for all tokens of a datastore.

    sorted prefixes of all groups of shards ─ cut at the same prefixes ─► ranges of about 2^20 tokens
    a range ─ order ─► the nearest prefix of another document ─► length of the longest match
    for each of `LENGTHS` up to it: all prefixes with the same last tokens ─► at most 32 of them ─► votes

Every range is sorted once, so time is linear in the tokens. Only documents of `train` vote, and no document for itself. Prefixes of
held-out documents are sorted among the others and vote for nothing. The text after a token changes nothing.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from indexing.progress import Advance
from indexing.store.datastore import SPLITS, Datastore, Split, shard_name
from indexing.store.deletions import inside
from indexing.store.files import save_array
from indexing.store.sharded_array import open_array
from indexing.suffixes.build import FOLDER as SUFFIXES
from indexing.suffixes.build import document_starts, first_positions, stored_groups
from indexing.suffixes.votes import (
    KEPT,
    LARGEST_SIZE,
    LENGTHS,
    LONGEST,
    SAMPLED,
    SHARES,
    packed,
    spread,
    vote_dtype,
)

_RANGE_TOKENS = 1 << 20
"""So large that only matches of one to three tokens lie on both sides of a cut. The longest match is looked for inside of a range."""
_PIVOT_STEP = 1 << 14
_BLOCK = 1 << 16


# --- one shard of a split ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """The tokens of one shard of a split, by position (see `document_starts`).

    Attributes:
        split: the split.
        shard: number of the shard.
        tokens: [chunks · m].
        starts: positions of the first tokens of the documents.
    """

    split: Split
    shard: int
    tokens: np.ndarray
    starts: np.ndarray

    def text_positions(self) -> np.ndarray:
        """The positions of all tokens, without padding: [n] int64."""
        lengths = np.asarray(self.split.lengths.shard(self.shard))
        return np.flatnonzero(np.arange(self.split.chunk_length) < lengths[:, None])

    def document(self, positions: np.ndarray) -> np.ndarray:
        """The documents of positions, counted from the first one of the shard."""
        return np.searchsorted(self.starts, positions, side="right") - 1

    def windows(self, positions: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
        """The last `count` tokens of prefixes, backwards and plus 1: [n] → [n, count] of dtype, 0 before a document begins."""
        available = positions - self.starts[self.document(positions)] + 1
        window = np.zeros((len(positions), count), dtype)
        whole = positions >= count - 1  # the others are at the begin of the shard
        if whole.any():
            runs = np.lib.stride_tricks.sliding_window_view(self.tokens, count)
            window[whole] = runs[positions[whole] - count + 1, ::-1]
        for row in np.flatnonzero(~whole):
            window[row, : positions[row] + 1] = self.tokens[positions[row] :: -1]
        window += dtype.type(1)
        window *= np.arange(count) < available[:, None]
        return window

    def following(self, positions: np.ndarray) -> np.ndarray:
        """The next token of the same document, [n] int64; -1 = none."""
        after = np.minimum(positions + 1, len(self.tokens) - 1)
        chunks, places = np.divmod(after, self.split.chunk_length)
        is_text = places < np.asarray(self.split.lengths.shard(self.shard))[chunks]
        same = (after > positions) & is_text & (self.document(after) == self.document(positions))
        return np.where(same, self.tokens[after].astype(np.int64), -1)

    def voting_documents(self, positions: np.ndarray) -> np.ndarray:
        """A number of each position's document if it votes, unlike held-out and deleted ones: [n] int64, otherwise -1."""
        if self.split.name != "train":
            return np.full(len(positions), -1)
        first = sum(self.split.document_rows[: self.shard])
        chunks = self.split.tokens.starts[self.shard] + positions // self.split.chunk_length
        return np.where(inside(chunks, self.split.deleted), -1, first + self.document(positions))


@dataclass(frozen=True)
class Group:
    """Shards of `train` whose prefixes are sorted together, or one shard of held-out documents.

    Attributes:
        sources: its shards.
        firsts: first position of each shard, [shards] int64.
        sorted_positions: of all prefixes in their order; None for held-out documents.
    """

    sources: list[Source]
    firsts: np.ndarray
    sorted_positions: np.ndarray | None

    def by_shard(self, positions: np.ndarray) -> list[np.ndarray]:
        """Positions in the group → for each shard the rows of those in it."""
        shards = np.searchsorted(self.firsts, positions, side="right") - 1
        return [np.flatnonzero(shards == shard) for shard in range(len(self.sources))]

    def keys(self, positions: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """The last 8 bytes of tokens of prefixes, as numbers: positions [n] → [n] uint64."""
        keys = np.zeros(len(positions), np.uint64)
        for source, first, rows in zip(self.sources, self.firsts, self.by_shard(positions), strict=True):
            if len(rows):
                keys[rows] = _keys(source.windows(positions[rows] - first, 8 // dtype.itemsize, dtype))[:, 0]
        return keys

    def rows_between(self, first: int, stop: int, dtype: np.dtype) -> range:
        """The rows of sorted prefixes whose key is in [first, stop)."""
        if (ordered := self.sorted_positions) is None:
            return range(0)
        rows = range(len(ordered))
        low, high = (
            bisect_left(rows, key, key=lambda row: int(self.keys(ordered[row : row + 1].astype(np.int64), dtype)[0]))
            for key in (first, stop)
        )
        return range(low, high)


def groups_of(datastore: Datastore) -> list[Group]:
    """All shards of all splits in their order; those of `train` are sorted."""
    groups = []
    for shards in stored_groups(datastore.train):
        path = datastore.folder / SUFFIXES / shard_name(shards.start) / "positions.npy"
        sources = [_source(datastore.train, shard) for shard in shards]
        groups.append(Group(sources, first_positions(datastore.train, shards)[:-1], np.asarray(open_array(path))))
    for split in (datastore.split(name) for name in SPLITS if name != "train"):
        groups += [
            Group([_source(split, shard)], np.zeros(1, np.int64), None) for shard in range(len(split.chunk_rows))
        ]
    return groups


def _source(split: Split, shard: int) -> Source:
    return Source(split, shard, np.asarray(split.tokens.shard(shard)).reshape(-1), document_starts(split, shard))


# --- ranges --------------------------------------------------------------------------------------------------------


def window_dtype(datastore: Datastore) -> np.dtype:
    """The type of tokens plus 1."""
    return np.dtype(np.uint16 if datastore.manifest["vocab_size"] < 2**16 else np.uint32)


def _keys(window: np.ndarray) -> np.ndarray:
    """Windows [n, w] as numbers that compare in the same order, [n, w · bytes of a token / 8] uint64."""
    return window.astype(window.dtype.newbyteorder(">")).view(">u8").astype(np.uint64)


def num_tokens(groups: Sequence[Group]) -> int:
    """Number of sorted prefixes."""
    return sum(len(group.sorted_positions) for group in groups if group.sorted_positions is not None)


def cuts(groups: Sequence[Group], dtype: np.dtype) -> list[int]:
    """Keys of the last 8 bytes of tokens at which the sorted prefixes are cut into ranges of similar size."""
    keys = [np.zeros(0, np.uint64)]
    for group in groups:
        if group.sorted_positions is not None:
            keys.append(group.keys(group.sorted_positions[::_PIVOT_STEP].astype(np.int64), dtype))
    ordered, count = np.sort(np.concatenate(keys)), -(-num_tokens(groups) // _RANGE_TOKENS)
    chosen = ordered[[len(ordered) * number // count for number in range(1, count)]]
    return [key for key in np.unique(chosen).tolist() if key > 0]


def positions_between(group: Group, first: int, stop: int, dtype: np.dtype) -> list[np.ndarray]:
    """For each shard the positions [n] int64 of the prefixes whose key is in [first, stop), in order if they are sorted."""
    ordered = group.sorted_positions
    if ordered is None:
        (source,) = group.sources
        text = source.text_positions()
        keys = group.keys(text, dtype)
        return [text[(keys >= first) & (keys <= stop - 1)]]
    rows = group.rows_between(first, stop, dtype)
    positions = ordered[rows.start : rows.stop].astype(np.int64)
    return [positions[rows] - first for rows, first in zip(group.by_shard(positions), group.firsts, strict=True)]


def order_of(keys: np.ndarray) -> np.ndarray:
    """The order [n] of rows of keys [n, w] uint64; equal rows stay in their order. Columns after the first are read for ties only."""
    order = np.argsort(keys[:, 0], kind="stable")
    tied = keys[order[1:], 0] == keys[order[:-1], 0]  # with the row before
    for column in range(1, keys.shape[1]):
        rows = np.flatnonzero(np.append(tied, False) | np.append(False, tied))
        if not len(rows):
            break
        run = np.cumsum(~np.append(False, tied))[rows]
        order[rows] = order[rows][np.lexsort((keys[order[rows], column], run))]
        pairs = np.flatnonzero(tied)
        tied[pairs] = keys[order[pairs + 1], column] == keys[order[pairs], column]
    return order


def _common(window: np.ndarray, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Equal last tokens of two prefixes, [n] int64; 0 with -1 in `others`."""
    lengths = np.zeros(len(rows), np.int64)
    for block in _blocks(len(rows)):
        one, other = window[rows[block]], window[others[block]]
        differs = (one != other) | (one == 0)
        lengths[block] = np.where(differs.any(1), differs.argmax(1), window.shape[1])
    return np.where(others < 0, 0, lengths)


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, count, _BLOCK))


@dataclass(frozen=True)
class CutMatch:
    """A match at a border of a range, with occurrences outside of it.

    Attributes:
        row: the first or last prefix of the range, which ends in it.
        length: its tokens.
        own, following: of at most 32 of all its voters, as in `votes_in_range`.
        voters: the number of all its voters, estimated from those.
    """

    row: int
    length: int
    own: np.ndarray
    following: np.ndarray
    voters: int


def votes_in_range(
    window: np.ndarray,
    following: np.ndarray,
    own: np.ndarray,
    voting: np.ndarray,
    tokens: np.dtype,
    cut: Sequence[CutMatch] = (),
) -> np.ndarray:
    """The votes [n] of `vote_dtype` of the prefixes of a range in their order.

    Args:
        window: their last tokens, [n, 64], see `Source.windows`.
        following: the token after each, [n] int64; -1 = none.
        own: [n] int64, a number of each one's document.
        voting: [n] bool.
        tokens: type of token ids.
        cut: matches that occur outside of the range too.
    """
    rows, voters = np.arange(len(window)), np.flatnonzero(voting)
    before, after = _nearest_of_other_documents(rows, voters, own)
    sides = np.stack([_common(window, rows, before), _common(window, rows, after)])
    length, nearest = sides.max(0), np.where(sides[0] >= sides[1], before, after)
    common, voters_before = _common(window, rows[:-1], rows[1:]), np.append(0, np.cumsum(voting))
    poll = _Poll(
        np.concatenate([own[voters], *(match.own for match in cut)]),
        np.concatenate([following[voters], *(match.following for match in cut)]).astype(np.int32),
        own,
        np.where(nearest < 0, -1, following[nearest]).astype(np.int32),
    )
    candidates = np.full((len(window), KEPT), -1, np.int32)
    numbers = np.zeros((len(window), len(LENGTHS), 1 + KEPT), np.uint8)
    longer = np.zeros((2, len(window)), np.int64)  # the voters [low, high) of the next longer match
    for level in reversed(range(len(LENGTHS))):
        low, high, size = _voters_of(LENGTHS[level], common, voters_before, cut)
        matched = length >= LENGTHS[level]
        same = matched & (low == longer[0]) & (high == longer[1])
        numbers[same, level] = numbers[same, min(level + 1, len(LENGTHS) - 1)]
        new = np.flatnonzero(matched & ~same)
        numbers[new, level] = poll.numbers(new, low[new], high[new], size[new], candidates)
        longer = np.where(matched, (low, high), 0)
    return packed(length, candidates, numbers, tokens)


def _voters_of(
    length: int, common: np.ndarray, voters_before: np.ndarray, cut: Sequence[CutMatch]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The voters [low, high) of each row at one length of match, and the number of all of them: three times [n].

    Args:
        length: the length.
        common: tokens shared by adjacent rows, [n - 1].
        voters_before: number of voters before each row, and of all, [n + 1].
        cut: as in `votes_in_range`; their voters are numbered after those of the range.
    """
    borders = np.flatnonzero(common < length) + 1
    edges = np.concatenate([[0], borders, [len(common) + 1]])
    sizes = np.diff(edges)
    low, high = voters_before[edges[:-1]].repeat(sizes), voters_before[edges[1:]].repeat(sizes)
    size, first = high - low, int(voters_before[-1])
    for match in cut:
        if match.length == length:
            there = (low == low[match.row]) & (high == high[match.row])
            low[there], high[there], size[there] = first, first + len(match.own), match.voters
        first += len(match.own)
    return low, high, size


@dataclass(frozen=True)
class _Poll:
    """The voters of a range and its rows.

    Attributes:
        documents, following: of the voters in order, int64 and int32.
        own: document of each row.
        nearest: the token that follows the nearest prefix of another document for each row, int32.
    """

    documents: np.ndarray
    following: np.ndarray
    own: np.ndarray
    nearest: np.ndarray

    def numbers(
        self, rows: np.ndarray, low: np.ndarray, high: np.ndarray, size: np.ndarray, candidates: np.ndarray
    ) -> np.ndarray:
        """Size code and shares of one length of match for some rows [n], whose voters are [low, high): [n, 4] uint8. See `count`."""
        numbers = np.zeros((len(rows), 1 + KEPT), np.uint8)
        step = np.maximum(1, -(-(high - low) // SAMPLED))
        drawn = -(-(high - low) // step)
        for least, most in pairwise((-1, 2, 4, 8, 16, SAMPLED)):  # most matches occur a few times only
            own_size = np.flatnonzero((drawn > least) & (drawn <= most))
            for block in _blocks(len(own_size)):
                at = own_size[block]
                found = self.found(rows[at], low[at], high[at], step[at], most)
                numbers[at] = self.count(rows[at], found, size[at], drawn[at], candidates)
        return numbers

    def found(self, rows: np.ndarray, low: np.ndarray, high: np.ndarray, step: np.ndarray, most: int) -> np.ndarray:
        """The tokens after every `step`-th voter of [low, high) for some rows [n], at most `most`: [n, most] int32; -1 = no vote."""
        voters = low[:, None] + step[:, None] * np.arange(most)
        votes = voters < high[:, None]
        voters[~votes] = 0
        votes &= self.documents[voters] != self.own[rows, None]
        return np.where(votes, self.following[voters], -1)

    def count(
        self, rows: np.ndarray, found: np.ndarray, size: np.ndarray, drawn: np.ndarray, candidates: np.ndarray
    ) -> np.ndarray:
        """Count the votes of one length of match.

        Args:
            rows: [n].
            found: the tokens after the sampled voters, [n, s].
            size: number of voters, [n].
            drawn: number of those that were sampled, [n].
            candidates: of all rows, [all, 3]; those of `rows` are completed.

        Returns:
            size code and shares, [n, 4] uint8.
        """
        counted = np.count_nonzero(found >= 0, axis=1)
        total = size * counted // np.maximum(1, drawn)
        none = np.flatnonzero(counted == 0)  # most occurrences are in the own document
        found[none, 0] = self.nearest[rows[none]]
        counted[none] = total[none] = found[none, 0] >= 0
        kept = candidates[rows]
        open_rows = np.flatnonzero(kept[:, -1] < 0)
        kept[open_rows] = _with_most_frequent(kept[open_rows], found[open_rows])
        candidates[rows] = kept
        numbers = np.zeros((len(rows), 1 + KEPT), np.uint8)
        # The exponent is 1 + log2, rounded down, and 0 for 0.
        numbers[:, 0] = np.minimum(np.frexp(total)[1], LARGEST_SIZE)
        for place in range(KEPT):
            votes = np.count_nonzero(found == kept[:, place, None], axis=1) * (kept[:, place] >= 0)
            numbers[:, 1 + place] = SHARES * votes // np.maximum(1, counted)
        return numbers


def _with_most_frequent(candidates: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Candidates [n, 3], completed with the most frequent tokens that were found, [n, s] (-1 = none)."""
    ordered = np.sort(found, axis=1)
    begins = np.ones(ordered.shape, dtype=bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    sizes = np.bincount(np.cumsum(begins.ravel()) - 1) if begins.size else np.zeros(0, np.int64)
    left = np.where(begins & (ordered >= 0), sizes.repeat(sizes).reshape(ordered.shape), 0)
    rows, filled = np.arange(len(found)), np.count_nonzero(candidates >= 0, axis=1)
    for _ in range(min(KEPT, found.shape[1])):  # enough, even if the candidates of longer matches come first
        best = left.argmax(axis=1)  # the first of several has the smallest id
        token = ordered[rows, best]
        new = np.flatnonzero((left[rows, best] > 0) & (filled < KEPT) & (candidates != token[:, None]).all(axis=1))
        candidates[new, filled[new]] = token[new]
        filled[new] += 1
        left[rows, best] = 0
    return candidates


def _nearest_of_other_documents(rows: np.ndarray, voters: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The last voter before each row, and the first one after it, that is of another document: [n] and [n]; -1 = none."""
    none = np.full(len(rows), -1)
    if not len(voters):
        return none, none
    document = own[voters]
    begins = np.flatnonzero(np.append(True, document[1:] != document[:-1]))  # of runs of voters of one document
    ends = np.append(begins[1:], len(voters))
    run = np.repeat(np.arange(len(begins)), ends - begins)

    def other(number: np.ndarray, beyond: np.ndarray) -> np.ndarray:
        """The voters with these numbers; those of the own document are replaced by `beyond` their run."""
        there = (number >= 0) & (number < len(voters))
        same = there & (document[number.clip(0, len(voters) - 1)] == own[rows])
        number = np.where(same, beyond[run[number.clip(0, len(voters) - 1)]], number)
        there = (number >= 0) & (number < len(voters))
        return np.where(there, voters[number.clip(0, len(voters) - 1)], none)

    before = other(np.searchsorted(voters, rows) - 1, begins - 1)
    return before, other(np.searchsorted(voters, rows, side="right"), ends)


# --- files ---------------------------------------------------------------------------------------------------------


def write_range(work: Path, datastore: Datastore, first: int, stop: int, advance: Advance) -> int:
    """Write the votes of all prefixes with keys in [first, stop): `positions.npy`, `votes.npy`, and by source `offsets.npy`.

    Returns:
        the number of tokens.
    """
    groups, dtype = groups_of(datastore), window_dtype(datastore)
    sources = [source for group in groups for source in group.sources]
    places = [rows for group in groups for rows in positions_between(group, first, stop, dtype)]
    pairs = list(zip(sources, places, strict=True))
    window = np.concatenate([source.windows(rows, LONGEST, dtype) for source, rows in pairs])
    order = order_of(_keys(window))
    following = np.concatenate([source.following(rows) for source, rows in pairs])
    document = np.concatenate([source.voting_documents(rows) for source, rows in pairs])
    tokens = sources[0].tokens.dtype
    window, document = window[order], document[order]
    votes = np.empty(len(window), vote_dtype(tokens))
    cut = list(_cut_matches(groups, window, first, stop))
    votes[order] = votes_in_range(window, following[order], document, document >= 0, tokens, cut)
    save_array(work / "positions.npy", np.concatenate(places).astype(np.uint32))
    save_array(work / "votes.npy", votes)
    save_array(work / "offsets.npy", np.cumsum([0, *map(len, places)]))
    trained = sum(len(rows) for source, rows in pairs if source.split.name == "train")
    advance(trained)
    return trained


def _cut_matches(groups: Sequence[Group], window: np.ndarray, first: int, stop: int) -> Iterator[CutMatch]:
    """The matches of a few tokens that occur in a range [first, stop) of keys and outside of it: those of its first and last prefix."""
    dtype, ends = window.dtype, [0, len(window) - 1] if len(window) else []
    for length in (length for length in LENGTHS if length * dtype.itemsize < 8):
        bits = 64 - 8 * dtype.itemsize * length
        for row, key in zip(ends, _keys(window[ends])[:, 0].tolist(), strict=True):
            low, high = key >> bits << bits, (key >> bits) + 1 << bits
            if low < first or high > stop:
                yield _cut_match(groups, row, length, low, high, dtype)


def _cut_match(groups: Sequence[Group], row: int, length: int, first: int, stop: int, dtype: np.dtype) -> CutMatch:
    """The match of all prefixes with keys in [first, stop)."""
    rows = [group.rows_between(first, stop, dtype) for group in groups]
    own, following, sampled = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for group, of_group, places in zip(groups, rows, spread([*map(len, rows)], SAMPLED), strict=True):
        if group.sorted_positions is None or not places:
            continue
        drawn = slice(of_group.start + places.start, of_group.start + places.stop, places.step)
        positions = group.sorted_positions[drawn].astype(np.int64)
        for source, start, at in zip(group.sources, group.firsts, group.by_shard(positions), strict=True):
            own.append(source.voting_documents(positions[at] - start))
            following.append(source.following(positions[at] - start))
        sampled += len(positions)
    documents, tokens = np.concatenate(own), np.concatenate(following)
    alive = documents >= 0
    voters = sum(map(len, rows)) * int(alive.sum()) // max(1, sampled)
    return CutMatch(row, length, documents[alive], tokens[alive], voters)


def write_shard(work: Path, datastore: Datastore, shard: int, ranges: Sequence[Path]) -> dict[str, int]:
    """Write `SPLIT.npy` [chunks, m] of `vote_dtype` for each split of a shard, from the votes of all ranges.

    Returns:
        split → tokens that have votes.
    """
    counts, number = {}, 0
    for split in map(datastore.split, SPLITS):
        tokens = split.tokens.shard(shard)
        votes = np.zeros(tokens.size, vote_dtype(tokens.dtype))
        for folder in ranges:
            offsets = open_array(folder / "offsets.npy")
            rows = slice(*offsets[number + shard : number + shard + 2].tolist())
            votes[open_array(folder / "positions.npy")[rows]] = open_array(folder / "votes.npy")[rows]
        save_array(work / f"{split.name}.npy", votes.reshape(tokens.shape))
        counts[split.name] = int(np.count_nonzero(votes["length"]))
        number += len(split.chunk_rows)
    return counts
