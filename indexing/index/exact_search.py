"""Exact distances of stored embeddings: re-rank candidates, search exhaustively, measure recall."""

from collections.abc import Iterator, Sequence

import numpy as np

from indexing.index.floats import to_float32
from indexing.machine import for_each
from indexing.store.datastore import Split
from indexing.store.retrieval_set import RetrievalSet
from indexing.store.sharded_array import ShardedArray

IdRanges = tuple[np.ndarray, np.ndarray]
"""First and stop [n] int64 of a range of chunk ids for each query, such as those of its own document."""

_BLOCK_ROWS = 16_384  # embeddings compared at a time
_BLOCK = 2**20  # components of candidates per thread at a time: 4 MB in float32


def rerank(queries: np.ndarray, ids: np.ndarray, embeddings: ShardedArray) -> tuple[np.ndarray, np.ndarray]:
    """Order candidates by the squared L2 distance of their stored embeddings; equal distances by id.

    Args:
        queries: [n, d] float32.
        ids: [n, c] int64 candidates, -1 = none.
        embeddings: embeddings of the split that the ids name, [chunks, d].

    Returns:
        distances [n, c] float32 ascending, +inf for none, and ids [n, c].
    """
    distances, ordered = np.empty(ids.shape, dtype=np.float32), np.empty_like(ids)
    norms = np.einsum("nd,nd->n", queries, queries)
    step = max(1, _BLOCK // max(1, ids.shape[1] * queries.shape[1]))

    def fill(start: int) -> None:
        block = slice(start, start + step)
        candidates = embeddings.gather(np.maximum(ids[block], 0).ravel())
        vectors = to_float32(candidates).reshape(*ids[block].shape, -1)  # [n, c, d]
        # einsum, not matmul: BLAS rounds differently with other numbers of threads, and stored bytes must not depend on
        # them.
        products = np.einsum("ncd,nd->nc", vectors, queries[block])
        squared = norms[block, None] - 2 * products + np.einsum("ncd,ncd->nc", vectors, vectors)
        distances[block], ordered[block] = order_by_distance(np.maximum(squared, 0), ids[block])

    for_each(fill, range(0, len(queries), step))
    return distances, ordered


def distances_to(queries: np.ndarray, ids: np.ndarray, retrieval: RetrievalSet) -> np.ndarray:
    """Squared L2 distances [n, c] float32 of queries [n, d] to chunks, ids [n, c] int64 of a retrieval set; +inf for
    -1.

    Embeddings are read in the order of their ids: many queries together read a file once and in sequence.
    """
    distances = np.full(ids.size, np.inf, dtype=np.float32)
    pairs = np.flatnonzero(ids.ravel() >= 0)
    pairs = pairs[np.argsort(ids.ravel()[pairs], kind="stable")]
    step = max(1, _BLOCK // queries.shape[1])

    def fill(some: np.ndarray) -> None:
        vectors = to_float32(retrieval.embeddings(ids.ravel()[some]))
        distances[some] = np.square(queries[some // ids.shape[1]] - vectors).sum(axis=1)

    for_each(fill, np.split(pairs, range(step, len(pairs), step)))
    return distances.reshape(ids.shape)


def stored_distances(split: Split, chunks: np.ndarray, retrieval: RetrievalSet, ranks: Sequence[int]) -> np.ndarray:
    """Squared L2 distances [n, ranks] float32 of chunks [n] of a split to their stored neighbors of some ranks; +inf
    for none."""
    ids = split.neighbor_ids.gather(chunks)[:, ranks]
    return distances_to(to_float32(split.embeddings.gather(chunks)), ids, retrieval)


def order_by_distance(distances: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort each row by distance, then by id, with missing ids (-1) last, so that the order is deterministic."""
    distances = np.where(ids < 0, np.float32(np.inf), distances)
    order = np.lexsort((np.where(ids < 0, np.iinfo(np.int64).max, ids), distances), axis=-1)
    return np.take_along_axis(distances, order, -1), np.take_along_axis(ids, order, -1)


def exact_search(
    queries: np.ndarray,
    embeddings: ShardedArray,
    k: int,
    excluded: IdRanges | None = None,
    among: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the true k nearest by a blocked matrix product over all stored embeddings. All recalls are measured against
    it.

    Args:
        queries: [n, d] float32.
        embeddings: [chunks, d].
        k: neighbors per query.
        excluded: ids that a query must not find (its own document).
        among: [ranges, 2] int64, first and stop of the ids to search; None = all.

    Returns:
        distances [n, k] float32 (+inf) and ids [n, k] (-1), nearest first.
    """
    best_distances = np.full((len(queries), k), np.inf, dtype=np.float32)
    best_ids = np.full((len(queries), k), -1, dtype=np.int64)
    norms = np.einsum("nd,nd->n", queries, queries)
    for ids, vectors in _blocks(embeddings, among):
        distances = norms[:, None] - 2 * (queries @ vectors.T) + np.einsum("nd,nd->n", vectors, vectors)
        if excluded is not None:
            distances[in_ranges(ids, excluded)] = np.inf
        if len(vectors) > k:
            columns = np.argpartition(distances, k - 1, axis=1)[:, :k]
        else:
            columns = np.broadcast_to(np.arange(len(vectors)), distances.shape)
        nearest = np.take_along_axis(distances, columns, 1)
        joined_ids = np.concatenate([best_ids, np.where(np.isfinite(nearest), ids[columns], -1)], axis=1)
        joined = order_by_distance(np.concatenate([best_distances, nearest], axis=1), joined_ids)
        best_distances, best_ids = joined[0][:, :k], joined[1][:, :k]
    return np.maximum(best_distances, 0), best_ids


def in_ranges(ids: np.ndarray, ranges: IdRanges) -> np.ndarray:
    """Whether the ids [n, c], or [c] of all queries, are in each query's range: [n, c] bool."""
    return (ids >= ranges[0][:, None]) & (ids < ranges[1][:, None])


def _blocks(embeddings: ShardedArray, among: np.ndarray | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ids [b] and vectors [b, d] float32 of all rows, or of the rows in ranges."""
    ranges = np.array([[0, len(embeddings)]]) if among is None else among
    stops = np.cumsum(ranges[:, 1] - ranges[:, 0])
    for start in range(0, int(stops[-1]) if len(stops) else 0, _BLOCK_ROWS):
        positions = np.arange(start, min(start + _BLOCK_ROWS, int(stops[-1])), dtype=np.int64)
        of_range = np.searchsorted(stops, positions, side="right")
        ids = positions - stops[of_range] + ranges[of_range, 1]
        whole = int(ids[-1]) - int(ids[0]) + 1 == len(ids)
        vectors = embeddings.read(int(ids[0]), int(ids[-1]) + 1) if whole else embeddings.gather(ids)
        yield ids, to_float32(vectors)


def recall(distances: np.ndarray, exact: np.ndarray) -> float:
    """Share of the exact neighbors that a search found, compared by distance, so that ties do not count as misses.

    Args:
        distances: [n, k] exact distances of the neighbors that it found, ascending.
        exact: [n, k] distances of the true nearest, ascending; +inf where there are fewer than k.
    """
    present = np.isfinite(exact)
    if not present.any():
        return 1.0
    limit = np.where(present, exact, -np.inf).max(axis=1, keepdims=True)
    hits = np.minimum((distances <= limit + 1e-4).sum(axis=1), present.sum(axis=1))
    return float(hits.sum() / present.sum())
