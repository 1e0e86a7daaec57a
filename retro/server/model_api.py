"""Endpoints over a language model: a text scored token by token with retrieval ON and OFF, and its continuation.

text ─► [bos] tokens ─► scores with k neighbors and with none ─► log-probability of each token, whole characters
prompt ─► [bos] tokens ─► pieces ─► one answer, or server-sent events
"""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from retro.inference.generation import Piece
from retro.inference.settings import GenerationSettings
from retro.server import schemas
from retro.server.errors import as_api_error, declared, error_json
from retro.server.json_route import JsonRoute, as_json
from retro.server.service import Service, Serving
from retro.server.spans import character_groups, token_ends

T = TypeVar("T")

router = APIRouter(tags=["model"], route_class=JsonRoute)

_LEAST_TEMPERATURE = 1e-3  # logits are divided by it: below, all that is left is the likeliest token


@router.post("/score", response_model=schemas.ScoreResponse, responses=declared(404, 413, 422))
async def score(request: schemas.ScoreRequest, service: Serving) -> Response:
    """Log-probabilities of a text's tokens, retrieval ON and OFF: where the difference is above 0, retrieval helped."""
    service.model()
    if service.retrieves:
        service.check_model_k(request.k)
    tokens = (await service.encoded([request.text], "text"))[0]
    sequence = document_of(service, tokens)
    asked = [(0,)]
    if service.retrieves:
        service.check_neighbors([len(tokens)], request.k, "text")
        asked.append((request.k,))
    off, *rest = await asyncio.gather(*(service.scores([sequence], *k) for k in asked))
    on = rest[0][0].log_probabilities if rest else None
    return as_json(await asyncio.to_thread(_scored, service, request.text, tokens, on, off[0].log_probabilities))


def _scored(
    service: Service, text: str, tokens: np.ndarray, on: np.ndarray | None, off: np.ndarray
) -> schemas.ScoreResponse:
    """Tokens [t] of a text and their log-probabilities [t] as an answer."""
    whole, ends = token_ends(service.retriever.tokenizer.decode_batch, tokens)
    scored, start = [], 0
    for first, stop in character_groups(ends):
        mine, other = float(off[first:stop].sum()), None if on is None else float(on[first:stop].sum())
        scored.append(
            schemas.TokenScore(
                text=whole[start : ends[stop - 1]],
                on=other,
                off=mine,
                difference=None if other is None else other - mine,
            )
        )
        start = ends[stop - 1]
    bits = len(text.encode()) * np.log(2)
    return schemas.ScoreResponse(
        tokens=scored,
        bits_per_byte_on=None if on is None else float(-on.sum() / bits),
        bits_per_byte_off=float(-off.sum() / bits),
    )


@router.post(
    "/generate",
    response_model=schemas.GenerateResponse,
    responses={
        **declared(404, 413, 422),
        200: {
            "description": "The continuation; with `stream`, events `data: {GenerateEvent}` and a last one `data: [DONE]`.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
    },
)
async def generate(request: schemas.GenerateRequest, service: Serving) -> Response:
    """Continue a prompt, with neighbors of every finished chunk where retrieval is ON."""
    service.model()
    prompt = document_of(service, (await service.encoded([request.prompt], "prompt"))[0])
    settings = GenerationSettings(
        max_tokens=service.check_max_tokens(request.max_tokens),
        temperature=temperature_of(request.temperature),
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
        stop=tuple(request.stop),
    )
    k = service.check_model_k(request.k) if request.retrieval and service.retrieves else 0
    service.check_generation([prompt], request.max_tokens, k, "prompt")
    steps = await begun(service.generate([prompt], settings, k))
    if request.stream:
        return event_stream(_events(steps))
    pieces = [piece async for step in steps for piece in step]
    text, finish = "".join(piece.text for piece in pieces), pieces[-1].finish_reason
    assert finish is not None
    return as_json(schemas.GenerateResponse(text=text, tokens=len(pieces), finish_reason=finish))


async def _events(steps: AsyncIterator[list[Piece]]) -> AsyncIterator[str]:
    async for pieces in steps:
        for piece in pieces:
            yield schemas.GenerateEvent(text=piece.text, finish_reason=piece.finish_reason).model_dump_json()


# --- also for openai_api ---------------------------------------------------------------------------------------------


def temperature_of(given: float) -> float:
    """The temperature that tokens are drawn with."""
    return 0.0 if given < _LEAST_TEMPERATURE else given


def document_of(service: Service, tokens: np.ndarray) -> np.ndarray:
    """Tokens as the beginning of a document, which is how the model has read every text."""
    bos = service.retriever.tokenizer.bos_id
    return tokens if len(tokens) and tokens[0] == bos else np.concatenate([[bos], tokens]).astype(np.int64)


async def begun(steps: AsyncIterator[T]) -> AsyncIterator[T]:
    """The same steps, once the first is there: what is wrong from the start is still an error and no stream."""
    first = await anext(steps)

    async def all_of_them() -> AsyncIterator[T]:
        yield first
        async for step in steps:
            yield step

    return all_of_them()


def event_stream(events: AsyncIterator[str]) -> Response:
    """Server-sent events, each some JSON, and `[DONE]` at the end, also after an error."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for event in events:
                yield f"data: {event}\n\n"
        except Exception as error:
            yield f"data: {error_json(as_api_error(error)).decode()}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
