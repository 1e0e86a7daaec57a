"""A tiny datastore and a tiny checkpoint served over HTTP: in-process and on a real socket."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from retro.inference.language_model import LanguageModel
from retro.server.app import make_app
from retro.server.protocol import uvicorn_config
from retro.server.settings import ServeSettings
from tests.conftest import PATIENCE, build_local, tiny_config

TEXT = "the index of a chunk and the neighbor in memory 检索模型 with a vector from the store\n"

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role + ': ' + m.content + (eos_token if m.role == 'assistant' else '') + '\n' }}{% endfor %}"
)


@pytest.fixture(scope="session")
def retriever(voting_datastore: Datastore) -> Retriever:
    return Retriever.open(voting_datastore.folder)


@pytest.fixture(scope="session")
def language_model(tiny_run: Path, retriever: Retriever) -> LanguageModel:
    return LanguageModel.open(tiny_run, retriever, "cpu")


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    """Two datastores searched as one: texts about ships, and texts about trains. No document is held out. Both can be traced."""
    folders = []
    for word in ("ship", "train"):
        folder = tmp_path_factory.mktemp(word)
        corpus = folder / "corpus.jsonl"
        rows = [{"id": f"{word}/{n}", "text": f"the {word} number {n} of the {word}s leaves " * 8} for n in range(30)]
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = tiny_config(folder, corpus)
        config = replace(config, corpus=replace(config.corpus, split=(1, 0, 0)))
        if folders:  # datastores that are searched as one share the tokenizer and the embedder
            model = str(folders[0] / "tokenizer" / "sentencepiece.model")
            config = replace(config, tokenizer=replace(config.tokenizer, kind="sentencepiece", path=model))
            config = replace(config, embedder=replace(config.embedder, path=str(folders[0])))
        build_local(config)
        folders.append(build_local(config, only="suffixes").folder)
    return Retriever.open(*folders)


Make = Callable[..., FastAPI]


@pytest.fixture(scope="session")
def app_with(retriever: Retriever, language_model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that makes an app. Keywords are settings, `token`, and `model=False` for no language model."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)

    def make(token: str = "", model: bool = True, **settings) -> FastAPI:
        settings = {"name": "tiny", "allowed_hosts": ("testserver",), "chat_template": str(template), **settings}
        return make_app(retriever, language_model if model else None, ServeSettings(**settings), token=token)

    return make


@pytest.fixture(scope="session")
def client(app_with: Make) -> Iterator[TestClient]:
    """A client of an app with default settings."""
    with TestClient(app_with()) as opened:
        yield opened


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, for the tests with the marks of `browser.py`."""
    from playwright.sync_api import sync_playwright

    from tests.retro.server.browser import ARGUMENTS, CHROMIUM

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open pages in new browser contexts. Console errors fail the test unless `errors` is True."""
    opened = []

    def new(address: str, errors: bool = False, **context) -> Any:
        page = browser.new_context(**context).new_page()
        page.set_default_timeout(1000 * PATIENCE)
        said: list[str] = []
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.goto(address)
        opened.append((page, [] if errors else said))
        return page

    yield new
    for page, said in opened:
        page.context.close()
        assert said == []


def events_of(response: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, whose last line must be `[DONE]`."""
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


class Gate:
    """Wraps a function: counts its calls, and holds each until `let_go` is set."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0
        self.let_go = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        assert self.let_go.wait(PATIENCE)
        return self.function(*args, **kwargs)


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serve the app from a thread and yield its URL."""
    server = uvicorn.Server(uvicorn_config(app, port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def url(app_with: Make) -> Iterator[str]:
    """The URL of an app with default settings."""
    with listening(app_with()) as opened:
        yield opened
