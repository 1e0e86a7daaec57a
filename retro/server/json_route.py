"""Fast routes for JSON requests: parse and validate the body in one step, call the endpoint, return JSON.

    bytes ─► pydantic ─► endpoint(request, service) ─► a Response, or a model that is converted to one

FastAPI creates the OpenAPI description from the endpoints' parameters and answers all other requests. It would answer JSON
requests in the same way, but its layers take a large part of the time of a request.
"""

import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, get_args

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

_MOST_NAMES, _LONGEST_NAME = 16, 64  # of ignored fields in a header


def as_json(model: BaseModel) -> Response:
    """Return a model as a JSON response without validating it again."""
    return Response(model.model_dump_json(), media_type="application/json")


class JsonRoute(APIRoute):
    """A route whose endpoint takes the body `request` and the `service`. Routes without a body use FastAPI's handler."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        if not self.dependant.body_params:
            return super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await self.answer(request.scope, await request.body())

        return handler

    @cached_property
    def _request_model(self) -> type[BaseModel]:
        (parameter,) = self.dependant.body_params
        model = parameter.field_info.annotation
        assert parameter.name == "request"
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        return model

    async def answer(self, scope: Scope, body: bytes) -> Response:
        """Answer a request.

        Raises:
            RequestValidationError: the body is not JSON or does not match the request's model.
        """
        # Browsers send JSON to another origin only after a preflight request, so pages of other sites cannot use the API.
        kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
        if kind.partition(b";")[0].strip().lower() != b"application/json":
            problem = "the body must be JSON: send the header Content-Type: application/json"
            raise RequestValidationError([{"type": "content_type", "loc": ("body",), "msg": problem}])
        try:
            received = self._request_model.model_validate_json(body)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False)
            raise RequestValidationError([_located(self._request_model, each) for each in problems]) from error
        service, unknown = scope["app"].state.service, list(_unknown_fields(received))
        if unknown and service.settings.strict_fields:
            refused = ErrorDetails(type="extra_forbidden", loc=unknown[0], msg="", input=None)
            raise RequestValidationError([_located(self._request_model, refused)])
        answer = await self.endpoint(request=received, service=service)
        response = answer if isinstance(answer, Response) else as_json(answer)
        if unknown:
            response.headers["Warning"] = _warning(unknown)
        return response


def _unknown_fields(received: Any, *place: str | int) -> Iterator[tuple[str | int, ...]]:
    """Yield the places of unknown fields in a request that accepts them; other requests have none."""
    if isinstance(received, BaseModel):
        yield from ((*place, name) for name in received.model_extra or ())
        for name in received.model_fields_set & type(received).model_fields.keys():
            yield from _unknown_fields(getattr(received, name), *place, name)
    elif isinstance(received, list):
        for number, each in enumerate(received):
            yield from _unknown_fields(each, *place, number)


def _warning(unknown: Sequence[tuple[str | int, ...]]) -> str:
    """Return the value of the header `Warning` that names ignored fields; 299 is HTTP's code for any warning."""
    names = [re.sub(r"[^\w.-]", "?", ".".join(map(str, place)), flags=re.ASCII)[:_LONGEST_NAME] for place in unknown]
    if len(names) > _MOST_NAMES:
        names[_MOST_NAMES:] = [f"{len(names) - _MOST_NAMES} more"]
    return f'299 retro "ignored unknown fields: {", ".join(names)}"'


def _located(model: type[BaseModel], problem: ErrorDetails) -> dict[str, Any]:
    """Return a validation error with FastAPI's location; for an unknown field, `ctx` lists the accepted fields."""
    *parents, _ = problem["loc"] or [""]
    for name in parents:
        field = model.model_fields.get(str(name))
        kinds = [field.annotation, *get_args(field.annotation)] if field else []
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model)
    accepted = {"accepted": list(model.model_fields)} if problem["type"] == "extra_forbidden" else {}
    return {**problem, "loc": ("body", *problem["loc"]), "ctx": problem.get("ctx", {}) | accepted}


class DirectJson:
    """ASGI middleware that sends JSON requests directly to their routes and all others through FastAPI's layers (`app`).

    It must follow `Limits`, which passes on the body in one piece and answers exceptions.
    """

    def __init__(self, app: ASGIApp, *, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes = {
            route.path: route for route in routes if isinstance(route, JsonRoute) and route.dependant.body_params
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope.get("method") == "POST" else None
        if route is None:
            return await self._app(scope, receive, send)
        scope["route"] = route
        response = await route.answer(scope, (await receive())["body"])
        await response(scope, receive, send)
