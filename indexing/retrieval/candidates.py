"""Find candidates in one datastore: search its index, remove excluded chunks, compute exact distances.

    vectors → index → remove deleted chunks and chunks that fail the filter → too few left? search deeper → exact distances
                            └─ few chunks match the filter, or the index gives no more → search all that match exhaustively

Memory does not grow with the datastore, for any filter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from indexing.index.exact_search import exact_search, rerank
from indexing.similarity.candidates import present_first
from indexing.store.datastore import Split
from indexing.store.deletions import inside

_FEW_CHUNKS = 16_384  # searched exhaustively: as fast as a deep search of the index
_DEEPEST = 16_384  # maximum of candidates per query that a filter requests from an index


class SearchableIndex(Protocol):
    """An index that finds candidates: local (`ShardedIndex`), or a handle on a remote one."""

    num_vectors: int

    def search(self, queries: np.ndarray, k: int, /) -> np.ndarray:
        """Vectors [n, d] float32 → ids [n, k] int64 of the datastore's chunks, -1 where there are fewer.

        Raises:
            PartsMissing: some parts of the index did not answer.
        """


class PartsMissing(Exception):
    """Some parts of an index did not answer a search.

    Args:
        names: names of these parts.
        ids: [n, k] int64, results of the other parts.
    """

    def __init__(self, names: Sequence[str], ids: np.ndarray) -> None:
        super().__init__(f"no answer from {', '.join(names)}")
        self.names, self.ids = tuple(names), ids


@dataclass(frozen=True)
class Candidates:
    """Candidates of each query, nearest first.

    Attributes:
        ids: [n, c] int64, -1 = none.
        distances: [n, c] float32, squared L2 of the stored embeddings, +inf for none.
        missing: names of the parts of the index that did not answer.
    """

    ids: np.ndarray
    distances: np.ndarray
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ranked:
    """The best chunks of each query as ids and numbers, best first.

    Attributes:
        ids: [n, k] int64 of the retrieval set, -1 = none.
        scores: [n, k] float32, larger is better, -inf for none.
        distances: [n, k] float32, squared L2, +inf for none; NaN of a sparse search without embeddings.
        missing: names of the parts of the index that did not answer.
    """

    ids: np.ndarray
    scores: np.ndarray
    distances: np.ndarray
    missing: tuple[str, ...]

    @classmethod
    def by_distance(cls, ids: np.ndarray, distances: np.ndarray, missing: tuple[str, ...]) -> "Ranked":
        """Chunks whose scores are the cosines."""
        return cls(ids, 1 - distances / 2, distances, missing)


def find_candidates(
    vectors: np.ndarray, index: SearchableIndex, split: Split, count: int, k: int, among: np.ndarray | None = None
) -> Candidates:
    """Find candidates for some queries.

    Args:
        vectors: [n, d] float32.
        index: over the chunks of `split`.
        split: the split to search.
        count: candidates per query.
        k: minimum of candidates per query, if that many chunks are allowed.
        among: [ranges, 2] int64, first and stop of the allowed chunks, none of them deleted; None = all that are not
            deleted.

    Returns:
        for each query at least k candidates, and at most max(count, k).
    """
    allowed = index.num_vectors if among is None else int((among[:, 1] - among[:, 0]).sum())
    count, k = max(count, k), min(k, allowed)
    if among is not None and allowed <= _FEW_CHUNKS:
        distances, ids = exact_search(vectors, split.embeddings, min(count, max(allowed, 1)), among=among)
        return Candidates(ids, distances)
    missing: dict[str, None] = {}
    depth = min(count, index.num_vectors)
    deepest = index.num_vectors if among is None else min(_DEEPEST, index.num_vectors)
    if among is not None:  # ask for more, in proportion to the share that the filter removes
        depth = min(deepest, count * index.num_vectors // allowed)
    restricted = among is not None or len(split.deleted) > 0
    while True:
        hits, names = search_available(index, vectors, depth)
        missing |= dict.fromkeys(names)
        hits = split.without_deleted(hits) if among is None else np.where(inside(hits, among), hits, -1)
        lacking = np.flatnonzero((hits >= 0).sum(axis=1) < k) if restricted else np.empty(0, dtype=np.int64)
        if not len(lacking) or depth >= deepest:
            break
        depth = min(4 * depth, deepest)
    if restricted:
        hits = np.take_along_axis(hits, present_first(hits, count), 1)
    distances, ids = rerank(vectors, hits, split.embeddings)
    if among is not None and len(lacking):  # the visited lists hold no more
        distances[lacking], ids[lacking] = exact_search(vectors[lacking], split.embeddings, ids.shape[1], among=among)
    return Candidates(ids, distances, tuple(missing))


def few_chunks(among: Sequence[np.ndarray]) -> list[int] | None:
    """The chunk ids in some ranges [r, 2] of each datastore, for a search of these only; None if they are too many for
    that."""
    if sum(int((ranges[:, 1] - ranges[:, 0]).sum()) for ranges in among) > _FEW_CHUNKS:
        return None
    return sorted({chunk for ranges in among for first, stop in ranges.tolist() for chunk in range(first, stop)})


def search_available(index: SearchableIndex, vectors: np.ndarray, depth: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Candidates [n, depth] int64 from the parts of an index that answer, and the names of those that do not."""
    try:
        return index.search(vectors, depth), ()
    except PartsMissing as partial:
        return partial.ids, partial.names
