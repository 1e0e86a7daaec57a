"""What endpoints share: the service of their application, bodies in JSON, answers as server-sent events."""

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.responses import Response, StreamingResponse
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from retro.server.errors import InvalidRequest, as_api_error, error_json, error_responses
from retro.server.schemas import ErrorResponse
from retro.server.service import Service


class JsonRoute(APIRoute):
    """A route that reads bodies with pydantic's parser, and answers HEAD as GET; uvicorn leaves out the answer's body.

    Unlike Python's, this parser rejects halves of surrogate pairs, which have no UTF-8. A compressed body is refused.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(self._as_get(scope))

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().handle(self._as_get(scope), receive, send)

    def _as_get(self, scope: Scope) -> Scope:
        # A method in `self.methods` would be an operation of its own in the description of the API.
        is_head = scope["type"] == "http" and scope["method"] == "HEAD" and "GET" in (self.methods or ())
        return {**scope, "method": "GET"} if is_head else scope

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            coding = request.headers.get("Content-Encoding", "identity")
            if coding.strip().lower() not in ("", "identity"):
                raise InvalidRequest(
                    f"Content-Encoding = {coding!r}: compressed bodies are not read. Send the JSON without this header."
                )
            return await handler(_JsonRequest(request.scope, request.receive))

        return answer


class _JsonRequest(Request):
    async def json(self) -> Any:
        return from_json(await self.body())


async def service_of(request: Request) -> Service:
    """Return the service of a request's application. (`async`, because FastAPI runs other functions on another
    thread.)"""
    service: Service = request.app.state.service
    return service


ServiceDependency = Annotated[Service, Depends(service_of)]
"""Type of the parameter `service` of an endpoint."""


def stream_responses(answer: str, model: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's `responses` of an endpoint that can stream: server-sent events with a model, or an error, as
    JSON."""
    kinds = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in (model, ErrorResponse)]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    item = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    description = f"{answer} With `stream`: events `data: {{{model.__name__}}}`, and `data: [DONE]` at the end."
    content = {"text/event-stream": {"itemSchema": item}}
    return error_responses(*statuses) | {200: {"description": description, "content": content}}


async def event_stream(events: AsyncIterator[BaseModel]) -> Response:
    """Return server-sent events with the JSON of models, and `[DONE]` at the end, also after an error.

    Raises:
        Exception: before the first event, so that the answer is an error instead of a stream.
    """
    first = await anext(events)

    async def lines() -> AsyncIterator[str]:
        try:
            yield f"data: {first.model_dump_json()}\n\n"
            async for event in events:
                yield f"data: {event.model_dump_json()}\n\n"
        except Exception as error:
            yield f"data: {error_json(as_api_error(error)).decode()}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
