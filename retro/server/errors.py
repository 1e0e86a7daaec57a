"""Everything that can go wrong as JSON with a reason, in the form that OpenAI's clients know: never a stack trace.

    a handler raises ApiError, InputError (a user's mistake) or pydantic's ─► {"error": {message, type, param, code}}
    anything else ─► 500 with an id that stands in the log beside the trace (`limits.py`)

A request that cannot be understood is 422, under /v1 it is 400 as there.
"""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from indexing.store.errors import InputError
from retro.server.schemas import ErrorResponse

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "overloaded",
    500: "internal_error",
    503: "unavailable",
    504: "timeout",
}
_REASONS = {
    400: "The request is not valid, or asks for what is not supported.",
    401: "The bearer token is missing or wrong.",
    404: "There is no such thing here.",
    413: "The request has more bytes than the server allows.",
    422: "The request is not valid, or asks for more than the server allows.",
    429: "Too many requests are waiting; `Retry-After` says when to try again.",
    500: "A fault of the server; the id stands in its log.",
    503: "The server is starting or shutting down.",
    504: "The request took longer than the server allows.",
}


class ApiError(Exception):
    """An answer other than the one that was asked for.

    Attributes:
        status: of HTTP.
        message: what was found and what is accepted.
        param: the field of the request, if it is one's fault.
        type: a word for programs; None = that of the status.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.type, self.headers = type or TYPES.get(status, "error"), headers


class Refused(ApiError):
    """A request that says something impossible: 422, under /v1 400."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(422, message, param=param)


def error_response(error: ApiError) -> Response:
    """The answer that tells an error."""
    return Response(error_json(error), error.status, error.headers, media_type="application/json")


def error_json(error: ApiError) -> bytes:
    """`{"error": …}`; ASCII, as a message may quote half a character of the request."""
    body = {"message": error.message, "type": error.type, "param": error.param, "code": None}
    return json.dumps({"error": body}).encode()


def declared(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of an endpoint for OpenAPI, with those that any may have."""
    every = sorted({*statuses, 401, 429, 500, 503, 504})
    return {status: {"model": ErrorResponse, "description": _REASONS[status]} for status in every}


def handle_errors(app: FastAPI) -> None:
    """Let an app answer errors as JSON."""

    async def answer(request: Request, error: Exception) -> Response:
        return error_response(_under_v1(request, as_api_error(error)))

    for kind in (ApiError, InputError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


def as_api_error(error: Exception) -> ApiError:
    """What a handler raised, as the answer to it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError | ValidationError):
        message, param = _first_problem(error.errors()[0])
        return Refused(message, param=param)
    if isinstance(error, InputError):
        return Refused(str(error))
    assert isinstance(error, HTTPException)
    detail = "there is nothing at this path; GET /docs lists what there is." if error.status_code == 404 else error.detail
    return ApiError(error.status_code, detail, headers=error.headers)


def _first_problem(problem: Mapping[str, Any]) -> tuple[str, str | None]:
    """The message of a problem that pydantic has found, and the field it lies in."""
    place = ".".join(str(part) for part in problem["loc"] if part not in ("body", "query", "path"))
    return (f"{place}: {problem['msg']}" if place else str(problem["msg"])), place or None


def _under_v1(request: Request, error: ApiError) -> ApiError:
    if error.status == 422 and request.url.path.startswith("/v1/"):
        return ApiError(400, error.message, param=error.param, type=error.type)
    return error
