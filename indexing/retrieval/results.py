"""Results of searches and lookups by id: plain records."""

from dataclasses import dataclass
from typing import Any

import numpy as np


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

    @classmethod
    def by_distance(cls, ids: np.ndarray, distances: np.ndarray, missing: tuple[str, ...]) -> "Ranked":
        """Chunks whose scores are the cosines."""
        return cls(ids, 1 - distances / 2, distances, missing)


class _DocumentFields:
    """Properties of the document that a hit, a chunk or a stored document belongs to; empty if unknown."""

    document: dict[str, Any]

    @property
    def document_id(self) -> str:
        """The id in the corpus."""
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
class Hit(_DocumentFields):
    """One retrieved chunk.

    Attributes:
        chunk_id: id in the retrieval set.
        score: orders the hits of a query, larger is better: the cosine for `dense`, BM25 for `sparse`, a mixture for `hybrid`.
        distance: squared L2 distance of the unit vectors, 0 to 4; cosine = 1 − distance / 2.
        text: text of the chunk.
        continuation: text of the next chunk of the same document, empty at its end.
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
        hits: for each query k hits, or all if there are fewer.
        missing: names of the parts of the index that did not answer; always empty on one machine.
    """

    hits: list[list[Hit]]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoredChunk(_DocumentFields):
    """A chunk looked up by id, with its position.

    Attributes:
        chunk_id: id in the retrieval set.
        text: text of the chunk.
        continuation: text of the next chunk of the same document, empty at its end.
        previous_chunk_id, next_chunk_id: ids in the same document; None at its ends.
        document: the row of `documents.parquet`.
    """

    chunk_id: int
    text: str
    continuation: str
    previous_chunk_id: int | None
    next_chunk_id: int | None
    document: dict[str, Any]


@dataclass(frozen=True)
class StoredDocument(_DocumentFields):
    """A document looked up by id, with some of its chunks.

    Attributes:
        document: the row of `documents.parquet`.
        num_chunks: chunks of the whole document.
        first: position of the first of `chunks` in the document, from 0.
        chunks: consecutive chunks.
    """

    document: dict[str, Any]
    num_chunks: int
    first: int
    chunks: list[StoredChunk]


def _text(value: Any) -> str:
    return "" if value is None else str(value)
