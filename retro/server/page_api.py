"""Endpoints that fill the page's forms: passages of held-out documents to try, and the values of a column to filter by.

held-out documents ─► mean distance of their first chunks' nearest neighbors ─► near to middling ─► their beginnings
column of the documents' metadata ─► its values, the most frequent first
"""

import math
from collections import Counter
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore, Split
from indexing.store.deletions import inside
from retro.server import schemas
from retro.server.errors import InvalidRequest, error_responses
from retro.server.json_route import JsonRoute, as_json
from retro.server.service import ServiceDependency

router = APIRouter(route_class=JsonRoute, tags=["server"])

_MOST_DOCUMENTS = 4096  # examples come from the first held-out documents
_QUANTILES = 0.1, 0.5  # of the documents' distances, between which they are chosen: the nearest ones are mostly copies
_FARTHEST = 4.0  # squared distance of unit vectors
_SCANNED_DOCUMENTS = 2**17
_LONGEST_VALUE = 200  # characters


@router.get("/examples", response_model=schemas.ExamplesResponse, responses=error_responses(422))
async def examples(
    service: ServiceDependency,
    count: Annotated[int, Query(ge=1, le=16, description="Largest number of passages.")] = 3,
    chunks: Annotated[int, Query(ge=1, le=64, description="Largest length of a passage in chunks.")] = 6,
) -> Response:
    """Return beginnings of held-out documents, those with the nearest neighbors first, to try search and model with."""
    return as_json(await run_in_threadpool(held_out_passages, service.retriever, count, chunks))


def held_out_passages(retriever: Retriever, count: int, chunks: int) -> schemas.ExamplesResponse:
    """Return the beginnings of documents that differ in how near their neighbors are.

    Without held-out documents, the documents are from the datastore itself and find themselves.
    """
    datastore = retriever.datastore
    held_out = (each for each in (datastore.valid, datastore.test) if each.num_documents > len(each.deleted))
    split = next(held_out, datastore.train)
    ranges = split.chunk_ranges(np.arange(min(split.num_documents, _MOST_DOCUMENTS)))  # [n, 2]
    ranges[inside(ranges[:, 0], split.deleted)] = 0
    is_long = np.diff(ranges)[:, 0] >= chunks
    documents = np.flatnonzero(is_long if is_long.any() else np.diff(ranges)[:, 0] > 0)
    documents = documents[np.argsort(_distances(datastore, split, ranges[documents], chunks), kind="stable")]
    places = np.linspace(*_QUANTILES, num=count) * len(documents)
    chosen = documents[np.unique(places.astype(int))] if len(documents) else documents
    return schemas.ExamplesResponse(
        held_out=split.name != "train",
        examples=[_beginning(retriever, split, document, chunks) for document in chosen.tolist()],
    )


def _distances(datastore: Datastore, split: Split, ranges: np.ndarray, chunks: int) -> np.ndarray:
    """Mean squared distance [n] of the nearest stored neighbors of the first chunks of documents with these ranges [n, 2]."""
    if not datastore.has("neighbors") or not len(ranges):
        return np.zeros(len(ranges))
    ids = np.minimum(ranges[:, :1] + np.arange(chunks), ranges[:, 1:] - 1)  # [n, chunks]
    nearest = split.neighbor_distances.gather(ids.ravel())[:, 0].reshape(ids.shape)
    means: np.ndarray = np.minimum(nearest, _FARTHEST).mean(axis=1)
    return means


def _beginning(retriever: Retriever, split: Split, document: int, chunks: int) -> schemas.Example:
    first, stop = split.chunk_range(document)
    stop = min(stop, first + chunks)
    rows = zip(split.tokens.read(first, stop), split.lengths.read(first, stop), strict=True)
    tokens = np.concatenate([row[:length] for row, length in rows]).astype(np.int64)
    metadata = split.metadata([document])[0]
    return schemas.Example(
        document_id=str(metadata.get("id") or ""),
        title=str(metadata.get("title") or ""),
        text=retriever.tokenizer.decode(tokens).rstrip("\ufffd"),  # a character may continue in the next chunk
    )


@router.get("/filter-values", response_model=schemas.FilterValuesResponse, responses=error_responses(422))
async def filter_values(
    service: ServiceDependency,
    column: Annotated[str, Query(description="Column of the documents' metadata.")],
    contains: Annotated[str, Query(description="Part of the values' text, in any case.")] = "",
    count: Annotated[int, Query(ge=1, le=1000, description="Largest number of values.")] = 50,
) -> Response:
    """Return values of a column that `filters` accepts, the most frequent first."""
    columns = service.retriever.filter_columns
    if column not in columns:
        raise InvalidRequest(f"column = {column!r}: accepted are {', '.join(columns)}.", param="column")
    return as_json(await run_in_threadpool(column_values, service.retriever, column, contains, count))


def column_values(retriever: Retriever, column: str, contains: str, count: int) -> schemas.FilterValuesResponse:
    """Return the values whose text contains `contains`; of large datastores, those of the first documents."""
    found: Counter[schemas.Value] = Counter()
    scanned, wanted = 0, contains.casefold()
    deleted = retriever.retrieval.deleted_documents
    for first, table in retriever.retrieval.scan_documents([column]):
        values = enumerate(table[column].to_pylist(), start=first)
        found.update(value for number, value in values if number not in deleted and _is_offered(value, wanted))
        scanned += len(table)
        if scanned >= _SCANNED_DOCUMENTS:
            break
    total = sum(split.num_documents for split in retriever.retrieval.splits)
    return schemas.FilterValuesResponse(
        values=[value for value, _ in found.most_common(count)],
        complete=scanned >= total and len(found) <= count,
    )


def _is_offered(value: object, wanted: str) -> bool:
    if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        return False
    return len(text := str(value)) <= _LONGEST_VALUE and wanted in text.casefold()
