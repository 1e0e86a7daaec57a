"""Everything that can go wrong as JSON with a reason, in the form that OpenAI's clients know: never a stack trace.

    a handler raises ApiError, InputError (a user's mistake) or pydantic's ─► {"error": {message, type, param, code}}
    anything else ─► 500 with an id that stands in the log beside the trace

A request that cannot be understood is 422, under /v1 it is 400 as there.
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

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "overloaded",
    431: "request_too_large",
    500: "internal_error",
    503: "unavailable",
    504: "timeout",
}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}  # OpenAI's, where it has one for all errors of a status
_REASONS = {
    400: "The request is not valid, or asks for what is not supported.",
    401: "The bearer token is missing or wrong.",
    403: "The server has no token, and the request's `Host` is not a name that it accepts.",
    404: "There is no such thing here.",
    408: "The request's body did not arrive in time.",
    413: "The request has more bytes than the server allows.",
    422: "The request is not valid, or asks for more than the server allows.",
    429: "Too many requests are waiting; `Retry-After` says when to try again.",
    431: "The request's address and headers have more bytes than the server allows.",
    500: "A fault of the server; the id stands in its log.",
    503: "The server is starting or shutting down.",
    504: "The request took longer than the server allows.",
}
_FIELD_CODES = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}
_TYPE_NAMES = {"str", "int", "float", "bool"}


class ApiError(Exception):
    """An answer other than the one that was asked for.

    Attributes:
        status: of HTTP.
        message: what was found and what is accepted.
        param: the field of the request, if it is one's fault.
        type: a word for programs; None = that of the status.
        code: a narrower one, as OpenAI has them; None = that of the status, if there is one.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        type: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.type, self.code = type or _TYPES.get(status, "error"), code or _CODES.get(status)
        self.headers = headers


class Refused(ApiError):
    """A request that says something impossible: 422, under /v1 400."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(422, message, param=param, code=code)


def took_too_long(seconds: float) -> ApiError:
    """A request that passed the time limit."""
    return ApiError(504, f"the request took longer than {seconds:g} s (request_seconds).")


def error_response(error: ApiError, path: str) -> Response:
    """The answer that tells an error to who asked for `path`."""
    status = 400 if error.status == 422 and path.startswith("/v1/") else error.status
    return Response(error_json(error), status, error.headers, media_type="application/json")


def error_json(error: ApiError) -> bytes:
    """`{"error": …}`; ASCII, as a message may quote half a character of the request."""
    body = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return json.dumps({"error": body}).encode()


def declared(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of an endpoint for OpenAPI, with those that any may have."""
    every = sorted({*statuses, 401, 403, 408, 429, 431, 500, 503, 504})
    return {status: {"model": ErrorResponse, "description": _REASONS[status]} for status in every}


def raise_errors(app: FastAPI) -> None:
    """Let what FastAPI would answer in its own way be raised; `Limits` answers everything that is."""

    async def raise_on(_: Request, error: Exception) -> Response:
        raise error

    for kind in (RequestValidationError, HTTPException):
        app.add_exception_handler(kind, raise_on)


def as_api_error(error: Exception) -> ApiError:
    """What was raised, as the answer to it; of what nobody expected, the log has the trace and the client an id."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _as_refused(error.errors()[0])
    if isinstance(error, NotFound):
        return ApiError(404, str(error))
    if isinstance(error, InputError):
        return Refused(str(error))
    if isinstance(error, HTTPException):
        missing = error.status_code == 404
        message = "there is nothing at this path; GET /docs lists what there is." if missing else error.detail
        return ApiError(error.status_code, message, headers=error.headers)
    number = uuid.uuid4().hex[:12]
    log.error("error %s", number, exc_info=error)
    return ApiError(500, f"a fault of the server, which stands in its log as error {number}.")


def _as_refused(problem: Mapping[str, Any]) -> Refused:
    """A problem that pydantic has found, with the field it lies in.

    Its place begins with the part of the request (`body`, `path`, `query`). Of a field that may be of several types it also
    names the one that was tried, which says nothing to a client: `body.vectors.0.list[float].3`.
    """
    _, *places = map(str, problem["loc"])
    unknown = problem["type"] == "extra_forbidden"
    sent = {0, len(places) - 1 if unknown else 0}  # places of names that can only be the client's
    named = [
        each
        for number, each in enumerate(places)
        if number in sent or (re.fullmatch(r"\w+", each) and each not in _TYPE_NAMES)
    ]
    param, message = ".".join(named), str(problem["msg"]).removeprefix("Value error, ")
    if unknown:
        message = f"there is no such field here; accepted are {', '.join(problem['ctx']['accepted'])}."
    code = _FIELD_CODES.get(problem["type"])
    return Refused(f"{param}: {message}" if param else message, param=param or None, code=code)
