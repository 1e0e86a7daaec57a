"""Endpoints of the language model: score a text with retrieval ON and OFF, or continue a prompt.

text ─► [bos] tokens ─► scores with k neighbors and with none ─► log-probability of each token, whole characters
prompt ─► as a request of /v1/completions ─► one answer, or server-sent events
"""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from retro.inference.language_model import Scores
from retro.inference.source_texts import sources_of_scores
from retro.inference.spans import character_groups, token_ends
from retro.server import schemas
from retro.server.errors import error_responses
from retro.server.openai.completions import Completion
from retro.server.openai.requests import generating_model
from retro.server.openai.schemas import CompletionRequest
from retro.server.routes import JsonRoute, ServiceDependency, event_stream, stream_responses
from retro.server.service import ScoreKey, Service

router = APIRouter(route_class=JsonRoute, tags=["model"])


@router.post("/score", responses=error_responses(404, 413, 422))
async def score(request: schemas.ScoreRequest, service: ServiceDependency) -> schemas.ScoreResponse:
    """Score a text: log-probabilities of its tokens with retrieval ON and OFF. A difference above 0 means that
    retrieval helped."""
    service.model()
    if service.retrieves:
        service.limits.within("max_model_k", request.k, "k")
    tokens = (await service.encoded([request.text], "text"))[0]
    sequence = service.as_document(tokens)
    keys = [ScoreKey(0)]
    if service.retrieves:
        service.limits.neighbors([len(tokens)], request.k, "text")
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
    fields = request.model_dump(exclude={"retrieval"})
    model = generating_model(service, request.retrieval)
    completion = await Completion.checked(service, CompletionRequest(model=model, **fields))
    if request.stream:
        return await event_stream(_events(completion))
    (choice,) = await completion.choices()
    assert choice.finish_reason is not None
    return schemas.GenerateResponse(
        text=choice.text,
        tokens=completion.usage.completion_tokens,
        finish_reason=choice.finish_reason,
        sources=choice.sources,
    )


async def _events(completion: Completion) -> AsyncIterator[schemas.GenerateEvent]:
    async for part in completion.parts():
        yield schemas.GenerateEvent(text=part.text, finish_reason=part.finish_reason, sources=part.sources)
