"""OpenAI's chat completions, for models with a chat template.

    messages ─ template ─► prompt, which ends where the answer begins ─► generated tokens ─► events, or one answer
       └─ search ─► passages in the prompt, if the request has `retrieval`

The template is that of `--chat-template`, or of the checkpoint: a model that `retro finetune` trained on instructions
or that `retro import` read with its template. The control token that ends a turn ends an answer.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from indexing.store.errors import InputError
from indexing.tokenization.tokenizer import Tokenizer
from retro.inference.chat_template import ChatTemplate, Message
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import GivenNeighbors
from retro.inference.passage_prompts import (
    ANSWER_TOKENS,
    PassagePrompt,
    passages_as_neighbors,
    queries_of,
    room_for_prompt,
    write_prompt,
)
from retro.inference.quotes import GroundedAnswer, Grounding
from retro.inference.source_texts import joined
from retro.server.errors import InvalidRequest
from retro.server.openai import schemas
from retro.server.openai.completions import token_name, usage_of
from retro.server.openai.requests import generation_settings, identity_of, lenient, neighbors_of
from retro.server.routes import JsonRoute, ServiceDependency, event_stream, stream_responses
from retro.server.service import PassageKey, Service, Sourced

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    response_model=schemas.ChatResponse,
    responses=stream_responses("Answers.", schemas.ChatChunk, 400, 404, 413),
)
async def chat_completions(
    request: Annotated[schemas.ChatRequest, lenient(schemas.ChatRequest)], service: ServiceDependency
) -> Response | schemas.ChatResponse:
    """Answer a conversation. With retrieval ON the model reads neighbors of every complete chunk. With `retrieval`, it
    answers from passages in its prompt."""
    k = neighbors_of(service, request)
    template = _template(service)
    _check_supported(service, request)
    messages = _messages(service, request.messages)
    written = PassagePrompt(await _prompt(service, template, messages), [])
    n = service.limits.continuations(request.n or 1, 1)
    service.limits.generation([written.tokens] * n, 1, 0, "messages")  # before a search
    if request.retrieval is not None:
        written = await _with_passages(service, template, messages, request, written.tokens)
        k = k if request.retrieval.copies else 0
    settings = generation_settings(
        service,
        request,
        max_tokens=_max_tokens(service, request, len(written.tokens)),
        logprobs=request.top_logprobs or 0,
        end_of_turn=template.end_of_turn,
    )
    given = _neighbors(service, written, settings.max_tokens) if k else None
    if given is None:
        service.limits.generation([written.tokens] * n, settings.max_tokens, k, "messages")
    tokens = service.generate(
        [written.tokens],
        settings,
        k,
        n=n,
        sources=request.return_sources,
        shares=request.retrieval is not None,
        given=given,
        inserted=[written.inserted],
    )
    identity, tokenizer = identity_of(service, request.model, "chatcmpl"), service.retriever.tokenizer
    if request.stream:
        chunk = schemas.ChatChunk.model_construct(**identity)
        return await event_stream(_events(request, chunk, tokens, written, tokenizer))
    sourced = [pair async for pair in tokens]
    answers = [[pair for pair in sourced if pair[0].row == index] for index in range(n)]
    choices = [_choice(index, answer, request, written, tokenizer) for index, answer in enumerate(answers)]
    usage = usage_of([written.tokens], [token for token, _ in sourced])
    return schemas.ChatResponse.model_construct(**identity, choices=choices, usage=usage)


def _template(service: Service) -> ChatTemplate:
    if service.chat_template is None:
        message = (
            "this model has no chat template that works. Use /v1/completions, or start the server with --chat-template, which names a "
            "Jinja file or the folder of a tokenizer."
        )
        raise InvalidRequest(message, code="no_chat_template")
    return service.chat_template


def _check_supported(service: Service, request: schemas.ChatRequest) -> None:
    """Raise ApiError if a request uses a feature of OpenAI's API that this server does not have."""
    kind = (request.response_format or {}).get("type", "text")
    if kind != "text":
        message = f"response_format of the type {kind!r} is not supported; accepted is 'text'."
        raise InvalidRequest(message, param="response_format")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs = true.", param="top_logprobs")
    if request.retrieval is not None:
        service.limits.within("max_k", request.retrieval.passages, "retrieval.passages")
        if request.model != service.name:
            message = (
                f"retrieval: the model {request.model!r} has retrieval OFF. Use {service.name!r}; with copy = false it "
                "reads passages in the prompt and copies nothing."
            )
            raise InvalidRequest(message, param="retrieval")


def _messages(service: Service, received: Sequence[schemas.ChatMessage]) -> list[Message]:
    """Return the messages of a request.

    Raises:
        ApiError: they have too many characters, or other content than text.
    """
    messages = [
        Message("system" if message.role == "developer" else message.role, _text(index, message))
        for index, message in enumerate(received)
    ]
    service.limits.characters([message.content for message in messages], "messages")
    return messages


async def _prompt(service: Service, template: ChatTemplate, messages: Sequence[Message]) -> np.ndarray:
    """Return the tokens [t] of messages, after which the answer begins.

    Raises:
        ApiError: the messages have too many tokens, or are rejected by the template.
    """
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


# --- passages --------------------------------------------------------------------------------------------------------


async def _with_passages(
    service: Service,
    template: ChatTemplate,
    messages: Sequence[Message],
    request: schemas.ChatRequest,
    plain: np.ndarray,
) -> PassagePrompt:
    """Search passages for a conversation and put them into its prompt, as far as they leave room for the answer.

    Raises:
        ApiError: no message of the user has text, or the datastore has no stage that searches.
    """
    assert request.retrieval is not None
    try:
        queries = queries_of(messages)
    except InputError as error:
        raise InvalidRequest(str(error), param="messages") from error
    wanted = request.max_completion_tokens or request.max_tokens or ANSWER_TOKENS
    most = room_for_prompt(service.model().context, wanted)
    tokens = min(request.retrieval.tokens, most - len(plain))
    key = PassageKey(request.retrieval.passages, tokens, request.retrieval.least_match)
    if key.tokens < 1:
        return PassagePrompt(plain, [])
    (passages,) = await service.passages(key, [queries])
    return await asyncio.to_thread(write_prompt, template, messages, plain, passages, most)


def _neighbors(service: Service, written: PassagePrompt, max_tokens: int) -> GivenNeighbors | None:
    """The passages as neighbors of all chunks, as many as the limits allow; None if there are none, or if the model
    reads no neighbors."""
    if not written.passages or not service.model().model.settings.retrieves:
        return None
    most = service.limits.neighbors_of(len(written.tokens) + max_tokens)
    return [passages_as_neighbors(service.retriever.retrieval, written.passages, most)]


# --- answers ---------------------------------------------------------------------------------------------------------


def _choice(
    index: int,
    answer: Sequence[Sourced],
    request: schemas.ChatRequest,
    written: PassagePrompt,
    tokenizer: Tokenizer,
) -> schemas.ChatChoice:
    tokens = [token for token, _ in answer]
    finish = tokens[-1].finish_reason
    assert finish is not None
    retrieval = None
    if request.retrieval is not None:
        grounded = GroundedAnswer(written.passages)
        for token in tokens:
            grounded.add(token)
        retrieval = replace(grounded.result(), passages=grounded.numbered())
    return schemas.ChatChoice(
        index=index,
        message=schemas.AnswerMessage(content="".join(token.text for token in tokens)),
        logprobs=_logprobs(tokens, tokenizer) if request.logprobs else None,
        finish_reason=finish,
        sources=joined(sources for _, sources in answer),
        retrieval=retrieval,
    )


async def _events(
    request: schemas.ChatRequest,
    chunk: schemas.ChatChunk,
    tokens: AsyncIterator[Sourced],
    written: PassagePrompt,
    tokenizer: Tokenizer,
) -> AsyncIterator[schemas.ChatChunk]:
    def event(**fields: object) -> schemas.ChatChunk:
        return chunk.model_copy(update=fields)

    generated, answers = list[GeneratedToken](), list[GroundedAnswer]()
    if request.retrieval is not None:
        answers = [GroundedAnswer(written.passages) for _ in range(request.n or 1)]
    async for token, sources in tokens:
        if not generated:
            for index in range(request.n or 1):
                passages = Grounding(answers[index].numbered()) if answers else None
                delta = schemas.Delta(role="assistant")
                yield event(choices=[schemas.ChunkChoice(index=index, delta=delta, retrieval=passages)])
        generated.append(token)
        retrieval = None
        if answers:
            answers[token.row].add(token)
            retrieval = answers[token.row].result() if token.finish_reason else None
        choice = schemas.ChunkChoice(
            index=token.row,
            delta=schemas.Delta(content=token.text),
            logprobs=_logprobs([token], tokenizer) if request.logprobs else None,
            finish_reason=token.finish_reason,
            sources=sources,
            retrieval=retrieval,
        )
        yield event(choices=[choice])
    if request.stream_options and request.stream_options.include_usage:
        yield event(choices=[], usage=usage_of([written.tokens], generated))


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
