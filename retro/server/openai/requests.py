"""Requests under /v1: their unknown fields, and the settings of a generation from a request for completions or chat."""

import re
import secrets
from collections.abc import Iterator
from typing import Any

from fastapi import Depends, Request
from pydantic import BaseModel

from retro.inference.settings import GenerationSettings
from retro.server.errors import InvalidRequest, accepted_fields
from retro.server.model_api import effective_temperature
from retro.server.openai.schemas import SamplingRequest
from retro.server.service import Service, ServiceDependency

_MOST_NAMES, _LONGEST_NAME = 16, 64  # of ignored fields in a header


def lenient(model: type[BaseModel]) -> Any:
    """Return the dependency for a body of this model. A header names unknown fields, or a strict server refuses them."""

    async def checked(body: model, request: Request, service: ServiceDependency) -> BaseModel:  # type: ignore[valid-type]
        unknown = list(_unknown_fields(body))
        if unknown and service.settings.strict_fields:
            name, parent = unknown[0]
            raise InvalidRequest(f"{name}: {accepted_fields(parent)}", param=name, code="unknown_parameter")
        if unknown:
            names = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:_LONGEST_NAME] for name, _ in unknown]
            if len(names) > _MOST_NAMES:
                names[_MOST_NAMES:] = [f"{len(names) - _MOST_NAMES} more"]
            warning = f'299 retro "ignored unknown fields: {", ".join(names)}"'  # 299 is HTTP's code for any warning
            request.state.headers = [(b"warning", warning.encode())]
        return body

    return Depends(checked)


def _unknown_fields(received: Any, *parents: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the unknown fields of a request that accepts them, each with the model that lacks it."""
    if isinstance(received, BaseModel):
        yield from ((".".join([*parents, name]), type(received)) for name in received.model_extra or ())
        for name in received.model_fields_set & type(received).model_fields.keys():
            yield from _unknown_fields(getattr(received, name), *parents, name)
    elif isinstance(received, list):
        for index, item in enumerate(received):
            yield from _unknown_fields(item, *parents, str(index))


def generation_settings(
    service: Service, request: SamplingRequest, *, max_tokens: int, logprobs: int, end_of_turn: int | None = None
) -> GenerationSettings:
    """Return the settings of a request; null is the default of a field.

    Args:
        service: its tokenizer checks token ids.
        request: the request.
        max_tokens: largest number of tokens to generate, at least 1.
        logprobs: number of likeliest tokens to return with each token.
        end_of_turn: another token that ends the text, unless the request ignores it.

    Raises:
        ApiError: a token id is invalid.
    """
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    ends = [*(request.stop_token_ids or ()), *(() if end_of_turn is None or request.ignore_eos else (end_of_turn,))]
    biases = _biases(request.logit_bias or {})
    for name, ids in (("logit_bias", [token for token, _ in biases]), ("stop_token_ids", ends)):
        service.check_ids(ids, name)
    return GenerationSettings(
        max_tokens=max_tokens,
        temperature=effective_temperature(1.0 if request.temperature is None else request.temperature),
        top_k=max(0, request.top_k),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=biases,
        seed=secrets.randbits(32) if request.seed is None else request.seed,
        stop=tuple(each for each in stop if each),
        stop_token_ids=tuple(ends),
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
    )


def continuations(service: Service, request: SamplingRequest, prompts: int) -> int:
    """Return the number of continuations of each prompt.

    Raises:
        ApiError: all prompts together have more than a request may have.
    """
    n, limit = request.n or 1, service.settings.max_queries
    if n > 1 and n * prompts > limit:
        raise InvalidRequest(f"n = {n:,}: {n * prompts:,} continuations; at most {limit:,} (max_queries).", param="n")
    return n


def _biases(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise InvalidRequest(f"logit_bias has the key {token!r}: keys are token ids.", param="logit_bias")
    return tuple((int(token), bias) for token, bias in given.items())
