"""Order candidates by the tokens that they share with the querying chunk, for models that copy from neighbors.

    score of a candidate = sum of w_t over the tokens x_t of the chunk that it contains, t = 0 … m - 1
    w_t = idf(x_t) · 2^(-2 (m - 1 - t) / m), halved for each neighbor chosen before that contains x_t

Embeddings compress the tokens of a chunk; the score compares them exactly. Rare tokens count more, and so do tokens near the end
of the chunk, where the model continues: the first token counts a quarter of the last one. Neighbors are chosen one after another,
so that each adds what the ones before lack. docs/results/which-neighbors.md compares this order with others.
"""

from dataclasses import dataclass

import numpy as np

from indexing.index.exact_search import order_by_distance
from indexing.machine import for_each
from indexing.store.retrieval_set import RetrievalSet

_PAIRS = 4096  # pairs of chunk and candidate scored at a time, so that they stay in the cache
_READ_PAIRS = 32_768  # pairs whose tokens are read at a time
_TABLE = 2**18  # masks of tokens at a time, 2 MB: five chunks with a vocabulary of 50,000
_WORD = 64  # tokens of a chunk in a mask
_BITS = np.uint8(1) << np.arange(8, dtype=np.uint8)  # of a byte, the lowest first
_SEEN = np.float32(0.5)  # what a token loses of its weight for each neighbor that contains it


@dataclass(frozen=True)
class SharedTokens:
    """The order by shared tokens.

    Attributes:
        weights: inverse document frequency of each token, [vocabulary] float32; 0 for special tokens, padding included.
        retrieval: the chunks that ids of candidates name.
    """

    weights: np.ndarray
    retrieval: RetrievalSet

    def best(self, tokens: np.ndarray, ids: np.ndarray, distances: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Choose k candidates of each chunk, one after another; of equal scores the nearest, then the smallest id.

        Args:
            tokens: [n, m], the chunks.
            ids: [n, c] int64, candidates; -1 = none.
            distances: [n, c] float32, their distances; +inf for none.
            k: at most c.

        Returns:
            ids [n, k] (-1 = none) and distances [n, k] (+inf).
        """
        distances, ids = order_by_distance(distances, ids)
        chosen = np.empty((len(ids), k), dtype=np.int64)
        rows = max(1, _READ_PAIRS // max(1, ids.shape[1]))

        def choose(start: int) -> None:
            block = slice(start, start + rows)
            chosen[block] = self._choose(np.asarray(tokens[block]), ids[block], k)

        for_each(choose, range(0, len(ids), rows))
        return np.take_along_axis(ids, chosen, 1), np.take_along_axis(distances, chosen, 1)

    def _choose(self, tokens: np.ndarray, ids: np.ndarray, k: int) -> np.ndarray:
        """Columns [n, k] of the chosen candidates; missing ones are last."""
        (n, m), columns = tokens.shape, np.empty((len(ids), k), dtype=np.int64)
        positions = np.exp2(-2 * np.arange(m - 1, -1, -1, dtype=np.float32) / m)
        weights = self.weights[tokens.T] * positions[:, None]  # [m, n]
        bits = self._shared(tokens, ids)
        step = max(1, _PAIRS // max(1, ids.shape[1]))
        for start in range(0, n, step):
            block = slice(start, start + step)
            # Pairs are adjacent, so that each operation runs over long rows.
            shared = (bits[:, None, block] & _BITS[:, None, None]) != 0
            shared = shared.reshape(-1, *shared.shape[2:])[:m].astype(np.float32)
            columns[block] = _best_columns(shared, weights[:, block].copy(), ids[block] >= 0, k)
        return columns

    def _shared(self, tokens: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Which tokens of the chunks [n, m] are in the candidates [n, c]: uint8 [⌈m/64⌉ · 8, n, c], one bit for each token, the lowest
        bit first; 0 for a candidate of -1.

        For each token of the vocabulary, a table has the bits of its places in a chunk. The masks of a candidate's tokens are joined.
        """
        (n, m), c = tokens.shape, ids.shape[1]
        candidates = self.retrieval.tokens(ids.ravel()).reshape(n, c * m)
        words = np.zeros((-(-m // _WORD), n, c), dtype="<u8")
        step = max(1, min(n, _TABLE // len(self.weights)))  # chunks at a time
        table = np.zeros((step, len(self.weights)), dtype="<u8")
        for start in range(0, n, step):
            block, rows = slice(start, start + step), np.arange(min(step, n - start))[:, None]
            positions = candidates[block] + rows * len(self.weights)
            for word, first in zip(words, range(0, m, _WORD), strict=True):
                some = tokens[block, first : first + _WORD]
                np.bitwise_or.at(table, (rows, some), np.uint64(1) << np.arange(some.shape[1], dtype=np.uint64))
                word[block] = np.bitwise_or.reduce(table.ravel()[positions].reshape(-1, c, m), axis=2)
                table[rows, some] = 0
        words[:, ids < 0] = 0
        in_bytes = np.moveaxis(words.view(np.uint8).reshape(*words.shape, 8), -1, 1)  # [words, 8, n, c]
        return np.ascontiguousarray(in_bytes).reshape(-1, n, c)


def _best_columns(shared: np.ndarray, weights: np.ndarray, present: np.ndarray, k: int) -> np.ndarray:
    """Columns [n, k] of candidates [n, c], chosen one after another.

    Args:
        shared: [m, n, c] float32, whether candidate c of chunk n contains the chunk's token m.
        weights: [m, n] float32 of the tokens; they are changed.
        present: [n, c], false for a missing candidate.
        k: columns.
    """
    rows, columns = np.arange(len(present)), np.empty((len(present), k), dtype=np.int64)
    excluded = np.where(present, np.float32(0), np.float32(-1))
    for rank in range(k):
        # einsum, not matmul: BLAS rounds differently with other numbers of threads.
        best = (np.einsum("tnc,tn->nc", shared, weights) + excluded).argmax(axis=1)
        columns[:, rank], excluded[rows, best] = best, -np.inf
        weights *= 1 - _SEEN * shared[:, rows, best]
    return columns
