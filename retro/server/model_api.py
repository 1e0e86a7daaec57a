"""Endpoints of the language model: score a text with retrieval ON and OFF, or continue a prompt.

text ─► [bos] tokens ─► scores with k neighbors and with none ─► log-probability of each token, whole characters
prompt ─► [bos] tokens ─► generated tokens ─► one answer, or server-sent events
"""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

from retro.inference.language_model import Scores
from retro.inference.settings import GenerationSettings
from retro.inference.source_texts import joined, sources_of_scores
from retro.inference.spans import character_groups, token_ends
from retro.server import schemas
from retro.server.errors import as_api_error, error_json, error_responses
from retro.server.service import JsonRoute, ScoreKey, Service, ServiceDependency, Sourced

T = TypeVar("T")

router = APIRouter(route_class=JsonRoute, tags=["model"])

_LEAST_TEMPERATURE = 1e-3  # logits are divided by it; below, the likeliest token has all the probability


def stream_responses(answer: str, model: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's `responses` of an endpoint that can stream: server-sent events with a model, or an error, as JSON."""
    kinds = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in (model, schemas.ErrorResponse)]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    item = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    description = f"{answer} With `stream`: events `data: {{{model.__name__}}}`, and `data: [DONE]` at the end."
    content = {"text/event-stream": {"itemSchema": item}}
    return error_responses(*statuses) | {200: {"description": description, "content": content}}


@router.post("/score", responses=error_responses(404, 413, 422))
async def score(request: schemas.ScoreRequest, service: ServiceDependency) -> schemas.ScoreResponse:
    """Score a text: log-probabilities of its tokens with retrieval ON and OFF. A difference above 0 means that retrieval helped."""
    service.model()
    if service.retrieves:
        service.check("max_model_k", request.k, "k")
    tokens = (await service.encoded([request.text], "text"))[0]
    sequence = as_document(service, tokens)
    keys = [ScoreKey(0)]
    if service.retrieves:
        service.check_neighbors([len(tokens)], request.k, "text")
        keys.append(ScoreKey(request.k, sources=request.return_sources))
    off, *rest = await asyncio.gather(*(service.scores([sequence], key) for key in keys))
    on = rest[0][0] if rest else None
    return await asyncio.to_thread(_scored, service, request, tokens, on, off[0])


def _scored(
    service: Service, request: schemas.ScoreRequest, tokens: np.ndarray, scores_on: Scores | None, scores_off: Scores
) -> schemas.ScoreResponse:
    """Return the answer for a text from its tokens [t] and their scores."""
    text, off = request.text, scores_off.log_probabilities
    on = None if scores_on is None else scores_on.log_probabilities
    whole, ends = token_ends(service.retriever.tokenizer.decode_batch, tokens)
    m = service.retriever.datastore.chunk_length
    scored, start = [], 0
    for first, stop in character_groups(ends):
        off_sum, on_sum = float(off[first:stop].sum()), None if on is None else float(on[first:stop].sum())
        scored.append(
            schemas.TokenScore(
                text=whole[start : ends[stop - 1]],
                on=on_sum,
                off=off_sum,
                difference=None if on_sum is None else on_sum - off_sum,
                chunk=(first + 1) // m,  # the beginning-of-document token is in the first chunk
            )
        )
        start = ends[stop - 1]
    sources = None
    if request.return_sources:
        texts = [whole[start:stop] for start, stop in pairwise([0, *ends])]
        sources = sources_of_scores(service.retriever, texts, scores_on or scores_off)
    bits = len(text.encode()) * np.log(2)
    return schemas.ScoreResponse(
        tokens=scored,
        bits_per_byte_on=None if on is None else float(-on.sum() / bits),
        bits_per_byte_off=float(-off.sum() / bits),
        sources=sources,
    )


@router.post(
    "/generate",
    response_model=schemas.GenerateResponse,
    responses=stream_responses("The continuation.", schemas.GenerateEvent, 404, 413, 422),
)
async def generate(request: schemas.GenerateRequest, service: ServiceDependency) -> Response | schemas.GenerateResponse:
    """Continue a prompt. With retrieval ON the model reads neighbors of every complete chunk."""
    service.model()
    prompt = as_document(service, (await service.encoded([request.prompt], "prompt"))[0])
    settings = GenerationSettings(
        max_tokens=service.check("max_tokens", request.max_tokens, "max_tokens"),
        temperature=effective_temperature(request.temperature),
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
        stop=tuple(request.stop),
    )
    k = service.check("max_model_k", request.k, "k") if request.retrieval and service.retrieves else 0
    service.check_generation([prompt], request.max_tokens, k, "prompt")
    steps = await with_first_step(service.generate([prompt], settings, k, sources=request.return_sources))
    if request.stream:
        return event_stream(_events(steps))
    generated, sources = zip(*[sourced async for step in steps for sourced in step], strict=True)
    text, finish = "".join(token.text for token in generated), generated[-1].finish_reason
    return schemas.GenerateResponse(text=text, tokens=len(generated), finish_reason=finish, sources=joined(sources))


async def _events(steps: AsyncIterator[list[Sourced]]) -> AsyncIterator[str]:
    async for step in steps:
        for token, sources in step:
            event = schemas.GenerateEvent(text=token.text, finish_reason=token.finish_reason, sources=sources)
            yield event.model_dump_json()


# --- shared with openai/api.py ---------------------------------------------------------------------------------------


def effective_temperature(given: float) -> float:
    """Return the temperature for sampling: 0 (the likeliest token) for very small values."""
    return 0.0 if given < _LEAST_TEMPERATURE else given


def as_document(service: Service, tokens: np.ndarray) -> np.ndarray:
    """Put the beginning-of-document token in front of tokens [t], unless it is there: the model was trained on whole documents."""
    tokenizer = service.retriever.tokenizer
    bos = tokenizer.bos_id
    # lm-eval's client begins a document with the end-of-document token if the beginning-of-document token has the id 0.
    begun = {bos, tokenizer.eos_id} if bos == 0 else {bos}
    rest = tokens[1:] if len(tokens) and int(tokens[0]) in begun else tokens
    return np.concatenate([[bos], rest]).astype(np.int64)


async def with_first_step(steps: AsyncIterator[T]) -> AsyncIterator[T]:
    """Wait for the first step and return all steps: an error at the start becomes an error answer instead of a stream."""
    first = await anext(steps)

    async def all_steps() -> AsyncIterator[T]:
        yield first
        async for step in steps:
            yield step

    return all_steps()


def event_stream(events: AsyncIterator[str]) -> Response:
    """Return JSON texts as server-sent events, with `[DONE]` at the end, also after an error."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for event in events:
                yield f"data: {event}\n\n"
        except Exception as error:
            yield f"data: {error_json(as_api_error(error)).decode()}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
