"""Endpoints over the datastores: search, neighbors of a text's chunks, chunks and documents by id, vectors of texts.

texts | token ids | vectors ─► Service.search (batched) ─► hits ─► JSON
a text ─► its chunks, as training cuts them ─► search ─► hits with what they share with their chunk
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

from indexing.overlap import overlap
from indexing.retrieval.results import Hit, StoredChunk
from indexing.retrieval.retriever import Retriever
from retro.server import schemas
from retro.server.datastore_facts import datastore_facts
from retro.server.errors import Refused, declared
from retro.server.json_route import JsonRoute, as_json
from retro.server.service import BareHit, Found, Kind, Search, Service, Serving
from retro.server.spans import characters, shared_runs, token_ends

router = APIRouter(route_class=JsonRoute)

_LARGEST_ID = 2**63 - 1
_NO_TEXT = {
    **dict.fromkeys(("text", "continuation", "document_id", "title", "source"), ""),
    "metadata": dict[str, Any](),
}


# --- search ----------------------------------------------------------------------------------------------------------


@router.post("/search", response_model=schemas.SearchResponse, responses=declared(413, 422), tags=["search"])
async def search(request: schemas.SearchRequest, service: Serving) -> Response:
    """The nearest chunks of texts, token ids or vectors; requests that come together are searched together."""
    found = await found_for(service, request)
    results = [[_hit_fields(hit) for hit in each.hits] for each in found]
    # Written as it is, without a model for each hit: that would cost more than a search.
    return Response(to_json({"results": results} | _missing(found)), media_type="application/json")


async def found_for(service: Service, request: schemas.SearchRequest) -> list[Found]:
    """What a search has found, query by query.

    Raises:
        ApiError: the request passes a limit, or its vectors cannot be read.
    """
    kind: Kind
    queries: Any
    if request.texts is not None:
        kind, queries = "texts", request.texts
        service.check_characters(queries, "texts")
    elif request.tokens is not None:
        kind, queries = "tokens", [np.array(row, dtype=np.int64) for row in request.tokens]
        service.check_input([len(row) for row in queries], "tokens")
    else:
        assert request.vectors is not None
        kind, queries = "vectors", vectors_of(request.vectors, service.retriever.embedder.dimension)
    service.check_queries(len(queries), kind)
    service.check_candidates(len(queries), service.check_k(request.k), request.rerank)
    filters = json.dumps(request.filters, sort_keys=True)
    search = Search(kind, request.k, filters, request.rerank, request.text)
    return await service.search(search, queries)


def vectors_of(given: Sequence[schemas.Vector], dimension: int) -> list[np.ndarray]:
    """Vectors [d] float32 of a request.

    Raises:
        ApiError: one has another width, is no base64, or holds what is no number.
    """
    vectors = []
    for number, vector in enumerate(given):
        if isinstance(vector, str):
            try:
                row = np.frombuffer(base64.b64decode(vector, validate=True), dtype="<f4")
            except (binascii.Error, ValueError) as error:
                message = f"vectors[{number}]: not the base64 of little-endian float32 ({error})."
                raise Refused(message, param="vectors") from error
        else:
            with np.errstate(over="ignore"):  # told below
                row = np.array(vector, dtype=np.float32)
        if len(row) != dimension:
            message = f"vectors[{number}] has {len(row)} numbers, the embedder's vectors have {dimension}."
            raise Refused(message, param="vectors")
        if not np.isfinite(row).all():
            raise Refused(f"vectors[{number}] holds a number that is not finite in float32.", param="vectors")
        vectors.append(row)
    return vectors


def _missing(found: Iterable[Found]) -> dict[str, Any]:
    names = sorted({name for each in found for name in each.missing})
    return {"partial": bool(names), "missing": names}


def _of_document(found: Hit | StoredChunk) -> dict[str, Any]:
    return {
        "document_id": found.document_id,
        "title": found.title,
        "source": found.source,
        "metadata": found.document,
    }


def _hit_fields(hit: Hit | BareHit) -> dict[str, Any]:
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


@router.post("/embed", response_model=schemas.EmbedResponse, responses=declared(413, 422), tags=["search"])
async def embed(request: schemas.EmbedRequest, service: Serving) -> Response:
    """Unit vectors of texts, by the datastore's own embedder."""
    service.check_queries(len(request.texts), "texts")
    service.check_characters(request.texts, "texts")
    vectors = await service.embed("texts", request.texts)
    return as_json(schemas.EmbedResponse.model_construct(vectors=[encoded(row, request.encoding) for row in vectors]))


def encoded(vector: np.ndarray, encoding: str | None) -> schemas.Vector:
    """A vector [d] as numbers, or as `base64` of little-endian float32."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


# --- neighbors of a text ---------------------------------------------------------------------------------------------


@router.post("/neighbors", response_model=schemas.NeighborsResponse, responses=declared(413, 422), tags=["search"])
async def neighbors(request: schemas.NeighborsRequest, service: Serving) -> Response:
    """The chunks of a text, as training cuts it, each with its neighbors and the runs of tokens that they share."""
    retriever = service.retriever
    tokens = (await service.encoded([request.text], "text"))[0]
    tokens = np.concatenate([[retriever.tokenizer.bos_id], tokens])  # a text begins a document
    m = retriever.datastore.chunk_length
    rows = [tokens[start : start + m] for start in range(0, len(tokens), m)]
    service.check_queries(len(rows), "chunks of text")
    service.check_candidates(len(rows), service.check_k(request.k), request.rerank)
    service.check_neighbors([len(rows) * m], request.k, "text")
    search = Search("tokens", request.k, json.dumps(request.filters, sort_keys=True), request.rerank)
    found = await service.search(search, rows)
    # Chunk by chunk, so that nothing goes on when the client is gone or the time is over.
    texts = NeighborTexts(retriever)
    chunks = [await run_in_threadpool(_chunk, retriever, texts, *each) for each in zip(rows, found, strict=True)]
    return as_json(schemas.NeighborsResponse(chunks=chunks, **_missing(found)))


@router.post(
    "/neighbors/tokens", response_model=schemas.NeighborTokensResponse, responses=declared(413, 422), tags=["search"]
)
async def neighbor_tokens(request: schemas.NeighborTokensRequest, service: Serving) -> Response:
    """What a model reads of the datastore: token ids of the neighbors of whole chunks, with their continuations."""
    retriever, m = service.retriever, service.retriever.datastore.chunk_length
    service.check_queries(len(request.chunks), "chunks")
    service.check_input([len(row) for row in request.chunks], "chunks")
    for number, row in enumerate(request.chunks):
        if len(row) != m:
            raise Refused(f"chunks[{number}] has {len(row)} tokens, the datastore's chunks have {m}.", param="chunks")
    service.check_candidates(len(request.chunks), service.check_k(request.k), "embeddings")
    search = Search("tokens", request.k, "{}", "embeddings", text=False)
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
    """Characters of the tokens of neighbors, for one request: a chunk that several chunks have found is decoded once."""

    def __init__(self, retriever: Retriever) -> None:
        self._decode, self._m = retriever.tokenizer.decode_batch, retriever.datastore.chunk_length
        self._ends: dict[int, list[int]] = {}

    def ends(self, chunk_id: int, tokens: np.ndarray) -> list[int]:
        """`token_ends` of a chunk and its continuation, decoded apart, as the hit's two texts were."""
        if chunk_id not in self._ends:
            text, ends = token_ends(self._decode, tokens[: self._m])
            _, later = token_ends(self._decode, tokens[self._m :])
            self._ends[chunk_id] = ends + [len(text) + end for end in later]
        return self._ends[chunk_id]


def _chunk(retriever: Retriever, texts: NeighborTexts, tokens: np.ndarray, found: Found) -> schemas.Chunk:
    """A chunk [≤ m] of the text with its neighbors."""
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
        neighbors.append(schemas.NeighborHit(**_hit_fields(hit), overlap=share, spans=spans))
    return schemas.Chunk(text=text, tokens=len(tokens), neighbors=neighbors)


# --- by id -----------------------------------------------------------------------------------------------------------


@router.get("/chunks/{chunk_id}", response_model=schemas.StoredChunk, responses=declared(404, 422), tags=["by id"])
def chunk(chunk_id: Annotated[int, Path(ge=0, le=_LARGEST_ID)], service: Serving) -> Response:
    """A chunk by the id that a hit has, with the ids of the ones before and after it in its document."""
    return as_json(_stored_chunk(service.retriever.chunk(chunk_id)))


First = Annotated[int, Query(ge=0, le=_LARGEST_ID, description="Place of the first chunk, from 0.")]
Count = Annotated[int, Query(ge=0, le=1024, description="Chunks at most.")]


@router.get("/documents", response_model=schemas.StoredDocument, responses=declared(404, 422), tags=["by id"])
def document_of_any_id(
    id: Annotated[str, Query(description="Any id, also one that no path can hold: `..`, line breaks.")],
    service: Serving,
    first: First = 0,
    count: Count = 8,
) -> Response:
    """A document by the id that a hit has, with some of its chunks."""
    return document(id, service, first, count)


@router.get(
    "/documents/{document_id:path}", response_model=schemas.StoredDocument, responses=declared(404, 422), tags=["by id"]
)
def document(document_id: str, service: Serving, first: First = 0, count: Count = 8) -> Response:
    """The same by a path, which most ids can be part of."""
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


@router.get("/datastore", response_model=schemas.DatastoreResponse, responses=declared(), tags=["server"])
def datastore(service: Serving) -> Mapping[str, Any]:
    """What is served, and what a request may ask for."""
    return datastore_facts(service)
