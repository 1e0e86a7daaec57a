"""Authentication, body size, load and time limits: each has its own error, and no error contains a stack trace."""

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from retro.inference.generation import Batch, Continuation, GeneratedToken
from retro.server.errors import ApiError
from retro.server.limits import Admission, Limits
from retro.server.metrics import Metrics
from retro.server.settings import ServeSettings
from tests.conftest import PATIENCE, wait_until
from tests.retro.server.conftest import TEXT, Make, listening


def limited(inner: Callable, admission: Admission | None = None, token: str = "", **settings) -> Limits:
    return Limits(
        inner,
        settings=ServeSettings(**{"allowed_hosts": ("test",), **settings}),
        admission=admission or Admission(),
        metrics=Metrics(),
        token=token,
        public=frozenset({"/ready"}),
    )


async def echo(scope, receive, send) -> None:
    """Answers with the body that it was sent."""
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def send_all(app: Limits, *requests: dict) -> list[httpx.Response]:
    """Send the requests at the same time and return their responses."""

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(
                *(client.request(**{"method": "POST", "url": "/x", **each}) for each in requests)
            )

    return asyncio.run(ask())


def reason(response) -> tuple[int, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return response.status_code, error["code"]


# --- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_body_within_the_limit_is_accepted(size: int) -> None:
    (response,) = send_all(limited(echo, max_body_bytes=1000), {"content": b"x" * size})
    assert (response.status_code, response.content) == (200, b"x" * size)


@pytest.mark.parametrize("said", [True, False], ids=["with Content-Length", "chunked"])
def test_a_longer_body_is_rejected_without_buffering_it(said: bool) -> None:
    sent = 0

    async def parts():
        nonlocal sent
        for _ in range(1000):
            sent += 100
            yield b"x" * 100

    (response,) = send_all(limited(echo, max_body_bytes=1000), {"content": b"x" * 1001 if said else parts()})
    assert reason(response) == (413, "request_too_large")
    assert "1,000 bytes" in response.json()["error"]["message"]
    assert sent <= 1200


@pytest.mark.parametrize("path", ["/ready", "/metrics"])
def test_readiness_and_metrics_accept_no_body(path: str) -> None:
    for content in (b"x", b""):
        (response,) = send_all(limited(echo), {"url": path, "content": content})
        assert response.status_code == (413 if content else 200)


def test_a_stalled_body_times_out_and_blocks_nobody() -> None:
    admission = Admission()

    async def slow():
        yield b"x"
        assert admission.under_way == 0
        await asyncio.Event().wait()

    app = limited(echo, admission, max_requests=1, read_seconds=0.1)
    *slow_ones, quick = send_all(app, {"content": slow()}, {"content": slow()}, {"content": b"y"})
    assert [reason(each) for each in slow_ones] == [(408, "request_timeout")] * 2
    assert (quick.status_code, quick.content) == (200, b"y")
    assert (admission.under_way, admission.unread_bytes) == (0, 0)


def test_the_number_of_unfinished_bodies_is_limited() -> None:
    async def unfinished():
        yield b"x" * 10
        await asyncio.Event().wait()

    app = limited(echo, max_body_bytes=10, read_seconds=0.2)
    answers = send_all(app, *({"content": unfinished()} for _ in range(70)))
    assert [each.status_code for each in answers] == [408] * 64 + [429] * 6


@pytest.mark.parametrize(
    "changes", [{"headers": {"X": "x" * 1000}}, {"url": "/" + "x" * 1000}, {"params": {"x": "x" * 1000}}]
)
def test_url_and_headers_are_limited_before_authentication(changes: dict) -> None:
    (response,) = send_all(limited(echo, max_head_bytes=1000, token="right"), changes)
    assert reason(response) == (431, "request_too_large")


# --- token -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["", "Bearer", "Bearer wrong", "Basic right", "right", "Bearer right2", "Bearer righ"])
def test_requests_without_the_token_are_rejected(sent: str) -> None:
    headers = {"Authorization": sent} if sent else {}
    (response,) = send_all(limited(echo, token="right"), {"headers": headers})
    assert reason(response) == (401, "invalid_api_key")
    assert response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("sent", ["Bearer right", "bearer right"])
def test_the_token_grants_access_and_public_paths_need_none(sent: str) -> None:
    answers = send_all(limited(echo, token="right"), {"headers": {"Authorization": sent}}, {"url": "/ready"})
    assert [each.status_code for each in answers] == [200, 200]


# --- load ------------------------------------------------------------------------------------------------------------


def test_overload_is_rejected_with_retry_after_and_recovers() -> None:
    async def overloaded() -> None:
        go_on = asyncio.Event()

        async def slow(scope, receive, send) -> None:
            await go_on.wait()
            await echo(scope, receive, send)

        admission = Admission()
        app = limited(slow, admission, max_requests=2)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            accepted = [asyncio.ensure_future(client.post("/x")) for _ in range(2)]
            while admission.under_way < 2:
                await asyncio.sleep(0)
            refused = await client.post("/x")
            assert reason(refused) == (429, "rate_limit_exceeded")
            assert int(refused.headers["Retry-After"]) > 0
            go_on.set()
            assert [each.status_code for each in await asyncio.gather(*accepted)] == [200, 200]
            assert (await client.post("/x")).status_code == 200

    asyncio.run(overloaded())


def test_a_draining_server_rejects_new_requests() -> None:
    (response,) = send_all(limited(echo, Admission(draining=True)), {})
    assert reason(response) == (503, "unavailable")


def test_readiness_reports_draining(app_with: Make) -> None:
    app = app_with()
    with TestClient(app) as client:
        assert client.get("/ready").json() == {"status": "ready"}
        app.state.service.admission.draining = True
        assert reason(client.get("/ready")) == (503, "unavailable")
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200
        assert reason(client.post("/search", json={"texts": ["a"]})) == (503, "unavailable")


# --- time ------------------------------------------------------------------------------------------------------------


def test_a_request_that_exceeds_its_time_is_cancelled() -> None:
    ended = []

    async def forever(scope, receive, send) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(True)
            raise

    admission = Admission()
    (response,) = send_all(limited(forever, admission, request_seconds=0.05), {})
    assert reason(response) == (504, "timeout")
    assert "0.05 s" in response.json()["error"]["message"]
    assert ended == [True]
    assert admission.under_way == 0


def test_a_generation_timeout_is_504_or_the_last_event_of_a_stream(
    app_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, steps = threading.Event(), []

    def step(batch: Batch) -> list[tuple[Continuation, GeneratedToken]]:
        """The first step of a text is that of the batch; the others wait."""
        (row,) = batch._texts
        if row in steps:
            assert go_on.wait(PATIENCE)
        steps.append(row)
        return original(batch)

    original = Batch.step
    monkeypatch.setattr(Batch, "step", step)
    body = {"prompt": "a", "temperature": 0, "retrieval": False}
    with TestClient(app_with(request_seconds=3)) as client:  # a stream starts with its first token
        assert reason(client.post("/generate", json=body)) == (504, "timeout")
        go_on.set()
        go_on.clear()
        streamed = client.post("/generate", json=body | {"stream": True})
        go_on.set()
    assert streamed.status_code == 200
    one, error, done = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert json.loads(one)["finish_reason"] is None
    assert json.loads(error)["error"]["code"] == "timeout"
    assert done == "[DONE]"


def test_a_cut_off_request_gets_an_error() -> None:
    """The error is JSON, and no exception reaches the log."""
    admission = Admission()

    async def forever(scope, receive, send) -> None:
        asyncio.get_running_loop().call_soon(admission.cut_off)
        await asyncio.Event().wait()

    (response,) = send_all(limited(forever, admission), {})
    assert reason(response) == (503, "unavailable")
    assert admission.under_way == 0


# --- faults ----------------------------------------------------------------------------------------------------------


def test_an_internal_error_has_an_id_that_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope, receive, send) -> None:
        raise RuntimeError("secret details")

    with caplog.at_level(logging.ERROR, logger="retro.server"):
        (response,) = send_all(limited(broken), {})
    assert reason(response) == (500, "internal_error")
    assert "secret" not in response.text
    number = re.search(r"error (\w+);", response.json()["error"]["message"])
    assert number is not None
    assert number[1] in caplog.text
    assert "secret details" in caplog.text


def test_client_errors_have_a_status_and_a_code(client: TestClient) -> None:
    assert reason(client.get("/nothing")) == (404, "not_found")
    assert reason(client.delete("/search")) == (405, "method_not_allowed")
    for path in ("/v1/responses", "/search/", "/v1/nothing"):
        assert reason(client.post(path, json={})) == (404, "not_found")
    assert reason(client.post("/search", content=b"{", headers={"Content-Type": "application/json"}))[0] == 422
    assert reason(client.post("/search", json={"texts": ["a"], "nonsense": 1}))[0] == 422
    assert (
        reason(client.post("/search", content=b"[" * 100_000, headers={"Content-Type": "application/json"}))[0] == 422
    )
    assert reason(client.post("/v1/embeddings", json={"nonsense": 1}))[0] == 400


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_needs_the_json_content_type(client: TestClient, kind: str) -> None:
    """Browsers send the other types cross-origin without a preflight request."""
    response = client.post("/search", content=b'{"texts": ["a"]}', headers={"Content-Type": kind})
    assert reason(response) == (422, None)
    assert "application/json" in response.json()["error"]["message"]


def test_an_error_message_may_contain_invalid_unicode() -> None:
    async def odd(scope, receive, send) -> None:
        raise ApiError(422, "half a character: \ud800")

    (response,) = send_all(limited(odd), {})
    assert reason(response) == (422, None)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/search", "POST"),
        ("PUT", "/search", "POST"),
        ("GET", "/v1/completions", "POST"),
        ("POST", "/datastore", "GET"),
        ("POST", "/page.css", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_rejected_with_the_allowed_ones(
    client: TestClient, method: str, path: str, allow: str
) -> None:
    response = client.request(method, path)
    assert reason(response) == (405, "method_not_allowed")
    assert sorted(response.headers["Allow"].split(", ")) == sorted(allow.split(", "))


@pytest.mark.parametrize("name", ["query", "path", "body", "str", "int", "top_k"])
def test_an_unknown_field_is_rejected_with_the_accepted_ones(client: TestClient, name: str) -> None:
    error = client.post("/search", json={"texts": ["a"], name: "a"}).json()["error"]
    assert (error["param"], error["code"]) == (name, "unknown_parameter")
    assert error["message"].startswith(f"{name}: unknown field")
    assert "texts, tokens, vectors, k," in error["message"]


def test_error_params_omit_the_types_of_a_union(client: TestClient) -> None:
    for path, body, param in (
        ("/v1/completions", {"model": "tiny", "prompt": {}}, "prompt"),
        ("/search", {"vectors": [["x"]]}, "vectors.0.0"),
        ("/search", {"texts": ["a"], "filters": {"str": {}}}, "filters"),
    ):
        assert client.post(path, json=body).json()["error"]["param"] == param


# --- headers ---------------------------------------------------------------------------------------------------------


def test_every_response_has_security_headers(client: TestClient) -> None:
    for response in (client.get("/health"), client.get("/nothing"), client.post("/search", json={})):
        assert response.headers["Content-Security-Policy"].startswith("default-src 'self'")
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in response.headers


def test_cors_origins_allows_the_listed_origins_only(app_with: Make) -> None:
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with TestClient(app_with(token="right", cors_origins=("https://a.example",))) as client:
        allowed = client.options("/search", headers=asks)
        assert allowed.headers["Access-Control-Allow-Origin"] == "https://a.example"
        refused = client.options("/search", headers=asks | {"Origin": "https://b.example"})
        assert "Access-Control-Allow-Origin" not in refused.headers
    with TestClient(app_with()) as client:
        assert "Access-Control-Allow-Origin" not in client.options("/search", headers=asks).headers


def test_a_request_id_is_in_the_response_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    app = limited(echo, access_log=True, token="right")
    headers = [{"X-Request-Id": "mine-1"}, {"X-Request-Id": "not mine"}, {}, {"Authorization": "Bearer right"}]
    with caplog.at_level(logging.INFO, logger="retro.access"):
        answers = send_all(app, *({"url": "/a%0Ab?secret", "headers": each} for each in headers))
    ids = [each.headers["X-Request-Id"] for each in answers]
    assert ids[0] == "mine-1"
    assert len(set(ids)) == 4
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids[1:])
    lines = [record.getMessage() for record in caplog.records]
    for line in lines:
        assert re.fullmatch(r"\S+ POST /a%0Ab (401|200) [\d.]+ ms \S+", line)
    assert sorted(line.split()[-1] for line in lines) == sorted(ids)


def test_without_access_log_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="retro.access"):
        send_all(limited(echo), {})
    assert not caplog.records


# --- clients that disconnect -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_stops_its_generation(app_with: Make, stream: bool) -> None:
    app: FastAPI = app_with(max_tokens=100_000)
    admission = app.state.service.admission
    with listening(app) as url:
        body = json.dumps(
            {"prompt": TEXT, "max_tokens": 100_000, "temperature": 1, "seed": 3, "stream": stream}
        ).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)) as connection:
            connection.sendall(head.encode() + body)
            wait_until(lambda: generated_tokens(url) > 3)
            assert admission.under_way == 1
        wait_until(lambda: admission.under_way == 0)
        wait_until(lambda: generation_stopped(url))
        assert generated_tokens(url) < 90_000
        assert 'path="/generate",status="499"' in httpx.get(url + "/metrics", timeout=PATIENCE).text or stream


def generated_tokens(url: str) -> float:
    """Number of tokens generated so far."""
    metrics = httpx.get(url + "/metrics", timeout=PATIENCE).text
    found = re.search(r"^retro_generated_tokens_total ([\d.]+)$", metrics, re.MULTILINE)
    assert found is not None
    return float(found[1])


def generation_stopped(url: str) -> bool:
    """True if no token is generated for a while. The running step may still finish."""
    before = generated_tokens(url)
    time.sleep(0.3)
    return generated_tokens(url) == before
