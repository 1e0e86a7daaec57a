"""OpenAI's completions and embeddings under /v1, and the tokenizer endpoints that lm-eval uses; `chat.py` has chat.

A prompt is always the beginning of a document: the server puts the beginning-of-document token in front unless the client has
sent it, and never echoes it. So the first token of a text has a log-probability too.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from retro.inference.language_model import Scores
from retro.inference.settings import GenerationSettings
from retro.server.errors import InvalidRequest, error_responses
from retro.server.model_api import as_document, event_stream, stream_responses, with_first_step
from retro.server.openai import schemas
from retro.server.openai.completions import CompletionBuilder, join_choices, special_names, usage_of
from retro.server.openai.requests import (
    check_embedder,
    continuations,
    generation_settings,
    identity_of,
    lenient,
    neighbors_of,
)
from retro.server.search_api import encoded
from retro.server.service import JsonRoute, ScoreKey, Service, ServiceDependency

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
tokenizer_router = APIRouter(route_class=JsonRoute, tags=["tokenizer"])

# --- completions -----------------------------------------------------------------------------------------------------


@router.post(
    "/v1/completions",
    response_model=schemas.CompletionResponse,
    responses=stream_responses("Continuations.", schemas.CompletionResponse, 400, 404, 413),
)
async def completions(
    request: Annotated[schemas.CompletionRequest, lenient(schemas.CompletionRequest)], service: ServiceDependency
) -> Response | schemas.CompletionResponse:
    """Continue prompts. With `echo` and `logprobs`, the answer also has the log-probabilities of the prompts."""
    k = neighbors_of(service, request)
    _check_supported(request)
    max_tokens = service.check("max_tokens", 16 if request.max_tokens is None else request.max_tokens, "max_tokens")
    settings = (
        generation_settings(service, request, max_tokens=max_tokens, logprobs=request.logprobs or 0)
        if max_tokens
        else None
    )
    prompts = await _token_rows(service, request.prompt, "prompt")
    n = continuations(service, request, len(prompts))
    _check_lengths(service, prompts, settings, k, n)
    builder = CompletionBuilder(service.retriever.tokenizer, request.logprobs)
    steps = await with_first_step(_steps(service, request, prompts, settings, k, n, builder))
    answer = schemas.CompletionResponse.model_construct(**identity_of(service, request.model, "cmpl"))
    if request.stream:
        return event_stream(_events(request, answer, steps, prompts, builder))
    choices = join_choices([part async for step in steps for part in step], request.logprobs)
    return answer.model_copy(update={"choices": choices, "usage": usage_of(prompts, builder.generated)})


def _check_lengths(
    service: Service, prompts: Sequence[np.ndarray], settings: GenerationSettings | None, k: int, n: int
) -> None:
    """Raise ApiError if a prompt does not fit into the context, or the texts would read too many neighbor tokens."""
    rows = [as_document(service, prompt) for prompt in prompts]
    if settings is not None:
        service.check_generation(rows * n, settings.max_tokens, k, "prompt")
    else:  # prompts are only scored, in any number of windows
        service.check_neighbors([len(row) for row in rows], k, "prompt")


async def _steps(
    service: Service,
    request: schemas.CompletionRequest,
    prompts: Sequence[np.ndarray],
    settings: GenerationSettings | None,
    k: int,
    n: int,
    builder: CompletionBuilder,
) -> AsyncIterator[list[schemas.CompletionChoice]]:
    """Yield the parts of the answer step by step. Without settings, generate nothing."""
    rows = [as_document(service, prompt) for prompt in prompts]
    if request.echo:
        scores: Sequence[Scores | None] = [None] * len(rows)
        if request.logprobs is not None:
            scores = await service.scores(rows, ScoreKey(k, request.logprobs))
        yield [builder.echo(index, prompts[index // n], scores[index // n]) for index in range(len(rows) * n)]
    if settings is None:
        yield [builder.end(index) for index in range(len(rows) * n)]
        return
    starts = [builder.length(index) for index in range(len(rows) * n)]
    async for step in service.generate(rows, settings, k, n=n, sources=request.return_sources, starts=starts):
        yield [builder.add(token, sources) for token, sources in step]


async def _events(
    request: schemas.CompletionRequest,
    answer: schemas.CompletionResponse,
    steps: AsyncIterator[list[schemas.CompletionChoice]],
    prompts: Sequence[np.ndarray],
    builder: CompletionBuilder,
) -> AsyncIterator[str]:
    """Yield the events of a stream as JSON."""
    async for step in steps:
        for part in step:
            yield answer.model_copy(update={"choices": [part]}).model_dump_json()
    if request.stream_options and request.stream_options.include_usage:
        usage = usage_of(prompts, builder.generated)
        yield answer.model_copy(update={"choices": [], "usage": usage}).model_dump_json()


def _check_supported(request: schemas.CompletionRequest) -> None:
    """Raise ApiError if a request uses a feature of OpenAI's API that this server does not have."""
    if request.return_sources and request.max_tokens == 0:
        message = "return_sources needs max_tokens of 1 or more. `/score` has the sources of a given text."
        raise InvalidRequest(message, param="return_sources")
    if request.suffix:
        raise InvalidRequest(f"suffix = {request.suffix!r} is not supported; remove it.", param="suffix")
    if request.best_of not in (None, request.n or 1):
        raise InvalidRequest(
            f"best_of = {request.best_of}: continuations are not ranked. Remove it; n = {request.n or 1}.",
            param="best_of",
        )


async def _token_rows(service: Service, prompt: schemas.Prompt, param: str) -> list[np.ndarray]:
    """Return the token ids [t] int64 of one or several prompts.

    Raises:
        ApiError: there are no prompts or too many, they are too long, or an id is not in the tokenizer.
    """
    several: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else [*prompt]
    if not several:
        raise InvalidRequest(f"{param} is an empty list.", param=param)
    service.check("max_queries", len(several), param)
    if isinstance(several[0], str):
        return await service.encoded(several, param)
    service.check("max_input_tokens", sum(map(len, several)), param, "tokens")
    rows = [np.array(row, dtype=np.int64) for row in several]
    for index, row in enumerate(rows):
        service.check_ids(row, f"{param}[{index}]", param)
    return rows


# --- embeddings ------------------------------------------------------------------------------------------------------


@router.post("/v1/embeddings", responses=error_responses(400, 404, 413))
async def embeddings(
    request: Annotated[schemas.EmbeddingRequest, lenient(schemas.EmbeddingRequest)], service: ServiceDependency
) -> schemas.EmbeddingResponse:
    """Embed texts or token ids; returns unit vectors."""
    check_embedder(service, request.model)
    dimension = service.retriever.embedder.dimension
    if request.dimensions not in (None, dimension):
        raise InvalidRequest(f"dimensions = {request.dimensions}: the embedder has {dimension}.", param="dimensions")
    rows = await _token_rows(service, request.input, "input")
    vectors = await service.embed("tokens", rows)
    data = [
        schemas.Embedding.model_construct(index=index, embedding=encoded(vector, request.encoding_format))
        for index, vector in enumerate(vectors)
    ]
    return schemas.EmbeddingResponse.model_construct(data=data, model=request.model, usage=usage_of(rows))


# --- tokenizer -------------------------------------------------------------------------------------------------------


@tokenizer_router.get("/tokenizer_info", responses=error_responses())
def tokenizer_info(service: ServiceDependency) -> schemas.TokenizerInfo:
    """Return the names of the special tokens and the size of the vocabulary."""
    tokenizer = service.retriever.tokenizer
    names = special_names(tokenizer)
    return schemas.TokenizerInfo(
        bos_token=names[tokenizer.bos_id],
        eos_token=names[tokenizer.eos_id],
        pad_token=names[tokenizer.pad_id],
        vocab_size=tokenizer.vocab_size,
    )


@tokenizer_router.post("/tokenize", responses=error_responses(413, 422))
async def tokenize(
    request: Annotated[schemas.TokenizeRequest, lenient(schemas.TokenizeRequest)], service: ServiceDependency
) -> schemas.TokenizeResponse:
    """Convert a text to token ids. The name of a special token is converted to its id."""
    tokenizer = service.retriever.tokenizer
    special = {name: token for token, name in special_names(tokenizer).items()}
    if request.prompt in special:
        tokens = [special[request.prompt]]
    else:
        tokens = (await service.encoded([request.prompt], "prompt"))[0].tolist()
    if request.add_special_tokens:
        tokens = [tokenizer.bos_id, *tokens]
    context = service.language_model.context if service.language_model else None
    return schemas.TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=context)


@tokenizer_router.post("/detokenize", responses=error_responses(413, 422))
async def detokenize(
    request: Annotated[schemas.DetokenizeRequest, lenient(schemas.DetokenizeRequest)], service: ServiceDependency
) -> schemas.DetokenizeResponse:
    """Convert token ids to text."""
    rows = await _token_rows(service, [request.tokens], "tokens")
    return schemas.DetokenizeResponse(prompt=service.retriever.tokenizer.decode(rows[0]))
