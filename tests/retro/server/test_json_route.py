"""DirectJson, the shortcut for JSON requests, answers exactly as FastAPI's own layers do."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from retro.server.json_route import DirectJson
from tests.retro.server.conftest import TEXT, Make

TOKEN = {"Authorization": "Bearer right"}
JSON = {**TOKEN, "Content-Type": "application/json"}
GREEDY = {"prompt": TEXT, "max_tokens": 4, "temperature": 0}


def json_request(path: str, json: Any) -> dict[str, Any]:
    return {"method": "POST", "url": path, "json": json, "headers": TOKEN}


def raw_request(content: bytes, headers: dict[str, str], path: str = "/search", method: str = "POST") -> dict[str, Any]:
    return {"method": method, "url": path, "content": content, "headers": headers}


GOOD = {
    "search": json_request("/search", {"texts": [TEXT, "memory"], "k": 3}),
    "ids alone": json_request("/search", {"texts": [TEXT], "text": False}),
    "nothing to search": json_request("/search", {"texts": []}),
    "kind with parameters": raw_request(
        b'{"texts": ["a"]}', {**TOKEN, "Content-Type": "Application/JSON; charset=utf-8"}
    ),
    "query string": json_request("/search?x=1", {"texts": [TEXT]}),
    "embed": json_request("/embed", {"texts": [TEXT]}),
    "neighbors": json_request("/neighbors", {"text": TEXT * 9}),
    "score": json_request("/score", {"text": TEXT}),
    "generate": json_request("/generate", GREEDY),
    "stream": json_request("/generate", GREEDY | {"stream": True}),
    "a model as the answer": json_request("/tokenize", {"prompt": TEXT}),
    "unknown field of OpenAI's": json_request("/v1/embeddings", {"model": "tiny:embedder", "input": TEXT, "store": 1}),
    "embeddings": json_request("/v1/embeddings", {"model": "tiny:embedder", "input": TEXT}),
}
BAD = {
    "no JSON": (422, raw_request(b"{", JSON)),
    "no body": (422, raw_request(b"", JSON)),
    "not UTF-8": (422, raw_request(b'{"texts": ["\xff"]}', JSON)),
    "other kind": (422, raw_request(b'{"texts": ["a"]}', {**TOKEN, "Content-Type": "text/plain"})),
    "no kind": (422, raw_request(b'{"texts": ["a"]}', TOKEN)),
    "unknown field": (422, json_request("/search", {"texts": ["a"], "nonsense": 1})),
    "wrong type": (422, json_request("/search", {"vectors": [["x"]]})),
    "limit": (422, json_request("/search", {"texts": ["a"], "k": 1000})),
    "user's mistake": (422, json_request("/search", {"texts": [" "]})),
    "v1, no model of that name": (404, json_request("/v1/embeddings", {"model": "other", "input": "a"})),
    "v1, wrong type": (400, json_request("/v1/embeddings", {"model": 1})),
    "v1, limit": (400, json_request("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 10**6})),
    "no token": (401, raw_request(b'{"texts": ["a"]}', {"Content-Type": "application/json"})),
    "too long": (413, raw_request(b" " * 2000, JSON)),
    "other method": (405, raw_request(b'{"texts": ["a"]}', JSON, method="PUT")),
    "GET": (405, raw_request(b"", JSON, method="GET")),
    "slash": (404, json_request("/search/", {"texts": ["a"]})),
    "nothing there": (404, raw_request(b"", JSON, path="/nothing", method="GET")),
}


@pytest.fixture(scope="module")
def both(app_with: Make) -> Iterator[list[TestClient]]:
    """Clients of two apps: with and without DirectJson."""
    direct, layers = (app_with(token="right", max_body_bytes=1000) for _ in range(2))
    layers.user_middleware = [each for each in layers.user_middleware if each.cls is not DirectJson]
    assert len(layers.user_middleware) == len(direct.user_middleware) - 1
    with (
        TestClient(direct, follow_redirects=False) as one,
        TestClient(layers, follow_redirects=False) as other,
    ):
        yield [one, other]


@pytest.mark.parametrize(
    ("status", "request_"), [*((200, each) for each in GOOD.values()), *BAD.values()], ids=[*GOOD, *BAD]
)
def test_answers_equal_fastapis(both: list[TestClient], status: int, request_: dict[str, Any]) -> None:
    direct, layers = (client.request(**request_) for client in both)
    assert direct.status_code == status, direct.text
    for response in (direct, layers):
        assert response.headers.pop("X-Request-Id")
    assert (direct.status_code, direct.headers, direct.content) == (layers.status_code, layers.headers, layers.content)


def test_metrics_equal_fastapis(both: list[TestClient]) -> None:
    for client in both:
        for request in (GOOD["embed"], BAD["no JSON"][1], BAD["v1, wrong type"][1], BAD["GET"][1], BAD["slash"][1]):
            client.request(**request)
    direct, layers = (
        [line for line in client.get("/metrics", headers=TOKEN).text.splitlines() if "_requests_total{" in line]
        for client in both
    )
    assert sorted(direct) == sorted(layers)
    assert any('path="/v1/embeddings",status="400"' in line for line in direct)


def test_direct_json_handles_every_route_with_a_body(app_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI's layers handle no route that has a body."""
    app = app_with()
    (direct,) = (each for each in app.user_middleware if each.cls is DirectJson)
    app_behind = DirectJson(app.router, **direct.kwargs)
    with_body = {path for path, methods in app.openapi()["paths"].items() if "post" in methods}
    assert set(app_behind._routes) == with_body
