"""The tokens that follow every token's text in other documents, by the length of the match, for all tokens of a
datastore.

    sorted prefixes of training documents, and of held-out ones ─ cut at the same heads ─► ranges of about 2^20 tokens
    a range ─ order ─► the nearest prefix of another document ─► length of the longest match
    for each of `LENGTHS` up to it: all prefixes with the same last tokens ─► at most 32 of them ─► votes
    votes of ranges ─► votes of shards; of many shards through blocks of them

Every token is in one range, so time is linear in the tokens. Tokens of appended documents are in ranges of the orders
that have them; earlier orders are searched (`compiled_search.py`), so their time is linear in the appended tokens times
a logarithm. Only documents of `train` vote, and no document for itself. Prefixes of held-out documents are sorted among
the others and vote for nothing. The text after a token changes nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from indexing.machine import compiled
from indexing.progress import Advance
from indexing.store.compressed_array import rows_of_block, write_compressed
from indexing.store.datastore import SPLITS, Datastore, shard_name
from indexing.store.deletions import inside
from indexing.store.files import save_array
from indexing.store.sharded_array import open_array
from indexing.suffixes.order import Prefixes, blocks, sampled_rows, stored_orders, with_tokens
from indexing.suffixes.order_build import RANGE_TOKENS, sorted_rows, write_run
from indexing.suffixes.rows import stride
from indexing.suffixes.texts import Texts, numbers
from indexing.suffixes.votes import KEPT, LENGTHS, SAMPLED, opaque, packed, vote_dtype

if TYPE_CHECKING:
    from indexing.suffixes.mapped_files import MappedFiles

FAN_OUT = 128
"""Shards whose votes are collected from the ranges directly. If there are more, blocks of shards are made first, as
many as this."""
_MOST_RANGES = 8
"""Ranges of prefixes whose votes one task finds, if there are many; so the files of a task stay below 250 MB."""
_LEAST_TASKS = 64
"""With fewer ranges each is a task."""
_DRAWN_GROUPS = 1 << 17
"""Groups of rows whose voters in several orders are drawn at a time."""
_HELD_OUT = tuple(name for name in SPLITS if name != "train")


# --- tasks ---------------------------------------------------------------------------------------------------------


def num_ranges(tokens: int) -> int:
    """How many ranges prefixes are cut into.

    Args:
        tokens: of the orders that are read whole.
    """
    return max(1, -(-tokens // RANGE_TOKENS))


def ranges_of_task(ranges: int) -> int:
    """For how many ranges one task finds the votes.

    Args:
        ranges: of the datastore.
    """
    return max(1, min(_MOST_RANGES, ranges // _LEAST_TASKS))


def shards_of_block(shards: int) -> int:
    """For how many shards one block collects the votes. 1: each shard collects its own from the ranges, without blocks.

    Args:
        shards: of the datastore.
    """
    return -(-shards // FAN_OUT)


# --- prefixes ------------------------------------------------------------------------------------------------------


def write_held_out(work: Path, datastore: Datastore, shard: int) -> None:
    """Write the prefixes of the held-out documents of a shard, in the order of their heads, with their tokens: a folder
    for each split."""
    for name in _HELD_OUT:
        (work / name).mkdir()
        write_run(work / name, Texts(datastore.split(name)), shard, carried=True)


@dataclass(frozen=True)
class Voting:
    """The prefixes of a datastore, for the votes of some shards.

    Attributes:
        wanted: [shards] bool, whether the votes of each shard are made.
        searched: orders of training documents that have none of these shards. They are searched for each prefix.
        runs: the other orders, and the runs of the held-out documents of these shards. They are read whole.
    """

    wanted: np.ndarray
    searched: "MappedFiles"
    runs: list[Prefixes]

    @property
    def orders(self) -> list[Prefixes]:
        """All orders of training documents."""
        return [*self.searched.orders, *(run for run in self.runs if run.texts.split.name == "train")]


def open_prefixes(datastore: Datastore, held_out: Path, shards: Sequence[int], searched: int) -> Voting:
    """Open the prefixes that the votes of some shards are made from.

    Args:
        datastore: the datastore.
        held_out: the folder with the runs of the held-out documents of each shard.
        shards: the shards.
        searched: the number of orders that are searched, the first ones; these shards are in the others.
    """
    from indexing.suffixes.mapped_files import MappedFiles  # imports numba, which takes half a second

    texts, wanted = Texts(datastore.train), np.zeros(len(datastore.train.chunk_rows), bool)
    wanted[np.array(shards)] = True
    orders = [parts for _, parts in stored_orders(datastore.train)]
    earlier = MappedFiles(texts, [Prefixes(texts, parts) for parts in orders[:searched]])
    runs = [Prefixes(texts, with_tokens(parts)) for parts in orders[searched:]]
    for name in _HELD_OUT:
        texts = Texts(datastore.split(name))
        runs += [Prefixes(texts, [held_out / shard_name(shard) / name]) for shard in shards]
    return Voting(wanted, earlier, runs)


def _voting_documents(texts: Texts, positions: np.ndarray) -> np.ndarray:
    """A number of each position's document if it votes, unlike held-out and deleted ones: [n] int64, otherwise -1."""
    if texts.split.name != "train":
        return np.full(len(positions), -1)
    return np.where(inside(positions // texts.split.chunk_length, texts.split.deleted), -1, texts.documents(positions))


@dataclass(frozen=True)
class Occurrences:
    """Occurrences of the ends of n texts in an order.

    Attributes:
        order: the order, of training documents.
        bounds: the rows [first, stop) that end in the last 1, 2, 3, 4, 6, 10 and 16 tokens of each text, [7, 2, n]
            int64; without meaning for lengths above `shared`.
        shared: tokens of the longest match with a document that is not deleted, [n] int64.
        following: the token after it, [n] int64; -1 = none.
    """

    order: Prefixes
    bounds: np.ndarray
    shared: np.ndarray
    following: np.ndarray


def occurrences_of(searched: "MappedFiles", window: np.ndarray, texts: np.ndarray) -> list[Occurrences]:
    """Find the last tokens of texts in each of some orders.

    Args:
        searched: orders of training documents.
        window: the last tokens of texts, [n, 64], see `ShardText.windows`.
        texts: the numbers [t] of those that are searched; the others get no occurrences.
    """
    from indexing.suffixes.compiled_search import find_occurrences

    orders = searched.orders
    if not orders:
        return []
    bounds = np.zeros((len(orders), len(LENGTHS), 2, len(window)), np.int64)
    shared, following = np.zeros((len(orders), len(window)), np.int64), np.full((len(orders), len(window)), -1)
    deleted = searched.texts.split.deleted
    searched.call(find_occurrences, window, texts, deleted, bounds, shared, following)
    return [Occurrences(*found) for found in zip(orders, bounds, shared, following, strict=True)]


# --- ranges --------------------------------------------------------------------------------------------------------


def _common(window: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Equal last tokens of the first prefixes of a range and of others: rows [n] of these → [n] int64; 0 with -1."""
    lengths = np.zeros(len(others), np.int64)
    compiled(_compare)(window, others, lengths)
    return lengths


def _compare(window: np.ndarray, others: np.ndarray, lengths: np.ndarray) -> None:
    for row in range(len(others)):
        other, length = others[row], 0
        if other >= 0:
            while length < window.shape[1] and window[row, length] == window[other, length] != 0:
                length += 1
        lengths[row] = length


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
    wanted: np.ndarray | None = None,
    others: Sequence[Occurrences] = (),
    first: int = 0,
) -> np.ndarray:
    """The votes [n] of `vote_dtype` of the prefixes of a range in their order.

    Args:
        window: their last tokens, [n, 64], see `ShardText.windows`.
        following: the token after each, [n] int64; -1 = none.
        own: [n] int64, a number of each one's document.
        voting: [n] bool.
        tokens: type of token ids.
        cut: matches that occur outside of the range too.
        wanted: [n] bool; the others get no votes. None = all.
        others: where the prefixes occur in orders of other documents, which vote too.
        first: voters before the range, which decides of a frequent match whose votes are counted.
    """
    from indexing.suffixes.compiled_search import count_votes, take_votes  # numba, which takes half a second

    if not len(window):
        return np.empty(0, vote_dtype(tokens))
    rows, voters = np.arange(len(window)), np.flatnonzero(voting)
    # Rows are sorted by their last tokens. So of all voters the nearest one above or below shares most tokens with a
    # row.
    voters_before = np.append(0, np.cumsum(voting))  # voters before row i, [n + 1]
    before, after = _nearest_of_other_documents(voters, voters_before, own)
    sides = np.stack([_common(window, before), _common(window, after)])
    length, nearest = sides.max(0), np.where(sides[0] >= sides[1], before, after)
    # Tokens shared by rows i and i + 1, [n - 1].
    common = _common(window, rows[1:])
    # Documents and next tokens of the voters of the range, then of those of cut matches: a row's voters are a slice of
    # both.
    poll = (
        np.concatenate([own[voters], *(match.own for match in cut)]),
        np.concatenate([following[voters], *(match.following for match in cut)]).astype(np.int32),
    )
    after = np.where(nearest < 0, -1, following[nearest])
    for other in others:
        after, length = np.where(other.shared > length, other.following, after), np.maximum(other.shared, length)
    length = length if wanted is None else length * wanted
    rest = own, after.astype(np.int32)
    candidates = np.full((len(window), KEPT), -1, np.int32)
    numbers = np.zeros((len(window), len(LENGTHS), 1 + KEPT), np.uint8)
    # Rows that end in the same tokens are a group: they have the same voters. From the longest match to the shortest.
    groups, pending = np.full(len(window), -1), np.zeros(len(window), bool)
    longer = np.empty((2 + 2 * len(others), 0), np.int64)
    for level in reversed(range(len(LENGTHS))):
        starts, low, high, size = _groups(LENGTHS[level], common, voters_before, cut)
        is_cut = high > len(voters)  # its voters are those of all orders
        elsewhere = [np.maximum.reduceat(other.bounds[level], starts[:-1], axis=1) for other in others]
        bounds = np.array([low, high, *(np.where(is_cut, 0, rows) for both in elsewhere for rows in both)])
        new = take_votes(starts, LENGTHS[level], length, bounds, longer, groups, level, numbers, pending)
        for some in (new[block] for block in blocks(len(new), _DRAWN_GROUPS if others else len(window))):
            drawn = low[some], high[some], size[some], first, *poll
            if others:
                drawn = _drawn(bounds[:, some], size[some], first, poll, [other.order for other in others])
            count_votes(starts[some], starts[some + 1], *drawn, *rest, pending, candidates, numbers[:, level])
        longer = bounds
    return packed(length, candidates, numbers, tokens)


def _groups(
    length: int, common: np.ndarray, voters_before: np.ndarray, cut: Sequence[CutMatch]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Groups of rows that end in the same `length` tokens: the first row of each and the end of all, [groups + 1]; the
    voters [low, high) of each, and their number, [groups].

    Args:
        length: the length.
        common: tokens shared by adjacent rows, [n - 1].
        voters_before: number of voters before each row, and of all, [n + 1].
        cut: as in `votes_in_range`; their voters are numbered after those of the range.
    """
    starts = np.concatenate([[0], np.flatnonzero(common < length) + 1, [len(common) + 1]])
    low, high = voters_before[starts[:-1]], voters_before[starts[1:]]
    size, first = high - low, int(voters_before[-1])
    for match in cut:
        if match.length == length:
            group = np.searchsorted(starts, match.row, side="right") - 1
            low[group], high[group], size[group] = first, first + len(match.own), match.voters
        first += len(match.own)
    return starts, low, high, size


def _drawn(
    bounds: np.ndarray, size: np.ndarray, first: int, poll: tuple[np.ndarray, np.ndarray], orders: Sequence[Prefixes]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, np.ndarray, np.ndarray]:
    """Draw the voters of groups [g] from a range and from other orders: the arguments of `count_votes` from `low` to
    `following`.

    Args:
        bounds: first and last + 1 of each group's voters among those of the range, then among the rows of each order,
            [2 + 2 · orders, g].
        size: the number of voters in the range, [g].
        first: voters before the range.
        poll: documents of the voters of the range, and the tokens after them.
        orders: the other orders.
    """
    low, sizes = bounds[::2], bounds[1::2] - bounds[::2]  # [1 + orders, g]
    total = sizes.sum(axis=0)
    drawn = np.minimum(total, SAMPLED)
    edges = np.append(0, np.cumsum(drawn))
    group = np.repeat(np.arange(len(drawn)), drawn)
    # Place of a drawn voter among those of its group; below, among those of its group from one order on.
    place = (np.arange(edges[-1]) - edges[group]) * total[group] // drawn[group]
    documents, following = np.full(len(place), -1), np.full(len(place), -1, np.int32)
    for order, start, count in zip((None, *orders), low, sizes, strict=True):
        here = np.flatnonzero((place >= 0) & (place < count[group]))
        rows = start[group[here]] + place[here]
        if order is None:
            documents[here], following[here] = poll[0][rows], poll[1][rows]
        else:
            positions = order.take(rows)
            documents[here] = _voting_documents(order.texts, positions)
            following[here] = np.where(documents[here] < 0, -1, order.texts.following(positions))
        place -= count[group]  # negative for voters that were read
    return edges[:-1], edges[1:], size + sizes[1:].sum(axis=0), first, documents, following


def _nearest_of_other_documents(
    voters: np.ndarray, voters_before: np.ndarray, own: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The last voter before each row, and the first one after it, that is of another document: [n] and [n]; -1 = none.

    Args:
        voters: rows that vote, ascending.
        voters_before: number of voters before each row, and of all, [n + 1].
        own: document of each row, [n].
    """
    none = np.full(len(own), -1)
    if not len(voters):
        return none, none
    document = own[voters]
    # Copies inside of one document give long runs of its voters. The next voter of another document is beyond the run.
    begins = np.flatnonzero(np.append(True, document[1:] != document[:-1]))  # of runs of voters of one document
    ends = np.append(begins[1:], len(voters))
    run = np.repeat(np.arange(len(begins)), ends - begins)

    def other(number: np.ndarray, beyond: np.ndarray) -> np.ndarray:
        """The voters with these numbers; those of the own document are replaced by `beyond` their run."""
        there = (number >= 0) & (number < len(voters))
        same = there & (document[number.clip(0, len(voters) - 1)] == own)
        number = np.where(same, beyond[run[number.clip(0, len(voters) - 1)]], number)
        there = (number >= 0) & (number < len(voters))
        return np.where(there, voters[number.clip(0, len(voters) - 1)], none)

    return other(voters_before[:-1] - 1, begins - 1), other(voters_before[1:], ends)


# --- files ---------------------------------------------------------------------------------------------------------


def write_ranges(
    work: Path, datastore: Datastore, prefixes: Voting, borders: Sequence[int], advance: Advance
) -> dict[str, int]:
    """Write the votes of all wanted prefixes with heads in the ranges between these borders, by source.

    A source is a split of a shard; those of the first shard come first, and `train` before the others.

    - `offsets.npy` [sources + 1] int64: the first row of each source, then the number of rows.
    - `positions.npy` [rows] uint32, counted from the first position of the shard.
    - `votes.npy` [rows] of `vote_dtype`.

    Returns:
        the number of training tokens.
    """
    sources, positions, votes = zip(
        *(_range(datastore, prefixes, first, stop) for first, stop in pairwise(borders)), strict=True
    )
    source = np.concatenate(sources)
    order, count = np.argsort(source, kind="stable"), len(SPLITS) * len(datastore.train.chunk_rows)
    save_array(work / "offsets.npy", np.searchsorted(source[order], np.arange(count + 1)))
    save_array(work / "positions.npy", np.concatenate(positions)[order])
    save_array(work / "votes.npy", np.concatenate([*map(opaque, votes)])[order].view(votes[0].dtype))
    trained = int(np.count_nonzero(source % len(SPLITS) == 0))
    advance(trained)
    return {"tokens": trained}


def _range(datastore: Datastore, prefixes: Voting, first: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Source, position in the shard and votes of all wanted prefixes with heads in [first, stop): [n], [n] uint32,
    [n]."""
    rows = [(run, run.between(first, stop)) for run in prefixes.runs]
    pairs = [(run.texts, run.positions(own.start, own.stop)) for run, own in rows]
    read = np.concatenate([run.tokens(own.start, own.stop) for run, own in rows])
    # Sorted rows from here on. Sources and positions stay in the order in which they were read; `votes[order]` leads
    # back.
    read, order = sorted_rows(read)
    following, window = read[:, 0].astype(np.int64) - 1, read[:, 1:]
    document = np.concatenate([_voting_documents(texts, positions) for texts, positions in pairs])[order]
    shards = [np.searchsorted(texts.starts, positions, side="right") - 1 for texts, positions in pairs]
    local = [positions - texts.starts[shard] for (texts, positions), shard in zip(pairs, shards, strict=True)]
    sources = [
        shard * len(SPLITS) + SPLITS.index(texts.split.name) for (texts, _), shard in zip(pairs, shards, strict=True)
    ]
    wanted = prefixes.wanted[np.concatenate(shards)]
    tokens = datastore.train.tokens.dtype
    votes = np.empty(len(window), vote_dtype(tokens))
    opaque(votes)[order] = opaque(
        votes_in_range(
            window,
            following,
            document,
            document >= 0,
            tokens,
            list(_cut_matches(prefixes.orders, window, first, stop)),
            wanted[order],
            occurrences_of(prefixes.searched, window, np.flatnonzero(wanted[order])),
            _voters_before(prefixes.orders[0], first),
        )
    )
    chosen = opaque(votes)[wanted].view(votes.dtype)
    return np.concatenate(sources)[wanted], np.concatenate(local).astype(np.uint32)[wanted], chosen


def _voters_before(order: Prefixes, first: int) -> int:
    """The prefixes of an order with heads below `first`, from the beginning of its part on."""
    row = order.first_row(first)
    return row - max(start for start in order.rows if start <= row)


def _cut_matches(orders: Sequence[Prefixes], window: np.ndarray, first: int, stop: int) -> Iterator[CutMatch]:
    """The matches of a few tokens that occur in a range [first, stop) of heads and outside of it: those of its first
    and last prefix."""
    ends = [0, len(window) - 1] if len(window) else []
    for length in (length for length in LENGTHS if length * window.itemsize < 8):
        # A head has 8 bytes of tokens, the last token in the highest bits. All prefixes that end in the same `length`
        # tokens have the heads from `low`, with zeros in the other bits, up to `high`.
        bits = 64 - 8 * window.itemsize * length
        for row, head in zip(ends, numbers(window[ends])[:, 0].tolist(), strict=True):
            low, high = head >> bits << bits, (head >> bits) + 1 << bits
            if low < first or high > stop:
                yield _cut_match(orders, row, length, low, high)


def _cut_match(orders: Sequence[Prefixes], row: int, length: int, first: int, stop: int) -> CutMatch:
    """The match of all training prefixes with heads in [first, stop)."""
    rows = [order.between(first, stop) for order in orders]
    total = sum(map(len, rows))
    sampled = sampled_rows(orders, [(own.start, own.stop) for own in rows], SAMPLED, stride(total, SAMPLED))
    positions = np.concatenate([order.take(own) for order, own in zip(orders, sampled, strict=True)])
    texts = orders[0].texts
    documents = _voting_documents(texts, positions)
    alive = documents >= 0
    voters = total * int(alive.sum()) // max(1, len(positions))
    return CutMatch(row, length, documents[alive], texts.following(positions[alive]), voters)


def write_block(work: Path, ranges: Sequence[Path], shards: range) -> None:
    """Collect the votes of consecutive shards from all ranges, in files as those of `write_ranges`, with the sources of
    these shards."""
    sources = slice(len(SPLITS) * shards.start, len(SPLITS) * shards.stop + 1)
    offsets = np.array([open_array(folder / "offsets.npy")[sources] for folder in ranges])  # [ranges, sources + 1]
    # Rows of each source in all ranges together, [sources], become the first row of each in the block.
    starts = np.append(0, np.cumsum(np.diff(offsets).sum(axis=0)))
    save_array(work / "offsets.npy", starts)
    for name in ("positions.npy", "votes.npy"):
        dtype = open_array(ranges[0] / name).dtype
        out, filled = np.lib.format.open_memmap(work / name, "w+", dtype, (int(starts[-1]),)), starts[:-1].copy()
        for folder, own in zip(ranges, offsets.tolist(), strict=True):
            rows = opaque(open_array(folder / name))
            for source, (first, stop) in enumerate(pairwise(own)):
                opaque(out)[filled[source] : filled[source] + stop - first] = rows[first:stop]
                filled[source] += stop - first
        out.flush()


def write_shard(work: Path, datastore: Datastore, shard: int, collected: Sequence[Path], number: int) -> dict[str, int]:
    """Write the votes [chunks, m] of `vote_dtype` of each split of a shard, see `write_compressed`.

    Args:
        work: the folder to write to.
        datastore: the datastore.
        shard: the shard.
        collected: all ranges, or the block of the shard.
        number: of the shard among those of `collected`.

    Returns:
        split → tokens that have votes.
    """
    counts = {}
    for source, split in enumerate(map(datastore.split, SPLITS), start=len(SPLITS) * number):
        tokens = split.tokens.shard(shard)
        votes = np.zeros(tokens.size, vote_dtype(tokens.dtype))
        for folder in collected:
            rows = slice(*open_array(folder / "offsets.npy")[source : source + 2].tolist())
            found = open_array(folder / "votes.npy")[rows]
            opaque(votes)[open_array(folder / "positions.npy")[rows]] = opaque(found)
        write_compressed(work / split.name, votes.reshape(tokens.shape), rows_of_block(split.chunk_length))
        counts[split.name] = int(np.count_nonzero(votes["length"]))
    return counts
