"""Neighbors and votes of held-out text in fractions of the datastore, to measure the benefit of a smaller datastore.

    documents ─ hash in [0, 1) ─ below the fraction? ─ embeddings of their chunks ─ exhaustive search ─ merged with the
                                                                                  neighbors in smaller fractions

A document belongs to every fraction above its hash, so a larger fraction contains the smaller ones. For each fraction
only the documents that the previous one lacks are searched, and the results are merged: all fractions together cost one
search of the largest. Memory does not depend on the size of the datastore: a block of embeddings and the candidates of
each held-out chunk. With `neighbors.rerank = "tokens"`, the candidates in each fraction are then ordered by shared
tokens, like the stored neighbors.

Neighbors by n-grams depend on how many chunks hold an n-gram. So the lists of each fraction are written to a temporary
folder, and searched like those of a datastore. Sorted prefixes stay in order when documents are left out: those of each
fraction are written to a temporary folder too, and the longest match of every held-out token is looked for there.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from indexing.embedding.lexical import token_weights
from indexing.index.floats import to_float32
from indexing.index.product_search import ProductIndex
from indexing.neighbors.index_search import Index, QueryChunks, neighbors_of, open_index
from indexing.neighbors.search import NeighborSearch, OpenIndex, merge_nearest
from indexing.neighbors.settings import NeighborSettings, stored_settings
from indexing.ngrams.index import NgramLists
from indexing.ngrams.search import NgramIndex
from indexing.progress import Advance
from indexing.similarity.shared_tokens import SharedTokens
from indexing.splitmix64 import mix
from indexing.store.datastore import Split
from indexing.store.retrieval_set import RetrievalSet, neighbor_ids
from indexing.suffixes.search import SuffixIndex
from retro.data.live_votes import live_votes
from retro.evaluation.sets import EvaluationSet

_BLOCK_CHUNKS = 2**20  # chunks of the datastore in a block
_BLOCK_QUERIES = 65_536


@dataclass(frozen=True)
class PartialDatastore:
    """Neighbors of an evaluation set's chunks in a fraction of the datastore.

    Attributes:
        fraction: fraction of the documents.
        documents, chunks: numbers of documents and chunks in the fraction.
        found: [n, k] int64 ids of the retrieval set, best first, -1 = missing; for `NeighborUse.found`. None: not
            searched.
        votes: [n, m, 32] int64 votes for each token; for `NeighborUse.found_votes`. None: not searched.
    """

    fraction: float
    documents: int
    chunks: int
    found: np.ndarray | None = None
    votes: np.ndarray | None = None


def votes_in_fractions(
    evaluation_set: EvaluationSet,
    num_chunks: int,
    fractions: Sequence[float],
    *,
    seed: int = 0,
    advance: Advance = lambda _: None,
) -> Iterator[PartialDatastore]:
    """Find the votes of held-out tokens in growing fractions of their own datastore, as while a text is generated.

    Args:
        evaluation_set: its datastore needs the stage `suffixes`.
        num_chunks: n; the first n chunks of the set are searched for, whole documents.
        fractions: fractions of the documents, above 0 and at most 1, in any order.
        seed: seed of the documents' hash.
        advance: called with numbers of searched chunks of the datastore.

    Yields:
        one `PartialDatastore` for each fraction, smallest first.

    Raises:
        InputError: the datastore has no sorted prefixes.
    """
    index, train = SuffixIndex.open(evaluation_set.datastore.folder), evaluation_set.datastore.train
    numbers = np.arange(train.num_documents)
    points, present = points_of(numbers, 0, seed), ~np.isin(numbers, train.deleted_documents)
    ranges = train.chunk_ranges(numbers)
    for fraction in sorted(set(fractions)):
        chosen = present & (points < fraction)
        chunks = int(np.diff(ranges[chosen]).sum())
        with tempfile.TemporaryDirectory(prefix="retro-fraction-") as folder:
            part = index.of_documents(chosen, Path(folder))
            votes = live_votes(part, evaluation_set.split, np.arange(num_chunks))
        advance(chunks)
        yield PartialDatastore(fraction, int(chosen.sum()), chunks, votes=votes)


def search_fractions(
    evaluation_set: EvaluationSet,
    num_chunks: int,
    k: int,
    fractions: Sequence[float],
    *,
    seed: int = 0,
    device: str = "auto",
    advance: Advance = lambda _: None,
) -> Iterator[PartialDatastore]:
    """Find the neighbors in growing fractions of the datastores that an evaluation set retrieves from.

    Like the stored neighbors, the results exclude near copies (`neighbors.max_overlap`) and deleted documents, and they
    have the order `neighbors.rerank`. Held-out documents are not in the training split, so a chunk's own document needs
    no exclusion.

    Args:
        evaluation_set: its datastore's embeddings are searched, and those of `neighbors.extra_datastores`.
        num_chunks: n; the first n chunks of the set are the queries.
        k: number of neighbors of each chunk.
        fractions: fractions of the documents, above 0 and at most 1, in any order.
        seed: seed of the documents' hash.
        device: device of the search.
        advance: called with numbers of searched chunks of the datastores.

    Yields:
        one `PartialDatastore` for each fraction, smallest first.

    Raises:
        InputError: the datastore has no embeddings, a datastore that it retrieves from cannot be opened or lacks
            n-grams, or the stored neighbors were found by terms.
    """
    datastore = evaluation_set.datastore
    datastore.require("embed")
    retrieval, stored = RetrievalSet.of(datastore), stored_settings(datastore)
    settings, method = stored or (NeighborSettings(rerank="embeddings"), "exact")
    order = None
    if settings.rerank == "tokens":
        order = SharedTokens(token_weights(datastore.folder / "embedder"), retrieval)
    search = _Search(evaluation_set.split, num_chunks, k, retrieval, settings, order, seed, advance)
    edges = [0.0, *sorted(set(fractions))]
    return search.by_ngrams(edges) if method == "ngrams" else search.by_embeddings(edges, device)


def points_of(documents: np.ndarray, datastore_index: int, seed: int) -> np.ndarray:
    """Return the hashes in [0, 1), float64, of documents [n] int64 of one datastore of the retrieval set
    (`datastore_index`)."""
    bits = mix(mix(mix(seed) ^ datastore_index) ^ documents.astype(np.uint64))
    return (bits >> np.uint64(11)) / 2.0**53  # 53 bits are exact in float64, so no value is rounded up to 1


@dataclass(frozen=True)
class _Search:
    """A search of growing fractions.

    Attributes:
        split, num_chunks, k: see `search_fractions`; the split has the queries.
        retrieval: what is searched.
        stored: settings of the stored neighbors.
        order: for `rerank` = "tokens".
        seed, advance: see `search_fractions`.
    """

    split: Split
    num_chunks: int
    k: int
    retrieval: RetrievalSet
    stored: NeighborSettings
    order: SharedTokens | None
    seed: int
    advance: Advance

    def by_embeddings(self, edges: list[float], device: str) -> Iterator[PartialDatastore]:
        """Search the documents between two edges at a time, and merge the results."""
        candidates = max(self.k, self.stored.candidates) if self.order is not None else 4 * self.k + 16
        settings = replace(self.stored, stored=self.k, candidates=candidates, materialized=0)
        ids = np.full((self.num_chunks, settings.per_index), -1, dtype=np.int64)
        distances = np.full((self.num_chunks, settings.per_index), np.inf, dtype=np.float32)
        documents = chunks = 0
        for low, high in pairwise(edges):
            for number, part, begun in self._parts(low, high):
                self._merge(number, part, settings, device, ids, distances)
                documents, chunks = documents + begun, chunks + len(part)
            best = ids
            if self.order is not None:
                best = self.order.best(self.split.tokens.read(0, self.num_chunks), ids, self.k)
            yield PartialDatastore(high, documents, chunks, best[:, : self.k].copy())

    def _merge(
        self,
        number: int,
        part: np.ndarray,
        settings: NeighborSettings,
        device: str,
        ids: np.ndarray,
        distances: np.ndarray,
    ) -> None:
        """Merge the nearest chunks of a part of one datastore into ids [n, kept] and distances [n, kept], in place."""
        train = self.retrieval.splits[number]
        index = ProductIndex(train.embeddings, device, ids=part)
        for start, stop, chunks in self._queries():
            near, far, _ = neighbors_of(chunks, index, train, settings)
            candidates = [(ids[start:stop], distances[start:stop]), (neighbor_ids(number, near), far)]
            ids[start:stop], distances[start:stop] = merge_nearest(candidates, settings.per_index)

    def by_ngrams(self, edges: list[float]) -> Iterator[PartialDatastore]:
        """Search each fraction with its own lists of n-grams."""
        stored, candidates = (max(self.k, count) for count in (self.stored.stored, self.stored.candidates))
        settings = replace(self.stored, stored=stored, candidates=candidates, materialized=0)
        splits, documents, chunks = self.retrieval.splits, 0, 0
        indexes = [open_index(train, range(len(train.chunk_rows)), "ngrams") for train in splits]
        for low, high in pairwise(edges):
            for _, part, begun in self._parts(low, high):
                documents, chunks = documents + begun, chunks + len(part)
            chosen = [partial(_chosen, train, number, 0.0, high, self.seed) for number, train in enumerate(splits)]
            searched = [
                OpenIndex(_PartOfIndex(*part), train, number)
                for number, (part, train) in enumerate(zip(zip(indexes, chosen, strict=True), splits, strict=True))
            ]
            found = np.empty((self.num_chunks, self.k), dtype=np.int64)
            with tempfile.TemporaryDirectory(prefix="retro-fraction-") as folder:
                lists = NgramLists.of_part(self.retrieval, chosen, Path(folder))
                by_ngrams = NgramIndex(self.retrieval, lists, chunks)
                search = NeighborSearch(searched, settings, self.order, by_ngrams)
                for start, stop, queries in self._queries():
                    found[start:stop] = search.find(queries, self.k)[0]
            yield PartialDatastore(high, documents, chunks, found)

    def _queries(self) -> Iterator[tuple[int, int, QueryChunks]]:
        """Yield blocks of queries: the first, the stop, and the chunks."""
        for start in range(0, self.num_chunks, _BLOCK_QUERIES):
            rows = start, min(start + _BLOCK_QUERIES, self.num_chunks)
            tokens = self.split.tokens.read(*rows), self.split.lengths.read(*rows)
            yield *rows, QueryChunks(to_float32(self.split.embeddings.read(*rows)), tokens)

    def _parts(self, low: float, high: float) -> Iterator[tuple[int, np.ndarray, int]]:
        """Yield chunks of documents whose hashes are in [low, high), block by block: the number of the datastore, their
        ids [n], and the number of these documents."""
        for number, train in enumerate(self.retrieval.splits):
            for start in range(0, train.num_chunks, _BLOCK_CHUNKS):
                ids = np.arange(start, min(start + _BLOCK_CHUNKS, train.num_chunks), dtype=np.int64)
                part = ids[_chosen(train, number, low, high, self.seed, ids)]
                if len(part):
                    yield number, part, int((train.documents_of(part)[1] == part).sum())
                    self.advance(len(part))


@dataclass(frozen=True)
class _PartOfIndex:
    """An index that returns some of its chunks only.

    Attributes:
        index: over all chunks.
        chosen: ids [n] → whether they are returned [n] bool.
    """

    index: Index
    chosen: Callable[[np.ndarray], np.ndarray]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.index, name)

    def search(self, queries: np.ndarray, k: int, *arguments: Any) -> np.ndarray:
        """See `Index.search`."""
        ids = self.index.search(queries, k, *arguments)
        ids[ids >= 0] = np.where(self.chosen(ids[ids >= 0]), ids[ids >= 0], -1)
        return ids


def _chosen(train: Split, datastore_index: int, low: float, high: float, seed: int, ids: np.ndarray) -> np.ndarray:
    """Whether chunks [n] int64 are in documents with a hash in [low, high) that are not deleted: [n] bool."""
    points = points_of(train.documents_of(ids)[0], datastore_index, seed)
    return (points >= low) & (points < high) & (train.without_deleted(ids) >= 0)
