"""Search the chunks of a retrieval set by queries: by embeddings (dense), by terms (sparse), or by both (hybrid).

queries → vectors → every index → candidates → filters → exact distances ┐
        → terms → sparse index → candidates → filters → BM25 ────────────┴→ the best chunks
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np

from indexing.index.exact_search import order_by_distance
from indexing.retrieval.candidates import Candidates, Ranked, few_chunks, find_candidates
from indexing.retrieval.dense import Dense, required
from indexing.retrieval.filters import DocumentFilters, Filters
from indexing.retrieval.queries import Queries, QueryEmbedder, Retrieval, query_texts
from indexing.sparse.term_search import TermSearch
from indexing.sparse.terms import words
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet, neighbor_ids
from indexing.tokenization.tokenizer import Tokenizer

CANDIDATES = 64
"""Candidates per query of each search, at least k. Exact distances correct the index's codes, and the hybrid joins
both."""
_LONG_QUERY = 48  # different words, or Chinese characters


@dataclass(frozen=True)
class ChunkSearch:
    """A retrieval set, opened for search by queries.

    Attributes:
        tokenizer: of the first datastore.
        filters: documents by their metadata.
        dense: the embedder and the indexes; None = only a sparse search works.
        retrieval: the chunks that ids name.
    """

    tokenizer: Tokenizer
    filters: DocumentFilters
    dense: Dense | None
    retrieval: RetrievalSet

    @property
    def best(self) -> Retrieval:
        """The best of the ways; `dense`, whose error names its stage, if there is none."""
        return self.ways[-1] if self.ways else "dense"

    def require(self, retrieval: Retrieval) -> None:
        """Raise InputError, which names the stage, unless a way of retrieval works. Callers that load a model check
        this first."""
        if retrieval != "sparse":
            required(self.dense, self.retrieval)
        if retrieval != "dense":
            self.retrieval.require("sparse")

    def rank(
        self, queries: Queries, k: int = 5, *, filters: Filters | None = None, retrieval: Retrieval = "dense"
    ) -> Ranked:
        """The results of `Retriever.search` as ids and numbers, without text."""
        if k < 1:
            raise InputError(f"k = {k}: must be at least 1.")
        if retrieval not in get_args(Retrieval):
            raise InputError(f"retrieval = {retrieval!r}: accepted are {', '.join(get_args(Retrieval))}.")
        self.retrieval.require_unchanged()  # before anything else of it is opened
        if retrieval != "sparse":
            required(self.dense, self.retrieval)
        vectors = QueryEmbedder(self.tokenizer, self.dense.embedder).vectors(queries) if self.dense else None
        among = self.filters.chunks(filters) if filters else None
        if retrieval == "dense":
            assert vectors is not None
            dense = self._candidates(vectors, CANDIDATES, k, among)
            return Ranked.by_distance(dense.ids[:, :k], dense.distances[:, :k], dense.missing)
        return self._by_terms(query_texts(queries, self.tokenizer), vectors, k, retrieval, among)

    def match(self, queries: Sequence[str], *, filters: Filters | None = None) -> np.ndarray:
        """How much of each query the best chunk says: its BM25 as a share of the largest BM25 that a text could have, [n]
        float32, 0 to 1.

        NaN where terms cannot tell: if there is no sparse index, if the embedder is a transformer, which also finds other
        words with the same meaning, and if the query is so long that no chunk repeats most of it.
        """
        if not self.retrieval.has("sparse") or self._term_search.mean is not None:
            return np.full(len(queries), np.nan, dtype=np.float32)
        ranked = self.rank(queries, 1, filters=filters, retrieval="sparse")
        long = [len(set(words(query))) > _LONG_QUERY for query in queries]
        return np.where(long, np.float32(np.nan), self._term_search.match(queries, ranked.scores[:, 0]))

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Vectors [n, d] → ids [n, k] int64 of the retrieval set (-1 = none) and squared distances [n, k] float32,
        nearest first."""
        candidates = self._candidates(vectors, CANDIDATES, k, None)
        return candidates.ids[:, :k], candidates.distances[:, :k]

    @property
    def ways(self) -> tuple[Retrieval, ...]:
        """The ways of retrieval for which all datastores have finished stages."""
        ways: tuple[Retrieval, ...] = ("dense",) if self.dense else ()
        if self.retrieval.has("sparse"):
            ways += ("sparse", "hybrid") if self.dense else ("sparse",)
        return ways

    @cached_property
    def _term_search(self) -> TermSearch:
        return TermSearch.open(self.retrieval)

    def _candidates(self, vectors: np.ndarray, count: int, k: int, among: Sequence[np.ndarray] | None) -> Candidates:
        """The nearest chunks of all datastores, [n, at least k]; `count` of them if there are as many."""
        indexes = required(self.dense, self.retrieval).indexes
        by_datastore = [
            find_candidates(vectors, index, split, count, k, among[datastore] if among else None)
            for datastore, (index, split) in enumerate(zip(indexes, self.retrieval.splits, strict=True))
        ]
        if len(by_datastore) == 1 and by_datastore[0].ids.shape[1] >= k:
            return by_datastore[0]
        ids = [neighbor_ids(datastore, candidates.ids) for datastore, candidates in enumerate(by_datastore)]
        ids.append(np.full((len(vectors), k), -1, dtype=np.int64))  # pads the result to k
        distances = [candidates.distances for candidates in by_datastore]
        distances.append(np.full((len(vectors), k), np.inf, dtype=np.float32))
        near, joined = order_by_distance(np.concatenate(distances, axis=1), np.concatenate(ids, axis=1))
        missing = tuple(name for candidates in by_datastore for name in candidates.missing)
        return Candidates(joined[:, : max(count, k)], near[:, : max(count, k)], missing)

    def _by_terms(
        self,
        texts: list[str],
        vectors: np.ndarray | None,
        k: int,
        retrieval: Retrieval,
        among: list[np.ndarray] | None,
    ) -> Ranked:
        """Sparse or hybrid retrieval of k chunks."""

        def allowed(_rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
            return self.retrieval.without_deleted(ids) if among is None else self.retrieval.among(ids, among)

        few = None if among is None else few_chunks(among)
        if retrieval == "sparse":
            return Ranked(*self._term_search.search(texts, vectors, k, allowed, few), ())
        assert vectors is not None
        count = max(k, CANDIDATES)
        near = self._candidates(vectors, count, k, among)
        dense = (near.ids, near.distances)
        ids, scores, distances = self._term_search.hybrid(texts, vectors, dense, count, allowed, few)
        return Ranked(ids[:, :k], scores[:, :k], distances[:, :k], near.missing)
