"""What a search reads of an order: for every prefix the token that follows it, and what distinguishes it from the one
before.

    rows         0      1      2      3  …            of a part, in order
    every 32nd   0                        32     …    the same for fewer rows, in the same file behind them
    every 1024th 0                               …    and so on, until 32 are left

Prefixes that end in the same tokens are consecutive rows. The number of tokens that a row shares with the one before
gives their first and last one (as in a suffix tree), and the next token behind these, compared without reading any
text, leads to the longest match (a blind search, as in String B-trees: Ferragina & Grossi 1999). Tokens that follow
many rows are read from the level that has few of them. So both read a few adjacent rows, in a datastore of any size.
"""

from pathlib import Path

import numpy as np

from indexing.machine import compiled
from indexing.store.files import NpyWriter
from indexing.store.ranged_reads import check_array
from indexing.store.sharded_array import fetch, open_array

FAN_OUT = 32
"""Rows of a level for one row of the next."""
LONGEST_SHARED = 31
"""Tokens that a row shares with the one before count up to this many."""
TOKEN_BITS = 11
"""Bits of the token that distinguishes a row from the one before."""
TOKEN_MASK = (1 << TOKEN_BITS) - 1
_FILE = "rows.npy"
_SHARED_BEFORE = np.full(FAN_OUT - 1, LONGEST_SHARED, np.uint16)
"""Of the rows before the first one, which are not there."""


def stride(count: int, most: int) -> int:
    """The level from which `most` of `count` consecutive rows are read, as the distance of its rows: a power of 32.

    It is the smallest level that still has at least `most` of these rows.

    Args:
        count: number of rows.
        most: number of rows that are read.
    """
    step = 1
    while step * FAN_OUT * most <= count:
        step *= FAN_OUT
    return step


def spread(count: int, most: int) -> np.ndarray:
    """The places of at most `most` of `count` elements, spread evenly: [n] int64."""
    chosen = min(count, most)
    return np.arange(chosen) * count // max(1, chosen)


def open_rows(folder: Path, count: int, token_dtype: np.dtype, level: int = 1) -> np.ndarray:
    """The rows of all levels of a part, memory-mapped. All but the first levels are read ahead.

    Args:
        folder: of the part.
        count: its prefixes.
        token_dtype: of a token plus 1.
        level: the first one that is read ahead; 1 has a 32nd of the rows.

    Raises:
        InputError: the file is missing or damaged.
    """
    opened, levels = open_array(folder / _FILE), [count]
    while levels[-1] > FAN_OUT:
        levels.append(-(-levels[-1] // FAN_OUT))
    check_array(folder / _FILE, opened, np.uint16, (_columns(token_dtype),), sum(levels))
    fetch(opened, sum(levels[:level]))
    return opened


def _columns(token_dtype: np.dtype) -> int:
    """Numbers of a row: those of the token that follows, and one more."""
    return token_dtype.itemsize // 2 + 1


class RowWriter:
    """Writes `rows.npy` [rows of all levels, 2] uint16, or 3 if token ids have more than 16 bits.

    The first column, or two, are the token that follows, plus 1, 0 = none, the lower 16 bits first. The last one has
    the number of tokens that are shared with the row before (in a higher level: with the row of this level before), at
    most 31, in the upper 5 bits, and in the others the lowest 11 bits of the next token before these, plus 1; 0 = none.
    The first row shares 0.

    Args:
        work: the folder of the part.
        dtype: of a token plus 1.
    """

    def __init__(self, work: Path, dtype: np.dtype) -> None:
        self._file = NpyWriter(work / _FILE, np.uint16, (_columns(dtype),))
        self._before = np.zeros((1, LONGEST_SHARED + 1), dtype)
        self._shared: np.ndarray = _SHARED_BEFORE
        self._left = np.empty((0, *self._file.row_shape), np.uint16)  # rows that are not in the next level yet
        self._level = [self._left]

    def append(self, tokens: np.ndarray) -> None:
        """Add rows by the token after each prefix and its last 64 tokens, [n, 65], see `Prefixes.tokens`."""
        # [n + 1, 32]: the last row of the call before comes first, so that every new row has one to be compared with.
        window = np.concatenate([self._before, tokens[:, 1 : LONGEST_SHARED + 2]])
        rows = np.empty((len(tokens), *self._file.row_shape), np.uint16)
        # A token of 32 bits is two numbers of 16 bits, the lower one first.
        rows[:, :-1] = np.ascontiguousarray(tokens[:, :1]).view(np.uint16)
        compiled(_distinguish)(window, rows[:, -1])
        self._file.append(rows)
        self._before, left = window[-1:], np.concatenate([self._left, rows])
        # The next level is made of whole groups of 32. It is kept in memory, as it follows all rows in the file.
        whole = left[: len(left) // FAN_OUT * FAN_OUT]
        if len(whole):
            self._level.append(_every(whole, self._shared))
            self._shared = whole[1 - FAN_OUT :, -1] >> TOKEN_BITS
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
    # Shifted by 31, the i-th group of 32 ends with row 32 i. Its least number is what row 32 i shares with row 32 (i -
    # 1), since that is shared from row to row.
    of_all = np.concatenate([shared, rows[:, -1] >> TOKEN_BITS])[: count * FAN_OUT]
    sampled = rows[::FAN_OUT].copy()
    sampled[:, -1] &= TOKEN_MASK
    sampled[:, -1] |= of_all.reshape(count, FAN_OUT).min(axis=1) << TOKEN_BITS
    return sampled


def _distinguish(window: np.ndarray, out: np.ndarray) -> None:
    """What distinguishes each of some windows [n + 1, 32] from the one before, see `RowWriter`: [n] uint16."""
    for row in range(len(out)):
        shared = 0
        while shared < LONGEST_SHARED and window[row, shared] == window[row + 1, shared] != 0:
            shared += 1
        out[row] = shared << TOKEN_BITS | window[row + 1, shared] & TOKEN_MASK
