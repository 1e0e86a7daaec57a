"""Results of searches and lookups by id: plain records with text, in the fields and the order of the HTTP API's
JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

PASSAGES, PASSAGE_TOKENS = 4, 1024
"""Defaults: number of passages for a question, and tokens of all of them."""


def known_distances(distances: np.ndarray) -> list[float | None]:
    """Distances [n] float32 as plain values; None where there are no embeddings (NaN)."""
    return [None if math.isnan(distance) else distance for distance in distances.tolist()]


def document_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a document in the records below, from its row of `documents.parquet`; a missing text is
    empty."""
    document_id, title, source = ("" if row.get(name) is None else str(row[name]) for name in ("id", "title", "source"))
    return {"document_id": document_id, "title": title, "source": source, "metadata": dict(row)}


@dataclass(frozen=True)
class Hit:
    """A retrieved chunk with its document's metadata."""

    chunk_id: int
    score: Annotated[
        float,
        Field(
            description="Hits are ordered by it, the largest first. `dense`: the cosine of the vectors, -1 to 1. `sparse`: BM25, "
            "above 0 without a limit. `hybrid`: BM25 as a fraction of its maximum, plus the weighted cosine. Compare "
            "scores within a query only."
        ),
    ]
    distance: Annotated[
        float | None,
        Field(
            description="Squared L2 distance of the unit vectors, 0 (equal) to 4, with every `retrieval`. With `dense`, "
            "score = 1 - distance / 2. Null if the datastore has no embeddings."
        ),
    ]
    text: str
    continuation: str  # of the same document; empty at its end
    document_id: str
    title: str
    source: str
    metadata: dict[str, Any]  # the row of `documents.parquet`


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
class Passage:
    """Consecutive chunks of a document that a search found for a question."""

    text: str
    document_id: str
    title: str
    source: str
    score: Annotated[float, Field(description="Score of its best chunk, as that of a hit.")]
    chunk_id: Annotated[int, Field(description="Id of its first chunk; the others follow.")]
    num_chunks: int
    first_chunk: Annotated[int, Field(description="Position of its first chunk in the document, from 0.")]
    tokens: Annotated[int, Field(description="Of the datastore's tokenizer.")]


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of the datastore with its document and the ids of its neighbors in the document."""

    chunk_id: int
    text: str
    continuation: str
    previous_chunk_id: int | None
    next_chunk_id: int | None
    document_id: str
    title: str
    source: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class StoredDocument:
    """A document of the datastore with a range of its chunks, which begins at chunk number `first`."""

    document_id: str
    title: str
    source: str
    metadata: dict[str, Any]
    num_chunks: int
    first: int
    chunks: list[StoredChunk]
