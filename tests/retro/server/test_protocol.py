"""Limits on the connection before a request is complete: oversized or slow input ends only that connection."""

import contextlib
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.retro.server.conftest import TEXT, Make, listening

SEARCH = json.dumps({"texts": [TEXT]}).encode()
HEAD = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LIMIT = 4000


@pytest.fixture(scope="module")
def url(app_with: Make) -> Iterator[str]:
    with listening(app_with(max_head_bytes=LIMIT, read_seconds=0.5, max_requests=2)) as opened:
        yield opened


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def read_to_end(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def parse_error(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


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
def test_an_endless_request_head_is_not_buffered(url: str, begin: bytes, part: bytes) -> None:
    sent = 0
    with connect(url) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(begin)
            while sent < 50_000_000:
                connection.sendall(part)
                sent += len(part)
        read_to_end(connection)
    assert sent < 50_000_000  # the rest is in the system's buffers
    assert httpx.get(url + "/health").status_code == 200


def test_too_long_headers_are_rejected(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * (LIMIT + 100))
        assert parse_error(read_to_end(connection)) == (431, "request_too_large")
    answer = httpx.get(url + "/health", headers={"X": "x" * LIMIT})  # sent in one piece
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "request_too_large")
    assert httpx.get(url + "/health", headers={"X": "x" * (LIMIT // 2)}).status_code == 200


def test_a_body_may_be_longer_than_the_header_limit(url: str) -> None:
    body = json.dumps({"texts": [TEXT], "filters": {"id": ["x" * 3 * LIMIT]}})
    with httpx.Client(base_url=url) as client:
        for content in (body.encode(), (body[i : i + 999].encode() for i in range(0, len(body), 999))):
            answer = client.post("/search", content=content, headers={"Content-Type": "application/json"})
            assert answer.json()["results"] == [[]]


def test_stalled_headers_end_the_connection(url: str) -> None:
    with connect(url) as idle, connect(url) as unfinished, connect(url) as again:
        unfinished.sendall(HEAD)
        again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert again.recv(2**16).startswith(b"HTTP/1.1 200")
        again.sendall(HEAD)
        assert read_to_end(idle) == b""
        assert parse_error(read_to_end(unfinished)) == (408, "request_timeout")
        assert parse_error(read_to_end(again)) == (408, "request_timeout")


def test_slow_bodies_do_not_block_other_clients(url: str) -> None:
    """More clients than max_requests send headers and a part of a body."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(url)) for _ in range(6)]
        for connection in slow:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(SEARCH) + SEARCH[:4])
        answer = httpx.post(url + "/search", content=SEARCH, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200
        for connection in slow:
            assert parse_error(read_to_end(connection)) == (408, "request_timeout")


def test_input_that_is_not_http_gets_a_json_error(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(b"\x16\x03\x01 this is TLS\r\n\r\n")
        assert parse_error(read_to_end(connection)) == (400, None)
