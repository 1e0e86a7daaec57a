"""Endpoints of the datastores: search, neighbors of a text's chunks, chunks and documents by id, embeddings of texts.

texts | token ids | vectors ─► Service.search (batched) ─► hits ─► JSON
text ─► chunks, as in training ─► search ─► hits with the token runs that they share with their chunk
"""

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path, Query
from fastapi.concurrency import run_in_threadpool
from pydantic_core import to_json
from starlette.responses import Response

from indexing.retrieval.results import Hit, StoredChunk
from indexing.retrieval.retriever import Retriever
from indexing.similarity.overlap import overlap
from retro.server import schemas
from retro.server.datastore_info import datastore_info
from retro.server.errors import InvalidRequest, error_responses
from retro.server.json_route import JsonRoute, as_json
from retro.server.service import BareHit, QueryKind, SearchKey, SearchResult, Service, ServiceDependency
from retro.server.spans import characters, shared_runs, token_ends

router = APIRouter(route_class=JsonRoute)

_LARGEST_ID = 2**63 - 1
_NO_TEXT = {
    **dict.fromkeys(("text", "continuation", "document_id", "title", "source"), ""),
    "metadata": dict[str, Any](),
}


# --- search ----------------------------------------------------------------------------------------------------------


@router.post("/search", response_model=schemas.SearchResponse, responses=error_responses(413, 422), tags=["search"])
async def search(request: schemas.SearchRequest, service: ServiceDependency) -> Response:
    """Find the nearest chunks of texts, token ids or vectors."""
    found = await search_for(service, request)
    results = [[hit_fields(hit) for hit in each.hits] for each in found]
    # Without a pydantic model for each hit, which would take longer than the search.
    return Response(to_json({"results": results} | _missing(found)), media_type="application/json")


async def search_for(service: Service, request: schemas.SearchRequest) -> list[SearchResult]:
    """Return the result of each query of a request.

    Raises:
        ApiError: the request exceeds a limit, or its vectors are invalid.
    """
    kind: QueryKind
    queries: Any
    if request.texts is not None:
        kind, queries = "texts", request.texts
        service.check_characters(queries, "texts")
    elif request.tokens is not None:
        kind, queries = "tokens", [np.array(row, dtype=np.int64) for row in request.tokens]
        service.check_input([len(row) for row in queries], "tokens")
    else:
        assert request.vectors is not None
        kind, queries = "vectors", decoded_vectors(request.vectors, service.retriever.embedder.dimension)
    service.check_queries(len(queries), kind)
    service.check_candidates(len(queries), service.check_k(request.k), request.retrieval)
    filters = json.dumps(request.filters, sort_keys=True)
    datastore = service.check_datastore(request.datastore)
    search = SearchKey(kind, request.k, filters, request.retrieval, request.text, datastore)
    return await service.search(search, queries)


def decoded_vectors(received: Sequence[schemas.Vector], dimension: int) -> list[np.ndarray]:
    """Return the vectors [d] float32 of a request.

    Raises:
        ApiError: a vector has another dimension, is not base64, or has a number that is not finite.
    """
    vectors = []
    for number, vector in enumerate(received):
        if isinstance(vector, str):
            try:
                row = np.frombuffer(base64.b64decode(vector, validate=True), dtype="<f4")
            except (binascii.Error, ValueError) as error:
                message = f"vectors[{number}]: not the base64 of little-endian float32 ({error})."
                raise InvalidRequest(message, param="vectors") from error
        else:
            with np.errstate(over="ignore"):  # rejected below
                row = np.array(vector, dtype=np.float32)
        if len(row) != dimension:
            message = f"vectors[{number}] has {len(row)} numbers; the embedder's vectors have {dimension}."
            raise InvalidRequest(message, param="vectors")
        if not np.isfinite(row).all():
            raise InvalidRequest(f"vectors[{number}] has a number that is not finite in float32.", param="vectors")
        vectors.append(row)
    return vectors


def _missing(found: Iterable[SearchResult]) -> dict[str, Any]:
    names = sorted({name for each in found for name in each.missing})
    return {"partial": bool(names), "missing": names}


def _of_document(found: Hit | StoredChunk) -> dict[str, Any]:
    return {
        "document_id": found.document_id,
        "title": found.title,
        "source": found.source,
        "metadata": found.document,
    }


def hit_fields(hit: Hit | BareHit) -> dict[str, Any]:
    """Return the fields of `schemas.Hit`."""
    if isinstance(hit, BareHit):
        return _NO_TEXT | {"chunk_id": hit.chunk_id, "score": hit.score, "distance": hit.distance}
    return {
        "chunk_id": hit.chunk_id,
        "score": hit.score,
        "distance": hit.distance,
        "text": hit.text,
        "continuation": hit.continuation,
        **_of_document(hit),
    }


@router.post("/embed", response_model=schemas.EmbedResponse, responses=error_responses(413, 422), tags=["search"])
async def embed(request: schemas.EmbedRequest, service: ServiceDependency) -> Response:
    """Embed texts with the datastore's embedder; returns unit vectors."""
    service.check_queries(len(request.texts), "texts")
    service.check_characters(request.texts, "texts")
    vectors = await service.embed("texts", request.texts)
    return as_json(schemas.EmbedResponse.model_construct(vectors=[encoded(row, request.encoding) for row in vectors]))


def encoded(vector: np.ndarray, encoding: str | None) -> schemas.Vector:
    """Return a vector [d] as numbers or, for `base64`, as its little-endian float32 bytes in base64."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


# --- neighbors of a text ---------------------------------------------------------------------------------------------


@router.post(
    "/neighbors", response_model=schemas.NeighborsResponse, responses=error_responses(413, 422), tags=["search"]
)
async def neighbors(request: schemas.NeighborsRequest, service: ServiceDependency) -> Response:
    """Cut a text into chunks as in training, and find each chunk's neighbors and the token runs that they share with it."""
    retriever = service.retriever
    tokens = (await service.encoded([request.text], "text"))[0]
    tokens = np.concatenate([[retriever.tokenizer.bos_id], tokens])  # the text is the beginning of a document
    m = retriever.datastore.chunk_length
    rows = [tokens[start : start + m] for start in range(0, len(tokens), m)]
    service.check_queries(len(rows), "chunks of text")
    service.check_candidates(len(rows), service.check_k(request.k), request.retrieval)
    service.check_neighbors([len(rows) * m], request.k, "text")
    filters, datastore = json.dumps(request.filters, sort_keys=True), service.check_datastore(request.datastore)
    search = SearchKey("tokens", request.k, filters, request.retrieval, datastore=datastore)
    found = await service.search(search, rows)
    # Chunk by chunk, so that the work stops when the client disconnects or the time is over.
    texts = NeighborTexts(retriever)
    chunks = [await run_in_threadpool(_chunk, retriever, texts, *each) for each in zip(rows, found, strict=True)]
    return as_json(schemas.NeighborsResponse(chunks=chunks, **_missing(found)))


@router.post(
    "/neighbors/tokens",
    response_model=schemas.NeighborTokensResponse,
    responses=error_responses(413, 422),
    tags=["search"],
)
async def neighbor_tokens(request: schemas.NeighborTokensRequest, service: ServiceDependency) -> Response:
    """Find the neighbors of whole chunks and return their token ids with continuations, as a model reads them.

    They are found and ordered as the stored neighbors that models are trained with (`neighbors.search`, `neighbors.rerank`).
    """
    retriever, m = service.retriever, service.retriever.datastore.chunk_length
    service.check_queries(len(request.chunks), "chunks")
    service.check_input([len(row) for row in request.chunks], "chunks")
    for number, row in enumerate(request.chunks):
        if len(row) != m:
            raise InvalidRequest(
                f"chunks[{number}] has {len(row)} tokens; the datastore's chunks have {m}.", param="chunks"
            )
        service.check_ids(row, f"chunks[{number}]", "chunks")
    service.check_candidates(len(request.chunks), service.check_k(request.k), "dense")
    search = SearchKey("tokens", request.k, "{}", "dense", text=False, neighbors=True)
    found = await service.search(search, [np.array(row, dtype=np.int64) for row in request.chunks])
    ids = np.full((len(found), request.k), -1, dtype=np.int64)
    for number, each in enumerate(found):
        ids[number, : len(each.hits)] = [hit.chunk_id for hit in each.hits]
    tokens, lengths = await run_in_threadpool(retriever.retrieval.with_continuation, ids.ravel())
    return as_json(
        schemas.NeighborTokensResponse(
            tokens=tokens.reshape(*ids.shape, 2 * m).tolist(),
            lengths=lengths.reshape(ids.shape).tolist(),
            **_missing(found),
        )
    )


class NeighborTexts:
    """Character positions of neighbors' tokens for one request: decodes each neighbor once, even if several chunks have it."""

    def __init__(self, retriever: Retriever) -> None:
        self._decode, self._m = retriever.tokenizer.decode_batch, retriever.datastore.chunk_length
        self._ends: dict[int, list[int]] = {}

    def ends(self, chunk_id: int, tokens: np.ndarray) -> list[int]:
        """Return `token_ends` of a chunk and its continuation, decoded separately like the two texts of a hit."""
        if chunk_id not in self._ends:
            text, ends = token_ends(self._decode, tokens[: self._m])
            _, later = token_ends(self._decode, tokens[self._m :])
            self._ends[chunk_id] = ends + [len(text) + end for end in later]
        return self._ends[chunk_id]


def _chunk(retriever: Retriever, texts: NeighborTexts, tokens: np.ndarray, found: SearchResult) -> schemas.Chunk:
    """Return a chunk [≤ m] of the text with its neighbors."""
    text, ends = token_ends(retriever.tokenizer.decode_batch, tokens)
    ids = np.array([hit.chunk_id for hit in found.hits], dtype=np.int64)
    stored, lengths = retriever.retrieval.with_continuation(ids)  # [k, 2m], [k]
    shares = overlap(np.tile(tokens, (len(ids), 1)), np.full(len(ids), len(tokens)), stored, lengths)
    neighbors = []
    for hit, row, length, share in zip(found.hits, stored, lengths, shares, strict=True):
        spans = [
            schemas.Span(
                chunk=characters(ends, i, i + n),
                neighbor=characters(texts.ends(hit.chunk_id, row[:length]), j, j + n),
                tokens=n,
            )
            for i, j, n in shared_runs(tokens, row[:length])
        ]
        neighbors.append(schemas.NeighborHit(**hit_fields(hit), overlap=share, spans=spans))
    return schemas.Chunk(text=text, tokens=len(tokens), neighbors=neighbors)


# --- by id -----------------------------------------------------------------------------------------------------------


@router.get(
    "/chunks/{chunk_id}", response_model=schemas.StoredChunk, responses=error_responses(404, 422), tags=["by id"]
)
def chunk(chunk_id: Annotated[int, Path(ge=0, le=_LARGEST_ID)], service: ServiceDependency) -> Response:
    """Return a chunk by its id, with the ids of the previous and the next chunk of its document."""
    return as_json(_stored_chunk(service.retriever.chunk(chunk_id)))


First = Annotated[int, Query(ge=0, le=_LARGEST_ID, description="Number of the first chunk, from 0.")]
Count = Annotated[int, Query(ge=0, le=1024, description="Largest number of chunks to return.")]


@router.get("/documents", response_model=schemas.StoredDocument, responses=error_responses(404, 422), tags=["by id"])
def document_by_query(
    id: Annotated[
        str, Query(description="Document id, also one that a path cannot contain, e.g. `..` or line breaks.")
    ],
    service: ServiceDependency,
    first: First = 0,
    count: Count = 8,
) -> Response:
    """Return a document by its id, with a range of its chunks."""
    return document(id, service, first, count)


@router.get(
    "/documents/{document_id:path}",
    response_model=schemas.StoredDocument,
    responses=error_responses(404, 422),
    tags=["by id"],
)
def document(document_id: str, service: ServiceDependency, first: First = 0, count: Count = 8) -> Response:
    """Return a document by its id in the path, with a range of its chunks."""
    found = service.retriever.document(document_id, first, count)
    return as_json(
        schemas.StoredDocument(
            document_id=found.document_id,
            title=found.title,
            source=found.source,
            metadata=found.document,
            num_chunks=found.num_chunks,
            first=found.first,
            chunks=[_stored_chunk(each) for each in found.chunks],
        )
    )


def _stored_chunk(chunk: StoredChunk) -> schemas.StoredChunk:
    return schemas.StoredChunk(
        chunk_id=chunk.chunk_id,
        text=chunk.text,
        continuation=chunk.continuation,
        previous_chunk_id=chunk.previous_chunk_id,
        next_chunk_id=chunk.next_chunk_id,
        **_of_document(chunk),
    )


@router.get("/datastore", response_model=schemas.DatastoreResponse, responses=error_responses(), tags=["server"])
def datastore(service: ServiceDependency) -> Mapping[str, Any]:
    """Return totals of the datastores, the model, and the limits of a request."""
    return datastore_info(service)
