"""What copying from the whole datastore would take at any size: files, bytes, memory, machines and hours, counted and not measured.

    python -m benchmarks.speed.plan_scale --tokens 1e9 1e10 1e11 1e12

Orders, parts, ranges, tasks and blocks are those of the functions that plan the stages `suffixes` and `votes`. Sequential bytes are what the tasks
read and write of files that they go through; reads are 4 KB somewhere in the tokens, one for each prefix and stage, and fall away while the
tokens of a machine's tasks fit into its memory. CPU seconds a token are measured ones, see `--cpu`.

A last table simulates a datastore that grows by 1,000 generations of random sizes: the orders that a search looks into, and how often a token
was sorted.
"""

import argparse
import math
from dataclasses import dataclass

import numpy as np

from benchmarks.common import markdown, measured_on, say
from indexing.suffixes.order import (
    PART_TOKENS,
    RANGE_TOKENS,
    ROWS_OF_HEAD,
    RUN_BYTES,
    num_parts,
    planned_orders,
    position_bytes,
)
from indexing.suffixes.votes import vote_dtype
from indexing.suffixes.votes_build import FAN_OUT, num_ranges, ranges_of_task, shards_of_block
from pipelines.cli.results import Table

_FILES = 3  # of a task of `votes`: positions, votes and offsets, without manifests
_SPLITS = 3


@dataclass(frozen=True)
class Counters:
    """What the stages of a datastore do, by counters. Bytes are those of sequential reads and writes.

    Attributes:
        shards: of text.
        parts: of the order.
        tasks: of `votes`, each some ranges.
        blocks: of shards; 0 if shards collect their votes from the tasks.
        files: made, those that are removed again included.
        opened: files opened by tasks, the tokens of each shard once for each worker.
        read, written: bytes.
        scattered: reads of 4 KB.
        kept: bytes of orders and votes.
    """

    shards: int
    parts: int
    tasks: int
    blocks: int
    files: int
    opened: int
    read: int
    written: int
    scattered: int
    kept: int


def counters(tokens: int, shard_tokens: int, token_bytes: int, workers: int) -> Counters:
    """Count what it takes to make the order and the votes of a datastore in one build."""
    shards, parts = -(-tokens // shard_tokens), num_parts(tokens)
    tasks = -(-num_ranges(tokens) // ranges_of_task(num_ranges(tokens)))
    together = shards_of_block(shards)
    blocks = -(-shards // together) if together > 1 else 0
    position = position_bytes(tokens)
    head, vote = 8 / ROWS_OF_HEAD, vote_dtype(np.dtype(f"u{token_bytes}")).itemsize
    prefixes = math.ceil(tokens * (position + head))
    found = tokens * (4 + vote) + 8 * tasks * _SPLITS * shards  # positions, votes and offsets of all tasks
    collected = tasks * _FILES * (blocks or shards)
    return Counters(
        shards=shards,
        parts=parts,
        tasks=tasks,
        blocks=blocks,
        files=2 * shards + 2 * parts + 4 * shards + _FILES * (tasks + blocks) + _SPLITS * shards,
        opened=3 * shards * workers * 2 + 2 * shards * parts + collected + (blocks and _FILES * shards),
        read=tokens * token_bytes + prefixes * 2 + (2 if blocks else 1) * found,
        written=prefixes * 2 + (2 if blocks else 1) * found + tokens * vote,
        scattered=2 * tokens,
        kept=prefixes + tokens * vote,
    )


def table(options: argparse.Namespace) -> Table:
    """A row for each size."""
    header = ["tokens", "shards", "parts", "tasks", "blocks", "files", "opened", "read", "written", "kept", "CPU hours"]
    rows = []
    for tokens in map(int, options.tokens):
        each = counters(tokens, int(options.shard_tokens), options.token_bytes, options.workers)
        hours = tokens * sum(options.cpu) * 1e-6 / 3600
        disk = (each.read + each.written) / options.disk / options.machines / 3600
        scattered = each.scattered / options.reads / options.machines / 3600
        counts = [each.shards, each.parts, each.tasks, each.blocks, each.files, each.opened]
        sizes = [f"{size / 1e9:,.0f} GB" for size in (each.read, each.written, each.kept)]
        rows.append([f"{tokens:.0e}", *(f"{count:,}" for count in counts), *sizes, f"{hours:,.1f}"])
        say(
            f"{tokens:.0e} tokens on {options.machines:,} machines: {hours / options.machines / options.cores:,.2f} h of {options.cores} cores, "
            f"{disk:,.2f} h of disks, {scattered:,.2f} h of scattered reads if the tokens are not in memory"
        )
    return Table(header, rows)


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
        "--cpu", type=float, nargs=2, default=[1.0, 2.8], help="CPU microseconds a token: suffixes and votes"
    )
    parser.add_argument("--machines", type=int, default=32)
    parser.add_argument("--cores", type=int, default=64, help="of a machine")
    parser.add_argument("--workers", type=int, default=2048, help="processes that make ranges and parts")
    parser.add_argument("--disk", type=float, default=2e9, help="bytes a second that a machine reads or writes")
    parser.add_argument("--reads", type=float, default=5e5, help="reads of 4 KB a second of a machine")
    options = parser.parse_args()
    say(f"parts of {PART_TOKENS:,} prefixes, ranges of {RANGE_TOKENS:,}, at most {FAN_OUT} blocks of shards")
    say(f"a run is sorted in {RUN_BYTES * options.shard_tokens / 1e9:.2f} GB of memory")
    say(markdown(table(options)))
    say(markdown(grown(1000)))
    say(", ".join(f"{name} {value}" for name, value in measured_on().items()))


if __name__ == "__main__":
    main()
