"""Speed of reading training batches from an S3 server by ranges of bytes, and the requests that they need.

    python -m benchmarks.speed.large_store --output FOLDER
    python -m benchmarks.speed.reading_s3 FOLDER [--latency-ms 0 30]

The server is a process on this machine that answers requests for the datastore's files, each after a latency. It has no
disk and network between, so only the latency and the work of the client are measured. `fetch` copies one file to the
cache, as `data.reading = "mmap"` does before the first batch.
"""

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.common import add_minutes, budget, say, write
from indexing.store import remote
from indexing.store.datastore import Datastore
from retro.data.batches import TrainingData
from retro.data.settings import DataSettings

CASES: dict[str, dict[str, Any]] = {"pread": {}, "materialized, pread": {"materialized": True}}
_BUCKET = "store"


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path)
    parser.add_argument("--latency-ms", type=float, nargs="+", default=[0, 30])
    parser.add_argument("--seconds", type=float, default=20, help="of reading in each case")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--k", type=int, default=2)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-reading-s3.json"))
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)  # of the server's process
    options = parser.parse_args()
    if options.port:
        web.run_app(server(options.datastore, options.latency_ms[0] / 1000), port=options.port, print=None)
        return
    limit, rows = budget(options), []
    port = free_port()  # one for all, because fsspec keeps the connection of an URL
    command = [sys.executable, "-m", "benchmarks.speed.reading_s3", str(options.datastore), f"--port={port}"]
    for latency in limit.each(options.latency_ms, "latency"):
        with subprocess.Popen([*command, f"--latency-ms={latency}"]) as process:
            try:
                rows += [{"latency_ms": latency, **row} for row in read_all(port, options)]
            finally:
                process.kill()
    settings = {key: str(value) for key, value in vars(options).items()}
    write(options.output, {"settings": settings, "rows": rows})


def free_port() -> int:
    """A port that no process uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# --- server ----------------------------------------------------------------------------------------------------------


def server(folder: Path, latency: float) -> web.Application:
    """An application that answers S3 requests for one bucket, the folder: whole files and ranges of bytes."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(latency)
        file = folder / request.match_info["key"]
        if not file.is_file():
            error = "<Error><Code>NoSuchKey</Code></Error>"
            return web.Response(status=404, text=error, content_type="application/xml")
        return web.FileResponse(file)

    application = web.Application()
    application.router.add_get(f"/{_BUCKET}/{{key:.*}}", answer)
    return application


# --- client ----------------------------------------------------------------------------------------------------------


def read_all(port: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Read with every case, each with an empty cache, then fetch a file."""
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    wait_for(port)
    rows = []
    for name in (*CASES, "fetch"):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["RETRO_CACHE"] = cache
            rows.append(fetch() if name == "fetch" else read(name, options))
        say(
            ", ".join(
                f"{key} {value:,.1f}" if isinstance(value, float) else f"{value}" for key, value in rows[-1].items()
            )
        )
    return rows


def wait_for(port: int) -> None:
    """Return when the server accepts connections."""
    for _ in range(300):
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit("The server did not start within 30 seconds.")


def read(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Make batches in this process for some seconds; count the requests and the bytes."""
    settings = DataSettings(sequence_length=options.sequence_length, k=options.k, reading="pread", **CASES[name])
    data = TrainingData([Path(f"s3://{_BUCKET}")], settings, retrieval=True)
    asked = {"requests": 0, "bytes": 0}
    read_ranges = remote.read_ranges

    def counted(ranges: Any) -> list[bytes]:
        found = read_ranges(ranges)
        asked["requests"] += len(found)
        asked["bytes"] += sum(map(len, found))
        return found

    firsts = count(0, options.batch_size)
    data.batch(range(first := next(firsts), first + options.batch_size))  # headers and the offsets of documents
    remote.read_ranges = counted
    try:
        started, tokens = time.perf_counter(), 0
        while time.perf_counter() - started < options.seconds:
            tokens += data.batch(range(first := next(firsts), first + options.batch_size)).tokens.size
        took = time.perf_counter() - started
    finally:
        remote.read_ranges = read_ranges
    per_sequence = options.sequence_length / tokens
    return {
        "case": name,
        "tokens_per_second": tokens / took,
        "requests_per_second": asked["requests"] / took,
        "requests_per_sequence": asked["requests"] * per_sequence,
        "bytes_per_token": asked["bytes"] / tokens,
    }


def fetch() -> dict[str, Any]:
    """Copy the first file of tokens to the cache."""
    path = Datastore.open(f"s3://{_BUCKET}").train.tokens.paths[0]
    started = time.perf_counter()
    size = remote.present(path).stat().st_size
    return {"case": "fetch", "bytes_per_second": size / (time.perf_counter() - started)}


if __name__ == "__main__":
    main()
