"""Texts, token ids or vectors → the nearest chunks of datastores: one class for the trainer, generation, evaluation and the server.

texts → tokens → embedder ┐
token ids      → embedder ┼→ vectors → every index → candidates → filters → ranking → hits with text and document
vectors ──────────────────┘

What an index gives are candidates; they are always ordered anew, by the stored embeddings (exact distances), by BM25, or by both
(`ranking.py`). A retriever is read only: several threads may search at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from indexing.embedders import Embedder, open_embedder
from indexing.exact import rerank
from indexing.hits import Hit, Results, StoredChunk, StoredDocument
from indexing.neighbors import merge_nearest
from indexing.sharded_index import ShardedIndex
from indexing.store.datastore import Datastore, Split
from indexing.store.deleted import deleted_ranges
from indexing.store.errors import InputError, NotFound
from indexing.store.retrieval import CHUNK_ID_BITS, RetrievalSet, check_searchable, neighbor_ids
from indexing.tokenizer import Tokenizer

Rerank = Literal["embeddings", "bm25", "hybrid"]
Filters = Mapping[str, Any]
Queries = Sequence[str] | Sequence[np.ndarray] | np.ndarray
"""Texts; or token ids [t] of each; or vectors [n, d] float."""

_CANDIDATES = 64


class SearchableIndex(Protocol):
    """What finds candidates: an index of this process (`ShardedIndex`), or a handle on one that others hold."""

    num_vectors: int

    def search(self, queries: np.ndarray, k: int) -> np.ndarray:
        """Vectors [n, d] float32 → ids [n, k] int64 of the datastore's chunks, -1 where there are fewer.

        Raises:
            PartsMissing: some parts of it did not answer.
        """


class PartsMissing(Exception):
    """Some parts of an index did not answer a search.

    Args:
        names: of these parts.
        ids: [n, k] int64, what the others have found.
    """

    def __init__(self, names: Sequence[str], ids: np.ndarray) -> None:
        super().__init__(f"no answer from {', '.join(names)}")
        self.names, self.ids = tuple(names), ids


@dataclass(frozen=True)
class Retriever:
    """Datastores opened for search. `Retriever.open(folder)`, then `search` or `neighbors`.

    Attributes:
        datastore: the first.
        tokenizer, embedder: its own.
        indexes: of every datastore in the retrieval set, its own first.
        retrieval: the chunks that ids name.
    """

    datastore: Datastore
    tokenizer: Tokenizer
    embedder: Embedder
    indexes: tuple[SearchableIndex, ...]
    retrieval: RetrievalSet

    @classmethod
    def open(cls, *locations: Path | str, indexes: Sequence[SearchableIndex] | None = None) -> "Retriever":
        """Open datastores to be searched as one.

        Args:
            locations: folders or URLs. Ids are those of the first one's stored neighbors (`store/retrieval.py`): the chunks of the
                datastores of its `neighbors.also` are searched too, and then those of the other locations.
            indexes: what searches each datastore of the retrieval set; None opens the indexes that lie in them.

        Raises:
            InputError: one is no datastore, its index is not finished, they do not fit together, or one of `neighbors.also` is gone
                or has changed.
        """
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
        tokenizer = Tokenizer.open(datastore.folder / "tokenizer")
        embedder = open_embedder(datastore.folder / "embedder", tokenizer.decode)
        opened = tuple(indexes) if indexes is not None else tuple(map(open_index, retrieval.splits))
        return cls(datastore, tokenizer, embedder, opened, retrieval)

    # --- vectors ----------------------------------------------------------------------------------------------------

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Texts of any length → unit vectors [n, d] float32."""
        return self.embed_tokens(self.tokenizer.encode_batch(list(texts)))

    def embed_tokens(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Token ids [t] of each text → unit vectors [n, d] float32."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        tokens = np.full((len(rows), max(1, *lengths) if len(rows) else 1), self.tokenizer.pad_id, dtype=np.int64)
        for number, row in enumerate(rows):
            tokens[number, : len(row)] = row
        return self.embedder.embed(tokens, lengths)

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Vectors [n, d] → ids [n, k] int64 of the retrieval set (-1 = none) and squared distances [n, k] float32, nearest first."""
        found = []
        for number, (index, split) in enumerate(zip(self.indexes, self.retrieval.splits, strict=True)):
            candidates = _present(vectors, index, split, k)
            distances, ids = rerank(vectors, candidates, split.embeddings)
            found.append((neighbor_ids(number, ids), distances))
        return merge_nearest(found, k)

    def neighbors(self, chunks: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Full chunks [n, m] → neighbor tokens [n, k, 2m] int64 with their continuations, and lengths [n, k] int64."""
        lengths = np.full(len(chunks), chunks.shape[1], dtype=np.int64)
        ids, _ = self.nearest(self.embedder.embed(chunks, lengths), k)
        tokens, found = self.retrieval.with_continuation(ids.ravel())
        return tokens.reshape(len(chunks), k, -1), found.reshape(len(chunks), k)

    # --- search -----------------------------------------------------------------------------------------------------

    @property
    def filter_columns(self) -> list[str]:
        """Columns of the documents' metadata that every datastore has, by which a search may be filtered."""
        first, *others = (split.documents.columns for split in self.retrieval.splits)
        return [name for name in first if all(name in columns for columns in others)]

    def search(
        self, queries: Queries, k: int = 5, *, filters: Filters | None = None, rerank: Rerank = "embeddings"
    ) -> Results:
        """The k nearest chunks of each query, nearest first.

        Args:
            queries: texts, token ids [t] of each, or vectors [n, d] float, which are brought to unit length.
            k: how many.
            filters: column of the documents' metadata → the value that it must have, or a list of values.
            rerank: what candidates are ordered by: exact distances of the `embeddings`, `bm25`, or both (`hybrid`).

        Raises:
            InputError: a query is empty or of no use here, k is below 1, or a filter names an unknown column.
        """
        if k < 1:
            raise InputError(f"k = {k}: must be at least 1.")
        if rerank not in get_args(Rerank):
            raise InputError(f"rerank = {rerank!r}: accepted are {', '.join(get_args(Rerank))}.")
        vectors = self.vectors_of(queries)
        if filters or rerank != "embeddings":
            raise NotImplementedError("filters and re-ranking by text")
        ids, distances = self.nearest(vectors, k)
        return Results([self.hits(row, near) for row, near in zip(ids, distances, strict=True)])

    def vectors_of(self, queries: Queries) -> np.ndarray:
        """Queries → unit vectors [n, d] float32.

        Raises:
            InputError: an empty text, a token id that the tokenizer does not have, or vectors of another width, not finite or zero.
        """
        if isinstance(queries, np.ndarray) and queries.dtype.kind == "f":
            return self._unit(queries)
        if not len(queries):
            return np.empty((0, self.embedder.dimension), dtype=np.float32)
        texts = [each for each in queries if isinstance(each, str)]
        if texts:
            if len(texts) < len(queries):
                raise InputError("queries are texts, or token ids, or vectors: not some of each.")
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
        """Chunk ids and distances, each [k], with all that a person wants to see; -1 is left out."""
        m, present = self.datastore.chunk_length, ids >= 0
        tokens, lengths = self.retrieval.with_continuation(ids[present])
        documents = self.retrieval.metadata(ids[present])
        return [
            Hit(
                chunk_id=int(chunk_id),
                score=1 - float(distance) / 2,
                distance=float(distance),
                text=self.tokenizer.decode(row[: min(m, length)]),
                continuation=self.tokenizer.decode(row[m : max(m, length)]),
                document=document,
            )
            for chunk_id, distance, row, length, document in zip(
                ids[present], distances[present], tokens, lengths, documents, strict=True
            )
        ]

    # --- by id ------------------------------------------------------------------------------------------------------

    def chunk(self, chunk_id: int) -> StoredChunk:
        """The chunk with this id of the retrieval set.

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
        """The document with this id, the first one where several share it, with its chunks [first, first + count).

        Raises:
            NotFound: there is none, or it has been deleted.
            InputError: `first` or `count` is below 0.
        """
        if first < 0 or count < 0:
            raise InputError(f"first = {first}, count = {count}: must be 0 or more.")
        for number, split in enumerate(self.retrieval.splits):
            for document in split.documents.find(document_id):
                start, stop = split.chunk_range(document)
                if split.without_deleted(np.array([start]))[0] < 0:
                    continue
                count = max(0, min(count, stop - start - first))
                chunks = self._chunks(number, start + first, count, (document, start, stop))
                return StoredDocument(split.metadata([document])[0], stop - start, first, chunks)
        raise NotFound(f"there is no document {document_id!r} among those that are searched.")

    def _chunks(self, number: int, start: int, count: int, document: tuple[int, int, int]) -> list[StoredChunk]:
        """Consecutive chunks of one document (its number, first chunk and last chunk + 1) of a datastore."""
        split, m = self.retrieval.splits[number], self.datastore.chunk_length
        local = np.arange(start, start + count, dtype=np.int64)
        tokens, lengths = split.with_continuation(local)
        own = np.minimum(lengths, m)
        texts = self.tokenizer.decode_batch([row[:length] for row, length in zip(tokens, own, strict=True)])
        following = [row[m : max(m, length)] for row, length in zip(tokens, lengths, strict=True)]
        continuations = self.tokenizer.decode_batch(following)
        metadata = split.metadata([document[0]])[0]
        ids = neighbor_ids(number, local).tolist()
        return [
            StoredChunk(
                chunk_id=chunk_id,
                text=text,
                continuation=continuation,
                previous_chunk_id=chunk_id - 1 if each > document[1] else None,
                next_chunk_id=chunk_id + 1 if each + 1 < document[2] else None,
                document=metadata,
            )
            for chunk_id, each, text, continuation in zip(ids, local, texts, continuations, strict=True)
        ]


def open_index(split: Split) -> ShardedIndex:
    """The index over the chunks of a datastore's training split."""
    return ShardedIndex.open(split.folder / "index", range(len(split.chunk_rows)))


def _present(vectors: np.ndarray, index: SearchableIndex, split: Split, k: int) -> np.ndarray:
    """Candidates [n, c] int64 of which k and more have not been deleted, as far as there are so many."""
    depth = max(k, min(_CANDIDATES, index.num_vectors))
    while True:
        ids = split.without_deleted(index.search(vectors, depth))
        lacking = len(ids) and (ids >= 0).sum(axis=1).min() < k and len(deleted_ranges(split.folder))
        if not lacking or depth >= index.num_vectors:
            return ids
        depth = min(4 * depth, index.num_vectors)
