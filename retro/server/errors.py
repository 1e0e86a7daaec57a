"""Errors as JSON in the format of OpenAI's API. An answer never contains a stack trace.

    ApiError, InputError (a user's mistake), pydantic's errors ─► {"error": {message, type, param, code}}
    any other exception ─► 500 with an id; the log has the stack trace under the same id

The status of an invalid request is 422; under /v1 it is 400, as in OpenAI's API.
"""

import json
import logging
import re
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from indexing.store.errors import InputError, NotFound
from retro.server.schemas import ErrorResponse

log = logging.getLogger("retro.server")

# OpenAI's type and code for all errors of a status; OpenAI has no code for some.
_TYPES = {429: "requests", 500: "server_error", 503: "server_error", 504: "server_error"}
_CODES = {
    401: "invalid_api_key",
    403: "host_not_allowed",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    431: "request_too_large",
    500: "internal_error",
    503: "unavailable",
    504: "timeout",
}
_REASONS = {
    400: "The request is invalid or not supported.",
    401: "The bearer token is missing or wrong.",
    403: "The server has no token and does not accept the request's `Host`.",
    404: "Not found.",
    408: "The request's body did not arrive in time.",
    413: "The request has more bytes than the server allows.",
    422: "The request is invalid or exceeds a limit of the server.",
    429: "Too many requests are waiting; retry after the time in `Retry-After`.",
    431: "The request's URL and headers have more bytes than the server allows.",
    500: "Internal error; the server's log has details under the id in the message.",
    503: "The server is starting or shutting down.",
    504: "The request took longer than the server allows.",
}
_FIELD_CODES = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}
_TYPE_NAMES = {"str", "int", "float", "bool"}


class ApiError(Exception):
    """An error answer.

    Attributes:
        status: HTTP status.
        message: what was found and what is accepted.
        param: the field of the request that caused the error; None if no single field did.
        type: OpenAI's kind of error: `invalid_request_error`, `requests` (too many) or `server_error`.
        code: reason, for programs; None = that of the status, if it has one.
        headers: additional headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.type, self.code = _TYPES.get(status, "invalid_request_error"), code or _CODES.get(status)
        self.headers = headers


class InvalidRequest(ApiError):
    """An invalid request: 422, or 400 under /v1."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(422, message, param=param, code=code)


def time_limit_error(seconds: float) -> ApiError:
    """Return the error of a request that exceeded the time limit."""
    return ApiError(504, f"the request took longer than {seconds:g} s (request_seconds).")


def error_response(error: ApiError, path: str) -> Response:
    """Return the HTTP response for an error of a request to `path`."""
    status = 400 if error.status == 422 and path.startswith("/v1/") else error.status
    return Response(error_json(error), status, error.headers, media_type="application/json")


def error_json(error: ApiError) -> bytes:
    """Return `{"error": …}` as JSON. It is ASCII, because a message may quote a lone surrogate of the request."""
    body = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return json.dumps({"error": body}).encode()


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's `responses` of an endpoint: the given statuses and those that every endpoint can return."""
    every = sorted({*statuses, 401, 403, 408, 429, 431, 500, 503, 504})
    return {status: {"model": ErrorResponse, "description": _REASONS[status]} for status in every}


def reraise_errors(app: FastAPI) -> None:
    """Reraise exceptions that FastAPI would answer in its own format, so that `Limits` answers them."""

    async def reraise(_: Request, error: Exception) -> Response:
        raise error

    for kind in (RequestValidationError, HTTPException):
        app.add_exception_handler(kind, reraise)


def as_api_error(error: Exception) -> ApiError:
    """Convert an exception to an error answer. Unexpected exceptions are logged with their stack trace under an id."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _as_invalid_request(error.errors()[0])
    if isinstance(error, NotFound):
        return ApiError(404, str(error))
    if isinstance(error, InputError):
        return InvalidRequest(str(error))
    if isinstance(error, HTTPException):
        missing = error.status_code == 404
        message = "unknown path; GET /docs lists all endpoints." if missing else error.detail
        return ApiError(error.status_code, message, headers=error.headers)
    number = uuid.uuid4().hex[:12]
    log.error("error %s", number, exc_info=error)
    return ApiError(500, f"internal error {number}; the server's log has the details.")


def _as_invalid_request(problem: Mapping[str, Any]) -> InvalidRequest:
    """Convert a validation error of pydantic, with the name of the field.

    The error's location begins with the part of the request (`body`, `path`, `query`). For a field with several types it also
    contains the type that pydantic tried, e.g. `body.vectors.0.list[float].3`. The name leaves both out.
    """
    _, *places = map(str, problem["loc"])
    unknown = problem["type"] == "extra_forbidden"
    sent = {0, len(places) - 1 if unknown else 0}  # these names always come from the client
    named = [
        each
        for number, each in enumerate(places)
        if number in sent or (re.fullmatch(r"\w+", each) and each not in _TYPE_NAMES)
    ]
    param, message = ".".join(named), str(problem["msg"]).removeprefix("Value error, ")
    if unknown:
        message = f"unknown field; accepted are {', '.join(problem['ctx']['accepted'])}."
    code = _FIELD_CODES.get(problem["type"])
    return InvalidRequest(f"{param}: {message}" if param else message, param=param or None, code=code)
