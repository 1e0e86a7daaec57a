"""Where the ends of many sorted texts occur in an order: a binary search for all of them at a time.

    texts in order ─ those that end in the same 1, 2, 3, 4, 6, 10, 14, 16, 20 … 64 tokens are one search ─► rows of the order

Each search looks only at the rows of the next shorter end, and compares one number of up to 8 bytes at a step. So time grows with the
texts and the logarithm of the order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from indexing.store.deletions import inside
from indexing.suffixes.order import LONGEST, Prefixes
from indexing.suffixes.texts import Texts
from indexing.suffixes.votes import LENGTHS


@dataclass(frozen=True)
class Occurrences:
    """Occurrences of the ends of n texts in an order.

    Attributes:
        order: the order, of training documents.
        bounds: the rows [first, stop) that end in the last 1, 2, 3, 4, 6, 10 and 16 tokens of each text, [7, 2, n] int64; without
            meaning for texts that are shorter.
        shared: tokens of the longest match with a document that is not deleted, [n] int64.
        following: the token after it, [n] int64; -1 = none.
    """

    order: Prefixes
    bounds: np.ndarray
    shared: np.ndarray
    following: np.ndarray


def occurrences_of(order: Prefixes, window: np.ndarray, texts: np.ndarray) -> Occurrences:
    """Find the last tokens of texts.

    Args:
        order: the order, of training documents.
        window: the last tokens of texts in order, [n, 64], see `ShardText.windows`.
        texts: the numbers [t] of those that are searched; the others get no occurrences.
    """
    out = Occurrences(
        order, np.zeros((len(LENGTHS), 2, len(window)), np.int64), *np.array([[0], [-1]]).repeat(len(window), axis=1)
    )
    window = window[texts]
    low, high = np.zeros(len(window), np.int64), np.full(len(window), len(order))
    common, length = shared_tokens(window[1:], window[:-1]), 0
    while length < LONGEST and (low < high).any():
        stop = min([length + order.texts.head_tokens, *(known for known in (*LENGTHS, LONGEST) if known > length)])
        begins = np.append(True, common < stop)  # texts that end in the same tokens are searched once
        first, group = np.flatnonzero(begins), np.cumsum(begins) - 1
        found = _narrowed(order, low[first], high[first], window[first], length, stop)
        low, high = found[0][group], found[1][group]
        if stop in LENGTHS:
            out.bounds[LENGTHS.index(stop)][:, texts] = low, high
        length = stop
    out.shared[texts], out.following[texts] = _nearest(order, window, low)
    return out


def shared_tokens(window: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The number of equal last tokens of pairs of texts: [n, 64] and [n, 64] → [n] int64."""
    shared = np.empty(len(window), np.int64)
    for rows in (slice(row, row + (1 << 16)) for row in range(0, len(window), 1 << 16)):
        different = (window[rows] != other[rows]) | (window[rows] == 0)
        shared[rows] = np.where(different.any(axis=1), different.argmax(axis=1), window.shape[1])
    return shared


def _narrowed(
    order: Prefixes, low: np.ndarray, high: np.ndarray, window: np.ndarray, skip: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rows [low, high) of texts whose tokens from `skip` to `stop` before the end are those of each text: [n] and [n].

    Both are the row where the text would be inserted if there are none.
    """
    width, bits = order.texts.head_tokens, 8 * order.texts.dtype.itemsize
    shifts = [np.uint64(bits * (width - 1 - place)) for place in range(stop - skip)]
    wanted = sum(
        (window[:, skip + place].astype(np.uint64) << shift for place, shift in enumerate(shifts)),
        start=np.zeros(len(window), np.uint64),
    )
    unused = np.uint64(bits * (width - (stop - skip)))

    def numbers(rows: np.ndarray) -> np.ndarray:
        positions = order.take(rows)
        return order.texts.words(positions, order.texts.available(positions), skip) >> unused << unused

    first = _first_row(low, high, lambda rows, texts: numbers(rows) >= wanted[texts])
    return first, _first_row(first, high, lambda rows, texts: numbers(rows) > wanted[texts])


def _first_row(
    low: np.ndarray, high: np.ndarray, reached: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """The first of the rows [low, high) of each text that is `reached(rows, texts)`, which holds from some row on; `high` if none is."""
    low, high = low.copy(), high.copy()
    while len(texts := np.flatnonzero(low < high)):
        middle = (low[texts] + high[texts]) // 2
        there = reached(middle, texts)
        high[texts[there]], low[texts[~there]] = middle[there], middle[~there] + 1
    return low


def _nearest(order: Prefixes, window: np.ndarray, inserted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shared tokens and following token of the longest match next to the rows where texts would be inserted: [n] and [n] int64."""
    shared, following = np.zeros(len(window), np.int64), np.full(len(window), -1)
    for row, step in ((inserted - 1, -1), (inserted, 1)):
        row = _not_deleted(order, row, step)
        texts = np.flatnonzero((row >= 0) & (row < len(order)))
        positions = order.take(row[texts])
        own = shared_tokens(window[texts], order.texts.windows(positions, LONGEST))
        better = own > shared[texts]
        shared[texts[better]] = own[better]
        following[texts[better]] = order.texts.following(positions[better])
    return shared, following


def _not_deleted(order: Prefixes, rows: np.ndarray, step: int) -> np.ndarray:
    """The next rows up or down that are not of deleted documents; beyond the order if there are none."""
    rows, left = rows.copy(), np.arange(len(rows))
    while len(order.texts.split.deleted) and len(left):
        left = left[(rows[left] >= 0) & (rows[left] < len(order))]
        left = left[is_deleted(order.texts, order.take(rows[left]))]
        rows[left] += step
    return rows


def is_deleted(texts: Texts, positions: np.ndarray) -> np.ndarray:
    """Whether positions are in deleted documents: [n] → [n] bool."""
    return inside(positions // texts.split.chunk_length, texts.split.deleted)
