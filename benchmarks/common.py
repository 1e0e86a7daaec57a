"""What every benchmark needs: the time of a call, rounds with a limit, a fast precision, results that name machine and commit."""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from indexing.device import has_bfloat16
from retro.device import Placement, choose_placement

MOST_SECONDS = 300
"""Of the rounds of a benchmark, unless one round alone takes longer. With its preparation it then ends within ten minutes."""

say = partial(print, flush=True)


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def rounds(count: int, most_seconds: float = MOST_SECONDS) -> Iterator[int]:
    """Numbers from 0 to `count` - 1, each announced. Ends sooner where one more round would take longer than is left."""
    started = time.perf_counter()
    for number in range(count):
        took = time.perf_counter() - started
        if number and took * (number + 1) / number > most_seconds:
            say(
                f"ended after {number} of {count} rounds: one more would make it more than {most_seconds} s",
                file=sys.stderr,
            )
            return
        say(f"round {number + 1} of {count}, after {took:.0f} s", file=sys.stderr)
        yield number


def median_seconds(work: dict[str, Callable[[], object]], count: int) -> dict[str, float]:
    """Of every piece of work, alternating, over `count` rounds; a round before the first warms up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in rounds(count + 1):
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
