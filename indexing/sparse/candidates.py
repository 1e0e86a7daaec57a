"""Candidates by terms under any condition, and the fusion of sparse and dense candidates.

terms of a query ─► sparse index ─► best chunks ─► drop those that the condition excludes ─► too few left? search deeper
candidates by terms ┐
candidates by vectors ┴─► one list: BM25 as a fraction of its maximum + weight · cosine
"""

from collections.abc import Sequence

import numpy as np

from indexing.similarity.candidates import Condition, allowed_first
from indexing.sparse.index import SparseIndex

_AGREEING = 8  # best candidates of each search that are compared


def find_by_terms(
    queries: Sequence[Sequence[str]],
    index: SparseIndex,
    k: int,
    condition: Condition,
    among: Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the chunks with the highest BM25 that a condition does not exclude.

    Args:
        queries: the terms of n queries.
        index: the index.
        k: candidates for each query.
        condition: which candidates count.
        among: chunk ids to search; see `SparseIndex.search`.

    Returns:
        ids [n, k] int64, best first, and scores [n, k] float32; -1 and 0 if fewer chunks contain a term.
    """
    ids = np.full((len(queries), k), -1, dtype=np.int64)
    scores = np.zeros((len(queries), k), dtype=np.float32)
    rows, depth = np.arange(len(queries)), k
    while len(rows):
        hits, best = index.search([queries[row] for row in rows], depth, among)
        ids[rows], scores[rows] = allowed_first(condition, rows, hits, best, k)
        rows, depth = rows[(ids[rows, -1] < 0) & (hits[:, -1] >= 0)], 4 * depth
    return ids, scores


def fuse(
    sparse: tuple[np.ndarray, np.ndarray, np.ndarray],
    dense: tuple[np.ndarray, np.ndarray],
    largest: np.ndarray,
    weights: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join the candidates of both searches, best first: BM25 as a fraction of its maximum, plus the weighted cosine.

    A chunk that only the dense search found counts as one without the terms.

    Args:
        sparse: ids [n, a] int64 (-1 = none), BM25 [n, a] and squared distances [n, a] float32, best first.
        dense: ids [n, b] int64 (-1 = none) and squared distances [n, b] float32, nearest first.
        largest: [n] float32, the maximum of each query's BM25.
        weights: [n] float32, weight of each query's cosines.

    Returns:
        ids [n, a + b] int64 without repetition (-1 = none), scores [n, a + b] float32 (-inf) and distances [n, a + b]
        float32 (+inf).
    """
    repeated = (dense[0][:, :, None] == sparse[0][:, None, :]).any(axis=2)  # [n, b]
    ids = np.concatenate([sparse[0], np.where(repeated, -1, dense[0])], axis=1)
    distances = np.where(ids >= 0, np.concatenate([sparse[2], dense[1]], axis=1), np.float32(np.inf))
    bm25 = np.where(sparse[0] >= 0, sparse[1], 0) / np.maximum(largest, 1e-6)[:, None]
    bm25 = np.pad(bm25, ((0, 0), (0, dense[0].shape[1])))
    cosines = np.where(ids >= 0, 1 - distances / 2, 0)
    scores = np.where(ids >= 0, bm25 + weights[:, None] * cosines, -np.inf).astype(np.float32)
    order = np.lexsort((ids, -scores), axis=-1)
    ids, scores, distances = (np.take_along_axis(table, order, 1) for table in (ids, scores, distances))
    return ids, scores, distances


def agreement(
    sparse: tuple[np.ndarray, np.ndarray], dense: tuple[np.ndarray, np.ndarray], usual: np.ndarray
) -> np.ndarray:
    """How near the best chunks by terms are to each query, from 0 (as any chunk) to 1 (as the nearest ones).

    Args:
        sparse: candidates by terms, ids [n, c] int64 (-1 = none) and squared distances [n, c] float32, best first.
        dense: candidates by embeddings, the same.
        usual: [n] float32, mean cosine of each query and any chunk.

    Returns:
        [n] float32; 1 for a query whose terms no chunk contains.
    """
    nearest = _mean_cosine(*dense)
    return np.clip((_mean_cosine(*sparse) - usual) / np.maximum(nearest - usual, 1e-6), 0, 1).astype(np.float32)


def _mean_cosine(ids: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Mean cosine [n] of the first candidates of each query; 1 without any."""
    present = ids[:, :_AGREEING] >= 0
    cosines = np.where(present, 1 - distances[:, :_AGREEING] / 2, 0)
    count = present.sum(axis=1)
    return np.where(count, cosines.sum(axis=1) / np.maximum(count, 1), 1)
