"""What copying from the whole datastore would take at any size: files, bytes, memory, machines and hours, counted and
not measured.

    python -m benchmarks.speed.plan_scale --tokens 1e9 1e10 1e11 1e12

Runs, levels of merges, orders, parts, ranges, tasks and blocks are those of the functions that plan the stages
`suffixes` and `votes`. Sequential bytes are what the tasks read and write of files that they go through; a text that
stays in memory is read once by each machine. Without tokens in the runs (`--carry no`) a larger text would be read at
random: 4 KB for each prefix and stage. CPU seconds a token are measured ones, see `--cpu`.

`--ties DATASTORE` measures how many prefixes of a real text share their last 4 to 64 tokens with a neighbor in the
order. A run that carries fewer than 64 tokens would leave those to reads at random.

A last table simulates a datastore that grows by 1,000 generations of random sizes: the orders that a search looks into,
and how often a token was sorted.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.common import markdown, measured_on, say
from indexing.store.datastore import Datastore
from indexing.suffixes.order import (
    ALL_HEADS,
    FAN_IN,
    LONGEST,
    PART_TOKENS,
    ROWS_OF_HEAD,
    Prefixes,
    SortedRun,
    blocks,
    carries_tokens,
    num_parts,
    planned_orders,
    position_bytes,
    runs_together,
    stored_orders,
)
from indexing.suffixes.order_build import RANGE_TOKENS, RUN_BYTES
from indexing.suffixes.rows import FAN_OUT as FAN_OUT_OF_ROWS
from indexing.suffixes.texts import Texts
from indexing.suffixes.votes import vote_dtype
from indexing.suffixes.votes_build import FAN_OUT, num_ranges, ranges_of_task, shards_of_block
from pipelines.cli.results import Table

_FILES = 3  # of a task of `votes`: positions, votes and offsets, without manifests
_SPLITS = 3
_STORED = 9  # bytes of the compressed votes of a token, measured (docs/results/scale.md)
_MERGED, _TOKENS = 60, 65
"""Bytes of a prefix in a merge, see `order_build.write_part`, and more for each byte of a token."""
_VOTES = 1.3e9  # bytes of a process that finds votes, measured with 311 million tokens (docs/results/scale.md)


@dataclass(frozen=True)
class Counters:
    """What the stages of a datastore do, by counters. Bytes are those of sequential reads and writes.

    Attributes:
        shards: of text.
        levels: of merges of runs into longer ones.
        parts: of the order.
        tasks: of `votes`, each some ranges.
        files: made, those that are removed again included.
        opened: files opened by tasks, the tokens of each shard once for each worker.
        maps: files that a worker of `votes` has opened at a time, which are memory-mapped.
        read, written: bytes.
        carried: how often each token is written with those before it.
        temporary: bytes of runs, which are kept until the order is done.
        scattered: reads of 4 KB.
        kept: bytes of orders and votes.
    """

    shards: int
    levels: int
    parts: int
    tasks: int
    files: int
    opened: int
    maps: int
    read: int
    written: int
    carried: int
    temporary: int
    scattered: int
    kept: int


def counters(tokens: int, options: argparse.Namespace) -> Counters:
    """Count what it takes to make the order and the votes of a datastore in one build."""
    shard_tokens, text = int(options.shard_tokens), tokens * options.token_bytes
    shards, parts = -(-tokens // shard_tokens), num_parts(tokens)
    carried = options.carry != "no" and carries_tokens(text, options.memory, math.inf)
    levels = list(merges(shards, tokens, shard_tokens))
    tasks = -(-num_ranges(tokens) // ranges_of_task(num_ranges(tokens)))
    together = shards_of_block(shards)
    blocks = -(-shards // together) if together > 1 else 0
    vote = vote_dtype(np.dtype(f"u{options.token_bytes}")).itemsize
    prefixes = math.ceil(tokens * (position_bytes(tokens) + 8 / ROWS_OF_HEAD))
    run = prefixes + carried * tokens * (1 + LONGEST) * options.token_bytes
    rows = 2 * (1 + options.token_bytes // 2) * FAN_OUT_OF_ROWS / (FAN_OUT_OF_ROWS - 1)
    order = prefixes + math.ceil(tokens * rows)
    found = tokens * (4 + vote) + 8 * tasks * _SPLITS * shards  # positions, votes and offsets of all tasks
    collected = tasks * _FILES * (blocks or shards)
    longer = levels if carried else levels[:-1]  # otherwise the last level is the order
    in_memory = 0 if carries_tokens(text, options.memory, math.inf) else options.machines * text
    # A worker opens the text of a shard at most once for each stage: tokens, lengths and offsets; for `votes` also
    # held-out runs, with tokens.
    voters = min(options.workers, tasks)
    sorters = 1 + (0 if carried else min(options.workers, parts))
    maps = 3 * _SPLITS * shards + (2 + carried) * parts
    return Counters(
        shards=shards,
        levels=len(levels) - 1,
        parts=parts,
        tasks=tasks,
        files=(2 + carried) * (shards + sum(made for made, _ in longer))
        + 3 * parts
        + 4 * shards
        + _FILES * (tasks + blocks)
        + 2 * _SPLITS * shards,
        opened=3 * shards * sorters
        + maps * voters
        + (2 + carried) * sum(opened for _, opened in levels)
        + collected
        + (blocks and _FILES * shards),
        maps=maps,
        read=text + in_memory + run * len(levels) + (run if carried else 0) + prefixes + (2 if blocks else 1) * found,
        written=run * (1 + len(longer)) + order + (2 if blocks else 1) * found + tokens * _STORED,
        carried=carried * (1 + len(longer)),
        temporary=run * (1 + len(longer)),
        scattered=0 if carried or in_memory else 3 * tokens,
        kept=order + tokens * _STORED,
    )


def merges(shards: int, tokens: int, shard_tokens: int) -> Iterator[tuple[int, int]]:
    """The parts that each level of merges makes, and the parts of runs that it opens. Heads are spread evenly."""
    runs = [whole_run(range(shard, shard + 1), 1) for shard in range(shards)]
    while (together := runs_together(len(runs))) > 1:
        groups = [runs[first : first + together] for first in range(0, len(runs), together)]
        longer = [merged(group, min(tokens, shard_tokens * sum(len(run.shards) for run in group))) for group in groups]
        yield sum(len(run.folders) for run, _ in longer), sum(opened for _, opened in longer)
        runs = [run for run, _ in longer]
    run, opened = merged(runs, tokens)  # the order, or a run from which it is copied, and which `votes` read
    yield len(run.folders), opened


def merged(runs: Sequence[SortedRun], tokens: int) -> tuple[SortedRun, int]:
    """The run that some runs with this many tokens are merged into, and how many of their parts are opened."""
    run = whole_run(range(runs[0].shards.start, runs[-1].shards.stop), num_parts(tokens))
    return run, sum(len(each.between(first, stop)) for first, stop in pairwise(run.borders) for each in runs)


def whole_run(shards: range, parts: int) -> SortedRun:
    """A run of some shards in parts of the same size."""
    borders = [ALL_HEADS * number // parts for number in range(parts + 1)]
    return SortedRun(shards, [Path(str(number)) for number in range(parts)], borders)


def table(options: argparse.Namespace) -> Table:
    """A row for each size."""
    header = [
        "tokens",
        "shards",
        "levels",
        "parts",
        "tasks",
        "files",
        "opened",
        "maps",
        "read",
        "written",
        "temporary",
        "kept",
    ]
    rows = []
    for tokens in map(int, options.tokens):
        each = counters(tokens, options)
        suffixes, votes, carried = options.cpu
        hours = tokens * (suffixes + votes + carried * each.carried) * 1e-6 / 3600
        disk, store = (
            (each.read + each.written) / rate / options.machines / 3600 for rate in (options.disk, options.store)
        )
        scattered = each.scattered / options.reads / options.machines / 3600
        counts = [each.shards, each.levels, each.parts, each.tasks, each.files, each.opened, each.maps]
        sizes = [f"{size / 1e9:,.0f} GB" for size in (each.read, each.written, each.temporary, each.kept)]
        times = [f"{hours:,.1f}", f"{disk:,.2f}", f"{store:,.2f}", f"{scattered:,.2f}"]
        rows.append([f"{tokens:.0e}", *(f"{count:,}" for count in counts), *sizes, *times])
    return Table([*header, "CPU hours", "hours of disks", "of an object store", "of scattered reads"], rows)


def ties(folder: Path) -> Table:
    """The share of prefixes in the orders of a datastore that have the same last tokens as the one before or after
    them."""
    split = Datastore.open(folder).train
    texts, lengths, total = Texts(split), (4, 8, 16, 32, LONGEST), 0
    tied = np.zeros(len(lengths), np.int64)
    for prefixes in (Prefixes(texts, parts) for _, parts in stored_orders(split)):
        for rows in blocks(len(prefixes), RANGE_TOKENS):
            windows = prefixes.tokens(rows.start, min(rows.stop, len(prefixes)))[:, 1:]
            equal = np.logical_and.accumulate((windows[1:] == windows[:-1]) & (windows[1:] > 0), axis=1)
            for place, length in enumerate(lengths):
                same = equal[:, length - 1]
                tied[place] += np.count_nonzero(np.append(same, False) | np.append(False, same))
        total += len(prefixes)
    return Table(["tokens", *map(str, lengths)], [[f"{total:,}", *(f"{count / total:.0%}" for count in tied)]])


def grown(generations: int, seed: int = 0) -> Table:
    """Orders and sorting of a datastore that grows by generations whose sizes differ by a factor of up to 1,000."""
    tokens = (1e9 * np.random.default_rng(seed).pareto(1, generations).clip(0.001, 1)).astype(int).tolist()
    before, again, most, rows = list[range](), 0, 0, []
    for count in range(1, generations + 1):
        orders = planned_orders([range(shard, shard + 1) for shard in range(count)], tokens)
        again += sum(sum(tokens[shards.start : shards.stop]) for shards in orders if shards not in before)
        before, most = orders, max(most, len(orders))
        if count in (1, 10, 100, generations):
            size = sum(tokens[:count])
            rows.append([f"{count:,}", f"{size / 1e9:,.1f}", f"{len(orders)}", f"{most}", f"{again / size:.1f}"])
    return Table(["generations", "10^9 tokens", "orders", "most so far", "times that a token was sorted"], rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e9, 1e10, 1e11, 1e12])
    parser.add_argument("--shard-tokens", type=float, default=15e6, help="of a shard of 64 MiB of text")
    parser.add_argument("--token-bytes", type=int, choices=(2, 4), default=2)
    parser.add_argument(
        "--cpu",
        type=float,
        nargs=3,
        default=[1.2, 2.8, 0.5],
        help="CPU microseconds a token: suffixes, votes, and each time that a run with tokens is written",
    )
    parser.add_argument("--machines", type=int, default=32)
    parser.add_argument("--cores", type=int, default=64, help="of a machine")
    parser.add_argument("--workers", type=int, default=2048, help="processes that make ranges and parts")
    parser.add_argument("--disk", type=float, default=2e9, help="bytes a second that a machine reads or writes")
    parser.add_argument(
        "--store",
        type=float,
        default=1.25e9,
        help="bytes a second between a machine and an object store (S3): 10 Gbit/s",
    )
    parser.add_argument("--memory", type=float, default=5e11, help="bytes of a machine")
    parser.add_argument("--carry", choices=("auto", "no"), default="auto", help="no: runs never carry tokens")
    parser.add_argument("--reads", type=float, default=5e5, help="reads of 4 KB a second of a machine")
    parser.add_argument("--ties", type=Path, help="a datastore with the stage suffixes")
    options = parser.parse_args()
    if options.ties:
        say(markdown(ties(options.ties)))
    say(
        f"parts of {PART_TOKENS:,} prefixes, ranges of {RANGE_TOKENS:,}, at most {FAN_IN} runs and {FAN_OUT} blocks of shards"
    )
    merge = RANGE_TOKENS * (_MERGED + 2 * _TOKENS * options.token_bytes)  # read, and in order
    say(
        f"memory of a task: a run {RUN_BYTES * options.shard_tokens / 1e9:.2f} GB, a merge {merge / 1e9:.2f} GB, "
        f"votes {_VOTES / 1e9:.1f} GB (measured)"
    )
    say(markdown(table(options)))
    say(markdown(grown(1000)))
    say(", ".join(f"{name} {value}" for name, value in measured_on().items()))


if __name__ == "__main__":
    main()
