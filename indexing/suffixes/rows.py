"""What a search reads of an order: for every prefix the token that follows it, and what distinguishes it from the one before.

    rows         0      1      2      3  …            of a part, in order
    every 32nd   0                        32     …    the same for fewer rows, in the same file behind them
    every 1024th 0                               …    and so on, until 32 are left

Prefixes that end in the same tokens are consecutive rows. The number of tokens that a row shares with the one before gives their first
and last one (as in a suffix tree), and the next token behind these, compared without reading any text, leads to the longest match (a blind
search, as in String B-trees: Ferragina & Grossi 1999). Tokens that follow many rows are read from the level that has few of them. So
both read a few adjacent rows, in a datastore of any size.
"""

from pathlib import Path

import numpy as np

from indexing.machine import compiled
from indexing.store.files import NpyWriter
from indexing.store.sharded_array import fetch, open_array

FAN_OUT = 32
"""Rows of a level for one row of the next."""
LONGEST_SHARED = 31
"""Tokens that a row shares with the one before count up to this many."""
_TOKEN_BITS = 11
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1
_FILE = "rows.npy"
_SHARED_BEFORE = np.full(FAN_OUT - 1, LONGEST_SHARED, np.uint16)
"""Of the rows before the first one, which are not there."""


def stride(count: int, most: int) -> int:
    """Of every how many-th row the level is from which `most` of some consecutive rows are read: at least as many are in it.

    Args:
        count: number of rows.
        most: how many are read.
    """
    step = 1
    while step * FAN_OUT * most <= count:
        step *= FAN_OUT
    return step


def spread(count: int, most: int) -> np.ndarray:
    """The places of at most `most` of `count` elements, spread evenly: [n] int64."""
    chosen = min(count, most)
    return np.arange(chosen) * count // max(1, chosen)


def _level_starts(count: int) -> np.ndarray:
    """The first row of each level in the file, then the number of rows of all: [levels + 1] int64."""
    starts = [0, count]
    while count > FAN_OUT:
        count = -(-count // FAN_OUT)
        starts.append(starts[-1] + count)
    return np.array(starts, np.int64)


# --- write ------------------------------------------------------------------------------------------------------------


class RowWriter:
    """Writes `rows.npy` [rows of all levels, 2] uint16, or 3 if token ids have more than 16 bits.

    The first column, or two, are the token that follows, plus 1, 0 = none, the lower 16 bits first. The last one has the number of tokens
    that are shared with the row before (in a higher level: with the row of this level before), at most 31, in the upper 5 bits, and in
    the others the lowest 11 bits of the next token before these, plus 1; 0 = none. The first row shares 0.

    Args:
        work: the folder of the part.
        dtype: of a token plus 1.
    """

    def __init__(self, work: Path, dtype: np.dtype) -> None:
        self._file = NpyWriter(work / _FILE, np.uint16, (dtype.itemsize // 2 + 1,))
        self._before = np.zeros((1, LONGEST_SHARED + 1), dtype)
        self._shared: np.ndarray = _SHARED_BEFORE
        self._left = np.empty((0, *self._file.row_shape), np.uint16)  # rows that are not in the next level yet
        self._level = [self._left]

    def append(self, tokens: np.ndarray) -> None:
        """Add rows by the token after each prefix and its last 64 tokens, [n, 65], see `Prefixes.tokens`."""
        window = np.concatenate([self._before, tokens[:, 1 : LONGEST_SHARED + 2]])
        rows = np.empty((len(tokens), *self._file.row_shape), np.uint16)
        rows[:, :-1] = np.ascontiguousarray(tokens[:, :1]).view(np.uint16)
        compiled(_distinguish)(window, rows[:, -1])
        self._file.append(rows)
        self._before, left = window[-1:], np.concatenate([self._left, rows])
        whole = left[: len(left) // FAN_OUT * FAN_OUT]
        if len(whole):
            self._level.append(_every(whole, self._shared))
            self._shared = whole[1 - FAN_OUT :, -1] >> _TOKEN_BITS
        self._left = left[len(whole) :]

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            count, level = self._file.rows, np.concatenate([*self._level, _every(self._left, self._shared)])
            while count > FAN_OUT:
                self._file.append(level)
                count, level = len(level), _every(level, _SHARED_BEFORE)
        self._file.__exit__(error)


def _every(rows: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Every 32nd of some rows, with the tokens that all shared since the one before.

    Args:
        rows: [n, c].
        shared: by the 31 rows before.
    """
    count = -(-len(rows) // FAN_OUT)
    of_all = np.concatenate([shared, rows[:, -1] >> _TOKEN_BITS])[: count * FAN_OUT]
    sampled = rows[::FAN_OUT].copy()
    sampled[:, -1] &= _TOKEN_MASK
    sampled[:, -1] |= of_all.reshape(count, FAN_OUT).min(axis=1) << _TOKEN_BITS
    return sampled


def _distinguish(window: np.ndarray, out: np.ndarray) -> None:
    """What distinguishes each of some windows [n + 1, 32] from the one before, see `RowWriter`: [n] uint16."""
    for row in range(len(out)):
        shared = 0
        while shared < LONGEST_SHARED and window[row, shared] == window[row + 1, shared] != 0:
            shared += 1
        out[row] = shared << _TOKEN_BITS | window[row + 1, shared] & _TOKEN_MASK


# --- read -------------------------------------------------------------------------------------------------------------


class Rows:
    """The rows of a part of an order, memory-mapped.

    Args:
        folder: of the part.
        count: its prefixes.
    """

    def __init__(self, folder: Path, count: int) -> None:
        opened, self._starts = open_array(folder / _FILE), _level_starts(count)
        fetch(opened, int(self._starts[min(2, len(self._starts) - 1)]))
        stored = np.asarray(opened)
        self._shared = stored[:, -1]
        self._tokens = stored[:, 0] if stored.shape[1] == 2 else stored[:, :-1]

    def following(self, rows: np.ndarray, step: int = 1) -> np.ndarray:
        """The tokens that follow some rows [n]: [n] int64; -1 = none. All are multiples of `step`, a power of 32."""
        level = 0
        while step > 1:
            level, step, rows = level + 1, step // FAN_OUT, rows // FAN_OUT
        tokens = self._tokens[rows + self._starts[level]].astype(np.int64)
        return (tokens if tokens.ndim == 1 else tokens @ np.array([1, 1 << 16])) - 1

    def around(self, row: int, sizes: np.ndarray) -> list[list[int]]:
        """The rows [first, stop) that share their last tokens with a row, for each number of tokens.

        Args:
            row: the row.
            sizes: numbers of tokens, at most 31, the largest first: [n] int64.
        """
        ranges = np.empty((len(sizes), 2), np.int64)
        compiled(_around)(self._shared, self._starts, row, sizes, ranges)
        found: list[list[int]] = ranges.tolist()
        return found

    def deepest(self, first: int, stop: int, text: list[int]) -> tuple[int, int]:
        """Find the row in [first, stop) that shares most last tokens with a text by 11 bits of each token that distinguishes rows.

        Args:
            first: first row.
            stop: the one behind the last row.
            text: backwards.

        Returns:
            the row, and a number in which bit n is set if the search followed token n. If the row and the text share exactly n tokens
            and this bit is set, two tokens have the same 11 bits, and another row may share more. Rows that share at least 31 tokens
            count as equal.
        """
        out = np.empty(2, np.int64)
        compiled(_descend)(self._shared[first:stop], np.array(text[:LONGEST_SHARED], np.int64), out)
        row, followed = out.tolist()
        return first + row, followed


def _around(shared: np.ndarray, starts: np.ndarray, row: int, sizes: np.ndarray, ranges: np.ndarray) -> None:
    """Fill `ranges` [n, 2], see `Rows.around`. A row of a higher level has the fewest tokens that are shared from its predecessor there on."""
    levels, first, stop = len(starts) - 1, row, row + 1
    for number in range(len(sizes)):
        size, level = sizes[number], 0
        while True:  # back to the last row that shares fewer tokens with the one before
            while (
                level + 1 < levels
                and first % FAN_OUT == 0
                and shared[starts[level + 1] + first // FAN_OUT] >> _TOKEN_BITS >= size
            ):
                level, first = level + 1, first // FAN_OUT
            if shared[starts[level] + first] >> _TOKEN_BITS >= size:
                first -= 1
            elif level:
                level, first = level - 1, first * FAN_OUT
            else:
                break
        while True:  # forward to the first such row
            while level + 1 < levels and (stop - 1) % FAN_OUT == 0:
                above = starts[level + 1] + (stop - 1) // FAN_OUT + 1
                if above >= starts[level + 2] or shared[above] >> _TOKEN_BITS < size:
                    break
                level, stop = level + 1, (stop - 1) // FAN_OUT + 1
            if starts[level] + stop < starts[level + 1] and shared[starts[level] + stop] >> _TOKEN_BITS >= size:
                stop += 1
            elif level:
                level, stop = level - 1, (stop - 1) * FAN_OUT + 1
            else:
                break
        ranges[number, 0], ranges[number, 1] = first, stop


def _descend(shared: np.ndarray, text: np.ndarray, out: np.ndarray) -> None:
    """The row and the followed tokens of `Rows.deepest`, among all of these rows.

    The rows are the leaves of a tree, from left to right. The first row below a node is followed until a later one has the text's token.
    """
    best, best_followed, followed, skipped = 0, 0, 0, LONGEST_SHARED
    for row in range(1, len(shared)):
        depth = int(shared[row]) >> _TOKEN_BITS
        if depth > skipped or depth >= LONGEST_SHARED:
            continue  # below a node that was not followed
        skipped = depth
        followed &= (2 << depth) - 1  # of this node and those above
        token = int(text[depth] + 1) & _TOKEN_MASK if depth < len(text) else -1
        if token == int(shared[row]) & _TOKEN_MASK and not followed >> depth & 1:
            followed |= 1 << depth
            best, best_followed, skipped = row, followed, LONGEST_SHARED
    out[0], out[1] = best, best_followed
