"""Measure how much of a chunk a retrieved text repeats word for word: the paper's measure of leakage.

Imports only numpy, because the neighbor search, training, evaluation and reports all use it.
"""

import numpy as np


def longest_common_substring(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Length of the longest token run that both have, for each pair: [n, s] and [n, t] → [n] int64.

    Negative tokens (the caller may mark padding so) match nothing.
    """
    if not first.size or not second.size:
        return np.zeros(len(first), dtype=np.int64)
    # Run lengths are bytes if they fit, and pairs are adjacent, so all data stays in cache and a batch takes
    # milliseconds.
    counts = np.uint8 if first.shape[1] < 256 else np.uint32
    # Different values for the padding of the two sides, which therefore never match.
    columns = np.ascontiguousarray(np.where(first < 0, -1, first).T, dtype=np.int32)  # [s, n]
    others = np.ascontiguousarray(np.where(second < 0, -2, second).T, dtype=np.int32)  # [t, n]
    before, run = np.zeros((2, len(others) + 1, others.shape[1]), dtype=counts)
    best, same = np.zeros(others.shape, dtype=counts), np.empty(others.shape, dtype=bool)
    for column in columns:
        # A run that ends at t is one token longer than the run that ended at t - 1, one token earlier in `first`.
        np.equal(others, column, out=same)
        np.add(before[:-1], 1, out=run[1:])
        np.multiply(run[1:], same.view(np.uint8), out=run[1:])
        np.maximum(best, run[1:], out=best)
        before, run = run, before
    return best.max(axis=0).astype(np.int64)


def overlap(tokens: np.ndarray, lengths: np.ndarray, neighbors: np.ndarray, neighbor_lengths: np.ndarray) -> np.ndarray:
    """r = s/m of the paper (section 2.7): longest common token substring of chunk and neighbor over the chunk's length.

    Args:
        tokens: [n, m] chunks.
        lengths: [n] real tokens in each.
        neighbors: [n, r] one neighbor each, with or without its continuation.
        neighbor_lengths: [n] real tokens in each.

    Returns:
        [n] float64 between 0 and 1.
    """
    first = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens.astype(np.int64), -1)
    second = np.where(np.arange(neighbors.shape[1]) < neighbor_lengths[:, None], neighbors.astype(np.int64), -2)
    return longest_common_substring(first, second) / np.maximum(lengths, 1)
