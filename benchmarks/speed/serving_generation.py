"""Tokens per second and waiting times of clients that generate at `retro serve`, by the size of the batch.

    python -m benchmarks.speed.serving_generation DATASTORE CHECKPOINT [--clients 1 8 32] [--batches 1 2 32]

Each size of the batch (`--max-num-seqs`) has its own application of `retro serve`. All listen in one other process and share
the model, but only one has work: the sizes alternate in every round. Size 1 generates one text after the other. Clients run
in this process; each has one request in flight and reads its stream token by token. All requests of a round begin at once, with greedy continuations of held-out
chunks of different lengths, and every text has `--tokens` tokens. "first" is the time from the request to its first
token, and "next" the time between two tokens of a text; both are medians over all texts. "equal" is the share of texts
that are the same, token for token, as with the first size; in bfloat16 the products of a batch can round differently.
"""

import argparse
import contextlib
import http.client
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import uvicorn

from benchmarks.common import add_minutes, budget, say, write
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from retro.inference.language_model import LanguageModel
from retro.server.app import make_app
from retro.server.protocol import uvicorn_config
from retro.server.settings import ServeSettings


class Text(NamedTuple):
    """A generated text: time of the request and of every token in seconds, and its tokens as text."""

    started: float
    times: list[float]
    tokens: list[str]


def main() -> None:
    """Print a line for each number of clients and size of the batch, and write all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--clients", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 2, 32], help="values of --max-num-seqs")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each text")
    parser.add_argument("--longest-prompt", type=int, default=96, help="tokens; the shortest has 8")
    parser.add_argument("--k", type=int, default=2, help="neighbors of each chunk; 0 = retrieval OFF")
    parser.add_argument("--rounds", type=int, default=3)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-serving-generation.json"))
    options = parser.parse_args()
    limit = budget(options)
    rounds = {(clients, batch): list[list[Text]]() for clients in options.clients for batch in options.batches}
    settings = [
        ServeSettings(name="benchmark", max_num_seqs=batch, request_seconds=3600.0) for batch in options.batches
    ]
    with applications(options.datastore, options.checkpoint, settings) as (addresses, _):
        urls = dict(zip(options.batches, addresses, strict=True))
        prompts = prompts_of(options.datastore, options.longest_prompt, max(options.clients))
        for url in addresses:
            texts_of(url, prompts[:1], options)  # warm-up
        for _ in limit.rounds(options.rounds):
            for clients, batch in rounds:
                texts = texts_of(urls[batch], prompts[:clients], options)
                rounds[clients, batch].append(texts)
                say(f"{clients} clients, batch {batch}: {rate_of(texts):.1f} tokens/s", file=sys.stderr)
    rows = [row_of(clients, batch, rounds, options) for clients, batch in rounds]
    for row in rows:
        say(
            f"{row['clients']:3} clients, batch {row['batch']:3}  {row['tokens_per_second']:8.1f} tokens/s  "
            f"{row['times_first']:5.2f} × batch {options.batches[0]}  first {1e3 * row['first_seconds']:7.0f} ms  "
            f"next {1e3 * row['next_seconds']:6.1f} ms  equal {row['equal']:.0%}"
        )
    write(options.output, {"k": options.k, "tokens": options.tokens, "rows": rows})


@contextlib.contextmanager
def applications(
    datastore: Path, checkpoint: Path, settings: Sequence[ServeSettings]
) -> Iterator[tuple[list[str], int]]:
    """Run an application with each of the settings in another process. Yields their addresses and the number of the process."""
    say("open the datastore and the checkpoint", file=sys.stderr)
    # Spawn, because a forked process would lack the threads of Faiss.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(datastore, checkpoint, settings, there))
    process.start()
    try:
        assert process.pid is not None
        yield here.recv(), process.pid
    finally:
        process.terminate()
        process.join()


def _serve(datastore: Path, checkpoint: Path, settings: Sequence[ServeSettings], ready: Connection) -> None:
    retriever = Retriever.open(datastore)
    model, addresses = LanguageModel.open(checkpoint, retriever), list[str]()
    for each in settings:
        server = uvicorn.Server(uvicorn_config(make_app(retriever, model, each), port=0))
        threading.Thread(target=server.run, daemon=True).start()
        while not server.started:
            time.sleep(0.01)
        addresses.append(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
    ready.send(addresses)
    threading.Event().wait()


def prompts_of(folder: Path, longest: int, count: int) -> list[list[int]]:
    """Return the beginnings of held-out documents, 8 to `longest` tokens each."""
    split = Datastore.open(folder).valid
    chunks = -(-longest // split.tokens.row_shape[0])
    starts = np.linspace(0, split.num_chunks - chunks, count).astype(int)
    rows = [split.tokens.read(start, start + chunks).ravel() for start in starts]
    wanted = np.random.default_rng(0).integers(8, longest + 1, count)
    return [row[:length].tolist() for row, length in zip(rows, wanted, strict=True)]


def texts_of(url: str, prompts: list[list[int]], options: argparse.Namespace) -> list[Text]:
    """Continue prompts, each by its own client."""
    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(lambda prompt: text_of(url, prompt, options), prompts))


def text_of(url: str, prompt: list[int], options: argparse.Namespace) -> Text:
    """Continue a prompt and read the stream."""
    address = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(address.hostname or "", address.port)) as connection:
        name = "benchmark" if options.k else "benchmark:off"
        body = {"model": name, "prompt": prompt, "max_tokens": options.tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "k": max(1, options.k)}
        started = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer, times, tokens = connection.getresponse(), list[float](), list[str]()
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                tokens.append(json.loads(line[len(b"data: ") :])["choices"][0]["text"])
    assert len(tokens) == options.tokens, tokens
    return Text(started, times, tokens)


def rate_of(texts: list[Text]) -> float:
    """Return the tokens per second of texts that were requested together."""
    took = max(text.times[-1] for text in texts) - min(text.started for text in texts)
    return sum(len(text.tokens) for text in texts) / took


def row_of(
    clients: int, batch: int, rounds: dict[tuple[int, int], list[list[Text]]], options: argparse.Namespace
) -> dict[str, Any]:
    """Return a row of the table: medians over rounds."""
    own, first = rounds[clients, batch], rounds[clients, options.batches[0]]
    texts = [text for each in own for text in each]
    pairs = [pair for each in zip(own, first, strict=True) for pair in zip(*each, strict=True)]
    return {
        "clients": clients,
        "batch": batch,
        "tokens_per_second": statistics.median(map(rate_of, own)),
        "times_first": statistics.median(rate_of(a) / rate_of(b) for a, b in zip(own, first, strict=True)),
        "first_seconds": statistics.median(text.times[0] - text.started for text in texts),
        "next_seconds": statistics.median(b - a for text in texts for a, b in pairwise(text.times)),
        "equal": statistics.mean(a.tokens == b.tokens for a, b in pairs),
    }


if __name__ == "__main__":
    main()
