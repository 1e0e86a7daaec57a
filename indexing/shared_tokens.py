"""Order candidates by the tokens that they share with the querying chunk, for models that copy from neighbors.

    score of a candidate = sum of idf(x_t) · 2^(-2 (m - 1 - t) / m) over the tokens x_t of the chunk that it contains, t = 0 … m - 1

Embeddings compress the tokens of a chunk; the score compares them exactly. Rare tokens count more, and so do tokens near the end
of the chunk, where the model continues: the first token counts a quarter of the last one. docs/results/neighbors-for-copying.md
compares this order with others.

The score depends only on the chunk and the candidate, so the best of several searches are the best of all.
"""

from dataclasses import dataclass

import numpy as np

from indexing.store.retrieval_set import RetrievalSet
from indexing.threads import one_thread_each

_PAIRS = 4096  # pairs of chunk and candidate compared at a time, so that they stay in the cache


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
        """Choose the k best candidates of each chunk, best first; equal scores by distance, then by id.

        Args:
            tokens: [n, m], the chunks.
            ids: [n, c] int64, candidates; -1 = none.
            distances: [n, c] float32, their distances.
            k: at most c.

        Returns:
            ids [n, k] (-1 = none) and distances [n, k] (+inf).
        """
        best_ids, best_distances = (np.empty((len(ids), k), each.dtype) for each in (ids, distances))
        rows = max(1, _PAIRS // max(1, ids.shape[1]))

        def choose(start: int) -> None:
            block = slice(start, start + rows)
            scores = self.scores(np.asarray(tokens[block]), ids[block])
            order = np.lexsort((ids[block], distances[block], -scores), axis=-1)[:, :k]
            best_ids[block] = np.take_along_axis(ids[block], order, 1)
            best_distances[block] = np.take_along_axis(distances[block], order, 1)

        with one_thread_each() as run:
            run(choose, range(0, len(ids), rows))
        return best_ids, best_distances

    def scores(self, tokens: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Scores [n, c] float32 of candidates [n, c] for chunks [n, m]; -inf for a candidate of -1."""
        (num_chunks, m), num_candidates = tokens.shape, ids.shape[1]
        places = np.exp2(-2 * np.arange(m - 1, -1, -1, dtype=np.float32) / m)
        weights = np.repeat(self.weights[tokens] * places, num_candidates, axis=0)  # [pairs, m]
        wanted = np.repeat(tokens, num_candidates, axis=0)
        present = np.flatnonzero(ids.ravel() >= 0)
        scores = np.full(num_chunks * num_candidates, -np.inf, dtype=np.float32)
        # Pairs are adjacent, so that each operation runs over long rows.
        found = np.ascontiguousarray(
            self.retrieval.chunks(ids.ravel()[present])[0].T, dtype=tokens.dtype
        )  # [m, present]
        shared = np.zeros(len(present), dtype=np.float32)
        for t in range(m):
            shared += weights[present, t] * (found == wanted[present, t]).any(axis=0)
        scores[present] = shared
        return scores.reshape(ids.shape)
