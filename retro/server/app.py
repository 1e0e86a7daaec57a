"""The HTTP application for a datastore and, optionally, a checkpoint.

    request ─► CORS (if set) ─► Limits ─► FastAPI ─┬─► endpoint ─► Service ─► Retriever, LanguageModel
                                                   └─► file of the web page

The application has no global state, so one process can hold several. uvicorn and Ray Serve both run it.
"""

import base64
import hashlib
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from indexing.retrieval.retriever import Retriever
from indexing.store.first_use import unchecked
from retro.inference.language_model import LanguageModel
from retro.server import model_api, page_api, schemas, search_api, trace_api
from retro.server.errors import ApiError, error_responses
from retro.server.examples import finish_measuring
from retro.server.limits import Limits
from retro.server.openai import api as openai_api
from retro.server.openai import chat, completions, requests
from retro.server.openai.schemas import ChatChunk
from retro.server.routes import JsonRoute, ServiceDependency
from retro.server.service import Service
from retro.server.settings import ServeSettings
from retro.server.warm_up import before_ready

PAGE = Path(__file__).parent / "page"

_SWAGGER = Path(str(files("fastapi_offline"))) / "static"
_SWAGGER_FILES = "/swagger-ui-bundle.js", "/swagger-ui.css"
_EVENTS = schemas.GenerateEvent, ChatChunk  # models that only events of streams have; FastAPI finds those of answers

router = APIRouter(route_class=JsonRoute, tags=["server"])


class Api(FastAPI):
    """FastAPI with the models of `routes.stream_responses` in its OpenAPI description."""

    def openapi(self) -> dict[str, Any]:
        described = super().openapi()
        models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "serialization") for model in _EVENTS]
        _, events = models_json_schema(models, ref_template="#/components/schemas/{model}")
        for name, schema in events["$defs"].items():
            described["components"]["schemas"].setdefault(name, schema)
        return described


def make_app(
    retriever: Retriever, language_model: LanguageModel | None, settings: ServeSettings, *, token: str = ""
) -> FastAPI:
    """Create the application.

    Args:
        retriever: searches the datastore.
        language_model: scores and generates; None = those endpoints answer 404.
        settings: limits and name.
        token: bearer token that requests must send, except to /health, /ready, /docs, /openapi.json and the web page;
            empty = none.
    """
    service = Service(retriever, language_model, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await before_ready(service)
        yield
        await finish_measuring(service)

    app = Api(
        title=f"HTTP API of {service.name}",
        version=version("retro"),
        description="Search a datastore, and score or generate text with a language model that reads the neighbors. "
        "[Page to try it in a browser](./)",
        lifespan=lifespan,
        exception_handlers={RequestValidationError: _reraise, HTTPException: _reraise},
        # Only describes the token; `Limits` checks it.
        dependencies=[Depends(HTTPBearer(auto_error=False))] if token else None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    routers = (
        router, search_api.router, trace_api.router, page_api.router, model_api.router,
        requests.router, chat.router, completions.router, openai_api.router, openai_api.tokenizer_router,
    )  # fmt: skip
    for included in routers:
        app.include_router(included)
    # One route for each file of the page: a mount at / would answer every path that has no GET.
    page_paths = _page_paths()
    for folder, paths in ((PAGE, sorted(page_paths)), (_SWAGGER, _SWAGGER_FILES)):
        static = StaticFiles(directory=folder, html=True, check_dir=False)
        app.router.routes.extend(Route(path, static, methods=["GET", "HEAD"]) for path in paths)
    app.add_middleware(
        Limits,
        settings=settings,
        admission=service.admission,
        metrics=service.metrics,
        token=token,
        public=frozenset({"/health", "/ready", "/docs", "/openapi.json", *_SWAGGER_FILES, *page_paths}),
        files=service.files,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


async def _reraise(_: Request, error: Exception) -> Response:
    """Reraise an exception that FastAPI would answer in its own format, so that `Limits` answers it."""
    raise error


def _page_paths() -> set[str]:
    """Paths of the page's files; `/` is its index."""
    if not PAGE.is_dir():
        return set()
    return {"/"} | {"/" + path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file()}


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """Swagger UI with files of the package fastapi-offline: the description of the API, with a form for each
    endpoint."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=request.app.title,
        swagger_js_url="swagger-ui-bundle.js",
        swagger_css_url="swagger-ui.css",
        swagger_favicon_url="icon.svg",
        swagger_ui_parameters={"tryItOutEnabled": True, "validatorUrl": None},
    )
    script = re.search(rb"<script>(.*?)</script>", bytes(page.body), re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1]).digest()).decode()
    page.headers["Content-Security-Policy"] = (
        f"default-src 'self'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'"
    )
    return page


@router.get("/health", response_model=schemas.Status, response_model_exclude_none=True)
async def health() -> Mapping[str, str]:
    """Report that the process answers."""
    return {"status": "ok"}


@router.get(
    "/ready",
    response_model=schemas.Status,
    response_model_exclude_none=True,
    responses={503: error_responses()[503]},
)
async def ready(service: ServiceDependency) -> Mapping[str, str | int]:
    """Report whether the server accepts requests; 503 while it shuts down, and if a datastore was built again or has a
    damaged file."""
    if service.admission.draining:
        raise ApiError(503, "the server is shutting down.")
    service.retriever.retrieval.require_unchanged()
    await service.files.require_all()
    return {"status": "ready"} | ({"files_to_compare": waiting} if (waiting := unchecked()[0]) else {})


@router.get(
    "/metrics",
    response_class=Response,
    responses={**error_responses(), 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(service: ServiceDependency) -> Response:
    """Metrics in the text format of Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
