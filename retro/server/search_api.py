"""Endpoints of the datastores: search, neighbors of a text's chunks, chunks and documents by id, embeddings of texts.

texts | token ids | vectors ─► Service.search (batched) ─► hits ─► JSON
text ─► chunks, as in training ─► search ─► hits with the token runs that they share with their chunk
"""

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as FolderPath
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path, Query
from fastapi.concurrency import run_in_threadpool
from pydantic_core import to_json
from starlette.responses import Response

from indexing.retrieval.results import StoredChunk, StoredDocument
from indexing.retrieval.retriever import Retriever
from indexing.similarity.overlap import overlap
from indexing.store.datastore import Datastore, read_report
from indexing.store.remote import datastore_name
from indexing.store.retrieval_set import embedder_kind, tokenizer_fingerprint
from retro.inference.spans import ChunkTexts, characters, shared_runs, token_ends
from retro.model.presets import count_parameters
from retro.server import schemas
from retro.server.batched_search import BareHit, QueryKind, SearchKey, SearchResult
from retro.server.errors import InvalidRequest, error_responses
from retro.server.routes import JsonRoute, ServiceDependency
from retro.server.service import Service

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
    results = await search_for(service, request)
    hits = [
        [_NO_TEXT | hit._asdict() if isinstance(hit, BareHit) else hit for hit in result.hits] for result in results
    ]
    # Without a pydantic model for each hit, which would take longer than the search.
    return Response(to_json({"results": hits} | _missing(results)), media_type="application/json")


async def search_for(service: Service, request: schemas.SearchRequest) -> list[SearchResult]:
    """Return the result of each query of a request.

    Raises:
        ApiError: the request exceeds a limit, or its vectors are invalid.
    """
    kind: QueryKind
    queries: Any
    if request.texts is not None:
        kind, queries = "texts", request.texts
        service.limits.characters(queries, "texts")
    elif request.tokens is not None:
        kind, queries = "tokens", [np.array(row, dtype=np.int64) for row in request.tokens]
        service.limits.tokens(queries, "tokens")
    else:
        assert request.vectors is not None
        kind, queries = "vectors", decoded_vectors(request.vectors, service.retriever.embedder.dimension)
    service.limits.search(len(queries), request.k, request.retrieval, kind)
    filters = json.dumps(request.filters, sort_keys=True)
    datastore = service.limits.datastore(request.datastore)
    search = SearchKey(kind, request.k, filters, request.retrieval, request.text, datastore)
    return await service.search(search, queries)


def decoded_vectors(received: Sequence[schemas.Vector], dimension: int) -> list[np.ndarray]:
    """Return the vectors [d] float32 of a request.

    Raises:
        ApiError: a vector has another dimension, is not base64, or has a number that is not finite.
    """
    vectors = []
    for index, vector in enumerate(received):
        if isinstance(vector, str):
            try:
                row = np.frombuffer(base64.b64decode(vector, validate=True), dtype="<f4")
            except (binascii.Error, ValueError) as error:
                message = f"vectors[{index}]: not the base64 of little-endian float32 ({error})."
                raise InvalidRequest(message, param="vectors") from error
        else:
            with np.errstate(over="ignore"):  # rejected below
                row = np.array(vector, dtype=np.float32)
        if len(row) != dimension:
            message = f"vectors[{index}] has {len(row)} numbers; the embedder's vectors have {dimension}."
            raise InvalidRequest(message, param="vectors")
        if not np.isfinite(row).all():
            raise InvalidRequest(f"vectors[{index}] has a number that is not finite in float32.", param="vectors")
        vectors.append(row)
    return vectors


def _missing(results: Iterable[SearchResult]) -> dict[str, Any]:
    names = sorted({name for result in results for name in result.missing})
    return {"partial": bool(names), "missing": names}


@router.post("/embed", responses=error_responses(413, 422), tags=["search"])
async def embed(request: schemas.EmbedRequest, service: ServiceDependency) -> schemas.EmbedResponse:
    """Embed texts with the datastore's embedder; returns unit vectors."""
    service.limits.within("max_queries", len(request.texts), "texts")
    service.limits.characters(request.texts, "texts")
    vectors = await service.embed("texts", request.texts)
    return schemas.EmbedResponse.model_construct(vectors=[encoded(row, request.encoding) for row in vectors])


def encoded(vector: np.ndarray, encoding: str | None) -> schemas.Vector:
    """Return a vector [d] as numbers or, for `base64`, as its little-endian float32 bytes in base64."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    floats: list[float] = vector.tolist()
    return floats


# --- neighbors of a text ---------------------------------------------------------------------------------------------


@router.post("/neighbors", responses=error_responses(413, 422), tags=["search"])
async def neighbors(request: schemas.NeighborsRequest, service: ServiceDependency) -> schemas.NeighborsResponse:
    """Cut a text into chunks as in training, and find each chunk's neighbors and the token runs that they share with
    it."""
    retriever = service.retriever
    tokens = (await service.encoded([request.text], "text"))[0]
    tokens = np.concatenate([[retriever.tokenizer.bos_id], tokens])  # the text is the beginning of a document
    m = retriever.datastore.chunk_length
    rows = [tokens[start : start + m] for start in range(0, len(tokens), m)]
    service.limits.search(len(rows), request.k, request.retrieval, "chunks of text")
    service.limits.neighbors([len(rows) * m], request.k, "text")
    filters, datastore = json.dumps(request.filters, sort_keys=True), service.limits.datastore(request.datastore)
    search = SearchKey("tokens", request.k, filters, request.retrieval, datastore=datastore)
    results = await service.search(search, rows)
    # Chunk by chunk, so that the work stops when the client disconnects or the time is over.
    texts = ChunkTexts(retriever)
    chunks = [await run_in_threadpool(_chunk, retriever, texts, *pair) for pair in zip(rows, results, strict=True)]
    return schemas.NeighborsResponse(chunks=chunks, **_missing(results))


@router.post("/neighbors/tokens", responses=error_responses(413, 422), tags=["search"])
async def neighbor_tokens(
    request: schemas.NeighborTokensRequest, service: ServiceDependency
) -> schemas.NeighborTokensResponse:
    """Find the neighbors of whole chunks and return their token ids with continuations, as a model reads them.

    They are found and ordered as the stored neighbors that models are trained with (`neighbors.search`,
    `neighbors.rerank`); without embeddings, in the sorted prefixes.
    """
    retriever, m = service.retriever, service.retriever.datastore.chunk_length
    service.limits.search(len(request.chunks), request.k, "dense", "chunks")
    service.limits.tokens(request.chunks, "chunks")
    for index, row in enumerate(request.chunks):
        if len(row) != m:
            raise InvalidRequest(
                f"chunks[{index}] has {len(row)} tokens; the datastore's chunks have {m}.", param="chunks"
            )
        service.limits.token_ids(row, f"chunks[{index}]", "chunks")
    search = SearchKey("tokens", request.k, "{}", "dense", text=False, neighbors=True)
    results = await service.search(search, [np.array(row, dtype=np.int64) for row in request.chunks])
    ids = np.full((len(results), request.k), -1, dtype=np.int64)
    for row, result in zip(ids, results, strict=True):
        row[: len(result.hits)] = [hit.chunk_id for hit in result.hits]
    tokens, lengths = await run_in_threadpool(retriever.retrieval.with_continuation, ids.ravel())
    return schemas.NeighborTokensResponse(
        tokens=tokens.reshape(*ids.shape, 2 * m).tolist(),
        lengths=lengths.reshape(ids.shape).tolist(),
        **_missing(results),
    )


def _chunk(retriever: Retriever, texts: ChunkTexts, tokens: np.ndarray, result: SearchResult) -> schemas.Chunk:
    """Return a chunk [≤ m] of the text with its neighbors."""
    text, ends = token_ends(retriever.tokenizer.decode_batch, tokens)
    ids = np.array([hit.chunk_id for hit in result.hits], dtype=np.int64)
    stored, lengths = retriever.retrieval.with_continuation(ids)  # [k, 2m], [k]
    shares = overlap(np.tile(tokens, (len(ids), 1)), np.full(len(ids), len(tokens)), stored, lengths)
    neighbors = []
    for hit, row, length, share in zip(result.hits, stored, lengths, shares, strict=True):
        spans = [
            schemas.Span(
                chunk=characters(ends, i, i + n),
                neighbor=characters(texts.ends(hit.chunk_id, row[:length]), j, j + n),
                tokens=n,
            )
            for i, j, n in shared_runs(tokens, row[:length])
        ]
        neighbors.append(schemas.NeighborHit(**vars(hit), overlap=float(share), spans=spans))
    return schemas.Chunk(text=text, tokens=len(tokens), neighbors=neighbors)


# --- by id -----------------------------------------------------------------------------------------------------------


@router.get("/chunks/{chunk_id}", responses=error_responses(404, 422), tags=["by id"])
def chunk(chunk_id: Annotated[int, Path(ge=0, le=_LARGEST_ID)], service: ServiceDependency) -> StoredChunk:
    """Return a chunk by its id, with the ids of the previous and the next chunk of its document."""
    return service.retriever.lookup.chunk(chunk_id)


First = Annotated[int, Query(ge=0, le=_LARGEST_ID, description="Number of the first chunk, from 0.")]
Count = Annotated[int, Query(ge=0, le=1024, description="Largest number of chunks to return.")]


@router.get("/documents", responses=error_responses(404, 422), tags=["by id"])
def document_by_query(
    id: Annotated[
        str, Query(description="Document id, also one that a path cannot contain, e.g. `..` or line breaks.")
    ],
    service: ServiceDependency,
    first: First = 0,
    count: Count = 8,
) -> StoredDocument:
    """Return a document by its id, with a range of its chunks."""
    return document(id, service, first, count)


@router.get("/documents/{document_id:path}", responses=error_responses(404, 422), tags=["by id"])
def document(document_id: str, service: ServiceDependency, first: First = 0, count: Count = 8) -> StoredDocument:
    """Return a document by its id in the path, with a range of its chunks."""
    return service.retriever.lookup.document(document_id, first, count)


# --- what is served --------------------------------------------------------------------------------------------------


@router.get("/datastore", response_model=schemas.DatastoreResponse, responses=error_responses(), tags=["server"])
def datastore(service: ServiceDependency) -> Mapping[str, Any]:
    """Return totals of the datastores, the model, and the limits of a request."""
    return datastore_info(service)


def datastore_info(service: Service) -> dict[str, Any]:
    """Return the fields of `schemas.DatastoreResponse`."""
    retriever = service.retriever
    retriever.retrieval.require_unchanged()
    return {
        "datastores": [_datastore(split.folder) for split in retriever.retrieval.splits],
        "chunk_length": retriever.datastore.chunk_length,
        "vocab_size": retriever.tokenizer.vocab_size,
        "tokenizer": tokenizer_fingerprint(retriever.datastore.folder),
        "embedder": embedder_kind(retriever.datastore.folder) if retriever.dense else None,
        "dimension": retriever.embedder.dimension if retriever.dense else None,
        "filters": retriever.filters.columns,
        "retrieval": list(retriever.chunks.ways),
        "trace": service.traces,
        "model": _model(service),
        "limits": service.settings.limits,
    }


def _datastore(folder: FolderPath) -> dict[str, Any]:
    datastore = Datastore.open(folder)
    totals = datastore.manifest["splits"]["train"]
    info: dict[str, Any] = {"name": datastore_name(folder)}
    info["fingerprint"] = datastore.fingerprint
    info |= {key: sum(totals[key]) for key in ("documents", "chunks", "tokens", "bytes")}
    report = read_report(folder)
    if report is not None and "index" in report:  # measured with neighbors
        measured = report["index"]
        info["index"] = f"{measured['key']}, nprobe {measured['nprobe']}"
        info["recall"] = {key: value for key, value in measured.items() if key.startswith("recall")}
    return info


def _model(service: Service) -> dict[str, Any] | None:
    language_model = service.language_model
    if language_model is None:
        return None
    checkpoint = language_model.checkpoint
    return {
        "name": service.name,
        "fingerprint": checkpoint.fingerprint,
        "step": checkpoint.step,
        "parameters": count_parameters(language_model.model, embeddings=True),
        "context": language_model.context,
        "retrieval": service.retrieves,
        "chat": service.chat_template is not None,
    }
