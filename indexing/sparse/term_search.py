"""Sparse and hybrid retrieval in a retrieval set."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from indexing.index.exact_search import distances_to
from indexing.index.floats import to_float32
from indexing.similarity.candidates import Condition
from indexing.sparse.candidates import agreement, find_by_terms, fuse
from indexing.sparse.index import SparseIndex
from indexing.sparse.terms import query_terms
from indexing.store.retrieval_set import RetrievalSet, embedder_kind
from indexing.tokenization.texts import as_texts

# Weight of the cosines of the lexical embedder. They repeat the terms less exactly, so they only decide between equals.
_LEXICAL_WEIGHT = 0.02
_SAMPLED_CHUNKS = 4096  # for the mean embedding
_BLOCK_QUERIES = 1024  # fused at a time


@dataclass(frozen=True)
class TermSearch:
    """The sparse index of a retrieval set, opened for search.

    Attributes:
        index: over all chunks of the retrieval set.
        retrieval: the chunks that ids name.
        mean: mean embedding [d] float32 of a uniform sample of the chunks, which is always the same; None for the
            lexical embedder, and without embeddings.
    """

    index: SparseIndex
    retrieval: RetrievalSet
    mean: np.ndarray | None

    @classmethod
    def open(cls, retrieval: RetrievalSet) -> "TermSearch":
        """Open the sparse index of a retrieval set.

        Raises:
            InputError: a datastore has none.
        """
        retrieval.require("sparse")
        index = SparseIndex.open(retrieval.splits)
        if not retrieval.has("embed") or embedder_kind(retrieval.own.folder) == "lexical":
            return cls(index, retrieval, None)
        total = retrieval.num_chunks
        positions = np.sort(np.random.default_rng(0).choice(total, min(total, _SAMPLED_CHUNKS), replace=False))
        mean = to_float32(retrieval.embeddings(retrieval.ids_at(positions))).mean(axis=0)
        return cls(index, retrieval, mean)

    def search(
        self,
        texts: Sequence[str],
        vectors: np.ndarray | None,
        k: int,
        condition: Condition,
        among: Sequence[int] | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the chunks with the highest BM25.

        Args:
            texts: n queries; a string is one.
            vectors: their embeddings [n, d] float32, for the distances; None without embeddings.
            k: candidates for each query.
            condition: which candidates count.
            among: chunk ids to search; see `SparseIndex.search`.

        Returns:
            ids [n, k] int64, best first (-1 = none), BM25 [n, k] float32 (-inf) and squared distances [n, k] float32
            (+inf; NaN without vectors).
        """
        ids, scores = find_by_terms([query_terms(text) for text in as_texts(texts)], self.index, k, condition, among)
        unknown = np.full(ids.shape, np.nan, dtype=np.float32)
        distances = unknown if vectors is None else distances_to(vectors, ids, self.retrieval)
        return ids, np.where(ids >= 0, scores, np.float32(-np.inf)), distances

    def match(self, texts: Sequence[str], scores: np.ndarray) -> np.ndarray:
        """BM25 [n] of a chunk for each query as a share of the largest that a text could have; float32, 0 to 1."""
        largest = np.array([self.index.largest(query_terms(text)) for text in as_texts(texts)], dtype=np.float32)
        return np.maximum(scores, 0) / np.maximum(largest, 1e-6)

    def hybrid(
        self,
        texts: Sequence[str],
        vectors: np.ndarray,
        dense: tuple[np.ndarray, np.ndarray],
        k: int,
        condition: Condition,
        among: Sequence[int] | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Like `search`, joined with dense candidates: ids [n, c] int64 and squared distances [n, c] float32, nearest
        first.

        The weight of a transformer's cosines is the agreement of both searches for the query: an embedder for another
        language finds chunks that have nothing to do with it.
        """
        texts = as_texts(texts)
        sparse = self.search(texts, vectors, k, condition, among)
        largest = np.array([self.index.largest(query_terms(text)) for text in texts], dtype=np.float32)
        weights = np.full(len(texts), _LEXICAL_WEIGHT, dtype=np.float32)
        if self.mean is not None:
            weights = agreement((sparse[0], sparse[2]), dense, vectors @ self.mean)
        parts = []
        for start in range(0, max(1, len(texts)), _BLOCK_QUERIES):
            block = slice(start, start + _BLOCK_QUERIES)
            by_terms = (sparse[0][block], sparse[1][block], sparse[2][block])
            parts.append(fuse(by_terms, (dense[0][block], dense[1][block]), largest[block], weights[block]))
        ids, scores, distances = (np.concatenate(blocks)[:, :k] for blocks in zip(*parts, strict=True))
        return ids, scores, distances
