"""The tokens that follow the longest match of every token's text in other documents, for all tokens of a datastore.

    sorted prefixes of all groups of shards ─ cut at the same prefixes ─► ranges of about 2^20 tokens
    a range ─ order ─► the nearest prefix of another document ─► length of the match ─► all prefixes that share it ─► votes

Every range is sorted once, so time is linear in the tokens. Only documents of `train` vote, and no document for itself. Prefixes of
held-out documents are sorted among the others and vote for nothing. The text after a token changes nothing.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from indexing.progress import Advance
from indexing.store.artifact import fingerprint, read_manifest
from indexing.store.datastore import SPLITS, Datastore, Split, shard_name
from indexing.store.deletions import inside
from indexing.store.errors import InputError
from indexing.store.files import save_array
from indexing.store.sharded_array import open_array
from indexing.suffixes.build import FOLDER as SUFFIXES
from indexing.suffixes.build import document_starts, first_positions, stored_groups

FOLDER = "votes"
LENGTHS = (1, 2, 3, 4, 6, 10, 16)
COLUMNS = 1 + 3 + 7 * 4
SHARES = 15
LONGEST = 64
"""Longer matches count as this long."""
SAMPLED = 32
"""At most this many occurrences of a match vote, spread evenly."""
KEPT = 3
"""Tokens whose votes are kept: those with the most."""
_RANGE_TOKENS = 1 << 20
"""So large that only very frequent ends of a text lie on both sides of a cut: matches are looked for inside of a range."""
_PIVOT_STEP = 1 << 14
_BLOCK = 1 << 16


def vote_dtype(tokens: np.dtype) -> np.dtype:
    """The votes of one position: 10 bytes with a vocabulary of 16 bits, 16 bytes with a larger one.

    `length` of the match, at most 64, 0 = nothing votes; `tokens` that followed it, most votes first, then by id; their `counts`,
    0 behind the last one.
    """
    return np.dtype([("length", np.uint8), ("tokens", tokens, (KEPT,)), ("counts", np.uint8, (KEPT,))])


def deletions_of(datastore: Datastore) -> str:
    """A fingerprint of the deleted documents, which do not vote."""
    return fingerprint(datastore.train.deleted.tolist())


def has_votes(datastore: Datastore) -> bool:
    """Whether the stage `votes` is finished, and made after the last deletion."""
    if not datastore.has(FOLDER):
        return False
    deleted = read_manifest(datastore.folder / FOLDER / shard_name(0))["recipe"]["settings"]["deleted"]
    return bool(deleted == deletions_of(datastore))


def require_votes(datastore: Datastore) -> None:
    """Raise InputError unless the datastore has votes, see `has_votes`."""
    if not datastore.has(FOLDER):
        raise InputError(
            f"{datastore.folder} has no finished '{FOLDER}' stage, which models read that copy from the whole datastore. Run "
            f"`retro index CONFIG` (or `--stage {SUFFIXES}`, then `--stage {FOLDER}`), or train with model.copy_head.datastore = false."
        )
    if not has_votes(datastore):
        raise InputError(
            f"{datastore.folder}: documents were deleted since the stage 'votes' was made, and still vote. Run "
            "`retro index CONFIG --stage votes`."
        )


def votes_for(lengths: np.ndarray, following: np.ndarray, tokens: np.dtype) -> np.ndarray:
    """Votes [n] of `vote_dtype` from lengths of matches [n] and the tokens that followed, [n, s] int64 (-1 = none)."""
    ordered = np.sort(following, axis=1)
    begins = np.ones(ordered.shape, dtype=bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    sizes = np.bincount(np.cumsum(begins.ravel()) - 1)
    left = np.where(begins & (ordered >= 0), sizes.repeat(sizes).reshape(ordered.shape), 0)
    votes, rows = np.zeros(len(following), vote_dtype(tokens)), np.arange(len(following))
    for place in range(KEPT):
        best = left.argmax(axis=1)  # the first of several has the smallest id
        count = left[rows, best]
        votes["counts"][:, place], votes["tokens"][:, place] = count, np.where(count, ordered[rows, best], 0)
        left[rows, best] = 0
    votes["length"] = np.where(votes["counts"][:, 0], lengths, 0)
    return votes


def as_columns(votes: np.ndarray) -> np.ndarray:
    """Votes [...] as numbers [..., 7] int64: the length of the match, three tokens, their three counts."""
    return np.concatenate([votes["length"][..., None], votes["tokens"], votes["counts"]], axis=-1, dtype=np.int64)


def within_limit(votes: np.ndarray, split: Split, max_overlap: float = 1.0) -> np.ndarray:
    """Remove, in place, the votes after matches that are longer than a part of a chunk.

    Only the text before a token counts. If the token itself counted too, all votes after the longest allowed match would be wrong ones:
    a right one makes the match longer.

    Args:
        votes: [..., 7], as `as_columns`.
        split: the split of the tokens; live votes: the searched one.
        max_overlap: longest match that votes, as a fraction of the chunk length. The limit of the stored neighbors
            (`neighbors.max_overlap`) also holds. 1 = no limit.
    """
    limit = min(max_overlap, split.neighbor_limit)
    if limit < 1:
        votes[votes[..., 0] > min(limit * split.chunk_length, LONGEST - 1)] = 0  # LONGEST stands for all longer matches
    return votes


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
    rows = range(len(ordered))
    low, high = (
        bisect_left(rows, key, key=lambda row: int(group.keys(ordered[row : row + 1].astype(np.int64), dtype)[0]))
        for key in (first, stop)
    )
    positions = ordered[low:high].astype(np.int64)
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


def votes_in_range(
    window: np.ndarray, following: np.ndarray, own: np.ndarray, voting: np.ndarray, tokens: np.dtype
) -> np.ndarray:
    """The votes [n] of `vote_dtype` of the prefixes of a range in their order.

    Args:
        window: their last tokens, [n, 64], see `Source.windows`.
        following: the token after each, [n] int64; -1 = none.
        own: [n] int64, a number of each one's document.
        voting: [n] bool.
        tokens: type of token ids.
    """
    rows, voters = np.arange(len(window)), np.flatnonzero(voting)
    before, after = _nearest_of_other_documents(rows, voters, own)
    sides = np.stack([_common(window, rows, before), _common(window, rows, after)])
    length, nearest = sides.max(0), np.where(sides[0] >= sides[1], before, after)
    low, high = _sharing(_common(window, rows[:-1], rows[1:]), length)
    low, high = np.searchsorted(voters, low), np.searchsorted(voters, high)
    votes = np.zeros(len(window), vote_dtype(tokens))
    matched = np.flatnonzero(length)
    for block in _blocks(len(matched)):
        at = matched[block]
        step = -(-(high[at] - low[at]) // SAMPLED)
        drawn = low[at, None] + step[:, None] * np.arange(SAMPLED)
        inside_group = drawn < high[at, None]
        drawn = voters[np.where(inside_group, drawn, 0)]
        found = np.where(inside_group & (own[drawn] != own[at, None]), following[drawn], -1)
        none = (found < 0).all(1)  # most occurrences are in the own document
        found[none, 0] = following[nearest[at[none]]]
        votes[at] = votes_for(length[at], found, tokens)
    return votes


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


def _sharing(common: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows [low, high) around each row that share its last `length` tokens, from the tokens shared by adjacent rows [n - 1]."""
    low, high = np.zeros((2, len(length)), np.int64)
    for level in np.unique(length[length > 0]):
        rows, borders = np.flatnonzero(length == level), np.flatnonzero(common < level)
        at = np.searchsorted(borders, rows)
        low[rows], high[rows] = np.append(-1, borders)[at] + 1, np.append(borders, len(common))[at] + 1
    return low, high


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
    votes = np.empty(len(window), vote_dtype(tokens))
    votes[order] = votes_in_range(window[order], following[order], document[order], document[order] >= 0, tokens)
    save_array(work / "positions.npy", np.concatenate(places).astype(np.uint32))
    save_array(work / "votes.npy", votes)
    save_array(work / "offsets.npy", np.cumsum([0, *map(len, places)]))
    trained = sum(len(rows) for source, rows in pairs if source.split.name == "train")
    advance(trained)
    return trained


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
