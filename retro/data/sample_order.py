"""The order of training data, as pure functions of a seed and a sample number.

So the position in the data is one integer, the order does not depend on the number of processes, and no permutation is
held in memory: a corpus can have more sequences than memory has bytes.
"""

from functools import lru_cache

import numpy as np

from indexing.splitmix64 import mix

_SMALL = 256


def permuted(position: int, size: int, seed: int) -> int:
    """The element at `position` of a pseudo-random permutation of `range(size)`, without computing the whole
    permutation.

    A four-round Feistel network on the next even number of bits is applied until the result is below `size`, on average
    fewer than four times. Below about a hundred elements such a network is not uniform over permutations, so small
    ranges are sorted by random keys.
    """
    if size <= _SMALL:
        return _shuffled(size, seed)[position]
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for number in range(4):
            left, right = right, left ^ (mix(right ^ mix(seed * 4 + number)) & mask)
        position = (left << half) | right
        if position < size:
            return position


@lru_cache(maxsize=16)  # an epoch reads every position of one permutation
def _shuffled(size: int, seed: int) -> list[int]:
    """A permutation of `range(size)`."""
    return sorted(range(size), key=lambda element: mix(mix(seed) + element))


def mixture(sample: int, weights: tuple[float, ...], seed: int) -> tuple[int, int]:
    """The datastore of a sample, and the number of earlier samples from that datastore.

    Blocks of 1024 samples are divided by the weights, with cumulative rounding so that every prefix of the stream
    follows the weights, and shuffled.
    """
    if len(weights) == 1:
        return 0, sample
    block, position = divmod(sample, 1024)
    chosen, before = _block(block, weights, seed)
    return int(chosen[position]), int(before[position])


@lru_cache(maxsize=16)  # 1024 consecutive samples read one block
def _block(block: int, weights: tuple[float, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The datastore of each sample of a block, and the number of earlier samples from it: both [1024] int64."""
    shares = np.cumsum(weights) / np.sum(weights)
    dealt = np.diff(np.rint(np.outer([block * 1024, (block + 1) * 1024], shares)).astype(np.int64), prepend=0, axis=1)
    chosen = np.repeat(np.arange(len(weights)), dealt[1] - dealt[0])
    chosen = np.random.default_rng([seed, block]).permutation(chosen)
    before = np.empty(len(chosen), dtype=np.int64)
    for datastore, first in enumerate(dealt[0]):
        rows = np.flatnonzero(chosen == datastore)
        before[rows] = first + np.arange(len(rows))
    return chosen, before
