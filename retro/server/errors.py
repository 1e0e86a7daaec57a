"""Errors as JSON in the format of OpenAI's API. An answer never contains a stack trace.

    ApiError, InputError (a user's mistake), DamagedFile (503), pydantic's errors ─► {"error": {message, type, param, code}}
    any other exception ─► 500 with an id; the log has the stack trace under the same id

The status of an invalid request is 422; under /v1 it is 400, as in OpenAI's API.
"""

import json
import logging
import re
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from indexing.store.errors import DamagedFile, DatastoreChanged, InputError, NotFound
from retro.server.schemas import ErrorResponse

log = logging.getLogger("retro.server")

_TYPES = {429: "requests", 500: "server_error", 503: "server_error", 504: "server_error"}  # OpenAI's names
_STATUSES: dict[int, tuple[str | None, str]] = {  # code of all errors of a status, OpenAI's if it has one; description
    400: (None, "The request is invalid or not supported."),
    401: ("invalid_api_key", "The bearer token is missing or wrong."),
    403: ("host_not_allowed", "The server has no token and does not accept the request's `Host`."),
    404: ("not_found", "Not found."),
    405: ("method_not_allowed", "The path does not have this method."),
    408: ("request_timeout", "The request's body did not arrive in time."),
    413: ("request_too_large", "The request has more bytes than the server allows."),
    422: (None, "The request is invalid or exceeds a limit of the server."),
    429: ("rate_limit_exceeded", "Too many requests are waiting; retry after the time in `Retry-After`."),
    431: ("request_too_large", "The request's URL and headers have more bytes than the server allows."),
    500: ("internal_error", "Internal error; the server's log has details under the id in the message."),
    503: (
        "unavailable",
        "The server is starting or shutting down, a file of a datastore is damaged, or it was built again.",
    ),
    504: ("timeout", "The request took longer than the server allows."),
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
        self.type = _TYPES.get(status, "invalid_request_error")
        self.code = code or _STATUSES.get(status, (None, ""))[0]
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
    return {status: {"model": ErrorResponse, "description": _STATUSES[status][1]} for status in every}


def is_expected(error: Exception) -> bool:
    """Whether an exception is answered with its own message, not with 500."""
    return isinstance(error, ApiError | RequestValidationError | InputError | HTTPException)


def as_api_error(error: Exception, scope: Scope | None = None) -> ApiError:
    """Convert an exception to an error answer. Unexpected exceptions are logged with their stack trace under an id.

    Args:
        error: the exception.
        scope: the request; None within a stream, whose request was valid.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        assert scope is not None
        return _as_invalid_request(error.errors()[0], scope)
    if isinstance(error, NotFound):
        return ApiError(404, str(error))
    if isinstance(error, DamagedFile):
        log.error("%s", error)
        return ApiError(503, f"a file of the datastore is damaged: {error.shown}.", code="damaged_file")
    if isinstance(error, DatastoreChanged):
        return ApiError(503, str(error))
    if isinstance(error, InputError):
        return InvalidRequest(str(error))
    if isinstance(error, HTTPException):
        if error.status_code == 400:  # FastAPI's, for a body that `JsonRoute` cannot read
            return InvalidRequest(f"the body is not valid JSON: {error.__context__}.")
        missing = error.status_code == 404
        message = "unknown path; GET /docs lists all endpoints." if missing else error.detail
        return ApiError(error.status_code, message, headers=error.headers)
    error_id = uuid.uuid4().hex[:12]
    log.error("error %s", error_id, exc_info=error)
    return ApiError(500, f"internal error {error_id}; the server's log has the details.")


def _as_invalid_request(problem: Mapping[str, Any], scope: Scope) -> InvalidRequest:
    """Convert a validation error of pydantic, with the name of the field.

    The error's location begins with the part of the request (`body`, `path`, `query`). For a field with several types
    it also contains the type that pydantic tried, e.g. `body.vectors.0.list[float].3`. The name leaves both out.
    """
    kind, (part, *names) = problem["type"], map(str, problem["loc"])
    if part == "body" and not names and kind in ("missing", "model_attributes_type"):
        # Browsers send JSON to another origin only after a preflight request, so pages of other sites cannot use the
        # API.
        return InvalidRequest("the body must be a JSON object: send it with the header Content-Type: application/json")
    unknown = kind == "extra_forbidden"
    sent = {0, len(names) - 1 if unknown else 0}  # these names always come from the client
    named = [
        name
        for index, name in enumerate(names)
        if index in sent or (re.fullmatch(r"\w+", name) and name not in _TYPE_NAMES)
    ]
    param, message = ".".join(named), str(problem["msg"]).removeprefix("Value error, ")
    if unknown:
        message = accepted_fields(scope["route"].body_field.field_info.annotation)
    return InvalidRequest(f"{param}: {message}" if param else message, param=param or None, code=_FIELD_CODES.get(kind))


def accepted_fields(model: type[BaseModel]) -> str:
    """Return the message about an unknown field of a model."""
    names = (field.alias or name for name, field in model.model_fields.items())
    return f"unknown field; accepted are {', '.join(names)}."
