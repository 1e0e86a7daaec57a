"""The HTTP application of a datastore and, where there is one, a checkpoint.

    request ─► CORS (if set) ─► Limits ─► Direct ───────────► endpoint with JSON ─┬─► Service ─► Retriever, LanguageModel
                                             └─► FastAPI ─┬─► other endpoint ─────┘
                                                          └─► a file of the page

It holds no state of the process: several apps live side by side, and an app is what uvicorn or Ray Serve runs.
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
from retro.server import docs_page, model_api, schemas, search_api
from retro.server.errors import ApiError, declared, raise_errors
from retro.server.json_route import Direct
from retro.server.limits import Limits
from retro.server.openai import api as openai_api
from retro.server.service import Service, Serving
from retro.server.settings import ServeSettings

PAGE = Path(__file__).parent / "page"

router = APIRouter(tags=["server"])


def make_app(
    retriever: Retriever, language_model: LanguageModel | None, settings: ServeSettings, *, token: str = ""
) -> FastAPI:
    """The application, ready for requests.

    Args:
        retriever: what is searched.
        language_model: what scores and generates; None = those endpoints answer 404.
        settings: limits and name.
        token: that every request must bear, but for health, readiness, the page and the description of the API; empty = none.
    """
    service = Service.of(retriever, language_model, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(service.warm_up)
        yield

    app = FastAPI(
        title=f"retro: {service.name}",
        version=version("retro"),
        description="Search in a datastore, and a language model that reads what it finds.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    routers = (router, search_api.router, model_api.router, openai_api.router, docs_page.router)
    for each in routers:
        app.include_router(each)
    # A route for each file of the page: what is mounted at / would answer every path that has no GET.
    page_paths = _page_paths()
    if page_paths:
        files = StaticFiles(directory=PAGE, html=True)
        app.router.routes.extend(Route(path, files, methods=["GET", "HEAD"]) for path in sorted(page_paths))
    raise_errors(app)
    app.add_middleware(Direct, routes=[route for each in routers for route in each.routes])
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
    """Paths at which the page's files are, `/` for its index."""
    if not PAGE.is_dir():
        return set()
    return {"/"} | {"/" + path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file()}


@router.get("/health", response_model=schemas.Status)
async def health() -> Mapping[str, str]:
    """Whether the process answers."""
    return {"status": "ok"}


@router.get("/ready", response_model=schemas.Status, responses={503: declared()[503]})
async def ready(service: Serving) -> Mapping[str, str]:
    """Whether it takes requests: 503 while it shuts down."""
    if service.admission.draining:
        raise ApiError(503, "the server is shutting down.")
    return {"status": "ready"}


@router.get(
    "/metrics",
    response_class=Response,
    responses={**declared(), 200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(service: Serving) -> Response:
    """Counts for Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
