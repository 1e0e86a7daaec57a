"""/v1 as OpenAI's clients know it, so that they work unchanged, and the tokenizer for those that ask a server for it (lm-eval).

    model NAME ─► retrieval ON      NAME:off ─► the same weights, OFF      NAME:embedder ─► /v1/embeddings

A prompt is always the beginning of a document: the token that begins one stands before it unless the client has sent it, and
is never echoed. So the first token has a log-probability too.
"""

import secrets
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from retro.inference.language_model import Scores
from retro.inference.settings import GenerationSettings
from retro.server.errors import ApiError, Refused, declared
from retro.server.json_route import JsonRoute, as_json
from retro.server.model_api import begun, document_of, event_stream, temperature_of
from retro.server.openai import schemas
from retro.server.openai.completions import Parts, joined, special_names
from retro.server.search_api import encoded
from retro.server.service import Service, Serving

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

_OFF, _EMBEDDER = ":off", ":embedder"


# --- models ----------------------------------------------------------------------------------------------------------


def _model_names(service: Service) -> list[str]:
    names = [service.name] if service.language_model else []
    return [*names, *(name + _OFF for name in names if service.retrieves), service.name + _EMBEDDER]


@router.get("/v1/models", response_model=schemas.ModelList, responses=declared())
def models(service: Serving) -> schemas.ModelList:
    """The names that `model` may have."""
    return schemas.ModelList(data=[_model(service, name) for name in _model_names(service)])


@router.get("/v1/models/{model}", response_model=schemas.Model, responses=declared(404))
def model(model: str, service: Serving) -> schemas.Model:
    """One of them."""
    _check_model(service, model, _model_names(service))
    return _model(service, model)


def _model(service: Service, name: str) -> schemas.Model:
    context = None if name.endswith(_EMBEDDER) else service.model().context
    return schemas.Model(id=name, created=service.started, max_model_len=context)


def _check_model(service: Service, name: str, accepted: Sequence[str]) -> None:
    if name not in accepted:
        message = f"model = {name!r}: accepted here are {', '.join(accepted)}."
        raise ApiError(404, message, param="model", type="invalid_request_error", code="model_not_found")


# --- completions -----------------------------------------------------------------------------------------------------


@router.post(
    "/v1/completions",
    response_model=schemas.CompletionResponse,
    responses={
        **declared(400, 404, 413),
        200: {
            "description": "Continuations; with `stream`, events `data: {CompletionResponse}` and a last one `data: [DONE]`.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
    },
)
async def completions(request: schemas.CompletionRequest, service: Serving) -> Response:
    """Continue prompts; with `echo` and `logprobs`, score them too."""
    service.model()
    _check_model(service, request.model, [name for name in _model_names(service) if not name.endswith(_EMBEDDER)])
    _check_supported(request)
    settings = _generation_settings(service, request)
    k = service.check_model_k(request.k) if service.retrieves and not request.model.endswith(_OFF) else 0
    prompts = await _token_rows(service, request.prompt, "prompt")
    _check_lengths(service, prompts, settings, k)
    parts = Parts(service.retriever.tokenizer, request.logprobs)
    steps = await begun(_steps(service, request, prompts, settings, k, parts))
    answer = schemas.CompletionResponse.model_construct(
        id=f"cmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=request.model,
        system_fingerprint=service.model().checkpoint.fingerprint,
    )
    if request.stream:
        return event_stream(_events(request, answer, steps, prompts, parts))
    choices = joined([part async for step in steps for part in step], request.logprobs)
    return as_json(answer.model_copy(update={"choices": choices, "usage": _usage(prompts, parts.generated)}))


def _check_lengths(
    service: Service, prompts: Sequence[np.ndarray], settings: GenerationSettings | None, k: int
) -> None:
    """Raise ApiError where prompts do not fit into the context, or read too many neighbors."""
    rows = [document_of(service, prompt) for prompt in prompts]
    if settings is not None:
        service.check_generation(rows, settings.max_tokens, k, "prompt")
    else:  # scored, by as many windows as it takes
        service.check_neighbors([len(row) for row in rows], k, "prompt")


async def _steps(
    service: Service,
    request: schemas.CompletionRequest,
    prompts: Sequence[np.ndarray],
    settings: GenerationSettings | None,
    k: int,
    parts: Parts,
) -> AsyncIterator[list[schemas.CompletionChoice]]:
    """The parts of the answer, step by step; without settings nothing is generated."""
    rows = [document_of(service, prompt) for prompt in prompts]
    if request.echo:
        scores: Sequence[Scores | None] = [None] * len(rows)
        if request.logprobs is not None:
            scores = await service.scores(rows, k, request.logprobs)
        yield [parts.echo(*each) for each in zip(range(len(rows)), prompts, scores, strict=True)]
    if settings is None:
        yield [parts.end(index) for index in range(len(rows))]
        return
    async for pieces in service.generate(rows, settings, k):
        yield [parts.add(piece) for piece in pieces]


async def _events(
    request: schemas.CompletionRequest,
    answer: schemas.CompletionResponse,
    steps: AsyncIterator[list[schemas.CompletionChoice]],
    prompts: Sequence[np.ndarray],
    parts: Parts,
) -> AsyncIterator[str]:
    """The events of a stream as JSON."""
    async for step in steps:
        for part in step:
            yield answer.model_copy(update={"choices": [part]}).model_dump_json()
    if request.stream_options and request.stream_options.include_usage:
        usage = _usage(prompts, parts.generated)
        yield answer.model_copy(update={"choices": [], "usage": usage}).model_dump_json()


def _generation_settings(service: Service, request: schemas.CompletionRequest) -> GenerationSettings | None:
    """How to draw; None where nothing is to be generated."""
    max_tokens = service.check_max_tokens(16 if request.max_tokens is None else request.max_tokens)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if max_tokens == 0:
        return None
    return GenerationSettings(
        max_tokens=max_tokens,
        temperature=temperature_of(1.0 if request.temperature is None else request.temperature),
        top_k=request.top_k,
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=secrets.randbits(32) if request.seed is None else request.seed,
        stop=tuple(each for each in stop if each),
        logprobs=request.logprobs or 0,
    )


def _check_supported(request: schemas.CompletionRequest) -> None:
    """Raise ApiError where a request wants what there is only in the protocol."""
    only: dict[str, Any] = {"n": 1, "best_of": 1, "suffix": None, "presence_penalty": 0, "frequency_penalty": 0}
    for name, accepted in (only | {"logit_bias": None}).items():
        given = getattr(request, name)
        if given is not None and given != accepted and given != {}:
            raise Refused(f"{name} = {given!r} is not supported here; leave it out.", param=name)


def _usage(prompts: Sequence[np.ndarray], generated: int = 0) -> schemas.Usage:
    asked = sum(map(len, prompts))
    return schemas.Usage(prompt_tokens=asked, completion_tokens=generated, total_tokens=asked + generated)


async def _token_rows(service: Service, prompt: schemas.Prompt, param: str) -> list[np.ndarray]:
    """Token ids [t] int64 of one or several prompts.

    Raises:
        ApiError: there is none, or too many, they are too long, or hold ids that the tokenizer does not have.
    """
    several: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else [*prompt]
    if not several:
        raise Refused(f"{param} is an empty list.", param=param)
    service.check_queries(len(several), param)
    if isinstance(several[0], str):
        return await service.encoded(several, param)
    service.check_input([len(row) for row in several], param)
    rows = [np.array(row, dtype=np.int64) for row in several]
    size = service.retriever.tokenizer.vocab_size
    for number, row in enumerate(rows):
        if len(row) and row.max() >= size:
            raise Refused(f"{param}[{number}] holds the token id {row.max()}: they are 0 to {size - 1}.", param=param)
    return rows


# --- embeddings ------------------------------------------------------------------------------------------------------


@router.post("/v1/embeddings", response_model=schemas.EmbeddingResponse, responses=declared(400, 404, 413))
async def embeddings(request: schemas.EmbeddingRequest, service: Serving) -> Response:
    """Unit vectors of texts or token ids."""
    _check_model(service, request.model, [service.name + _EMBEDDER])
    dimension = service.retriever.embedder.dimension
    if request.dimensions not in (None, dimension):
        raise Refused(f"dimensions = {request.dimensions}: this embedder has {dimension}.", param="dimensions")
    rows = await _token_rows(service, request.input, "input")
    vectors = await service.embed("tokens", rows)
    data = [
        schemas.Embedding.model_construct(index=index, embedding=encoded(vector, request.encoding_format))
        for index, vector in enumerate(vectors)
    ]
    return as_json(schemas.EmbeddingResponse.model_construct(data=data, model=request.model, usage=_usage(rows)))


# --- tokenizer -------------------------------------------------------------------------------------------------------


@router.get("/tokenizer_info", response_model=schemas.TokenizerInfo, responses=declared(), tags=["tokenizer"])
def tokenizer_info(service: Serving) -> schemas.TokenizerInfo:
    """What the special tokens are called."""
    tokenizer = service.retriever.tokenizer
    names = special_names(tokenizer)
    return schemas.TokenizerInfo(
        bos_token=names[tokenizer.bos_id],
        eos_token=names[tokenizer.eos_id],
        pad_token=names[tokenizer.pad_id],
        vocab_size=tokenizer.vocab_size,
    )


@router.post("/tokenize", response_model=schemas.TokenizeResponse, responses=declared(413, 422), tags=["tokenizer"])
async def tokenize(request: schemas.TokenizeRequest, service: Serving) -> schemas.TokenizeResponse:
    """Token ids of a text."""
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


@router.post("/detokenize", response_model=schemas.DetokenizeResponse, responses=declared(413, 422), tags=["tokenizer"])
async def detokenize(request: schemas.DetokenizeRequest, service: Serving) -> schemas.DetokenizeResponse:
    """The text of token ids."""
    rows = await _token_rows(service, [request.tokens], "tokens")
    return schemas.DetokenizeResponse(prompt=service.retriever.tokenizer.decode(rows[0]))
