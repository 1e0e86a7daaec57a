"""A server is ready after everything that requests need was used once."""

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from retro.inference.language_model import LanguageModel
from retro.model_settings import CopyHeadSettings
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from retro.server.warm_up import FirstUse, first_uses, run_all
from retro.training.trainer import train
from tests.conftest import tiny_config
from tests.retro.server.conftest import TEXT


@pytest.fixture(scope="module")
def copying_run(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, voting_datastore: Datastore) -> Path:
    """A run whose model copies from its context, from neighbors, and from the whole datastore."""
    config = replace(tiny_config(tmp_path_factory.mktemp("run"), tiny_corpus), datastore=voting_datastore.folder)
    copies = CopyHeadSettings(context=True, neighbors=True, datastore=True)
    config = replace(config, model=replace(config.model, copy_head=copies), train=replace(config.train, steps=1))
    train(config.run, config.run_settings)
    return config.run


def names(app: FastAPI) -> list[str]:
    return [use.name for use in first_uses(app.state.service)]


def test_ready_means_that_tokens_were_generated_with_all_sources(
    app_with: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    generated: list[Any] = []
    generate = LanguageModel.generate

    def recorded(self: LanguageModel, *arguments: Any, **options: Any) -> Any:
        for step in generate(self, *arguments, **options):
            generated.extend(step)
            yield step

    monkeypatch.setattr(LanguageModel, "generate", recorded)
    with TestClient(app_with()):
        assert len(generated) == 2
        assert generated[0].read  # neighbors of a complete chunk
    assert names(app_with()) == [
        "checksums of files that came from elsewhere", "a dense search", "a hybrid search", "neighbors of a chunk",
        "verbatim runs",
        "scores", "scores with 2 neighbors", "generated tokens with all sources",
    ]  # fmt: skip


def test_a_server_without_a_model_waits_for_searches_neighbors_and_traces(app_with: Callable[..., FastAPI]) -> None:
    assert names(app_with(model=False)) == [
        "checksums of files that came from elsewhere", "a dense search", "a hybrid search", "neighbors of a chunk",
        "verbatim runs",
    ]  # fmt: skip


def test_the_log_says_what_a_server_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    order: list[str] = []
    with caplog.at_level(1):
        run_all([FirstUse(name, lambda name=name: order.append(name)) for name in ("a search", "checksums")])  # type: ignore[misc]
    assert order == ["a search", "checksums"]
    assert "waits for: a search, checksums" in caplog.text
    assert "waiting for checksums" in caplog.text


def test_a_server_whose_first_use_fails_does_not_start(
    app_with: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Retriever, "search", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), TestClient(app_with()):
        pass


def test_a_file_that_is_damaged_at_the_start_is_named_by_ready(
    tmp_path: Path, voting_datastore: Datastore, copying_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(voting_datastore.folder, tmp_path / "datastore")
    tokens = np.load(folder / "chunks/00000/train/tokens.npy", mmap_mode="r+")
    tokens[:] = np.iinfo(tokens.dtype).max
    tokens.flush()
    retriever = Retriever.open(folder)
    app = make_app(retriever, None, ServeSettings(allowed_hosts=("testserver",)))
    with caplog.at_level(logging.WARNING), TestClient(app) as client:
        assert "tokens.npy" in client.get("/ready").json()["error"]["message"]
    assert "Requests are answered 503" in caplog.text


_CHILD = """
import gc, sys
from starlette.testclient import TestClient
from indexing.retrieval.retriever import Retriever
from retro.inference.language_model import LanguageModel
from retro.server.app import make_app
from retro.server.settings import ServeSettings

def compiled():
    from numba.core.dispatcher import Dispatcher
    return {(each.py_func.__qualname__, str(signature)) for each in gc.get_objects() if isinstance(each, Dispatcher)
            if each.py_func.__module__.startswith(("indexing", "retro")) for signature in each.signatures}

datastore, run, text = sys.argv[1:]
retriever = Retriever.open(datastore)
model = LanguageModel.open(run, retriever, "cpu") if run else None
app = make_app(retriever, model, ServeSettings(name="tiny", allowed_hosts=("testserver",)))
bodies = [("/search", {"texts": [text] * 3, "retrieval": way}) for way in ("dense", "sparse", "hybrid")]
bodies += [("/neighbors", {"text": text * 3}), ("/trace", {"text": text * 3})]
if run:
    bodies += [("/score", {"text": text * 3, "k": k}) for k in (1, 2)]
    for ask in ({}, {"return_sources": True}, {"temperature": 0}):
        bodies.append(("/generate", {"prompt": text, "max_tokens": 8, **ask}))
    bodies.append(("/v1/completions", {"model": "tiny", "prompt": [text, text[:20]], "max_tokens": 3, "logprobs": 2}))
with TestClient(app) as client:
    before = compiled()
    for path, body in bodies:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
    print("new:", sorted(compiled() - before))
    print("known:", len(before))
"""


@pytest.mark.slow
@pytest.mark.parametrize("with_model", [False, True])
def test_no_request_compiles_what_the_start_did_not(
    with_model: bool, voting_datastore: Datastore, copying_run: Path
) -> None:
    arguments = [str(voting_datastore.folder), str(copying_run) if with_model else "", TEXT]
    child = subprocess.run([sys.executable, "-c", _CHILD, *arguments], capture_output=True, text=True, check=False)
    assert "new: []" in child.stdout, child.stdout + child.stderr
    assert "known: 0" not in child.stdout
