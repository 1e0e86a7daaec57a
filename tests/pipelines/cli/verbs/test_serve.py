"""`retro serve` as a process: startup messages, authentication, limits on requests, and shutdown."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from indexing.store.datastore import Datastore
from indexing.tokenization.settings import TokenizerSettings
from pipelines.cli.main import main
from tests.conftest import PATIENCE, build_local, tiny_config, wait_until

TEXT = "the index of a chunk and the neighbor in memory 检索模型 with a vector from the store\n"
LONG = {"prompt": TEXT, "temperature": 0}
ENDLESS = {**LONG, "model": "tiny", "max_tokens": 10**6, "ignore_eos": True}  # to /v1/completions


class Serving:
    """A running `retro serve`."""

    def __init__(self, process: subprocess.Popen, output: str) -> None:
        self.process, self.output = process, output
        found = re.search(r"^ready: (\S+)$", output, re.MULTILINE)
        assert found is not None
        self.url = found[1]


@contextlib.contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[Serving]:
    command = [sys.executable, "-m", "pipelines.cli", "serve", *arguments, "--port", "0"]
    pipes: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, **pipes) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while not lines or not lines[-1].startswith("ready: "):
                lines.append(process.stdout.readline())
                assert lines[-1], process.stderr.read() if process.stderr else ""
            yield Serving(process, "".join(lines))
        finally:
            process.kill()


@pytest.fixture(scope="module")
def with_token(tiny_datastore: Datastore, tiny_run: Path) -> Iterator[Serving]:
    """One server for most tests, with a model, a token, and room for four requests."""
    limits = ("--max-requests", "4", "--max-tokens", "100000", "--request-seconds", str(PATIENCE), "--name", "tiny")
    folder = str(tiny_datastore.folder)
    with serving(folder, "--checkpoint", str(tiny_run), *limits, RETRO_TOKEN="right") as running:
        yield running


def asking(server: Serving, token: str = "right") -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE)


def test_server_prints_datastore_model_and_source_of_the_token(with_token: Serving, tiny_datastore: Datastore) -> None:
    assert f"{tiny_datastore.train.num_chunks:,} chunks" in with_token.output
    assert "model: tiny, step 8" in with_token.output
    assert "token: from RETRO_TOKEN" in with_token.output
    assert with_token.url.startswith("http://127.0.0.1:")


def test_requests_need_the_token_except_health_and_readiness(with_token: Serving) -> None:
    with asking(with_token) as client:
        assert client.post("/search", json={"texts": [TEXT]}).json()["results"][0]
        assert client.get("/datastore").json()["model"]["name"] == "tiny"
        assert "retro_requests_total" in client.get("/metrics").text
    with asking(with_token, "wrong") as client:
        for path in ("/datastore", "/metrics", "/v1/models"):
            assert client.get(path).status_code == 401
        assert client.post("/search", json={"texts": [TEXT]}).status_code == 401
        assert client.get("/health").status_code == client.get("/ready").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_signal_accepted_requests_finish_and_new_ones_are_refused(
    tiny_datastore: Datastore, tiny_run: Path, number: int
) -> None:
    limits = ("--max-tokens", "100000", "--shutdown-seconds", str(PATIENCE))
    with serving(str(tiny_datastore.folder), "--checkpoint", str(tiny_run), *limits) as server:
        with asking(server) as client, asking(server) as other:
            body = {**LONG, "max_tokens": 500, "stream": True}
            with client.stream("POST", "/generate", json=body) as stream:
                events = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
                first = next(events)
                server.process.send_signal(number)
                wait_until(lambda: other.get("/ready").status_code != 200)
                refused = other.post("/search", json={"texts": [TEXT]})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
                *rest, last, done = events
        assert done == "[DONE]"
        assert json.loads(last)["finish_reason"] in ("length", "stop")
        assert "error" not in first + "".join(rest)
        assert server.process.wait(PATIENCE) == 0
        assert server.process.stdout is not None
        assert "all accepted requests were answered" in server.process.stdout.read()
        assert server.process.stderr is not None
        assert "Traceback" not in server.process.stderr.read()


@pytest.mark.slow
def test_shutdown_cuts_off_requests_after_its_time_limit(tiny_datastore: Datastore, tiny_run: Path) -> None:
    limits = ("--max-tokens", "1000000", "--shutdown-seconds", "0.3", "--name", "tiny")
    with serving(str(tiny_datastore.folder), "--checkpoint", str(tiny_run), *limits) as server:
        cut_off_all(server, lambda: server.process.send_signal(signal.SIGTERM))


@pytest.mark.slow
def test_second_signal_cuts_off_requests_with_an_error(tiny_datastore: Datastore, tiny_run: Path) -> None:
    limits = ("--max-tokens", "1000000", "--shutdown-seconds", "1000", "--name", "tiny")

    def twice() -> None:
        server.process.send_signal(signal.SIGINT)
        wait_until_not_ready(server)
        server.process.send_signal(signal.SIGINT)

    with serving(str(tiny_datastore.folder), "--checkpoint", str(tiny_run), *limits) as server:
        cut_off_all(server, twice)


def cut_off_all(server: Serving, stop: Callable[[], None]) -> None:
    """Shutdown ends a stream, a generation and a request with an incomplete body by an error, without a traceback."""
    address, socket_address = server.url + "/v1/completions", urlsplit(server.url)
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream("POST", address, json=ENDLESS | {"stream": True}, timeout=PATIENCE) as stream,
        socket.create_connection((socket_address.hostname, socket_address.port), timeout=PATIENCE) as slow,
    ):
        slow.sendall(b"POST /search HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
        lines = stream.iter_lines()
        next(lines)
        whole = pool.submit(httpx.post, address, json=ENDLESS, timeout=PATIENCE)
        wait_until(lambda: "retro_requests_under_way 2.0" in httpx.get(server.url + "/metrics", timeout=PATIENCE).text)
        stop()
        *_, error, done = (line.removeprefix("data: ") for line in lines if line)
        assert (json.loads(error)["error"]["code"], done) == ("unavailable", "[DONE]")
        answer = whole.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert slow.recv(2**16).startswith(b"HTTP/1.1 503 ")
    assert server.process.wait(PATIENCE) == 0
    assert server.process.stdout is not None
    assert server.process.stderr is not None
    assert "stopped; 2 requests were cut off" in server.process.stdout.read()
    said = server.process.stderr.read()
    assert "Traceback" not in said
    assert "Exception" not in said


def wait_until_not_ready(server: Serving) -> None:
    wait_until(lambda: httpx.get(server.url + "/ready", timeout=PATIENCE).status_code != 200)


# --- mistakes are reported in one line -------------------------------------------------------------------------------


@pytest.fixture
def error_of(capsys):
    def run(*arguments: str) -> str:
        assert main(["serve", *arguments]) == 2
        return capsys.readouterr().err

    return run


def test_port_in_use_is_refused(tiny_datastore: Datastore, error_of) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port}: Address already in use. Name another" in error_of(
            str(tiny_datastore.folder), "--port", port
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--port 70000", "port = 70000"),
        ("--max-k 0", "max-k = 0"),
        ("--max-kk 5", "--max-k"),
        ("--token-env NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE is not set"),
        ("--port 0 --checkpoint none", "neither a checkpoint"),
        ("--host no-such-host.invalid", "no-such-host.invalid"),
        ("--chat-template chat.jinja", "chat_template = 'chat.jinja'"),
        ("--device cuda:7", "device = 'cuda:7'"),
        ("another", "'another'"),
        *((f"--cors-origins {origin}", origin) for origin in ("localhost:3000", "http://localhost:3000/")),
        *((f"--allowed-hosts {host}", host) for host in ("http://search.internal", "search.internal:8080")),
    ],
)
def test_invalid_options_are_refused_by_name(tiny_datastore: Datastore, options: str, words: str, error_of) -> None:
    assert words in error_of(str(tiny_datastore.folder), *options.split())


def test_folder_without_a_datastore_is_refused(tmp_path: Path, error_of) -> None:
    assert "is not a datastore" in error_of(str(tmp_path), "--port", "0")


def test_checkpoint_with_another_vocabulary_size_is_refused(
    tiny_run: Path, tiny_corpus: Path, tmp_path: Path, error_of
) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    other = build_local(replace(config, tokenizer=TokenizerSettings(vocab_size=350)))
    message = error_of(str(other.folder), "--port", "0", "--checkpoint", str(tiny_run))
    assert "the model's tokenizer has 400 ids" in message
    assert "has vocab_size = 350" in message


@pytest.mark.parametrize("token", ["geheim ß", ""])  # empty: as after `RETRO_TOKEN=$(cat no-such-file)`
def test_token_that_protects_nothing_is_refused(
    tiny_datastore: Datastore, monkeypatch: pytest.MonkeyPatch, token: str, error_of
) -> None:
    monkeypatch.setenv("RETRO_TOKEN", token)
    assert "RETRO_TOKEN" in error_of(str(tiny_datastore.folder))


@pytest.mark.parametrize("token", ["", "right"])
def test_public_server_without_a_token_logs_a_warning(
    tiny_datastore: Datastore, monkeypatch: pytest.MonkeyPatch, token: str, error_of
) -> None:
    monkeypatch.setenv("RETRO_TOKEN", token)
    if not token:
        monkeypatch.delenv("RETRO_TOKEN")
    with socket.create_server(("0.0.0.0", 0)) as taken:
        printed = error_of(str(tiny_datastore.folder), "--host", "0.0.0.0", "--port", str(taken.getsockname()[1]))
    assert ("without a token" in printed) == (not token)
