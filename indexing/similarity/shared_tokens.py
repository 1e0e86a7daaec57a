"""Order candidates by the tokens that they share with the querying chunk, for models that copy from neighbors.

    score of a candidate = sum of w_t over the tokens x_t of the chunk that it contains, t = 0 … m - 1
    w_t = idf(x_t) · 2^(-2 (m - 1 - t) / m), halved for each neighbor chosen before that contains x_t

Embeddings compress the tokens of a chunk; the score compares them exactly. Rare tokens count more, and so do tokens near the end
of the chunk, where the model continues: the first token counts a quarter of the last one. Neighbors are chosen one after another,
so that each adds what the ones before lack. docs/results/neighbors-for-copying.md compares this order with others.
"""

from dataclasses import dataclass

import numpy as np

from indexing.index.exact_search import order_by_distance
from indexing.machine import one_thread_each
from indexing.store.retrieval_set import RetrievalSet

_PAIRS = 4096  # pairs of chunk and candidate compared at a time, so that they stay in the cache
_SEEN = np.float32(0.5)  # factor of a token for each neighbor that contains it


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
        rows = max(1, _PAIRS // max(1, ids.shape[1]))

        def choose(start: int) -> None:
            block = slice(start, start + rows)
            chosen[block] = self._choose(np.asarray(tokens[block]), ids[block], k)

        with one_thread_each() as run:
            run(choose, range(0, len(ids), rows))
        return np.take_along_axis(ids, chosen, 1), np.take_along_axis(distances, chosen, 1)

    def _choose(self, tokens: np.ndarray, ids: np.ndarray, k: int) -> np.ndarray:
        """Columns [n, k] of the chosen candidates; missing ones are last."""
        m, rows = tokens.shape[1], np.arange(len(ids))
        weights = self.weights[tokens] * np.exp2(-2 * np.arange(m - 1, -1, -1, dtype=np.float32) / m)  # [n, m]
        shared = self._shared(tokens, ids)
        columns, excluded = np.empty((len(ids), k), dtype=np.int64), np.where(ids < 0, np.float32(-1), 0)
        for number in range(k):
            # einsum, not matmul: BLAS rounds differently with other numbers of threads.
            best = (np.einsum("tnc,nt->nc", shared, weights) + excluded).argmax(axis=1)
            columns[:, number], excluded[rows, best] = best, -np.inf
            weights *= np.where(shared[:, rows, best].T > 0, _SEEN, 1)
        return columns

    def _shared(self, tokens: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Which tokens of the chunks [n, m] are in the candidates [n, c]: float32 [m, n, c], 0 for a candidate of -1."""
        present = np.flatnonzero(ids.ravel() >= 0)
        wanted = tokens[present // ids.shape[1]]  # [present, m]
        # Pairs are adjacent, so that each operation runs over long rows.
        held = np.ascontiguousarray(
            self.retrieval.chunks(ids.ravel()[present])[0].T, dtype=tokens.dtype
        )  # [m, present]
        shared = np.zeros((tokens.shape[1], ids.size), dtype=np.float32)
        wanted = np.ascontiguousarray(wanted.T)
        step = max(1, _PAIRS // max(1, len(present)))  # tokens at a time
        for start in range(0, len(wanted), step):
            some = wanted[start : start + step, None]
            shared[start : start + step, present] = (held == some).any(axis=1)
        return shared.reshape(-1, *ids.shape)
