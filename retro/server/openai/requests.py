"""Requests under /v1: the models that they can name, their unknown fields, and the settings of a generation.

NAME ─► retrieval ON      NAME:off ─► the same weights, retrieval OFF      NAME:embedder ─► /v1/embeddings
"""

import re
import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel

from retro.inference.settings import GenerationSettings
from retro.server.errors import ApiError, InvalidRequest, accepted_fields, error_responses
from retro.server.openai import schemas
from retro.server.routes import JsonRoute, ServiceDependency
from retro.server.service import Service

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

_OFF, _EMBEDDER = ":off", ":embedder"
_MOST_NAMES, _LONGEST_NAME = 16, 64  # of ignored fields in a header
_PENALTIES = "presence_penalty", "frequency_penalty", "repetition_penalty"
_SAMPLING = "temperature", "top_p", "min_p", *_PENALTIES, "copy_strength"
_LEAST_TEMPERATURE = 1e-3  # logits are divided by it; below, the likeliest token has all the probability

# --- models ----------------------------------------------------------------------------------------------------------


@router.get("/v1/models", responses=error_responses())
def models(service: ServiceDependency) -> schemas.ModelList:
    """List the models."""
    return schemas.ModelList(data=[_model(service, name) for name in [*_generating(service), *_embedders(service)]])


@router.get("/v1/models/{model}", responses=error_responses(404))
def model(model: str, service: ServiceDependency) -> schemas.Model:
    """Return one model."""
    _check(model, [*_generating(service), *_embedders(service)])
    return _model(service, model)


def generating_model(service: Service, retrieval: bool) -> str:
    """Return the name of the model with retrieval ON or OFF."""
    return service.name if retrieval or not service.retrieves else service.name + _OFF


def neighbors_of(service: Service, request: schemas.SamplingRequest) -> int:
    """Return the number of neighbors of each chunk that a request's model reads; 0 = retrieval OFF.

    Raises:
        ApiError: no model has this name, it does not generate, or k is too large.
    """
    service.model()
    _check(request.model, _generating(service))
    retrieves = service.retrieves and request.model == service.name
    return service.limits.within("max_model_k", request.k, "k") if retrieves else 0


def check_embedder(service: Service, name: str) -> None:
    service.retriever.chunks.require("dense")
    _check(name, _embedders(service))


def _generating(service: Service) -> list[str]:
    names = [service.name] if service.language_model else []
    return [*names, *(name + _OFF for name in names if service.retrieves)]


def _embedders(service: Service) -> list[str]:
    return [service.name + _EMBEDDER] if service.retriever.dense else []


def _model(service: Service, name: str) -> schemas.Model:
    context = None if name in _embedders(service) else service.model().context
    return schemas.Model(id=name, created=service.started, max_model_len=context)


def _check(name: str, accepted: Sequence[str]) -> None:
    if name not in accepted:
        message = f"model = {name!r}: accepted are {', '.join(accepted)}."
        raise ApiError(404, message, param="model", code="model_not_found")


def identity_of(service: Service, model: str, prefix: str) -> dict[str, Any]:
    """Return the fields that identify an answer and the model that gave it."""
    identity = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
    return identity | {"system_fingerprint": service.model().checkpoint.fingerprint}


# --- fields ----------------------------------------------------------------------------------------------------------


def lenient(model: type[BaseModel]) -> Any:
    """Return the dependency for a body of this model. A header names unknown fields, or a strict server refuses
    them."""

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


async def token_rows(service: Service, prompt: schemas.Prompt, param: str) -> list[np.ndarray]:
    """Return the token ids [t] int64 of one or several prompts.

    Raises:
        ApiError: there are no prompts or too many, they are too long, or an id is not in the tokenizer.
    """
    several: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else [*prompt]
    if not several:
        raise InvalidRequest(f"{param} is an empty list.", param=param)
    service.limits.within("max_queries", len(several), param)
    if isinstance(several[0], str):
        return await service.encoded(several, param)
    service.limits.tokens(several, param)
    rows = [np.array(row, dtype=np.int64) for row in several]
    for index, row in enumerate(rows):
        service.limits.token_ids(row, f"{param}[{index}]", param)
    return rows


def generation_settings(
    service: Service,
    request: schemas.SamplingRequest,
    *,
    max_tokens: int,
    logprobs: int,
    end_of_turn: int | None = None,
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
        service.limits.token_ids(ids, name)
    sampling: dict[str, Any] = {name: _or_default(request, name) for name in _SAMPLING}
    if sampling["temperature"] < _LEAST_TEMPERATURE:
        sampling["temperature"] = 0.0
    return GenerationSettings(
        **sampling,
        max_tokens=max_tokens,
        top_k=max(0, request.top_k),
        logit_bias=biases,
        seed=secrets.randbits(32) if request.seed is None else request.seed,
        stop=tuple(text for text in stop if text),
        stop_token_ids=tuple(ends),
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
    )


def _or_default(request: schemas.SamplingRequest, name: str) -> float:
    value = getattr(request, name)
    return float(type(request).model_fields[name].default if value is None else value)


def _biases(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise InvalidRequest(f"logit_bias has the key {token!r}: keys are token ids.", param="logit_bias")
    return tuple((int(token), bias) for token, bias in given.items())
