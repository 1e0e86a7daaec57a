"""Many clients generate at `retro serve` for minutes, and some of them hang up: answers by status, and memory over time.

    python -m benchmarks.speed.serving_soak DATASTORE CHECKPOINT [--clients 64] [--minutes 6]

Every client sends one request after the other: a prompt of random length and number of neighbors, streamed or not, with one
or more continuations. A third of the requests is abandoned after a random time. Every ten seconds a line shows the answers so
far and the server's resident memory. The benchmark fails at an answer other than 200, 429, 503 or 504 (a request that took
longer than `--request-seconds`), or if no request was answered. After the last request, no text is left in the batch.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.common import add_minutes, say, write
from benchmarks.speed.serving_generation import applications, prompts_of
from retro.server.settings import ServeSettings

_ALLOWED = {200, 429, 503, 504}
_HUNG_UP = 0
_EVERY = 10.0


def main() -> None:
    """Run the clients, and print and write what they received."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32, help="value of --max-num-seqs")
    parser.add_argument("--tokens", type=int, default=64, help="largest number of tokens of a text")
    parser.add_argument("--longest-prompt", type=int, default=200)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-serving-soak.json"))
    options = parser.parse_args()
    prompts = prompts_of(options.datastore, options.longest_prompt, 256)
    settings = ServeSettings(name="benchmark", max_num_seqs=options.batch)
    with applications(options.datastore, options.checkpoint, [settings]) as ((url,), process):
        answers, memory = asyncio.run(soaked(url, process, prompts, options))
        left = gauge(url, "retro_running"), gauge(url, "retro_waiting")
    quarter = max(1, len(memory) // 4)
    first, last = (max(part) / 2**20 for part in (memory[quarter : 2 * quarter] or memory, memory[-quarter:]))
    say(
        f"memory: at most {first:,.0f} MiB in the second quarter, {last:,.0f} MiB in the last; left in the batch: {left}"
    )
    results = {"answers": dict(answers), "memory_mib": [round(each / 2**20) for each in memory], "left": left}
    write(options.output, {"clients": options.clients, **results})
    if not answers[200] or not set(answers) <= _ALLOWED | {_HUNG_UP} or left != (0, 0):
        sys.exit(f"unexpected: {dict(answers)}, left in the batch {left}")


async def soaked(
    url: str, process: int, prompts: list[list[int]], options: argparse.Namespace
) -> tuple[Counter[int], list[int]]:
    """Run all clients; return the number of answers by status (0: hung up) and the resident memory over time, in bytes."""
    answers, memory, started = Counter[int](), list[int](), time.monotonic()
    until = started + 60 * options.minutes

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            body = request_of(rng, prompts, options)
            seconds = rng.uniform(0, 5) if rng.random() < 1 / 3 else None
            try:
                async with asyncio.timeout(seconds):
                    answers[await answered(url, body)] += 1
            except TimeoutError:
                answers[_HUNG_UP] += 1
            if answers[429] + answers[503]:
                await asyncio.sleep(rng.random())

    clients = [asyncio.create_task(client(number)) for number in range(options.clients)]
    while any(not each.done() for each in clients):
        await asyncio.wait(clients, timeout=_EVERY)
        memory.append(resident_bytes(process))
        say(
            f"{time.monotonic() - started:4.0f} of {until - started:.0f} s: {memory[-1] / 2**20:,.0f} MiB, "
            f"answers {dict(sorted(answers.items()))} (0: hung up)",
            file=sys.stderr,
        )
    await asyncio.gather(*clients)
    while gauge(url, "retro_running"):
        await asyncio.sleep(0.1)
    return answers, memory


def request_of(rng: random.Random, prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Return a random request."""
    return {
        "model": rng.choice(["benchmark", "benchmark", "benchmark:off"]),
        "prompt": rng.choice(prompts),
        "max_tokens": rng.randint(1, options.tokens),
        "temperature": rng.choice([0, 0.8]),
        "n": rng.choice([1, 1, 1, 3]),
        "k": rng.choice([1, 2, 4]),
        "stream": rng.random() < 0.5,
        "return_sources": rng.random() < 0.2,
    }


async def answered(url: str, body: dict[str, Any]) -> int:
    """Send a request and read the answer to its end; return its status."""
    address, content = urlsplit(url), json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json"
        writer.write(f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        answer = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    status = int(answer.split(b" ", 2)[1])
    if status == 200 and b'{"error"' in answer:  # the last event of a stream
        status = 504 if b'"timeout"' in answer else 500
    return status


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


def gauge(url: str, name: str) -> float:
    """Return a metric of generation."""
    with urllib.request.urlopen(url + "/metrics") as answer:
        text = answer.read().decode()
    return float(text.partition(f'\n{name}{{work="generate"}} ')[2].split()[0])


if __name__ == "__main__":
    main()
