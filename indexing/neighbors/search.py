"""Find the neighbors of chunks, stored or live, in all indexes (paper, sections 2.2 and 2.4).

    embeddings of chunks → candidates of every index → the nearest of all, or shared tokens (optional) → the best
                                      │
    rare n-grams of tokens (optional) ┘

Each generation of the datastore and each datastore of `neighbors.extra_datastores` has an index. Every index is
searched, and the nearest or best neighbors of all are returned. Missing neighbors are -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from indexing.index.exact_search import distances_to, in_ranges, order_by_distance
from indexing.index.floats import to_float32
from indexing.neighbors.index_search import Index, QueryChunks, neighbors_of, too_similar
from indexing.neighbors.settings import NeighborSettings
from indexing.ngrams.search import NgramIndex
from indexing.similarity.candidates import present_first
from indexing.similarity.shared_tokens import SharedTokens
from indexing.store.datastore import Split
from indexing.store.retrieval_set import RetrievalSet, neighbor_ids

_FEW_LISTS = 8  # that chunks with too few candidates by n-grams visit

Nearest = tuple[np.ndarray, np.ndarray]
"""Ids of the retrieval set [n, c] int64 (-1 = none) and exact squared distances [n, c] float32 (+inf)."""


@dataclass(frozen=True)
class OpenIndex:
    """One open index to retrieve from, over a datastore or over one of its generations.

    Attributes:
        index: over chunks of `train`.
        train: the split whose ids the index returns.
        datastore: its number in the retrieval set; 0 = the datastore whose neighbors are searched.
    """

    index: Index
    train: Split
    datastore: int = 0


@dataclass(frozen=True)
class NeighborSearch:
    """Indexes and rules. Stored neighbors and those of a live search are its results.

    Attributes:
        indexes: what is searched.
        settings: the rules.
        order: for `rerank` = "tokens".
        by_ngrams: for `search` = "ngrams". `indexes` are then searched only for chunks with too few candidates.
    """

    indexes: Sequence[OpenIndex]
    settings: NeighborSettings
    order: SharedTokens | None = None
    by_ngrams: NgramIndex | None = None

    def find(
        self, chunks: QueryChunks, k: int | None = None, earlier: Sequence[Nearest] = ()
    ) -> tuple[np.ndarray, int]:
        """Find the neighbors of some chunks.

        Args:
            chunks: the queries.
            k: neighbors to return, the first of the stored ones; None = all.
            earlier: results [n, stored] of searches of other indexes, to merge with this search; none with order or
                n-grams.

        Returns:
            ids [n, k] int64 of the retrieval set (-1 = none), and the number of queries searched again.
        """
        k = self.settings.stored if k is None else k
        if self.by_ngrams is not None:
            return self._find_by_ngrams(chunks, self.by_ngrams, k)
        results, deeper = self._search_indexes(chunks)
        if self.order is None:
            return merge_nearest([*results, *earlier], k)[0], deeper
        assert chunks.tokens is not None
        return self.order.best(chunks.tokens[0], merge_nearest(results, self.settings.candidates)[0], k), deeper

    def _search_indexes(self, chunks: QueryChunks, most_lists: int | None = None) -> tuple[list[Nearest], int]:
        """The nearest chunks in every index, and the number of queries searched again. It visits at most `most_lists`
        at first."""
        results, deeper = list[Nearest](), 0
        for opened in self.indexes:
            queries = chunks if opened.datastore == 0 else replace(chunks, own=None)
            nprobe = None if most_lists is None else min(most_lists, opened.index.nprobe)
            ids, distances, again = neighbors_of(queries, opened.index, opened.train, self.settings, nprobe)
            results.append((neighbor_ids(opened.datastore, ids), distances))
            deeper += again
        return results, deeper

    def _find_by_ngrams(self, chunks: QueryChunks, by_ngrams: NgramIndex, k: int) -> tuple[np.ndarray, int]:
        """`find` for candidates by n-grams. Chunks with fewer than `stored` of them get the nearest in a few lists
        after them."""
        assert chunks.tokens is not None
        stored, candidates, retrieval = self.settings.stored, self.settings.candidates, by_ngrams.retrieval

        def condition(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
            return self._allowed(chunks, rows, ids, retrieval)

        ids = by_ngrams.search(*chunks.tokens, candidates, stored, condition, own=chunks.own is not None)
        starved = np.flatnonzero(ids[:, stored - 1] < 0)
        if len(starved) and self.indexes:
            near, _ = merge_nearest(self._search_indexes(chunks.take(starved), _FEW_LISTS)[0], stored)
            near = np.where((near[:, :, None] == ids[starved, None, :]).any(axis=2), -1, near)
            joined = np.concatenate([ids[starved], near], axis=1)
            ids[starved] = np.take_along_axis(joined, present_first(joined, candidates), 1)
        if self.order is not None:
            return self.order.best(chunks.tokens[0], ids, k), len(starved)
        distances = distances_to(to_float32(chunks.vectors), ids, retrieval)
        return order_by_distance(distances, ids)[1][:, :k], len(starved)

    def _allowed(self, chunks: QueryChunks, rows: np.ndarray, ids: np.ndarray, retrieval: RetrievalSet) -> np.ndarray:
        """Candidates [r, c] of the chunks `rows`, with -1 for those of the own document, of deleted documents, and for
        near copies."""
        if chunks.own is not None:
            ids = np.where(in_ranges(ids, (chunks.own[0][rows], chunks.own[1][rows])), -1, ids)
        if chunks.live:
            ids = retrieval.without_deleted(ids)
        if self.settings.max_overlap < 1:
            assert chunks.tokens is not None
            tokens = (chunks.tokens[0][rows], chunks.tokens[1][rows])
            ids = np.where(too_similar(ids, retrieval, tokens, self.settings.max_overlap), -1, ids)
        return ids


def merge_nearest(results: Sequence[Nearest], k: int) -> Nearest:
    """Merge the results [n, c] of several indexes, c >= k: the k nearest."""
    if len(results) == 1:
        return results[0][0][:, :k], results[0][1][:, :k]
    ids = np.concatenate([ids for ids, _ in results], axis=1)
    distances, ids = order_by_distance(np.concatenate([distances for _, distances in results], axis=1), ids)
    return ids[:, :k], distances[:, :k]
