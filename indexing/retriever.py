"""Text or vectors → the nearest chunks of a datastore: one class for the command line, generation and evaluation.

texts → tokens → embedder ┐
chunks [n, m] → embedder  ┼→ vectors → index → exact distances → hits with text, continuation and document
vectors ──────────────────┘
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from indexing.embedders import Embedder, open_embedder
from indexing.exact import rerank
from indexing.neighbors import merge_nearest
from indexing.sharded_index import ShardedIndex
from indexing.store.datastore import Datastore, Split
from indexing.store.deleted import deleted_ranges
from indexing.store.errors import InputError
from indexing.store.retrieval import RetrievalSet, neighbor_ids
from indexing.tokenizer import Tokenizer

_CANDIDATES = 64


@dataclass(frozen=True)
class Hit:
    """One retrieved chunk.

    Attributes:
        chunk_id: its id in the retrieval set.
        distance: squared L2 distance of the unit vectors, 0 to 4; cosine = 1 − distance / 2.
        text: of the chunk.
        continuation: text of the next chunk of the same document, empty where it ends.
        document: the row of `documents.parquet`: id, file, title, …
    """

    chunk_id: int
    distance: float
    text: str
    continuation: str
    document: dict[str, Any]


@dataclass(frozen=True)
class Retriever:
    """A datastore opened for search. `Retriever.open(folder)`, then `search` or `neighbors`.

    Attributes:
        datastore: the one at `folder`.
        tokenizer, embedder: its own.
        indexes: of every datastore in the retrieval set, its own first.
        retrieval: the chunks that ids name: what the datastore's stored neighbors were chosen from.
    """

    datastore: Datastore
    tokenizer: Tokenizer
    embedder: Embedder
    indexes: tuple[ShardedIndex, ...]
    retrieval: RetrievalSet

    @classmethod
    def open(cls, folder: Path | str) -> "Retriever":
        """Open the datastore at `folder`.

        Raises:
            InputError: it is not one, its index is not finished, or a datastore of `neighbors.also` is gone or has changed.
        """
        datastore = Datastore.open(folder)
        datastore.require("add")
        tokenizer = Tokenizer.open(datastore.folder / "tokenizer")
        embedder = open_embedder(datastore.folder / "embedder", tokenizer.decode)
        retrieval = RetrievalSet.of(datastore)
        indexes = tuple(
            ShardedIndex.open(each.folder / "index", range(len(each.chunk_rows))) for each in retrieval.splits
        )
        return cls(datastore, tokenizer, embedder, indexes, retrieval)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Texts of any length → unit vectors [n, d] float32."""
        rows = self.tokenizer.encode_batch(list(texts))
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

    def search(self, texts: Sequence[str], k: int = 5) -> list[list[Hit]]:
        """The k nearest chunks of each text, nearest first.

        Raises:
            InputError: a text is empty, or k is below 1.
        """
        if k < 1:
            raise InputError(f"k = {k}: must be at least 1.")
        for text in texts:
            if not text.strip():
                raise InputError("the text to search for is empty.")
        ids, distances = self.nearest(self.embed(texts), k)
        return [self.hits(row, near) for row, near in zip(ids, distances, strict=True)]

    def hits(self, ids: np.ndarray, distances: np.ndarray) -> list[Hit]:
        """Chunk ids and distances, each [k], with all that a person wants to see; -1 is left out."""
        m, present = self.datastore.chunk_length, ids >= 0
        tokens, lengths = self.retrieval.with_continuation(ids[present])
        documents = self.retrieval.metadata(ids[present])
        return [
            Hit(
                chunk_id=int(chunk_id),
                distance=float(distance),
                text=self.tokenizer.decode(row[: min(m, length)]),
                continuation=self.tokenizer.decode(row[m : max(m, length)]),
                document=document,
            )
            for chunk_id, distance, row, length, document in zip(
                ids[present], distances[present], tokens, lengths, documents, strict=True
            )
        ]


def _present(vectors: np.ndarray, index: ShardedIndex, split: Split, k: int) -> np.ndarray:
    """Candidates [n, c] int64 of which k and more have not been deleted, as far as there are so many."""
    depth = max(k, min(_CANDIDATES, index.num_vectors))
    while True:
        ids = split.without_deleted(index.search(vectors, depth))
        lacking = len(ids) and (ids >= 0).sum(axis=1).min() < k and len(deleted_ranges(split.folder))
        if not lacking or depth >= index.num_vectors:
            return ids
        depth = min(4 * depth, index.num_vectors)
