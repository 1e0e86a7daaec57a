"""Order candidates by the tokens that they share with the querying chunk, for models that copy from neighbors.

    score of a candidate = sum of w_t over the tokens x_t of the chunk that it contains, t = 0 … m - 1
    w_t = idf(x_t) · 2^(-2 (m - 1 - t) / m), halved for each neighbor chosen before that contains x_t

Embeddings compress the tokens of a chunk; the score compares them exactly. Rare tokens count more, and so do tokens
near the end of the chunk, where the model continues: the first token counts a quarter of the last one. Neighbors are
chosen one after another, so that each adds what the ones before lack. docs/results/which-neighbors.md compares this
order with others.
"""

from dataclasses import dataclass

import numpy as np

from indexing.machine import compiled, for_each
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet

_READ_PAIRS = 32_768  # pairs of chunk and candidate whose tokens are read at a time
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

    def best(self, tokens: np.ndarray, ids: np.ndarray, k: int) -> np.ndarray:
        """Choose k candidates of each chunk, one after another; of equal scores the first.

        Args:
            tokens: [n, m], the chunks.
            ids: [n, c] int64, candidates; -1 = none.
            k: at most c.

        Returns:
            ids [n, k], -1 = none.
        """
        chosen = np.empty((len(ids), k), dtype=np.int64)
        rows = max(1, _READ_PAIRS // max(1, ids.shape[1]))

        def choose(start: int) -> None:
            block = slice(start, start + rows)
            chosen[block] = self._columns(np.asarray(tokens[block]), ids[block], k)

        for_each(choose, range(0, len(ids), rows))
        return np.take_along_axis(ids, chosen, 1)

    def _columns(self, tokens: np.ndarray, ids: np.ndarray, k: int) -> np.ndarray:
        """Columns [n, k] of the chosen candidates; missing ones are last."""
        (n, m), c = tokens.shape, ids.shape[1]
        positions = np.exp2(-2 * np.arange(m - 1, -1, -1, dtype=np.float32) / m)
        candidates, columns = self.retrieval.tokens(ids.ravel()).reshape(n, c, m), np.empty((n, k), dtype=np.int64)
        for read in (tokens, candidates):  # compiled code would read outside of the array
            if read.max(initial=0) >= len(self.weights) or read.min(initial=0) < 0:
                raise InputError(
                    f"chunks contain tokens above the vocabulary of {len(self.weights):,}: a file is damaged. `retro verify "
                    "DATASTORE` names it."
                )
        places = np.zeros(len(self.weights), dtype=np.uint32)
        compiled(_choose)(
            tokens.astype(candidates.dtype), candidates, ids >= 0, self.weights[tokens] * positions, places, columns
        )
        return columns


def _choose(
    tokens: np.ndarray,
    candidates: np.ndarray,
    present: np.ndarray,
    weights: np.ndarray,
    places: np.ndarray,
    columns: np.ndarray,
) -> None:
    """Choose candidates one after another.

    Args:
        tokens: [n, m].
        candidates: [n, c, m], their tokens.
        present: [n, c], false for a missing candidate.
        weights: [n, m] float32 of the tokens; they are changed.
        places: [vocabulary] uint32, zeros.
        columns: [n, k] int64, receives the chosen candidates.
    """
    (n, m), c = tokens.shape, present.shape[1]
    shared = np.empty((m + 1, c), dtype=np.float32)  # 1 if a candidate contains a token; row 0: other tokens
    scores, penalties = np.empty(c, dtype=np.float32), np.empty(c, dtype=np.float32)
    for row in range(n):
        for t in range(m):  # of equal tokens the first
            if places[tokens[row, t]] == 0:
                places[tokens[row, t]] = t + 1
        for t in range(m + 1):
            for j in range(c):
                shared[t, j] = 0
        for j in range(c):
            penalties[j] = 0 if present[row, j] else 1
            if present[row, j]:
                for i in range(m):
                    shared[places[candidates[row, j, i]], j] = 1
        for rank in range(columns.shape[1]):
            for j in range(c):
                scores[j] = 0
            for t in range(m):  # in this order, since sums of floats depend on it
                weight, place = weights[row, t], places[tokens[row, t]]
                for j in range(c):
                    scores[j] += weight * shared[place, j]
            best = 0
            for j in range(c):
                scores[j] -= penalties[j]
                if scores[j] > scores[best]:
                    best = j
            columns[row, rank] = best
            penalties[best] = np.inf
            for t in range(m):
                weights[row, t] *= 1 - _SEEN * shared[places[tokens[row, t]], best]
        for t in range(m):
            places[tokens[row, t]] = 0
