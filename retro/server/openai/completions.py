"""Completions of prompts: `/v1/completions`, and the parts of its answers, from which `/generate` makes its own.

    request ─► limits ─► prompts ─┬─ echoed ─► scores ──┐
                                  └─ generated tokens ──┴► parts: a stream sends them one by one, other answers join them

A prompt is always the beginning of a document: the server puts the beginning-of-document token in front unless the
client has sent it, and never echoes it. So the first token of a text has a log-probability too.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from indexing.tokenization.tokenizer import Tokenizer
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import Scores
from retro.inference.settings import GenerationSettings
from retro.inference.source_texts import joined
from retro.inference.spans import token_ends
from retro.server.errors import InvalidRequest
from retro.server.openai import schemas
from retro.server.openai.requests import generation_settings, identity_of, lenient, neighbors_of, token_rows
from retro.server.openai.schemas import (
    CompletionChoice,
    CompletionRequest,
    CompletionTokensDetails,
    Logprobs,
    Usage,
)
from retro.server.routes import JsonRoute, ServiceDependency, event_stream, stream_responses
from retro.server.service import ScoreKey, Service

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

LikeliestTokens = Sequence[tuple[int, float]]
"""Token ids with log-probabilities, likeliest first."""


@router.post(
    "/v1/completions",
    response_model=schemas.CompletionResponse,
    responses=stream_responses("Continuations.", schemas.CompletionResponse, 400, 404, 413),
)
async def completions(
    request: Annotated[CompletionRequest, lenient(CompletionRequest)], service: ServiceDependency
) -> Response | schemas.CompletionResponse:
    """Continue prompts. With `echo` and `logprobs`, the answer also has the log-probabilities of the prompts."""
    completion = await Completion.checked(service, request)
    answer = schemas.CompletionResponse.model_construct(**identity_of(service, request.model, "cmpl"))
    if request.stream:
        return await event_stream(_events(request, answer, completion))
    choices = await completion.choices()
    return answer.model_copy(update={"choices": choices, "usage": completion.usage})


async def _events(
    request: CompletionRequest, answer: schemas.CompletionResponse, completion: "Completion"
) -> AsyncIterator[schemas.CompletionResponse]:
    async for part in completion.parts():
        yield answer.model_copy(update={"choices": [part]})
    if request.stream_options and request.stream_options.include_usage:
        yield answer.model_copy(update={"choices": [], "usage": completion.usage})


@dataclass
class Completion:
    """The answer to a request, while it is generated. A part is new text of one of its continuations.

    Attributes:
        service: generates and scores.
        request: the request.
        prompts: token ids [t] int64 of each prompt.
        settings: of the generation; None = only score the prompts.
        k: number of neighbors of each chunk; 0 = retrieval OFF.
        n: number of continuations of each prompt.
        generated: the tokens so far, of all continuations.
    """

    service: Service
    request: CompletionRequest
    prompts: Sequence[np.ndarray]
    settings: GenerationSettings | None
    k: int
    n: int
    generated: list[GeneratedToken] = field(default_factory=list)
    _lengths: dict[int, int] = field(default_factory=dict)  # continuation → characters so far

    @classmethod
    async def checked(cls, service: Service, request: CompletionRequest) -> "Completion":
        """Check a request.

        Raises:
            ApiError: the request exceeds a limit, or uses a feature that this server does not have.
        """
        k = neighbors_of(service, request)
        _check_supported(request)
        settings = None
        if max_tokens := 16 if request.max_tokens is None else request.max_tokens:
            service.limits.within("max_tokens", max_tokens, "max_tokens")
            settings = generation_settings(service, request, max_tokens=max_tokens, logprobs=request.logprobs or 0)
        prompts = await token_rows(service, request.prompt, "prompt")
        n = service.limits.continuations(request.n or 1, len(prompts))
        completion = cls(service, request, prompts, settings, k, n)
        if settings is not None:
            service.limits.generation(completion.documents * n, max_tokens, k, "prompt")
        else:  # prompts are only scored, in any number of windows
            service.limits.neighbors(map(len, completion.documents), k, "prompt")
        return completion

    @cached_property
    def documents(self) -> list[np.ndarray]:
        """The prompts as beginnings of documents."""
        return [self.service.as_document(prompt) for prompt in self.prompts]

    @property
    def usage(self) -> Usage:
        """Tokens of the prompts and of what has been generated so far."""
        return usage_of(self.prompts, self.generated)

    async def choices(self) -> list[CompletionChoice]:
        """Return the continuations when they are complete."""
        return _joined([part async for part in self.parts()], self.request.logprobs)

    async def parts(self) -> AsyncIterator[CompletionChoice]:
        """Yield the parts as they come: of each prompt, if it is echoed, then of each generated token."""
        indices, documents, n = range(len(self.prompts) * self.n), self.documents, self.n
        if self.request.echo:
            scores: Sequence[Scores | None] = [None] * len(documents)
            if self.request.logprobs is not None:
                scores = await self.service.scores(documents, ScoreKey(self.k, self.request.logprobs))
            for index in indices:
                yield self._echo(index, self.prompts[index // n], scores[index // n])
        if self.settings is None:
            for index in indices:
                yield self._part(index, [], [], [], [], "length")
            return
        starts, sources = [self._lengths.get(index, 0) for index in indices], self.request.return_sources
        tokens = self.service.generate(documents, self.settings, self.k, n=n, sources=sources, starts=starts)
        async for token, new_sources in tokens:
            self.generated.append(token)
            part = self._part(
                token.row, [token.text], [token.token], [token.log_probability], [token.top], token.finish_reason
            )
            part.sources = new_sources
            yield part

    def _echo(self, index: int, prompt: np.ndarray, scores: Scores | None) -> CompletionChoice:
        """Return the prompt [t] as a part; `scores` belong to its last tokens: all, or all except the first."""
        text, ends = token_ends(self._tokenizer.decode_batch, prompt)
        texts = [text[start:stop] for start, stop in pairwise([0, *ends])]
        values: list[float | None] = []
        tops: list[LikeliestTokens | None] = []
        if scores is not None:
            unscored = len(prompt) - len(scores.log_probabilities)
            values = [None] * unscored + scores.log_probabilities.tolist()
            rows = zip(scores.likeliest.tolist(), scores.likeliest_log_probabilities.tolist(), strict=True)
            tops = [None] * unscored + [list(zip(*row, strict=True)) for row in rows]
        return self._part(index, texts, prompt.tolist(), values, tops, None)

    def _part(
        self,
        index: int,
        texts: list[str],
        tokens: list[int],
        values: list[float | None],
        tops: Sequence[LikeliestTokens | None],
        finish_reason: str | None,
    ) -> CompletionChoice:
        start = self._lengths.get(index, 0)
        offsets = np.cumsum([start, *map(len, texts)]).tolist()
        self._lengths[index] = offsets[-1]
        logprobs = None
        if self.request.logprobs is not None:
            named = list(map(self._named, tokens, values, tops)) if self.request.logprobs else None
            logprobs = Logprobs(tokens=texts, token_logprobs=values, top_logprobs=named, text_offset=offsets[:-1])
        return CompletionChoice.model_construct(
            index=index, text="".join(texts), logprobs=logprobs, finish_reason=finish_reason, sources=None
        )

    def _named(self, token: int, value: float | None, top: LikeliestTokens | None) -> dict[str, float] | None:
        """Return log-probabilities of the likeliest tokens and of the token itself, by text."""
        if value is None:
            return None
        return {token_name(self._tokenizer, likely): log_p for likely, log_p in (*(top or ()), (token, value))}

    @property
    def _tokenizer(self) -> Tokenizer:
        return self.service.retriever.tokenizer


def _check_supported(request: CompletionRequest) -> None:
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


def _joined(parts: Iterable[CompletionChoice], logprobs: int | None) -> list[CompletionChoice]:
    """Join the parts of each prompt."""
    by_index: dict[int, list[CompletionChoice]] = {}
    for part in parts:
        by_index.setdefault(part.index, []).append(part)
    choices = []
    for index, of_index in sorted(by_index.items()):
        whole = None
        if logprobs is not None:
            logprobs_of_parts = [part.logprobs for part in of_index if part.logprobs is not None]
            lists: dict[str, Any] = {
                name: [entry for part in logprobs_of_parts for entry in getattr(part, name) or ()]
                for name in Logprobs.model_fields
            }
            whole = Logprobs(**lists if logprobs else lists | {"top_logprobs": None})
        choices.append(
            CompletionChoice(
                index=index,
                text="".join(part.text for part in of_index),
                logprobs=whole,
                finish_reason=of_index[-1].finish_reason,
                sources=joined(part.sources for part in of_index),
            )
        )
    return choices


def usage_of(prompts: Sequence[np.ndarray], generated: Sequence[GeneratedToken] | None = None) -> Usage:
    """Count the tokens of prompts and of their continuations, if there are any."""
    received = sum(map(len, prompts))
    if generated is None:
        return Usage(prompt_tokens=received, total_tokens=received)
    return Usage(
        prompt_tokens=received,
        completion_tokens=len(generated),
        total_tokens=received + len(generated),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=sum(token.accepted for token in generated),
            rejected_prediction_tokens=sum(token.rejected for token in generated),
        ),
    )


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token, the name of a special token, or `token:ID` for a part of a character."""
    name = special_names(tokenizer).get(token) or tokenizer.decode([token])
    return f"token:{token}" if not name or "\ufffd" in name else name


def special_names(tokenizer: Tokenizer) -> dict[int, str]:
    """Return names for the special tokens, which have no text."""
    return {tokenizer.pad_id: "<pad>", tokenizer.bos_id: "<s>", tokenizer.eos_id: "</s>"}
