"""A server opens datastores that lack stages, and answers what needs a missing stage with its name and commands."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from retro.checkpoints.checkpoint import latest
from retro.inference.language_model import LanguageModel
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.conftest import without_stages
from tests.retro.server.conftest import TEXT

SETTINGS = ServeSettings(name="copying", allowed_hosts=("testserver",))


@pytest.fixture(scope="module")
def client(copying_run: Path, copying_datastore: Datastore) -> Iterator[TestClient]:
    """A model that copies from the whole datastore, which has no vectors."""
    retriever = Retriever.open(copying_datastore.folder)
    model = LanguageModel.open(latest(copying_run) or "", retriever, "cpu")
    with TestClient(make_app(retriever, model, SETTINGS), raise_server_exceptions=False) as opened:
        yield opened


def test_text_is_completed_and_traced_without_vectors(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"model": "copying", "prompt": TEXT, "max_tokens": 3, "seed": 1})
    assert answer.json()["choices"][0]["text"]
    assert client.post("/score", json={"text": TEXT}).status_code == 200
    assert client.post("/trace", json={"text": TEXT, "least": 2}).json()["runs"]
    assert client.get("/examples").json()["examples"]
    assert client.get("/ready").status_code == 200


def test_terms_are_searched_and_distances_are_null_without_vectors(client: TestClient) -> None:
    for text in (True, False):
        request = {"texts": ["memory of a chunk"], "retrieval": "sparse", "text": text}
        hits = client.post("/search", json=request).json()["results"][0]
        assert hits
        assert all(hit["distance"] is None for hit in hits)
    chunks = client.post("/neighbors", json={"text": TEXT, "retrieval": "sparse"}).json()["chunks"]
    assert chunks[0]["neighbors"]


def test_neighbors_of_chunks_are_searched_in_the_sorted_prefixes(
    client: TestClient, copying_datastore: Datastore
) -> None:
    split = copying_datastore.train
    chunks = split.tokens.gather(np.array([0, 3])).astype(np.int64)
    answer = client.post("/neighbors/tokens", json={"chunks": chunks.tolist(), "k": 2}).json()
    tokens, lengths = Retriever.open(copying_datastore.folder).neighbors.find(chunks, 2)[:2]
    assert answer["lengths"] == lengths.tolist()
    assert answer["tokens"] == tokens.tolist()


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("/search", {"texts": ["memory"]}),
        ("/search", {"texts": ["memory"], "retrieval": "hybrid"}),
        ("/search", {"vectors": [[0.5] * 32]}),
        ("/neighbors", {"text": TEXT}),
        ("/embed", {"texts": ["memory"]}),
        ("/v1/embeddings", {"model": "copying:embedder", "input": "memory"}),
    ],
)
def test_requests_that_need_vectors_are_told_the_commands(client: TestClient, path: str, request_: object) -> None:
    answer = client.post(path, json=request_)
    assert 400 <= answer.status_code < 500
    assert "`--stage embed`, then `--stage train-index`, then `--stage add`" in answer.text


def test_the_server_says_what_it_can_do(client: TestClient) -> None:
    served = client.get("/datastore").json()
    assert (served["retrieval"], served["dimension"], served["trace"]) == (["sparse"], None, True)
    assert [row["id"] for row in client.get("/v1/models").json()["data"]] == ["copying", "copying:off"]


def test_a_datastore_of_chunks_is_served_and_a_trace_names_its_stage(
    copying_datastore: Datastore, tmp_path: Path
) -> None:
    bare = without_stages(copying_datastore, tmp_path / "bare", "sparse", "suffixes", "votes")
    with TestClient(make_app(Retriever.open(bare.folder), None, SETTINGS), raise_server_exceptions=False) as client:
        assert client.get("/datastore").json()["retrieval"] == []
        assert client.get("/chunks/0").json()["text"]
        for path, request in (("/trace", {"text": TEXT}), ("/search", {"texts": ["a"], "retrieval": "sparse"})):
            answer = client.post(path, json=request)
            assert 400 <= answer.status_code < 500
            assert "`--stage s" in answer.text
