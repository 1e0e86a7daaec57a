"""Queries per second and latencies of `retro serve`, against bare `faiss.search` on the same index in the same run.

    python -m benchmarks.speed.serving CONFIG|DATASTORE [--clients 1 8 64] [--queries 1 16] [--seconds 3]

CONFIG is the TOML file of a datastore, which is built if it is not finished. `retro serve` runs in one process. All
clients run in another process, in one loop over plain sockets: each has one connection and one request in flight,
requests are encoded in advance, and of an answer only status and length are read. A client thus takes little time from
the cores that it shares with the server: about 0.03 ms per request, and every line prints its measurement. "Bare" calls
the index repeatedly in a process without other work, each time with as many queries as the clients have in flight
together. Server and bare index alternate in every round. The results are medians over rounds; latencies are those of
requests.

Three kinds of requests: `vectors` (as base64; the answer has ids and distances, like Faiss), `texts` (the server embeds
them; same answer) and `texts, text` (the answer has the texts and metadata of the hits). For texts, "bare" is the
embedder and the index. Queries are chunks of held-out documents, and of training documents if there are few. Each line
also has the server's processor time per query, which predicts the rate of a server on a separate machine better than
the measured rate.
"""

import argparse
import base64
import contextlib
import json
import multiprocessing
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.common import Budget, add_minutes, budget, say, seconds, write
from indexing.index.sharded import ShardedIndex
from indexing.retrieval.retriever import Retriever
from pipelines.cli.settings.load import load
from pipelines.config import Config
from pipelines.executors.factory import make_executor
from pipelines.stages.table import build

_QUERIES = 4096
_WARM_UP_SECONDS = 0.5


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path, metavar="CONFIG|DATASTORE")
    parser.add_argument("--clients", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--queries", nargs="*", type=int, default=[1, 16], help="queries of a request")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--k", type=int, default=10)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-serving.json"))
    options = parser.parse_args()
    limit = budget(options)
    folder = options.datastore
    if folder.suffix == ".toml":
        config = load(Config, folder, [], verb="index")
        build(config, make_executor(config.executor))
        folder = config.datastore
    retriever = Retriever.open(folder)
    texts = query_texts(retriever)
    vectors = retriever.queries.vectors(texts)
    (searched,) = retriever.indexes
    assert isinstance(searched, ShardedIndex)
    index = next(searched.indexes())
    bare: dict[str, Callable[[slice], object]] = {
        "vectors": lambda rows: index.search(vectors[rows], options.k),
        "texts": lambda rows: index.search(retriever.queries.vectors(texts[rows]), options.k),
    }
    bare["texts, text"] = bare["texts"]
    with serving(folder) as server:
        check(
            server.url, requests_of("vectors", texts[:8], vectors[:8], options.k, 1), retriever, vectors[:8], options.k
        )
        cases = list(product(bare.items(), options.queries, options.clients))
        rows = []
        for number, ((kind, call), queries, clients) in enumerate(cases):
            say(f"case {number + 1} of {len(cases)}", file=sys.stderr)
            requests = requests_of(kind, texts, vectors, options.k, queries)
            rows.append(
                measured(kind, clients, queries, server, requests, call, options, limit.share(len(cases) - number))
            )
    write(options.output, {"chunks": retriever.retrieval.num_chunks, "k": options.k, "rows": rows})


@dataclass(frozen=True)
class Server:
    """A running `retro serve`."""

    url: str
    pid: int

    def processor_seconds(self) -> float:
        """Return the processor time of the server so far, over all cores."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(
    kind: str,
    clients: int,
    queries: int,
    server: Server,
    requests: list[bytes],
    bare: Callable[[slice], object],
    options: argparse.Namespace,
    limit: Budget,
) -> dict[str, Any]:
    """Return a row of the table: medians over rounds that alternate between the server and the bare index."""
    rounds = []
    for _ in limit.rounds(options.rounds):
        rate = bare_rate(bare, clients * queries, options.seconds / 2)
        used = server.processor_seconds()
        load = load_of(server.url, requests, clients, options.seconds)
        used, clients_used = (
            each / (load.all_answered * queries) for each in (server.processor_seconds() - used, load.processor_seconds)
        )
        rounds.append((rate, queries * load.answered / options.seconds, load.p50, load.p99, used, clients_used))
    rate, served, p50, p99, used, clients_used = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(
        f"{kind:13} {clients:3} clients × {queries:2} {served:8,.0f} queries/s  bare {rate:8,.0f}  {served / rate:5.2f} of bare  "
        f"p50 {1e3 * p50:7.2f} ms  p99/p50 {p99 / p50:5.2f}  processor {1e3 * used:6.3f} ms "
        f"+ {1e3 * clients_used:6.3f} ms of the clients",
        flush=True,
    )
    return {
        "requests": kind,
        "clients": clients,
        "queries_in_a_request": queries,
        "queries_per_second": served,
        "bare_queries_per_second": rate,
        "of_bare": served / rate,
        "p50_ms": 1e3 * p50,
        "p99_ms": 1e3 * p99,
        "processor_ms_per_query": 1e3 * used,
        "clients_processor_ms_per_query": 1e3 * clients_used,
    }


# --- requests --------------------------------------------------------------------------------------------------------


def query_texts(retriever: Retriever) -> list[str]:
    """Return texts of chunks, held-out ones first."""
    texts: list[str] = []
    for split in (retriever.datastore.valid, retriever.datastore.test, retriever.datastore.train):
        count = min(_QUERIES - len(texts), split.num_chunks)
        if count:
            ids = np.sort(np.random.default_rng(0).choice(split.num_chunks, count, replace=False))
            rows = zip(split.tokens.gather(ids), split.lengths.gather(ids), strict=True)
            texts += retriever.tokenizer.decode_batch([row[:length] for row, length in rows])
    return [text for text in texts if text.strip()]


def requests_of(kind: str, texts: list[str], vectors: np.ndarray, k: int, queries: int) -> list[bytes]:
    """Return encoded HTTP requests with `queries` queries each."""
    rows = [slice(start, start + queries) for start in range(0, len(texts) - queries + 1, queries)]
    if kind != "vectors":
        return [_post({"texts": texts[each], "k": k, "text": kind == "texts, text"}) for each in rows]
    coded = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    return [_post({"vectors": coded[each], "k": k, "text": False}) for each in rows]


def _post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    return head.encode() + b"\r\n\r\n" + content


# --- clients ---------------------------------------------------------------------------------------------------------


def bare_rate(search: Callable[[slice], object], batch: int, for_seconds: float) -> float:
    """Return the queries per second of consecutive calls."""
    search(slice(0, batch))
    number, took = 0, 0.0
    while took < for_seconds:
        first = number * batch % max(1, _QUERIES - batch)
        took += seconds(partial(search, slice(first, first + batch)))
        number += 1
    return number * batch / took


@dataclass(frozen=True)
class Load:
    """Measurements of the clients.

    Attributes:
        answered: number of requests that were sent after the warm-up and answered before the end.
        all_answered: number of all answered requests.
        p50, p99: percentiles of the latency, in seconds.
        processor_seconds: processor time of the clients' process for all answered requests.
    """

    answered: int
    all_answered: int
    p50: float
    p99: float
    processor_seconds: float


def load_of(url: str, requests: list[bytes], clients: int, for_seconds: float) -> Load:
    """Measure with `clients` clients in another process."""
    # Spawn, because a forked process would lack the threads of Faiss.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_load, (url, requests, clients, for_seconds))


def _load(url: str, requests: list[bytes], clients: int, for_seconds: float) -> Load:
    used = time.process_time()
    begin = time.perf_counter() + _WARM_UP_SECONDS
    end, times, all_answered = begin + for_seconds, list[float](), 0
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as connections:
        for number in range(clients):
            client = connections.enter_context(Client(url))
            selector.register(client, selectors.EVENT_READ, client)
            client.place = number * len(requests) // clients
            client.send(requests[client.place])
        while selector.get_map():
            for key, _ in selector.select():
                client = key.data
                if client.answer() is None:
                    continue
                stopped, all_answered = time.perf_counter(), all_answered + 1
                if client.sent_at >= begin and stopped <= end:
                    times.append(stopped - client.sent_at)
                if stopped >= end:
                    selector.unregister(client)
                else:
                    client.place = (client.place + 1) % len(requests)
                    client.send(requests[client.place])
    if not times:
        raise ValueError(f"no request was sent and answered within {for_seconds:g} s. Increase --seconds.")
    p50, p99 = np.percentile(times, [50, 99])
    return Load(len(times), all_answered, float(p50), float(p99), time.process_time() - used)


class Client:
    """A connection with one request in flight."""

    def __init__(self, url: str) -> None:
        self._socket = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received, self.sent_at, self.place = b"", 0.0, 0

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """Return the socket's file descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, request: bytes) -> None:
        """Send a request."""
        self._received, self.sent_at = b"", time.perf_counter()
        self._socket.sendall(request)

    def answer(self) -> bytes | None:
        """Receive a part of the answer. Return the body when it is complete, else None."""
        more = self._socket.recv(1 << 20)
        assert more, "the server has closed the connection"
        self._received += more
        head, blank, body = self._received.partition(b"\r\n\r\n")
        if not blank:
            return None
        assert head.startswith(b"HTTP/1.1 200"), self._received
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        return body if len(body) == length else None


def check(url: str, requests: list[bytes], retriever: Retriever, vectors: np.ndarray, k: int) -> None:
    """Check that the server returns the same ids as the retriever."""
    expected = retriever.chunks.rank(vectors, k).ids.tolist()
    with Client(url) as client:
        for request, ids in zip(requests, expected, strict=True):
            client.send(request)
            while (answer := client.answer()) is None:
                pass
            found = [hit["chunk_id"] for hit in json.loads(answer)["results"][0]]
            assert found == ids, (found, ids)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Run `retro serve` in another process."""
    command = [sys.executable, "-m", "pipelines.cli", "serve", str(folder), "--port", "0"]
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    environment.pop("RETRO_TOKEN", None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("ready: "):
                    yield Server(line.split()[1], process.pid)
                    break
        finally:
            process.terminate()
            process.communicate()


if __name__ == "__main__":
    main()
