"""Access, size, load and time of requests, in the application and on a real socket: each refusal has its own error."""

import asyncio
import contextlib
import gzip
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
from starlette.testclient import TestClient

from retro.inference.generation import Batch, Continuation, GeneratedToken
from retro.server.errors import ApiError
from retro.server.limits import Admission, Limits
from retro.server.metrics import Metrics
from retro.server.settings import ServeSettings
from retro.server.watched_files import WatchedFiles
from tests.conftest import PATIENCE, wait_until
from tests.retro.server.conftest import TEXT, Make, events_of, listening

JSON = {"Content-Type": "application/json"}


def limited(inner: Callable, admission: Admission | None = None, token: str = "", **settings) -> Limits:
    return Limits(
        inner,
        settings=ServeSettings(**{"allowed_hosts": ("test",), **settings}),
        admission=admission or Admission(),
        metrics=Metrics(),
        token=token,
        public=frozenset({"/ready"}),
        files=WatchedFiles(),
    )


async def echo(scope, receive, send) -> None:
    """Answers with the body that it was sent."""
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def send_all(app: Limits, *requests: dict) -> list[httpx.Response]:
    """Send the requests at the same time and return their responses."""

    async def send() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            defaults = {"method": "POST", "url": "/x"}
            return await asyncio.gather(*(client.request(**defaults | request) for request in requests))

    return asyncio.run(send())


def reason(response) -> tuple[int, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return response.status_code, error["code"]


# --- bodies and headers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "status"), [(10, 200), (500, 413)])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_longer_than_the_limit_is_rejected_without_buffering_it(parts: int, status: int, chunked: bool) -> None:
    sent = 0

    async def body():
        nonlocal sent
        for _ in range(parts):
            sent += 100
            yield b"x" * 100

    content = body() if chunked else b"x" * 100 * parts
    (response,) = send_all(limited(echo, max_body_bytes=1000), {"content": content})
    assert sent <= 1200
    if status == 413:
        assert reason(response) == (413, "request_too_large")
    else:
        assert (response.status_code, response.content) == (200, b"x" * 100 * parts)


@pytest.mark.parametrize("path", ["/ready", "/metrics"])
def test_readiness_and_metrics_accept_no_body(path: str) -> None:
    answers = send_all(limited(echo), *({"url": path, "content": content} for content in (b"x", b"")))
    assert [answer.status_code for answer in answers] == [413, 200]


def test_a_stalled_body_times_out_and_blocks_nobody() -> None:
    admission = Admission()

    async def slow():
        yield b"x"
        assert admission.under_way == 0
        await asyncio.Event().wait()

    app = limited(echo, admission, max_requests=1, read_seconds=0.1)
    *slow_ones, quick = send_all(app, {"content": slow()}, {"content": slow()}, {"content": b"y"})
    assert [reason(answer) for answer in slow_ones] == [(408, "request_timeout")] * 2
    assert (quick.status_code, quick.content) == (200, b"y")
    assert (admission.under_way, admission.unread_bytes) == (0, 0)


def test_the_number_of_unfinished_bodies_is_limited() -> None:
    async def unfinished():
        yield b"x" * 10
        await asyncio.Event().wait()

    app = limited(echo, max_body_bytes=10, read_seconds=0.2)
    answers = send_all(app, *({"content": unfinished()} for _ in range(70)))
    assert [answer.status_code for answer in answers] == [408] * 64 + [429] * 6


@pytest.mark.parametrize(
    "changes", [{"headers": {"X": "x" * 1000}}, {"url": "/" + "x" * 1000}, {"params": {"x": "x" * 1000}}]
)
def test_url_and_headers_are_limited_before_authentication(changes: dict) -> None:
    (response,) = send_all(limited(echo, max_head_bytes=1000, token="right"), changes)
    assert reason(response) == (431, "request_too_large")


# --- token and host --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["", "Bearer", "Basic right", "right", "Bearer right2", "Bearer righ"])
def test_requests_without_the_token_are_rejected(sent: str) -> None:
    headers = {"Authorization": sent} if sent else {}
    (response,) = send_all(limited(echo, token="right"), {"headers": headers})
    assert reason(response) == (401, "invalid_api_key")
    assert response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("sent", ["Bearer right", "bearer right"])
def test_the_token_grants_access_to_any_host_and_public_paths_need_none(sent: str) -> None:
    allowed = {"headers": {"Authorization": sent, "Host": "evil.example"}}
    answers = send_all(limited(echo, token="right"), allowed, {"url": "/ready"})
    assert [answer.status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        *(((), host, 403) for host in ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example")),
        *(((), host, 200) for host in ("localhost", "LocalHost:80", "127.0.0.1:80", "10.1.2.3", "[::1]:80", "localhost.", "")),
        (("Search.internal",), "search.internal:80", 200),
        (("Search.internal",), "other.internal", 403),
        (("*",), "evil.example", 200),
    ],
)  # fmt: skip
def test_a_server_without_a_token_accepts_local_addresses_and_allowed_hosts(
    allowed: tuple[str, ...], host: str, status: int
) -> None:
    headers = {"headers": {"Host": host}}
    answer, public = send_all(limited(echo, allowed_hosts=allowed), headers, headers | {"url": "/ready"})
    assert (answer.status_code, public.status_code) == (status, 200)
    if status == 403:
        assert reason(answer) == (403, "host_not_allowed")


# --- load and shutdown -----------------------------------------------------------------------------------------------


def test_overload_is_rejected_with_retry_after_and_recovers() -> None:
    async def overloaded() -> None:
        let_go, admission = asyncio.Event(), Admission()

        async def slow(scope, receive, send) -> None:
            await let_go.wait()
            await echo(scope, receive, send)

        app = limited(slow, admission, max_requests=2)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            accepted = [asyncio.ensure_future(client.post("/x")) for _ in range(2)]
            while admission.under_way < 2:
                await asyncio.sleep(0)
            refused = await client.post("/x")
            assert reason(refused) == (429, "rate_limit_exceeded")
            assert int(refused.headers["Retry-After"]) > 0
            let_go.set()
            assert [answer.status_code for answer in await asyncio.gather(*accepted)] == [200, 200]
            assert (await client.post("/x")).status_code == 200

    asyncio.run(overloaded())


def test_readiness_reports_draining(app_with: Make) -> None:
    app = app_with()
    with TestClient(app) as client:
        assert client.get("/ready").json() == {"status": "ready"}
        app.state.service.admission.draining = True
        assert reason(client.get("/ready")) == (503, "unavailable")
        assert client.get("/health").status_code == client.get("/metrics").status_code == 200
        assert reason(client.post("/search", json={"texts": ["a"]})) == (503, "unavailable")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_request_that_exceeds_its_time_or_is_cut_off_is_cancelled(stopped: bool) -> None:
    ended, admission = [], Admission()

    async def forever(scope, receive, send) -> None:
        if stopped:
            asyncio.get_running_loop().call_soon(admission.cut_off)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    (response,) = send_all(limited(forever, admission, request_seconds=60 if stopped else 0.05), {})
    assert reason(response) == ((503, "unavailable") if stopped else (504, "timeout"))
    assert (ended, admission.under_way) == ([True], 0)


def test_a_generation_timeout_is_504_or_the_last_event_of_a_stream(
    app_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, rows, step = threading.Event(), [], Batch.step

    def held(batch: Batch) -> list[tuple[Continuation, GeneratedToken | Exception]]:
        """The first step of a text is that of the batch; the others wait."""
        (row,) = batch._texts
        if row in rows:
            assert let_go.wait(PATIENCE)
        rows.append(row)
        return step(batch)

    body = {"prompt": "a", "temperature": 0, "retrieval": False}
    with TestClient(app_with(request_seconds=3)) as client:  # a stream starts with its first token
        monkeypatch.setattr(Batch, "step", held)  # the server generated some tokens before it was ready
        assert reason(client.post("/generate", json=body)) == (504, "timeout")
        let_go.set()
        let_go.clear()
        streamed = client.post("/generate", json=body | {"stream": True})
        let_go.set()
    assert streamed.status_code == 200
    token, error = events_of(streamed)
    assert token["finish_reason"] is None
    assert error["error"]["code"] == "timeout"


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_stops_its_generation(app_with: Make, stream: bool) -> None:
    app = app_with(max_tokens=100_000)
    admission = app.state.service.admission

    def generated_tokens() -> float:
        metrics = httpx.get(url + "/metrics", timeout=PATIENCE).text
        return float(re.findall(r"^retro_generated_tokens_total ([\d.]+)$", metrics, re.MULTILINE)[0])

    def generation_stopped() -> bool:
        """True if no token is generated for a while. The running step may still finish."""
        before = generated_tokens()
        time.sleep(0.3)
        return generated_tokens() == before

    with listening(app) as url:
        request = {"prompt": TEXT, "max_tokens": 100_000, "temperature": 1, "seed": 3, "stream": stream}
        with connect(url) as connection:
            connection.sendall(post(json.dumps(request).encode(), path="/generate"))
            wait_until(lambda: generated_tokens() > 3)
            assert admission.under_way == 1
        wait_until(lambda: admission.under_way == 0)
        wait_until(generation_stopped)
        assert generated_tokens() < 90_000
        assert 'path="/generate",status="499"' in httpx.get(url + "/metrics", timeout=PATIENCE).text or stream


# --- errors and headers ----------------------------------------------------------------------------------------------


def test_an_internal_error_has_an_id_that_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope, receive, send) -> None:
        raise RuntimeError("secret details")

    with caplog.at_level(logging.ERROR, logger="retro.server"):
        (response,) = send_all(limited(broken), {})
    assert reason(response) == (500, "internal_error")
    assert "secret" not in response.text
    assert re.findall(r"error (\w+);", response.json()["error"]["message"])[0] in caplog.text
    assert "secret details" in caplog.text


def test_an_error_message_may_contain_invalid_unicode() -> None:
    async def odd(scope, receive, send) -> None:
        raise ApiError(422, "half a character: \ud800")

    (response,) = send_all(limited(odd), {})
    assert reason(response) == (422, None)


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "allow"),
    [
        ("GET", "/nothing", 404, "not_found", None),
        ("POST", "/v1/responses", 404, "not_found", None),
        ("GET", "/search", 405, "method_not_allowed", {"POST"}),
        ("POST", "/page.css", 405, "method_not_allowed", {"GET", "HEAD"}),
        ("PUT", "/health", 405, "method_not_allowed", {"GET"}),
    ],
)
def test_unknown_paths_and_methods_are_rejected(client, method, path, status, code, allow) -> None:
    response = client.request(method, path)
    assert reason(response) == (status, code)
    assert allow is None or set(response.headers["Allow"].split(", ")) == allow


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"[" * 100_000, b'{"texts": ["\xff"]}', b'{"texts": ["\\ud800"]}', b'{"texts": ["a"], "k": 1e400}'],
)  # fmt: skip
def test_a_body_that_is_not_a_json_object_is_rejected(client: TestClient, content: bytes) -> None:
    assert reason(client.post("/search", content=content, headers=JSON))[0] == 422
    assert client.post("/v1/embeddings", content=content, headers=JSON).status_code == 400


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_needs_the_json_content_type(client: TestClient, kind: str) -> None:
    """Browsers send the other types cross-origin without a preflight request."""
    response = client.post("/search", content=b'{"texts": ["a"]}', headers={"Content-Type": kind})
    assert reason(response) == (422, None)
    assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(("path", "status"), [("/search", 422), ("/v1/embeddings", 400)])
@pytest.mark.parametrize("coding", ["gzip", "BR", "identity, zstd"])
def test_a_compressed_body_is_refused_by_the_name_of_its_header(client, path: str, status: int, coding: str) -> None:
    body = {"texts": [TEXT]} if path == "/search" else {"input": TEXT, "model": "retro"}
    content = gzip.compress(json.dumps(body).encode())
    response = client.post(path, content=content, headers=JSON | {"Content-Encoding": coding})
    assert response.status_code == status
    assert f"Content-Encoding = '{coding}'" in response.json()["error"]["message"]
    assert client.post("/search", json={"texts": [TEXT]}, headers={"Content-Encoding": "identity"}).status_code == 200


@pytest.mark.parametrize("name", ["query", "int"])
def test_an_unknown_field_is_rejected_with_the_accepted_ones(client: TestClient, name: str) -> None:
    error = client.post("/search", json={"texts": ["a"], name: "a"}).json()["error"]
    assert (error["param"], error["code"]) == (name, "unknown_parameter")
    assert "texts, tokens, vectors, k," in error["message"]


def test_every_response_has_security_headers(client: TestClient) -> None:
    for response in (client.get("/health"), client.get("/nothing"), client.post("/search", json={})):
        assert response.headers["Content-Security-Policy"].startswith("default-src 'self'")
        assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("origins", [("https://a.example",), ()])
def test_listed_origins_may_ask_without_a_token(app_with: Make, origins: tuple[str, ...]) -> None:
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with TestClient(app_with(token="right", cors_origins=origins)) as client:
        answer = client.options("/search", headers=headers)
    assert answer.headers.get("Access-Control-Allow-Origin") == (origins[0] if origins else None)


@pytest.mark.parametrize("logged", [True, False])
def test_a_request_id_is_in_the_response_and_the_log(caplog: pytest.LogCaptureFixture, logged: bool) -> None:
    app = limited(echo, access_log=logged, token="right")
    headers = [{"X-Request-Id": "mine-1"}, {"X-Request-Id": "not mine"}, {}, {"Authorization": "Bearer right"}]
    with caplog.at_level(logging.INFO, logger="retro.access"):
        answers = send_all(app, *({"url": "/a%0Ab?secret", "headers": own} for own in headers))
    ids = [answer.headers["X-Request-Id"] for answer in answers]
    assert ids[0] == "mine-1"
    assert len(set(ids)) == 4
    assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in ids[1:])
    lines = [record.getMessage() for record in caplog.records]
    assert all(re.fullmatch(r"\S+ POST /a%0Ab (401|200) [\d.]+ ms \S+", line) for line in lines)
    assert sorted(line.split()[-1] for line in lines) == (sorted(ids) if logged else [])


# --- on a socket, before a request is complete -----------------------------------------------------------------------

HEAD = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD_BYTES = 4000


@pytest.fixture(scope="module")
def strict(app_with: Make):
    """The URL of a server with small limits."""
    with listening(app_with(max_head_bytes=HEAD_BYTES, read_seconds=0.5, max_requests=2)) as opened:
        yield opened


def post(body: bytes, path: str = "/search") -> bytes:
    return HEAD.replace(b"/search", path.encode()) + b"Content-Length: %d\r\n\r\n" % len(body) + body


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=PATIENCE)


def last_answer(connection: socket.socket) -> tuple[int, str | None] | None:
    """Read until the server closes the connection; return status and code of the error, or None without an answer."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(2**16):
            parts.append(part)
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    return (int(head.split()[1]), json.loads(body)["error"]["code"]) if head else None


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"GET /health HTTP/1.1\r\nX: ", b"x" * 1000),
        (b"GET /health HTTP/1.1\r\n", b"X: 1\r\n" * 200),
        (b"GET /", b"x" * 1000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x" * 1000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"X: 1\r\n" * 200),
    ],
    ids=["one header", "many headers", "address", "extension of a chunk", "trailers"],
)
def test_an_endless_request_head_is_not_buffered(strict: str, begin: bytes, part: bytes) -> None:
    sent = 0
    with connect(strict) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(begin)
        while sent < 50_000_000:
            connection.sendall(part)
            sent += len(part)
    assert sent < 50_000_000  # the rest is in the system's buffers
    assert httpx.get(strict + "/health", timeout=PATIENCE).status_code == 200


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", None),
        (HEAD, (408, "request_timeout")),
        (HEAD + b"Content-Length: 99\r\n\r\n{", (408, "request_timeout")),
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * (HEAD_BYTES + 100), (431, "request_too_large")),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * HEAD_BYTES + b"\r\n\r\n", (431, "request_too_large")),
        (b"\x16\x03\x01 this is TLS\r\n\r\n", (400, None)),
        (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1", (400, None)),
        (HEAD + b"Content-Length: -1\r\n\r\n", (400, None)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", (400, None)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", (400, None)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 20 + b"\r\n", (400, None)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\nxyz\r\n", (400, None)),
    ],
    ids=[
        "nothing",
        "headers",
        "body",
        "long header",
        "complete long header",
        "TLS",
        "two lengths",
        "negative length",
        "chunk size of letters",
        "negative chunk size",
        "huge chunk size",
        "second chunk size",
    ],
)
def test_incomplete_and_invalid_requests_end_the_connection_and_block_nobody(strict: str, sent: bytes, answer) -> None:
    """There are more of them than `max_requests`."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(strict)) for _ in range(5)]
        for connection in connections:
            connection.sendall(sent)
        with connect(strict) as other:  # in one piece: a body that comes later could be late
            other.sendall(post(json.dumps({"texts": [TEXT]}).encode()))
            assert other.recv(2**16).startswith(b"HTTP/1.1 200")
        assert [last_answer(connection) for connection in connections] == [answer] * 5


def test_a_second_request_on_a_connection_is_limited_too(strict: str) -> None:
    with connect(strict) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200")
        connection.sendall(HEAD)
        assert last_answer(connection) == (408, "request_timeout")


def test_head_is_answered_as_get_without_a_body(app_with: Make) -> None:
    app = app_with()
    paths = {path for path, methods in app.openapi()["paths"].items() if "get" in methods and "{" not in path}
    assert paths > {"/health", "/ready", "/metrics", "/v1/models"}
    with listening(app) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        for path in sorted(paths | {"/", "/docs", "/openapi.json"}):
            head, got = client.head(path), client.get(path)  # on the same connection
            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers["Content-Type"] == got.headers["Content-Type"]
            assert path == "/metrics" or head.headers["Content-Length"] == got.headers["Content-Length"]
        assert client.head("/search").status_code == 405
        assert client.head("/nothing").status_code == 404


def test_a_body_may_be_longer_than_the_header_limit(app_with: Make) -> None:
    body = json.dumps({"texts": [TEXT], "filters": {"id": ["x" * 3 * HEAD_BYTES]}}).encode()
    with (
        listening(app_with(max_head_bytes=HEAD_BYTES)) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        for content in (body, (body[i : i + 999] for i in range(0, len(body), 999))):
            assert client.post("/search", content=content, headers=JSON).json()["results"] == [[]]
        assert client.get("/health", headers={"X": "x" * (HEAD_BYTES // 2)}).status_code == 200
