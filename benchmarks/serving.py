"""Queries per second and waiting times of `retro serve`, against bare `faiss.search` on the same index in the same run.

    python benchmarks/serving.py CONFIG|DATASTORE [--clients 1 8 64] [--seconds 5] [--rounds 3] [--k 10]

CONFIG is the TOML file of a datastore, which is built where it is not finished. `retro serve` runs as a process, and the clients,
each with one connection and one query under way, are another process. Bare is one call of the index for as many queries
as there are clients, in a process that does nothing else; the two take turns in every round, and medians are told.

Three kinds of requests, each with one query: `vectors` (as base64, ids and distances are answered), `vectors, text` (the hits'
texts and metadata too) and `texts` (embedded by the server, texts and metadata answered). For `texts` bare is the embedder and
the index. Queries are pieces of held-out documents where there are some, else of training documents.
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
    requests = requests_of(texts, vectors, options.k)
    with serving(folder) as url:
        check(url, requests["vectors"], retriever.search(vectors[:8], options.k).hits)
        rows = [
            measured(kind, clients, url, requests[kind], bare[kind], options)
            for kind in requests
            for clients in options.clients
        ]
    write(options.out, {"chunks": retriever.retrieval.num_chunks, "k": options.k, "rows": rows})


def measured(
    kind: str,
    clients: int,
    url: str,
    requests: list[bytes],
    bare: Callable[[slice], object],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One line of the table: medians over rounds in which the server and the bare index take turns."""
    rounds = []
    for _ in range(options.rounds):
        rate = bare_rate(bare, clients, options.seconds / 2)
        served = load_of(url, requests, clients, options.seconds)
        rounds.append((rate, *served))
    rate, queries, p50, p99 = (statistics.median(column) for column in zip(*rounds, strict=True))
    line = {
        "requests": kind,
        "clients": clients,
        "queries_per_second": queries,
        "bare_queries_per_second": rate,
        "of_bare": queries / rate,
        "p50_ms": 1e3 * p50,
        "p99_ms": 1e3 * p99,
    }
    print(
        f"{kind:14} {clients:3} clients {queries:9,.0f} queries/s  bare {rate:9,.0f}  {queries / rate:5.2f} of bare  "
        f"p50 {1e3 * p50:7.2f} ms  p99 {1e3 * p99:7.2f} ms  p99/p50 {p99 / p50:5.2f}",
        flush=True,
    )
    return line


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


def requests_of(texts: list[str], vectors: np.ndarray, k: int) -> dict[str, list[bytes]]:
    """HTTP requests as they go over the wire, one query each."""
    coded = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    return {
        "vectors": [_post({"vectors": [each], "k": k, "text": False}) for each in coded],
        "vectors, text": [_post({"vectors": [each], "k": k}) for each in coded],
        "texts": [_post({"texts": [each], "k": k}) for each in texts],
    }


def _post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /search HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


# --- who asks --------------------------------------------------------------------------------------------------------


def bare_rate(search: Callable[[slice], object], batch: int, for_seconds: float) -> float:
    """Queries per second of one call after the other."""
    number, started, took = 0, time.perf_counter(), 0.0
    search(slice(0, batch))
    while time.perf_counter() - started < for_seconds:
        first = number * batch % (_QUERIES // 2)
        took += seconds(lambda first=first: search(slice(first, first + batch)))
        number += 1
    return number * batch / took


def load_of(url: str, requests: list[bytes], clients: int, for_seconds: float) -> tuple[float, float, float]:
    """Queries per second, p50 and p99 in seconds, as clients in another process see them."""
    # Spawned: this process has threads of Faiss, which a fork would not take along.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_load, (url, requests, clients, for_seconds))


def _load(url: str, requests: list[bytes], clients: int, for_seconds: float) -> tuple[float, float, float]:
    times = asyncio.run(_all_clients(url, requests, clients, for_seconds))
    return len(times) / for_seconds, float(np.percentile(times, 50)), float(np.percentile(times, 99))


async def _all_clients(url: str, requests: list[bytes], clients: int, for_seconds: float) -> list[float]:
    """Seconds of every request that began after the warm-up and was answered before the end."""
    begin = time.perf_counter() + _WARM_UP_SECONDS
    end, times = begin + for_seconds, list[float]()

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        place = number * len(requests) // clients
        while (started := time.perf_counter()) < end:
            writer.write(requests[place % len(requests)])
            await _answer(reader)
            place += 1
            if started >= begin and (stopped := time.perf_counter()) <= end:
                times.append(stopped - started)
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*map(client, range(clients)))
    return times


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """The body of an answer of the server."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    return await reader.readexactly(length)


def check(url: str, requests: list[bytes], expected: list[list[Any]]) -> None:
    """That what is measured is right: the server finds what the retriever finds."""

    async def ask() -> list[bytes]:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        answers = []
        for request in requests[: len(expected)]:
            writer.write(request)
            answers.append(await _answer(reader))
        writer.close()
        await writer.wait_closed()
        return answers

    for answer, hits in zip(asyncio.run(ask()), expected, strict=True):
        found = [hit["chunk_id"] for hit in json.loads(answer)["results"][0]]
        assert found == [hit.chunk_id for hit in hits], (found, hits)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL of `retro serve` in a process of its own."""
    command = [sys.executable, "-m", "pipelines.cli", "serve", str(folder), "--port", "0"]
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    environment.pop("RETRO_TOKEN", None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("ready: "):
                    yield line.split()[1]
                    break
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
