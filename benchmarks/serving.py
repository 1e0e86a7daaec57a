"""Queries per second and waiting times of `retro serve`, against bare `faiss.search` on the same index in the same run.

    python benchmarks/serving.py CONFIG|DATASTORE [--clients 1 8 64] [--queries 1 16] [--seconds 5] [--rounds 3] [--k 10]

CONFIG is the TOML file of a datastore, which is built where it is not finished. `retro serve` runs as a process, and the clients,
each with one connection and one request under way, are another process. Bare is one call of the index after the other, each
for as many queries as the clients have under way together, in a process that does nothing else; the two take turns in every
round, and medians are told. Times are those of requests.

Three kinds of requests: `vectors` (as base64, ids and distances are answered), `vectors, text` (the hits' texts and metadata
too) and `texts` (embedded by the server, texts and metadata answered). For `texts` bare is the embedder and the index. Queries
are chunks of held-out documents, and of training documents where those are few. The server's processor time for a query is
told too: with the clients on the same cores, it says more than a rate about what a server of its own would do.
"""

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from measure import seconds, write

from indexing.retriever import Retriever
from pipelines.config import Config
from pipelines.executors import make_executor
from pipelines.settings import load
from pipelines.stages import build

_QUERIES = 4096
_WARM_UP_SECONDS = 0.5


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path, metavar="CONFIG|DATASTORE")
    parser.add_argument("--clients", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--queries", nargs="*", type=int, default=[1, 16], help="in each request")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("benchmark-serving.json"))
    options = parser.parse_args()
    folder = options.datastore
    if folder.suffix == ".toml":
        config = load(Config, folder, [], verb="index")
        build(config, make_executor(config.executor))
        folder = config.datastore
    retriever = Retriever.open(folder)
    texts = query_texts(retriever)
    vectors = retriever.embed(texts)
    index = next(retriever.indexes[0].each())
    bare: dict[str, Callable[[slice], object]] = {
        "vectors": lambda rows: index.search(vectors[rows], options.k),
        "texts": lambda rows: index.search(retriever.embed(texts[rows]), options.k),
    }
    bare["vectors, text"] = bare["vectors"]
    with serving(folder) as server:
        check(
            server.url, requests_of("vectors", texts[:8], vectors[:8], options.k, 1), retriever, vectors[:8], options.k
        )
        rows = [
            measured(
                kind, clients, queries, server, requests_of(kind, texts, vectors, options.k, queries), call, options
            )
            for kind, call in bare.items()
            for queries in options.queries
            for clients in options.clients
        ]
    write(options.out, {"chunks": retriever.retrieval.num_chunks, "k": options.k, "rows": rows})


@dataclass(frozen=True)
class Server:
    """A running `retro serve`."""

    url: str
    pid: int

    def processor_seconds(self) -> float:
        """That it has used so far, of all cores."""
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
) -> dict[str, Any]:
    """One line of the table: medians over rounds in which the server and the bare index take turns."""
    rounds = []
    for _ in range(options.rounds):
        rate = bare_rate(bare, clients * queries, options.seconds / 2)
        used = server.processor_seconds()
        answered, all_answered, p50, p99 = load_of(server.url, requests, clients, options.seconds)
        used = (server.processor_seconds() - used) / (all_answered * queries)
        rounds.append((rate, queries * answered / options.seconds, p50, p99, used))
    rate, served, p50, p99, used = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(
        f"{kind:13} {clients:3} clients × {queries:2} {served:8,.0f} queries/s  bare {rate:8,.0f}  {served / rate:5.2f} of bare  "
        f"p50 {1e3 * p50:7.2f} ms  p99/p50 {p99 / p50:5.2f}  processor {1e3 * used:6.3f} ms",
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
    }


# --- what is asked ---------------------------------------------------------------------------------------------------


def query_texts(retriever: Retriever) -> list[str]:
    """Texts of chunks, held-out ones first."""
    texts: list[str] = []
    for split in (retriever.datastore.valid, retriever.datastore.test, retriever.datastore.train):
        count = min(_QUERIES - len(texts), split.num_chunks)
        if count:
            ids = np.sort(np.random.default_rng(0).choice(split.num_chunks, count, replace=False))
            rows = zip(split.tokens.gather(ids), split.lengths.gather(ids), strict=True)
            texts += retriever.tokenizer.decode_batch([row[:length] for row, length in rows])
    return [text for text in texts if text.strip()]


def requests_of(kind: str, texts: list[str], vectors: np.ndarray, k: int, queries: int) -> list[bytes]:
    """HTTP requests as they go over the wire, with so many queries each."""
    rows = [slice(start, start + queries) for start in range(0, len(texts) - queries + 1, queries)]
    if kind == "texts":
        return [_post({"texts": texts[each], "k": k}) for each in rows]
    coded = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    return [_post({"vectors": coded[each], "k": k, "text": kind == "vectors, text"}) for each in rows]


def _post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /search HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


# --- who asks --------------------------------------------------------------------------------------------------------


def bare_rate(search: Callable[[slice], object], batch: int, for_seconds: float) -> float:
    """Queries per second of one call after the other."""
    search(slice(0, batch))
    number, took = 0, 0.0
    while took < for_seconds:
        first = number * batch % max(1, _QUERIES - batch)
        took += seconds(lambda first=first: search(slice(first, first + batch)))
        number += 1
    return number * batch / took


def load_of(url: str, requests: list[bytes], clients: int, for_seconds: float) -> tuple[int, int, float, float]:
    """Requests answered in the time, and with those of the warm-up; p50 and p99 in seconds, as clients in another process see them."""
    # Spawned: this process has threads of Faiss, which a fork would not take along.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_load, (url, requests, clients, for_seconds))


def _load(url: str, requests: list[bytes], clients: int, for_seconds: float) -> tuple[int, int, float, float]:
    times, answered = asyncio.run(_all_clients(url, requests, clients, for_seconds))
    if not times:
        raise ValueError(f"no request was both sent and answered within {for_seconds:g} s: give --seconds more.")
    return len(times), answered, float(np.percentile(times, 50)), float(np.percentile(times, 99))


async def _all_clients(url: str, requests: list[bytes], clients: int, for_seconds: float) -> tuple[list[float], int]:
    """Seconds of every request that began after the warm-up and was answered before the end, and the number of all."""
    begin = time.perf_counter() + _WARM_UP_SECONDS
    end, times, answered = begin + for_seconds, list[float](), 0

    async def client(number: int) -> None:
        nonlocal answered
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        place = number * len(requests) // clients
        while (started := time.perf_counter()) < end:
            writer.write(requests[place % len(requests)])
            await _answer(reader)
            place, answered = place + 1, answered + 1
            if started >= begin and (stopped := time.perf_counter()) <= end:
                times.append(stopped - started)
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*map(client, range(clients)))
    return times, answered


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """The body of an answer of the server."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    return await reader.readexactly(length)


def check(url: str, requests: list[bytes], retriever: Retriever, vectors: np.ndarray, k: int) -> None:
    """That what is measured is right: the server finds what the retriever finds."""
    expected = retriever.rank(vectors, k).ids.tolist()

    async def ask() -> list[bytes]:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        answers = []
        for request in requests:
            writer.write(request)
            answers.append(await _answer(reader))
        writer.close()
        await writer.wait_closed()
        return answers

    for answer, ids in zip(asyncio.run(ask()), expected, strict=True):
        found = [hit["chunk_id"] for hit in json.loads(answer)["results"][0]]
        assert found == ids, (found, ids)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """`retro serve` in a process of its own."""
    command = [sys.executable, "-m", "pipelines.cli", "serve", str(folder), "--port", "0"]
    root = str(Path(__file__).resolve().parents[1])
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
