"""Shared code of the benchmarks: time budget, timing, precision, and results with the machine and the commit."""

import argparse
import json
import math
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

from indexing.machine import onednn_has_bfloat16, processor_name, resolve
from indexing.measured import fastest_products
from indexing.store.errors import InputError
from pipelines.cli.results import Table
from retro.device import Placement, choose_placement

MINUTES = 6.0
"""Default of `--minutes`. It leaves room for prediction errors: a benchmark ends within ten minutes."""

T = TypeVar("T")
say = partial(print, flush=True)


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def memory_bytes(kind: str, process: str = "self") -> int:
    """Memory of a process on Linux: `VmRSS`, `VmHWM` (its peak), `RssAnon` (without mapped files); 0 for a process that
    has none."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


class Budget:
    """A time limit that starts now.

    Args:
        seconds: length of the limit.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.started = seconds, time.perf_counter()

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self.seconds - (time.perf_counter() - self.started)

    def share(self, parts: float) -> "Budget":
        """Return a budget of 1 / `parts` of the remaining time."""
        return Budget(self.left / parts)

    def rounds(self, count: int) -> Iterator[int]:
        """Yield the numbers 0 to `count` - 1, like `each`."""
        return self.each(range(count), "round")

    def each(self, items: Sequence[T], name: str, cost: Callable[[T], float] = lambda _: 1.0) -> Iterator[T]:
        """Yield and announce items until the next one does not fit into the remaining time. The first one always runs.

        Args:
            items: rounds, sizes or cases.
            name: noun for an item, for the lines on standard error.
            cost: relative cost of an item. The time of one item predicts the time of the next.
        """
        started, rate = time.perf_counter(), 0.0
        for number, item in enumerate(items):
            if number and rate * cost(item) > self.left:
                needed = f"the next {name} takes about {rate * cost(item):.0f} s"
                say(
                    f"stopped after {number} of {len(items)} {name}s: {needed}, and {max(0, self.left):.0f} s remain. "
                    "--minutes sets the limit; 0 removes it.",
                    file=sys.stderr,
                )
                return
            ahead = min(self.left, rate * sum(map(cost, items[number:])))
            so_far = (
                f"{time.perf_counter() - started:.0f} s so far, about {ahead:.0f} s remain" if number else "started"
            )
            say(f"{name} {number + 1} of {len(items)}: {so_far}", file=sys.stderr)
            began = time.perf_counter()
            yield item
            rate = (time.perf_counter() - began) / cost(item)


def add_minutes(parser: argparse.ArgumentParser, default: float = MINUTES) -> None:
    """Add the option `--minutes` for `budget`."""
    about = "time limit in minutes; the benchmark stops before a step that would exceed it; 0: no limit"
    parser.add_argument("--minutes", type=float, default=default, help=f"{about} (default: {default:g})")


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Add the option `--cases`."""
    parser.add_argument("--cases", nargs="*", default=[], help="run only cases whose name contains one of these")


def model_parser(about: str) -> argparse.ArgumentParser:
    """A parser for measurements of a trained model: the model or the word `summary`, a folder for the figures,
    `--minutes`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the model, or the word summary")
    parser.add_argument("--output", type=Path, required=True, help="folder of the figures")
    add_minutes(parser)
    return parser


def budget(options: argparse.Namespace) -> Budget:
    """Start the budget of `--minutes`."""
    return Budget(60 * options.minutes or math.inf)


def corpora_parser(about: str | None, tokens: int) -> argparse.ArgumentParser:
    """A parser for measurements of models that are trained on some corpora, with a default for the held-out tokens."""
    parser = model_parser(about or "")
    parser.add_argument("corpora", nargs="*", type=Path, help="more files of text")
    parser.add_argument("--preset", default="tiny", help="of the model")
    parser.add_argument("--steps", type=int, default=240, help="of 2,048 tokens")
    parser.add_argument("--tokens", type=int, default=tokens, help="held-out tokens")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--precision", default="auto", help="of training and scoring, as `train.precision`")
    return parser


def measure_corpora(
    parser: argparse.ArgumentParser, measure: Callable[[Path, argparse.Namespace, Budget], dict[str, Any]], kind: str
) -> Path:
    """Measure the corpora of the command line, and write the figures; returns their folder. `kind` is a part of the
    names of files."""
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    limit = budget(options)
    corpora = [Path(options.base), *options.corpora] if options.base != "summary" else []
    if len({corpus.name for corpus in corpora}) < len(corpora):
        parser.error("two corpora have the same file name, which names their results; give one of them another name")
    for corpus in corpora:
        stored = options.output / f"{corpus.name.partition('.')[0]}-{kind}-{options.preset}-{options.steps}.json"
        write(stored, measure(corpus, options, limit))
    return Path(options.output)


def agreed(items: Iterator[int]) -> Iterator[int]:
    """Yield the items of the first process in all processes, so that they stop together."""
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
    """Return the median time of each function over `count` alternating rounds, after a warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in limit.rounds(count + 1):
        for name, call in work.items():
            times[name].append(seconds(call))
    return {name: statistics.median(values[1:] or values) for name, values in times.items()}


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add the option `--precision` for `placement`."""
    choices = ("auto", "float32", "bfloat16")
    parser.add_argument(
        "--precision",
        choices=choices,
        default="auto",
        help="auto: bfloat16 if the device is faster with it, else float32",
    )


def placement(precision: Any = "auto", device: str = "auto") -> Placement:
    """Choose device and precision as evaluation does."""
    return choose_placement(device, precision)


def training_placement(precision: Any = "auto", device: str = "auto") -> Placement:
    """Choose device and precision as training does."""
    chosen = fastest_products("training", resolve(device)) if precision == "auto" else precision
    return choose_placement(device, chosen)


def percent(change: Sequence[float]) -> str:
    """A change in percent with its interval, as `compare` returns them."""
    return "{:+.1f}% ({:+.1f} to {:+.1f})".format(*change)


def markdown(table: Table) -> str:
    """Return a table as Markdown."""
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write(file: Path, results: dict[str, Any]) -> None:
    """Write results as JSON with the machine and the commit, and print these."""
    environment = measured_on()
    file.write_text(json.dumps({**environment, **results}, indent=1))
    say(f"{file}: " + ", ".join(f"{name} {value}" for name, value in environment.items()))


def check_same_options(file: Path, stored: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise InputError if the file of a stopped run has other options than those given."""
    for name, value in given.items():
        if stored.get(name) != value:
            raise InputError(
                f"{file}: {name} was {stored.get(name)!r}, and is {value!r} now. Give the same options to resume, or another --output."
            )


def measured_on() -> dict[str, Any]:
    """Return the machine, the number of threads, the version of PyTorch and the commit."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    threads = torch.get_num_threads()
    return {"machine": machine(), "threads": threads, "torch": torch.__version__, "commit": commit}


def machine() -> str:
    """Return the name of the GPU, or of the processor with its instructions for matrix products."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    instructions = torch.backends.cpu.get_cpu_capability() + (" with bfloat16" if onednn_has_bfloat16() else "")
    return f"{processor_name()}, {instructions}"
