"""Endpoints that fill the page's forms: passages of held-out documents to try, and the values of a column to filter by.

column of the documents' metadata ─► its values, the most frequent first
"""

import math
from collections import Counter
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool

from indexing.retrieval.retriever import Retriever
from retro.server import schemas
from retro.server.errors import InvalidRequest, error_responses
from retro.server.examples import best_examples
from retro.server.routes import JsonRoute, ServiceDependency

router = APIRouter(route_class=JsonRoute, tags=["server"])

_SCANNED_DOCUMENTS = 2**17
_LONGEST_VALUE = 200  # characters


@router.get("/examples", responses=error_responses(422))
async def examples(
    service: ServiceDependency,
    count: Annotated[int, Query(ge=1, le=16, description="Largest number of passages.")] = 3,
    chunks: Annotated[int, Query(ge=1, le=64, description="Largest length of a passage in chunks.")] = 6,
) -> schemas.ExamplesResponse:
    """Return beginnings of held-out documents to try search and model with, those that retrieval helps most first."""
    return await best_examples(service, count, chunks)


@router.get("/filter-values", responses=error_responses(422))
async def filter_values(
    service: ServiceDependency,
    column: Annotated[str, Query(description="Column of the documents' metadata.")],
    contains: Annotated[str, Query(description="Part of the values' text, in any case.")] = "",
    count: Annotated[int, Query(ge=1, le=1000, description="Largest number of values.")] = 50,
) -> schemas.FilterValuesResponse:
    """Return values of a column that `filters` accepts, the most frequent first."""
    columns = service.retriever.filters.columns
    if column not in columns:
        raise InvalidRequest(f"column = {column!r}: accepted are {', '.join(columns)}.", param="column")
    return await run_in_threadpool(column_values, service.retriever, column, contains, count)


def column_values(retriever: Retriever, column: str, contains: str, count: int) -> schemas.FilterValuesResponse:
    """Return the values whose text contains `contains`; of large datastores, those of the first documents."""
    counts: Counter[schemas.Value] = Counter()
    scanned, part = 0, contains.casefold()
    deleted = retriever.retrieval.deleted_documents
    for first, table in retriever.retrieval.scan_documents([column]):
        values = enumerate(table[column].to_pylist(), start=first)
        counts.update(value for document, value in values if document not in deleted and _is_offered(value, part))
        scanned += len(table)
        if scanned >= _SCANNED_DOCUMENTS:
            break
    total = sum(split.num_documents for split in retriever.retrieval.splits)
    return schemas.FilterValuesResponse(
        values=[value for value, _ in counts.most_common(count)],
        complete=scanned >= total and len(counts) <= count,
    )


def _is_offered(value: object, part: str) -> bool:
    if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        return False
    return len(text := str(value)) <= _LONGEST_VALUE and part in text.casefold()
