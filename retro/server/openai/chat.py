"""OpenAI's chat completions, for models with a chat template.

    messages ─ template ─► prompt, which ends where the answer begins ─► generated tokens ─► events, or one answer

The template is that of `--chat-template`, or of the checkpoint: a model that `retro finetune` trained on instructions
or that `retro import` read with its template. The control token that ends a turn ends an answer.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from indexing.store.errors import InputError
from indexing.tokenization.tokenizer import Tokenizer
from retro.inference.chat_template import ChatTemplate, Message
from retro.inference.generation import GeneratedToken
from retro.inference.source_texts import joined
from retro.server.errors import InvalidRequest
from retro.server.openai import schemas
from retro.server.openai.completions import token_name, usage_of
from retro.server.openai.requests import generation_settings, identity_of, lenient, neighbors_of
from retro.server.routes import JsonRoute, ServiceDependency, event_stream, stream_responses
from retro.server.service import Service, Sourced

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    response_model=schemas.ChatResponse,
    responses=stream_responses("Answers.", schemas.ChatChunk, 400, 404, 413),
)
async def chat_completions(
    request: Annotated[schemas.ChatRequest, lenient(schemas.ChatRequest)], service: ServiceDependency
) -> Response | schemas.ChatResponse:
    """Answer a conversation. With retrieval ON the model reads neighbors of every complete chunk."""
    k = neighbors_of(service, request)
    template = _template(service)
    _check_supported(request)
    prompt = await _prompt(service, template, request.messages)
    settings = generation_settings(
        service,
        request,
        max_tokens=_max_tokens(service, request, len(prompt)),
        logprobs=request.top_logprobs or 0,
        end_of_turn=template.end_of_turn,
    )
    n = service.limits.continuations(request.n or 1, 1)
    service.limits.generation([prompt] * n, settings.max_tokens, k, "messages")
    tokens = service.generate([prompt], settings, k, n=n, sources=request.return_sources)
    identity, tokenizer = identity_of(service, request.model, "chatcmpl"), service.retriever.tokenizer
    if request.stream:
        chunk = schemas.ChatChunk.model_construct(**identity)
        return await event_stream(_events(request, chunk, tokens, prompt, tokenizer))
    sourced = [pair async for pair in tokens]
    answers = [[pair for pair in sourced if pair[0].row == index] for index in range(n)]
    choices = [_choice(index, answer, request, tokenizer) for index, answer in enumerate(answers)]
    usage = usage_of([prompt], [token for token, _ in sourced])
    return schemas.ChatResponse.model_construct(**identity, choices=choices, usage=usage)


def _template(service: Service) -> ChatTemplate:
    if service.chat_template is None:
        message = (
            "this model has no chat template that works. Use /v1/completions, or start the server with --chat-template, which names a "
            "Jinja file or the folder of a tokenizer."
        )
        raise InvalidRequest(message, code="no_chat_template")
    return service.chat_template


def _check_supported(request: schemas.ChatRequest) -> None:
    """Raise ApiError if a request uses a feature of OpenAI's API that this server does not have."""
    kind = (request.response_format or {}).get("type", "text")
    if kind != "text":
        message = f"response_format of the type {kind!r} is not supported; accepted is 'text'."
        raise InvalidRequest(message, param="response_format")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs = true.", param="top_logprobs")


async def _prompt(service: Service, template: ChatTemplate, received: Sequence[schemas.ChatMessage]) -> np.ndarray:
    """Return the tokens [t] of messages, after which the answer begins.

    Raises:
        ApiError: the messages are too long, have other content than text, or are rejected by the template.
    """
    messages = [
        Message("system" if message.role == "developer" else message.role, _text(index, message))
        for index, message in enumerate(received)
    ]
    service.limits.characters([message.content for message in messages], "messages")
    try:
        prompt = await asyncio.to_thread(template.prompt, messages)
    except InputError as error:
        raise InvalidRequest(str(error), param="messages") from error
    service.limits.tokens([prompt], "messages")
    return prompt


def _text(index: int, message: schemas.ChatMessage) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        problem = (
            f"messages[{index}] has no content: it must be a text, except in an assistant's message with tool_calls."
        )
        raise InvalidRequest(problem, param="messages")
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text":
            problem = (
                f"messages[{index}] has content of the type {part.type!r}, which is not supported; accepted is 'text'."
            )
            raise InvalidRequest(problem, param="messages")
        if part.text is None:
            raise InvalidRequest(f"messages[{index}] has content of the type 'text' without `text`.", param="messages")
    return "".join(part.text or "" for part in content)


def _max_tokens(service: Service, request: schemas.ChatRequest, prompt: int) -> int:
    """Return the largest number of tokens of an answer to a prompt of this length."""
    for name in ("max_completion_tokens", "max_tokens"):
        if (given := getattr(request, name)) is not None:
            return service.limits.within("max_tokens", given, name)
    return min(service.settings.max_tokens, max(1, service.model().context - prompt))


# --- answers ---------------------------------------------------------------------------------------------------------


def _choice(
    index: int, answer: Sequence[Sourced], request: schemas.ChatRequest, tokenizer: Tokenizer
) -> schemas.ChatChoice:
    tokens = [token for token, _ in answer]
    finish = tokens[-1].finish_reason
    assert finish is not None
    return schemas.ChatChoice(
        index=index,
        message=schemas.AnswerMessage(content="".join(token.text for token in tokens)),
        logprobs=_logprobs(tokens, tokenizer) if request.logprobs else None,
        finish_reason=finish,
        sources=joined(sources for _, sources in answer),
    )


async def _events(
    request: schemas.ChatRequest,
    chunk: schemas.ChatChunk,
    tokens: AsyncIterator[Sourced],
    prompt: np.ndarray,
    tokenizer: Tokenizer,
) -> AsyncIterator[schemas.ChatChunk]:
    def event(**fields: object) -> schemas.ChatChunk:
        return chunk.model_copy(update=fields)

    generated = list[GeneratedToken]()
    async for token, sources in tokens:
        if not generated:
            for index in range(request.n or 1):
                yield event(choices=[schemas.ChunkChoice(index=index, delta=schemas.Delta(role="assistant"))])
        generated.append(token)
        choice = schemas.ChunkChoice(
            index=token.row,
            delta=schemas.Delta(content=token.text),
            logprobs=_logprobs([token], tokenizer) if request.logprobs else None,
            finish_reason=token.finish_reason,
            sources=sources,
        )
        yield event(choices=[choice])
    if request.stream_options and request.stream_options.include_usage:
        yield event(choices=[], usage=usage_of([prompt], generated))


def _logprobs(tokens: Sequence[GeneratedToken], tokenizer: Tokenizer) -> schemas.ChatLogprobs:
    def entry(token: int, value: float) -> schemas.TopLogprob:
        text = tokenizer.decode([token])
        utf8 = [*text.encode()] if text and "\ufffd" not in text else None
        return schemas.TopLogprob(token=token_name(tokenizer, token), logprob=value, bytes=utf8)

    return schemas.ChatLogprobs(
        content=[
            schemas.TokenLogprob(
                **entry(token.token, token.log_probability).model_dump(),
                top_logprobs=[entry(*likely) for likely in token.top],
            )
            for token in tokens
        ]
    )
