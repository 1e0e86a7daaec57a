"""The HTTP application for a datastore and, optionally, a checkpoint.

    request ─► CORS (if set) ─► Limits ─► DirectJson ──────────► endpoint with JSON ─┬─► Service ─► Retriever, LanguageModel
                                              └─► FastAPI ─┬─► other endpoint ───────┘
                                                           └─► file of the web page

The application has no global state, so one process can hold several. uvicorn and Ray Serve both run it.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from indexing.retrieval.retriever import Retriever
from retro.inference.language_model import LanguageModel
from retro.server import docs_page, model_api, page_api, schemas, search_api
from retro.server.errors import ApiError, error_responses, reraise_errors
from retro.server.examples import finish_measuring
from retro.server.json_route import DirectJson
from retro.server.limits import Limits
from retro.server.openai import api as openai_api
from retro.server.openai import chat, models
from retro.server.service import Service, ServiceDependency
from retro.server.settings import ServeSettings

PAGE = Path(__file__).parent / "page"

router = APIRouter(tags=["server"])


def make_app(
    retriever: Retriever, language_model: LanguageModel | None, settings: ServeSettings, *, token: str = ""
) -> FastAPI:
    """Create the application.

    Args:
        retriever: searches the datastore.
        language_model: scores and generates; None = those endpoints answer 404.
        settings: limits and name.
        token: bearer token that requests must send, except to /health, /ready, /docs and the web page; empty = none.
    """
    service = Service.of(retriever, language_model, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(service.warm_up)
        yield
        await finish_measuring(service)

    app = FastAPI(
        title=f"HTTP API of {service.name}",
        version=version("retro"),
        description="Search a datastore, and score or generate text with a language model that reads the neighbors.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    routers = (
        router, search_api.router, page_api.router, model_api.router,
        models.router, chat.router, openai_api.router, docs_page.router,
    )  # fmt: skip
    for each in routers:
        app.include_router(each)
    # One route for each file of the page: a mount at / would answer every path that has no GET.
    page_paths = _page_paths()
    if page_paths:
        files = StaticFiles(directory=PAGE, html=True)
        app.router.routes.extend(Route(path, files, methods=["GET", "HEAD"]) for path in sorted(page_paths))
    reraise_errors(app)
    app.add_middleware(DirectJson, routes=[route for each in routers for route in each.routes])
    app.add_middleware(
        Limits,
        settings=settings,
        admission=service.admission,
        metrics=service.metrics,
        token=token,
        public=frozenset({"/health", "/ready", "/docs", *page_paths}),
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


def _page_paths() -> set[str]:
    """Paths of the page's files; `/` is its index."""
    if not PAGE.is_dir():
        return set()
    return {"/"} | {"/" + path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file()}


@router.get("/health", response_model=schemas.Status)
async def health() -> Mapping[str, str]:
    """Report that the process answers."""
    return {"status": "ok"}


@router.get("/ready", response_model=schemas.Status, responses={503: error_responses()[503]})
async def ready(service: ServiceDependency) -> Mapping[str, str]:
    """Report whether the server accepts requests; 503 while it shuts down."""
    if service.admission.draining:
        raise ApiError(503, "the server is shutting down.")
    return {"status": "ready"}


@router.get(
    "/metrics",
    response_class=Response,
    responses={**error_responses(), 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(service: ServiceDependency) -> Response:
    """Metrics in the text format of Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
