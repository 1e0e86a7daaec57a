"""Retrieve the nearest chunks of datastores for texts, token ids or vectors; used by training, generation, evaluation and serving.

texts → tokens → embedder ┐
token ids      → embedder ┼→ vectors → every index → candidates → filters → exact distances ┐
vectors ──────────────────┘                                                                 ┼→ hits with text and document
texts, token ids → terms → sparse index → candidates → filters → BM25 ──────────────────────┘

Dense retrieval searches by vectors, sparse retrieval by terms, and hybrid retrieval joins the candidates of both. A retriever is
read-only, so several threads can search at once.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import get_args

import numpy as np

from indexing.embedding.embedder import open_embedder
from indexing.embedding.lexical import token_weights
from indexing.embedding.settings import Embedder, NotFinite
from indexing.index.exact_search import order_by_distance
from indexing.index.floats import to_float32
from indexing.index.product_search import ProductIndex
from indexing.index.sharded import MEMORY, ShardedIndex
from indexing.neighbors.list_search import ListIndex
from indexing.neighbors.search import (
    Index,
    Method,
    NeighborSettings,
    OpenIndex,
    find_neighbors,
    open_index,
    stored_settings,
)
from indexing.ngrams.search import NgramIndex
from indexing.progress import during
from indexing.retrieval.candidates import Candidates, SearchableIndex, few_chunks, find_candidates, search_available
from indexing.retrieval.filters import Filters, check_filters, matching_chunks
from indexing.retrieval.results import Hit, Results, StoredChunk, StoredDocument, document_fields
from indexing.similarity.shared_tokens import SharedTokens
from indexing.sparse.candidates import Retrieval
from indexing.sparse.term_search import TermSearch
from indexing.store.datastore import Datastore, Split
from indexing.store.errors import InputError, NotFound
from indexing.store.retrieval_set import CHUNK_ID_BITS, RetrievalSet, check_searchable, neighbor_ids
from indexing.tokenization.tokenizer import Tokenizer

log = logging.getLogger("retro")

Queries = Sequence[str] | Sequence[np.ndarray] | np.ndarray
"""Texts, token ids [t] of each, or vectors [n, d] float."""

CANDIDATES = 64
"""Candidates per query of each search, at least k. Exact distances correct the index's codes, and the hybrid joins both."""
_FILTERS_KEPT = 8
_HERE = (ShardedIndex, ProductIndex, ListIndex)  # indexes in this process
_PADDED_TOKENS = 2**22  # tokens of texts embedded together, including padding


@dataclass(frozen=True)
class Ranked:
    """The best chunks of each query as ids and numbers, best first.

    Attributes:
        ids: [n, k] int64 of the retrieval set, -1 = none.
        scores: [n, k] float32, larger is better, -inf for none.
        distances: [n, k] float32, squared L2, +inf for none.
        missing: names of the parts of the index that did not answer.
    """

    ids: np.ndarray
    scores: np.ndarray
    distances: np.ndarray
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Retriever:
    """Datastores opened for search. `Retriever.open(folder)`, then `search` or `neighbors`.

    Attributes:
        datastore: the first datastore.
        tokenizer, embedder: those of the first datastore.
        indexes: one for every datastore in the retrieval set, the first datastore's first.
        retrieval: the chunks that ids name.
    """

    datastore: Datastore
    tokenizer: Tokenizer
    embedder: Embedder
    indexes: tuple[SearchableIndex, ...]
    retrieval: RetrievalSet

    @classmethod
    def open(cls, *locations: Path | str, indexes: Sequence[SearchableIndex] | None = None) -> "Retriever":
        """Open datastores to search them as one.

        Args:
            locations: folders or URLs. Ids are those of the first datastore's stored neighbors (`store/retrieval_set.py`): the
                datastores of its `neighbors.extra_datastores` are searched too, then those of the other locations.
            indexes: one index for each datastore of the retrieval set; None opens the stored indexes.

        Raises:
            InputError: a location is not a datastore, its index is not finished, the datastores do not fit together, or one of
                `neighbors.extra_datastores` is missing or has changed, or a file is damaged.
        """
        with during("opening %s", ", ".join(map(str, locations))):
            return cls._open(locations, indexes)

    @classmethod
    def _open(cls, locations: Sequence[Path | str], indexes: Sequence[SearchableIndex] | None) -> "Retriever":
        datastore, *others = map(Datastore.open, locations)
        retrieval = RetrievalSet.of(datastore)
        known = {split.folder.resolve() for split in retrieval.splits}
        for each in (datastore, *others):
            each.require("add")
        for other in others:
            check_searchable(datastore, other, "searching several datastores")
            if other.folder.resolve() not in known:
                retrieval = RetrievalSet((*retrieval.splits, other.train))
                known.add(other.folder.resolve())
        for split in retrieval.splits:
            split.require_shards("chunks", "embeddings", *(["index"] if indexes is None else []))
        tokenizer = Tokenizer.open(datastore.folder / "tokenizer")
        embedder = open_embedder(datastore.folder / "embedder", tokenizer.decode)
        opened = tuple(indexes) if indexes is not None else tuple(map(_open_codes, retrieval.splits))
        return cls(datastore, tokenizer, embedder, opened, retrieval)

    # --- vectors ----------------------------------------------------------------------------------------------------

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Texts of any length → unit vectors [n, d] float32."""
        return self.embed_tokens(self.tokenizer.encode_batch(list(texts)))

    def embed_tokens(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Token ids [t] of each text → unit vectors [n, d] float32."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        if len(rows) > 1 and len(rows) * lengths.max() > _PADDED_TOKENS:
            # Batches of similar length: one long text must not pad a thousand short ones to its length.
            order, vectors = (
                np.argsort(lengths, kind="stable"),
                np.empty((len(rows), self.embedder.dimension), np.float32),
            )
            for half in np.array_split(order, 2):
                vectors[half] = self.embed_tokens([rows[row] for row in half])
            return vectors
        tokens = np.full((len(rows), max(1, *lengths) if len(rows) else 1), self.tokenizer.pad_id, dtype=np.int64)
        for number, row in enumerate(rows):
            tokens[number, : len(row)] = row
        return self.embedder.embed(tokens, lengths)

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Vectors [n, d] → ids [n, k] int64 of the retrieval set (-1 = none) and squared distances [n, k] float32, nearest first."""
        candidates = self._candidates(vectors, CANDIDATES, k, None)
        return candidates.ids[:, :k], candidates.distances[:, :k]

    def _candidates(self, vectors: np.ndarray, wanted: int, k: int, among: Sequence[np.ndarray] | None) -> Candidates:
        """The nearest chunks of all datastores, [n, at least k]; `wanted` of them if there are as many."""
        candidates = [
            find_candidates(vectors, index, split, wanted, k, among[number] if among else None)
            for number, (index, split) in enumerate(zip(self.indexes, self.retrieval.splits, strict=True))
        ]
        if len(candidates) == 1 and candidates[0].ids.shape[1] >= k:
            return candidates[0]
        ids = [neighbor_ids(number, each.ids) for number, each in enumerate(candidates)]
        ids.append(np.full((len(vectors), k), -1, dtype=np.int64))  # pads the result to k
        distances = [*(each.distances for each in candidates), np.full((len(vectors), k), np.inf, dtype=np.float32)]
        near, joined = order_by_distance(np.concatenate(distances, axis=1), np.concatenate(ids, axis=1))
        keep = max(wanted, k)
        return Candidates(joined[:, :keep], near[:, :keep], tuple(name for each in candidates for name in each.missing))

    def neighbors(self, chunks: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Full chunks [n, m] → neighbor tokens with continuations [n, k, 2m] int64, and lengths [n, k] int64.

        See `rank_neighbors` for the order.
        """
        return self.neighbors_with_ids(chunks, k)[:2]

    def neighbors_with_ids(self, chunks: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """As `neighbors`, with ids [n, k] int64 (-1 = none) and squared distances [n, k] float32."""
        ranked = self.rank_neighbors(chunks, k)
        tokens, lengths = self.retrieval.with_continuation(ranked.ids.ravel())
        return tokens.reshape(len(chunks), k, -1), lengths.reshape(len(chunks), k), ranked.ids, ranked.distances

    def rank_neighbors(self, chunks: np.ndarray, k: int) -> Ranked:
        """The first k neighbors of full chunks [n, m] by the rules of the datastore's stored ones, without deleted chunks.

        Without stored neighbors, the nearest. Scores are cosines. A chunk without a finite embedding has no neighbors.
        docs/explanation/neighbor-search.md says when the stored neighbors of a chunk can differ.
        """
        import torch

        self.retrieval.require_unchanged()
        settings = self._neighbor_settings
        settings = replace(settings, stored=max(k, settings.stored), candidates=max(k, settings.candidates))
        lengths = np.full(len(chunks), chunks.shape[1], dtype=np.int64)
        try:
            vectors = to_float32(self.embedder.embed(chunks, lengths).astype(np.float16))  # as the stored embeddings
        except NotFinite as error:
            log.warning("no neighbors for %s chunks: %s", len(error.rows), error)
            return self._rank_others(chunks, k, error.rows)
        missing: dict[str, None] = {}
        with torch.inference_mode(False):  # which the threads of a search do not inherit from generation
            searched = [
                OpenIndex(index if isinstance(index, _HERE) else _Elsewhere(index, missing), split, number)
                for number, (index, split) in enumerate(
                    zip(self._neighbor_indexes, self.retrieval.splits, strict=False)
                )
            ]
            ids, distances, _ = find_neighbors(
                vectors,
                (chunks, lengths),
                searched,
                settings,
                order=self._order,
                by_ngrams=self._ngrams,
                live=True,
                first=k,
            )
        return Ranked(ids, np.where(ids < 0, -np.inf, 1 - distances / 2), distances, tuple(missing))

    def _rank_others(self, chunks: np.ndarray, k: int, left_out: Sequence[int]) -> Ranked:
        """`rank_neighbors` without some of the chunks, which get no neighbors, so that the other texts of a batch continue."""
        rows = np.delete(np.arange(len(chunks)), left_out)
        ids = np.full((len(chunks), k), -1, dtype=np.int64)
        distances, missing = np.full(ids.shape, np.inf, dtype=np.float32), tuple[str, ...]()
        if len(rows):
            found = self.rank_neighbors(chunks[rows], k)
            ids[rows], distances[rows], missing = found.ids, found.distances, found.missing
        return Ranked(ids, np.where(ids < 0, -np.inf, 1 - distances / 2), distances, missing)

    @cached_property
    def _stored(self) -> tuple[NeighborSettings, Method] | None:
        return stored_settings(self.datastore)

    @property
    def _neighbor_settings(self) -> NeighborSettings:
        return self._stored[0] if self._stored else NeighborSettings(rerank="embeddings")

    @cached_property
    def _neighbor_indexes(self) -> tuple[Index | SearchableIndex, ...]:
        """The indexes that `rank_neighbors` searches.

        They are those that found the stored neighbors, unless embeddings exceed `MEMORY` or the index is in other processes.
        """
        method = self._stored[1] if self._stored else "index"
        if method not in ("exact", "lists"):
            return self.indexes
        opened = list[Index | SearchableIndex](self.indexes)
        for number, split in enumerate(self.retrieval.splits):
            size = split.num_chunks * split.embeddings.row_shape[0] * 4
            if isinstance(self.indexes[number], ShardedIndex) and size <= MEMORY:
                opened[number] = open_index(split, range(len(split.chunk_rows)), method, "cpu", keep=True)
        return tuple(opened)

    @cached_property
    def _ngrams(self) -> NgramIndex | None:
        """The n-grams, if they found the stored neighbors."""
        return NgramIndex.open(self.retrieval) if self._stored and self._stored[1] == "ngrams" else None

    @cached_property
    def _order(self) -> SharedTokens | None:
        """The order by tokens, if the stored neighbors have it."""
        if self._neighbor_settings.rerank != "tokens":
            return None
        return SharedTokens(token_weights(self.datastore.folder / "embedder"), self.retrieval)

    # --- search -----------------------------------------------------------------------------------------------------

    def search(
        self, queries: Queries, k: int = 5, *, filters: Filters | None = None, retrieval: Retrieval = "dense"
    ) -> Results:
        """Find the k nearest chunks of each query, nearest first.

        Args:
            queries: texts, token ids [t] of each, or vectors [n, d] float, which are scaled to unit length.
            k: hits per query; fewer with `sparse` if fewer chunks contain a term of the query.
            filters: column of the documents' metadata → the required value, or a list of accepted values.
            retrieval: `dense` searches by embeddings, `sparse` by terms (BM25), `hybrid` by both.

        Raises:
            InputError: a query is empty or invalid, k is below 1, a filter names an unknown column, or the sparse index is missing.
            DatastoreChanged: a datastore was built again since it was opened.
        """
        ranked = self.rank(queries, k, filters=filters, retrieval=retrieval)
        hits = iter(self._hits(*(each[ranked.ids >= 0] for each in (ranked.ids, ranked.distances, ranked.scores))))
        counts = (ranked.ids >= 0).sum(axis=1).tolist()
        return Results([[next(hits) for _ in range(count)] for count in counts], ranked.missing)

    def rank(
        self, queries: Queries, k: int = 5, *, filters: Filters | None = None, retrieval: Retrieval = "dense"
    ) -> Ranked:
        """The results of `search` as ids and numbers, without text."""
        if k < 1:
            raise InputError(f"k = {k}: must be at least 1.")
        if retrieval not in get_args(Retrieval):
            raise InputError(f"retrieval = {retrieval!r}: accepted are {', '.join(get_args(Retrieval))}.")
        self.retrieval.require_unchanged()  # before anything else of it is opened
        vectors = self.vectors_of(queries)
        among = self._among(filters) if filters else None
        if retrieval == "dense":
            near = self._candidates(vectors, CANDIDATES, k, among)
            return Ranked(near.ids[:, :k], 1 - near.distances[:, :k] / 2, near.distances[:, :k], near.missing)
        return self._by_terms(queries, vectors, k, retrieval, max(k, CANDIDATES), among)

    def _by_terms(
        self,
        queries: Queries,
        vectors: np.ndarray,
        k: int,
        retrieval: Retrieval,
        candidates: int,
        among: list[np.ndarray] | None = None,
    ) -> Ranked:
        """Sparse retrieval of k chunks; hybrid retrieval joins this number of candidates of both searches."""
        if isinstance(queries, np.ndarray) and queries.dtype.kind == "f":
            raise InputError("sparse and hybrid retrieval need texts or token ids: vectors have no terms.")
        texts = [each if isinstance(each, str) else self.tokenizer.decode(each) for each in queries]

        def kept(rows: np.ndarray, found: np.ndarray) -> np.ndarray:
            return self.retrieval.without_deleted(found) if among is None else self.retrieval.among(found, among)

        few = None if among is None else few_chunks(among)
        if retrieval == "sparse":
            return Ranked(*self._term_search.search(texts, vectors, k, kept, few), ())
        near = self._candidates(vectors, candidates, k, among)
        dense = (near.ids, near.distances)
        ids, scores, distances = self._term_search.hybrid(texts, vectors, dense, candidates, kept, few)
        return Ranked(ids[:, :k], scores[:, :k], distances[:, :k], near.missing)

    @cached_property
    def _term_search(self) -> TermSearch:
        return TermSearch.open(self.retrieval)

    @property
    def has_terms(self) -> bool:
        """Whether all datastores have a sparse index."""
        return all(Datastore.open(split.folder).has("sparse") for split in self.retrieval.splits)

    # --- filters ----------------------------------------------------------------------------------------------------

    @cached_property
    def filter_columns(self) -> list[str]:
        """Metadata columns that every datastore has, usable in filters."""
        first, *others = (split.documents.columns for split in self.retrieval.splits)
        return [name for name in first if all(name in columns for columns in others)]

    def _among(self, filters: Filters) -> list[np.ndarray]:
        """The matching chunks of each datastore, as ranges. The result of the last filters is cached until a deletion."""
        checked = check_filters(filters, self.filter_columns)
        key = json.dumps(checked, sort_keys=True)
        splits = self.retrieval.splits
        return [self._matching(number, key, len(split.deleted)) for number, split in enumerate(splits)]

    @cached_property
    def _matching(self) -> Callable[[int, str, int], np.ndarray]:
        splits = self.retrieval.splits
        return lru_cache(maxsize=_FILTERS_KEPT * len(splits))(
            lambda number, key, num_deleted: matching_chunks(splits[number], json.loads(key))
        )

    # --- queries and hits -------------------------------------------------------------------------------------------

    def vectors_of(self, queries: Queries) -> np.ndarray:
        """Queries → unit vectors [n, d] float32.

        Raises:
            InputError: a text is empty, a token id is not in the vocabulary, or vectors have another width, are zero or not finite.
        """
        if isinstance(queries, np.ndarray) and queries.dtype.kind == "f":
            return self._unit(queries)
        if not len(queries):
            return np.empty((0, self.embedder.dimension), dtype=np.float32)
        texts = [each for each in queries if isinstance(each, str)]
        if texts:
            if len(texts) < len(queries):
                raise InputError("queries must be all texts, all token ids or all vectors.")
            if not all(text.strip() for text in texts):
                raise InputError("the text to search for is empty.")
            return self.embed(texts)
        rows = [np.asarray(row, dtype=np.int64) for row in queries]
        for row in rows:
            if not len(row):
                raise InputError("a list of token ids to search for is empty.")
            if row.min() < 0 or row.max() >= self.tokenizer.vocab_size:
                wrong = row[(row < 0) | (row >= self.tokenizer.vocab_size)][0]
                raise InputError(f"token id {wrong}: the tokenizer's are 0 to {self.tokenizer.vocab_size - 1}.")
        return self.embed_tokens(rows)

    def _unit(self, vectors: np.ndarray) -> np.ndarray:
        if vectors.ndim != 2 or vectors.shape[1] != self.embedder.dimension:
            raise InputError(
                f"vectors of shape {list(vectors.shape)}: must be [queries, {self.embedder.dimension}], as embedded here."
            )
        norms = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        if not np.isfinite(norms).all() or (norms == 0).any():
            raise InputError("a vector to search for is zero or holds numbers that are not finite.")
        return (vectors / norms).astype(np.float32)

    def hits(self, ids: np.ndarray, distances: np.ndarray) -> list[Hit]:
        """Chunk ids and distances, each [k], with text and document; -1 is skipped."""
        present = ids >= 0
        return self._hits(ids[present], distances[present], 1 - distances[present] / 2)

    def _hits(self, ids: np.ndarray, distances: np.ndarray, scores: np.ndarray) -> list[Hit]:
        """Hits [h] of any number of queries. A chunk that several queries found is read once."""
        each, rows = np.unique(ids, return_inverse=True)
        texts, continuations = self._texts(*self.retrieval.with_continuation(each))
        documents = self.retrieval.metadata(each)
        return [
            Hit(chunk_id, score, distance, texts[row], continuations[row], **document_fields(documents[row]))
            for chunk_id, score, distance, row in zip(
                ids.tolist(), scores.tolist(), distances.tolist(), rows.ravel().tolist(), strict=True
            )
        ]

    def _texts(self, tokens: np.ndarray, lengths: np.ndarray) -> tuple[list[str], list[str]]:
        """Chunks with their continuations [n, 2m] → the texts of both."""
        m = self.datastore.chunk_length
        own = [row[: min(m, length)] for row, length in zip(tokens, lengths, strict=True)]
        following = [row[m : max(m, length)] for row, length in zip(tokens, lengths, strict=True)]
        texts = self.tokenizer.decode_batch([*own, *following])
        return texts[: len(own)], texts[len(own) :]

    # --- by id ------------------------------------------------------------------------------------------------------

    def chunk(self, chunk_id: int) -> StoredChunk:
        """Look up the chunk with this id of the retrieval set.

        Raises:
            NotFound: there is none, or its document has been deleted.
        """
        number, local = chunk_id >> CHUNK_ID_BITS, chunk_id & ((1 << CHUNK_ID_BITS) - 1)
        if not 0 <= number < len(self.retrieval.splits) or local >= self.retrieval.splits[number].num_chunks:
            raise NotFound(
                f"there is no chunk {chunk_id}; the first datastore's are 0 to {self.retrieval.own.num_chunks - 1}."
            )
        split = self.retrieval.splits[number]
        if split.without_deleted(np.array([local]))[0] < 0:
            raise NotFound(f"the document of chunk {chunk_id} has been deleted.")
        documents, first, stop = split.documents_of(np.array([local]))
        return self._chunks(number, local, 1, (int(documents[0]), int(first[0]), int(stop[0])))[0]

    def document(self, document_id: str, first: int = 0, count: int = 8) -> StoredDocument:
        """Look up the document with this id (the first if several share it), with its chunks [first, first + count).

        Raises:
            NotFound: there is none, or it has been deleted.
            InputError: `first` or `count` is below 0.
        """
        if first < 0 or count < 0:
            raise InputError(f"first = {first}, count = {count}: must be 0 or more.")
        self.retrieval.require_unchanged()
        for number, split in enumerate(self.retrieval.splits):
            for document in split.documents.find(document_id):
                start, stop = split.chunk_range(document)
                if split.without_deleted(np.array([start]))[0] < 0:
                    continue
                count = max(0, min(count, stop - start - first))
                chunks = self._chunks(number, start + first, count, (document, start, stop))
                return StoredDocument(
                    **document_fields(split.metadata([document])[0]),
                    num_chunks=stop - start,
                    first=first,
                    chunks=chunks,
                )
        raise NotFound(f"there is no document {document_id!r} in the datastores that are searched.")

    def _chunks(self, number: int, start: int, count: int, document: tuple[int, int, int]) -> list[StoredChunk]:
        """Consecutive chunks of one document (number, first chunk, last chunk + 1) of a datastore."""
        split = self.retrieval.splits[number]
        local = np.arange(start, start + count, dtype=np.int64)
        texts, continuations = self._texts(*split.with_continuation(local))
        metadata = split.metadata([document[0]])[0]
        ids = neighbor_ids(number, local).tolist()
        return [
            StoredChunk(
                chunk_id=chunk_id,
                text=text,
                continuation=continuation,
                previous_chunk_id=chunk_id - 1 if each > document[1] else None,
                next_chunk_id=chunk_id + 1 if each + 1 < document[2] else None,
                **document_fields(metadata),
            )
            for chunk_id, each, text, continuation in zip(ids, local, texts, continuations, strict=True)
        ]


class _Elsewhere:
    """An index in other processes, as `find_neighbors` searches it: without exclusion, and with its own number of lists.

    Args:
        index: the index.
        missing: receives the names of the parts that do not answer.
    """

    nprobe = max_nprobe = 1
    by_codes = True

    def __init__(self, index: SearchableIndex, missing: dict[str, None]) -> None:
        self.index, self.missing, self.num_vectors = index, missing, index.num_vectors

    def search(
        self,
        queries: np.ndarray,
        k: int,
        excluded: tuple[np.ndarray, np.ndarray] | None = None,
        nprobe: int | None = None,
    ) -> np.ndarray:
        """See `Index`."""
        ids, names = search_available(self.index, queries, k)
        self.missing |= dict.fromkeys(names)
        return ids


def _open_codes(split: Split) -> ShardedIndex:
    return ShardedIndex.open(split.folder / "index", range(len(split.chunk_rows)))
