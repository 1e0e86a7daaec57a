"""Compare documents by sets of n-grams: exact Jaccard similarity, and MinHash bands to find similar pairs.

    text ──units──► hashes of words ──gram_set──► sorted set of 64-bit n-grams ──Sketch──► MinHash bands

A unit is a lower-cased word, or one character of a script without spaces (Chinese, Japanese, Thai …). So 13 units are
about a sentence in either kind of script. Punctuation and blanks do not count.
"""

import re
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from indexing.splitmix64 import finalize
from indexing.store.errors import InputError

# Thai and Lao, Burmese, Khmer, radicals to kana and bopomofo, and the blocks of Han characters.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_UNIT = re.compile(rf"(?=\w)[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_SEED = 1
_BLOCK_GRAMS = 4096  # grams permuted at a time, so that memory does not grow with the document
_MISSED = 0.01  # accepted probability that a pair exactly at the threshold shares no band


def units(text: str) -> np.ndarray:
    """The words of a text, or its characters in scripts without spaces, in order: [units] uint64 hashes."""
    words = _UNIT.findall(text.lower())
    return np.fromiter(map(zlib.crc32, map(str.encode, words)), np.uint64, len(words))


def gram_set(text: str, ngram: int) -> np.ndarray:
    """The distinct runs of `ngram` units in a text: [grams] uint64 hashes, sorted.

    A text with fewer units is one gram. A text without units has none.
    """
    hashes = units(text)
    if not len(hashes):
        return hashes
    length = min(ngram, len(hashes))
    grams = np.zeros(len(hashes) - length + 1, np.uint64)
    for offset, factor in enumerate(_factors(length)):
        grams += hashes[offset : offset + len(grams)] * factor
    return np.unique(finalize(grams))


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """|A ∩ B| / |A ∪ B| of two sorted sets of grams; 0 if both are empty."""
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / max(1, len(first) + len(second) - shared)


def banding(threshold: float, permutations: int) -> tuple[int, int] | None:
    """Choose the shape of MinHash bands: (number, rows), or None if there are too few permutations for the threshold.

    Two sets share a given band with probability J^rows. Of all shapes that miss at most 1 in 100 pairs exactly at the
    threshold, this one has the most rows, and so the fewest pairs that share a band by chance.
    """
    for rows in range(permutations, 0, -1):
        bands = permutations // rows
        if (1 - threshold**rows) ** bands <= _MISSED:
            return bands, rows
    return None


@dataclass(frozen=True)
class Sketch:
    """MinHash bands of gram sets. Similar sets share a band with high probability.

    Attributes:
        bands: bands per set.
        rows: MinHash values per band.
    """

    bands: int
    rows: int

    @cached_property
    def _empty(self) -> Any:
        """The MinHash of the empty set."""
        try:
            from datasketch import MinHash
        except ImportError as error:
            raise InputError("[dedup] needs the package datasketch: pip install 'retro[dedup]'.") from error
        # The scheme is fixed because it determines stored bytes. Grams are hashes already, so they are not hashed
        # again.
        return MinHash(self.bands * self.rows, seed=_SEED, scheme="affine32", hashfunc=int)

    def __call__(self, grams: np.ndarray) -> np.ndarray:
        """A set [grams] uint64 → the hashes of its bands [bands] uint64."""
        minhash = self._empty.copy()
        upper = grams >> np.uint64(32)
        for start in range(0, len(upper), _BLOCK_GRAMS):
            minhash.update_batch(upper[start : start + _BLOCK_GRAMS].tolist())
        values = minhash.hashvalues.astype(np.uint64).reshape(self.bands, self.rows)
        return finalize((values * _factors(self.rows)).sum(axis=1, dtype=np.uint64))


def _factors(count: int) -> np.ndarray:
    """[number] odd uint64 constants."""
    return finalize(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)
