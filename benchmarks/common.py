"""What every benchmark needs: a budget of minutes, the time of a call, a fast precision, results that name machine and commit."""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from indexing.device import has_bfloat16
from retro.device import Placement, choose_placement

MINUTES = 6.0
"""The default of `--minutes`. Predictions err and machines slow down: a benchmark still ends within ten minutes."""

T = TypeVar("T")
say = partial(print, flush=True)


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Budget:
    """The time that a benchmark may take, from now on.

    Args:
        seconds: of all that the benchmark does.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.started = seconds, time.perf_counter()

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.seconds - (time.perf_counter() - self.started)

    def share(self, parts: float) -> "Budget":
        """One of `parts` equal shares of the time that is left."""
        return Budget(self.left / parts)

    def rounds(self, count: int) -> Iterator[int]:
        """Numbers from 0 to `count` - 1: as `each`."""
        return self.each(range(count), "round")

    def each(self, items: Sequence[T], name: str, cost: Callable[[T], float] = lambda _: 1.0) -> Iterator[T]:
        """Yield and announce items until the next one does not fit into the time that is left. The first one always runs.

        Args:
            items: rounds, sizes or cases.
            name: of an item, for the lines on standard error.
            cost: of an item in any unit. The time of the last item predicts that of the next one.
        """
        started, rate = time.perf_counter(), 0.0
        for number, item in enumerate(items):
            if number and rate * cost(item) > self.left:
                needed = f"the next {name} takes about {rate * cost(item):.0f} s"
                say(
                    f"stopped after {number} of {len(items)} {name}s: {needed} and {max(0, self.left):.0f} s are left. "
                    "--minutes sets the limit, 0 removes it.",
                    file=sys.stderr,
                )
                return
            ahead = min(self.left, rate * sum(map(cost, items[number:])))
            so_far = f"{time.perf_counter() - started:.0f} s so far, about {ahead:.0f} s left" if number else "started"
            say(f"{name} {number + 1} of {len(items)}: {so_far}", file=sys.stderr)
            began = time.perf_counter()
            yield item
            rate = (time.perf_counter() - began) / cost(item)


def add_minutes(parser: argparse.ArgumentParser) -> None:
    """Add the option `--minutes`, for `budget`."""
    about = "of the whole benchmark: it stops before what would not fit; 0: no limit"
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"{about} (default: {MINUTES:g})")


def budget(options: argparse.Namespace) -> Budget:
    """Start the budget that `--minutes` asks for."""
    return Budget(60 * options.minutes or math.inf)


def agreed(items: Iterator[int]) -> Iterator[int]:
    """Items of the first process, in all processes of a group: they stop together. Without a group, the items."""
    if not dist.is_initialized():
        yield from items
        return
    while True:
        item = [next(items, None) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(item)
        if item[0] is None:
            return
        yield item[0]


def median_seconds(work: dict[str, Callable[[], object]], count: int, limit: Budget) -> dict[str, float]:
    """Of every piece of work, alternating, over `count` rounds; a round before the first warms up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in limit.rounds(count + 1):
        for name, call in work.items():
            times[name].append(seconds(call))
    return {name: statistics.median(values[1:] or values) for name, values in times.items()}


def add_precision(parser: argparse.ArgumentParser) -> None:
    """The option `--precision`, for `placement`."""
    choices = ("auto", "float32", "bfloat16")
    parser.add_argument("--precision", choices=choices, default="auto", help="auto: what this machine multiplies fast")


def placement(precision: Any = "auto", device: str = "auto") -> Placement:
    """Device and precision of models: `auto` is bfloat16 where the hardware multiplies it, else float32, as in training."""
    return choose_placement(device, precision)


def write(file: Path, results: dict[str, Any]) -> None:
    """Results as JSON, with what they were measured on, which is also printed."""
    facts = measured_on()
    file.write_text(json.dumps({**facts, **results}, indent=1))
    say(f"{file}: " + ", ".join(f"{name} {value}" for name, value in facts.items()))


def measured_on() -> dict[str, Any]:
    """The machine and the code."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    threads = torch.get_num_threads()
    return {"machine": machine(), "threads": threads, "torch": torch.__version__, "commit": commit}


def machine() -> str:
    """The GPU's name, or else the processor's and its instructions for matrix products."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    instructions = torch.backends.cpu.get_cpu_capability() + (" with bfloat16" if has_bfloat16("cpu") else "")
    return f"{names[0] if names else platform.processor()}, {instructions}"
