"""Search the neighbors of new chunks by the rules of the stored ones: generation and scoring read what training
read."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from indexing.embedding.lexical import token_weights
from indexing.embedding.settings import Embedder, NotFinite
from indexing.index.exact_search import IdRanges, distances_to
from indexing.index.floats import to_float32
from indexing.index.product_search import ProductIndex
from indexing.index.sharded import MEMORY, ShardedIndex
from indexing.neighbors.index_search import Index, QueryChunks, open_index
from indexing.neighbors.search import NeighborSearch, OpenIndex
from indexing.neighbors.settings import Method, NeighborSettings, stored_settings
from indexing.ngrams.search import NgramIndex
from indexing.retrieval.candidates import Ranked, SearchableIndex, search_available
from indexing.similarity.shared_tokens import SharedTokens
from indexing.store.datastore import Datastore
from indexing.store.retrieval_set import RetrievalSet

log = logging.getLogger("retro")

_LOCAL = (ShardedIndex, ProductIndex)  # indexes in this process


@dataclass(frozen=True)
class LiveNeighbors:
    """The neighbor search of a datastore, opened for new chunks.

    Attributes:
        embedder: of the datastore.
        retrieval: the chunks that ids name.
        indexes: one for every datastore in the retrieval set, in order.
        settings: those of the stored neighbors; without stored neighbors, the nearest chunks are found.
        order: the order by tokens, if the stored neighbors have it.
        by_ngrams: the n-grams, if they found the stored neighbors.
    """

    embedder: Embedder
    retrieval: RetrievalSet
    indexes: tuple[Index | SearchableIndex, ...]
    settings: NeighborSettings
    order: SharedTokens | None
    by_ngrams: NgramIndex | None

    @classmethod
    def open(
        cls,
        datastore: Datastore,
        embedder: Embedder,
        indexes: tuple[SearchableIndex, ...],
        retrieval: RetrievalSet,
    ) -> "LiveNeighbors":
        """Open what found the stored neighbors of a datastore; see `Retriever` for the arguments.

        Raises:
            InputError: a file is damaged.
            DatastoreChanged: a datastore was built again since it was opened.
        """
        retrieval.require_unchanged()
        settings, method = stored_settings(datastore) or (NeighborSettings(rerank="embeddings"), "index")
        order = None
        if settings.rerank == "tokens":
            order = SharedTokens(token_weights(datastore.folder / "embedder"), retrieval)
        by_ngrams = NgramIndex.open(retrieval) if method == "ngrams" else None
        return cls(embedder, retrieval, _precise(indexes, retrieval, method), settings, order, by_ngrams)

    def find(self, chunks: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The first k neighbors of full chunks [n, m], in the order of `rank`.

        Returns:
            tokens with continuations [n, k, 2m] int64, lengths [n, k] int64, ids [n, k] int64 (-1 = none) and squared
            distances [n, k] float32.
        """
        ranked = self.rank(chunks, k)
        tokens, lengths = self.retrieval.with_continuation(ranked.ids.ravel())
        return tokens.reshape(len(chunks), k, -1), lengths.reshape(len(chunks), k), ranked.ids, ranked.distances

    def rank(self, chunks: np.ndarray, k: int) -> Ranked:
        """The first k neighbors of full chunks [n, m] by the rules of the datastore's stored ones, without deleted
        chunks.

        Without stored neighbors, the nearest. Scores are cosines. A chunk without a finite embedding has no neighbors.
        docs/explanation/neighbor-search.md says when the stored neighbors of a chunk can differ.
        """
        import torch

        self.retrieval.require_unchanged()
        stored, candidates = max(k, self.settings.stored), max(k, self.settings.candidates)
        settings = replace(self.settings, stored=stored, candidates=candidates)
        lengths = np.full(len(chunks), chunks.shape[1], dtype=np.int64)
        try:
            vectors = to_float32(self.embedder.embed(chunks, lengths).astype(np.float16))  # as the stored embeddings
        except NotFinite as error:
            log.warning("no neighbors for %s chunks: %s", len(error.rows), error)
            return self._rank_others(chunks, k, error.rows)
        missing: dict[str, None] = {}
        searched = [
            OpenIndex(index if isinstance(index, _LOCAL) else _Remote(index, missing), split, datastore)
            for datastore, (index, split) in enumerate(zip(self.indexes, self.retrieval.splits, strict=False))
        ]
        with torch.inference_mode(False):  # which the threads of a search do not inherit from generation
            search = NeighborSearch(searched, settings, self.order, self.by_ngrams)
            ids, _ = search.find(QueryChunks(vectors, (chunks, lengths), live=True), k)
            distances = distances_to(vectors, ids, self.retrieval)
        return Ranked.by_distance(ids, distances, tuple(missing))

    def _rank_others(self, chunks: np.ndarray, k: int, excluded: Sequence[int]) -> Ranked:
        """`rank` without some of the chunks, which get no neighbors, so that the other texts of a batch continue."""
        rows = np.delete(np.arange(len(chunks)), excluded)
        ids = np.full((len(chunks), k), -1, dtype=np.int64)
        distances, missing = np.full(ids.shape, np.inf, dtype=np.float32), tuple[str, ...]()
        if len(rows):
            others = self.rank(chunks[rows], k)
            ids[rows], distances[rows], missing = others.ids, others.distances, others.missing
        return Ranked.by_distance(ids, distances, missing)


def _precise(
    indexes: tuple[SearchableIndex, ...], retrieval: RetrievalSet, method: Method
) -> tuple[Index | SearchableIndex, ...]:
    """The indexes that found the stored neighbors, but the given one where embeddings exceed `MEMORY` or it is in other
    processes."""
    if method != "exact":
        return indexes
    opened = list[Index | SearchableIndex](indexes)
    for datastore, split in enumerate(retrieval.splits):
        size = split.num_chunks * split.embeddings.row_shape[0] * 4
        if isinstance(indexes[datastore], ShardedIndex) and size <= MEMORY:
            opened[datastore] = open_index(split, range(len(split.chunk_rows)), method, "cpu", keep=True)
    return tuple(opened)


class _Remote:
    """An index in other processes, as `NeighborSearch` searches it: without exclusion, with the number of lists set
    there.

    Args:
        index: the index.
        missing: receives the names of the parts that do not answer.
    """

    nprobe = max_nprobe = 1
    by_codes = True

    def __init__(self, index: SearchableIndex, missing: dict[str, None]) -> None:
        self.index, self.missing, self.num_vectors = index, missing, index.num_vectors

    def search(
        self, queries: np.ndarray, k: int, excluded: IdRanges | None = None, nprobe: int | None = None
    ) -> np.ndarray:
        """See `Index`."""
        ids, names = search_available(self.index, queries, k)
        self.missing |= dict.fromkeys(names)
        return ids
