"""What a search returns and what stands behind an id: plain records with the text that a person wants to see."""

from dataclasses import dataclass
from typing import Any, Literal

Rerank = Literal["embeddings", "bm25", "hybrid"]
"""What candidates are ordered by: exact distances of their embeddings, BM25, or both."""


class _OfDocument:
    """What hits, chunks and documents say of the document that they are of; empty where it is not known."""

    document: dict[str, Any]

    @property
    def document_id(self) -> str:
        """As in the corpus."""
        return _text(self.document.get("id"))

    @property
    def title(self) -> str:
        """The metadata `title`."""
        return _text(self.document.get("title"))

    @property
    def source(self) -> str:
        """The metadata `source`."""
        return _text(self.document.get("source"))


@dataclass(frozen=True)
class Hit(_OfDocument):
    """One retrieved chunk.

    Attributes:
        chunk_id: its id in the retrieval set.
        score: what the hits of a query are ordered by, larger is nearer: the cosine for `embeddings`, else BM25's or the
            hybrid's.
        distance: squared L2 distance of the unit vectors, 0 to 4; cosine = 1 − distance / 2.
        text: of the chunk.
        continuation: text of the next chunk of the same document, empty where it ends.
        document: the row of `documents.parquet`: id, file, title, …
    """

    chunk_id: int
    score: float
    distance: float
    text: str
    continuation: str
    document: dict[str, Any]


@dataclass(frozen=True)
class Results:
    """The hits of each query, nearest first.

    Attributes:
        hits: of each query, k of them or all that there are.
        missing: names of the parts of the index that did not answer; () where all did, as on one machine.
    """

    hits: list[list[Hit]]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoredChunk(_OfDocument):
    """A chunk by its id, with where it stands.

    Attributes:
        chunk_id: its id in the retrieval set.
        text: of the chunk.
        continuation: text of the next chunk of the same document, empty where it ends.
        previous_chunk_id, next_chunk_id: of the same document; None at its ends.
        document: the row of `documents.parquet`.
    """

    chunk_id: int
    text: str
    continuation: str
    previous_chunk_id: int | None
    next_chunk_id: int | None
    document: dict[str, Any]


@dataclass(frozen=True)
class StoredDocument(_OfDocument):
    """A document by its id, with some of its chunks.

    Attributes:
        document: the row of `documents.parquet`.
        num_chunks: of the whole document.
        first: place of the first of `chunks` in it, from 0.
        chunks: in order.
    """

    document: dict[str, Any]
    num_chunks: int
    first: int
    chunks: list[StoredChunk]


def _text(value: Any) -> str:
    return "" if value is None else str(value)
