"""Products of few rows with all weights of a model of SmolLM2-135M's size, by kernel, against reading the weights.

    python -m benchmarks.speed.products [--rows 1 2 4 9] [--rounds 9]

One thread. Kernels (`retro/inference/packed_kernels.py`) take turns; the table has the shortest times.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import add_minutes, budget, markdown, write
from indexing.machine import onednn_has_bfloat16
from pipelines.cli.results import Table
from retro.inference.packed_kernels import KERNELS, MANY_ROWS

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]
"""Outputs and inputs of queries, keys and values, of the attention's output, gate and up, down, and the output
layer."""


def multiplied(kernel: str, weights: list[torch.Tensor]) -> Callable[[int], None]:
    """Products of a number of rows with all weights."""
    packed = [(KERNELS[kernel](weight, None), weight.shape[1]) for weight in weights]

    @torch.inference_mode()
    def run(rows: int) -> None:
        inputs = {width: torch.ones(rows, width) for width in (576, 1536)}
        for product, width in packed:
            product(inputs[width])

    return run


def read(weights: list[torch.Tensor]) -> Callable[[int], None]:
    """Reads all weights in float16, whatever the number of rows."""
    numbers = [weight.half().numpy().view(np.uint64) for weight in weights]

    def run(_: int) -> None:
        for each in numbers:
            np.bitwise_xor.reduce(each, axis=None)

    return run


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 9])
    parser.add_argument("--rounds", type=int, default=9)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-products.json"))
    options = parser.parse_args()
    limit = budget(options)
    torch.set_num_threads(1)
    weights = [torch.randn(shape) / shape[1] ** 0.5 for shape in SHAPES]
    kernels = (*MANY_ROWS.ways, *(("bfloat16",) if onednn_has_bfloat16() else ()))
    ways = {kernel: multiplied(kernel, weights) for kernel in kernels} | {"reading float16": read(weights)}
    times: dict[tuple[str, int], list[float]] = {(way, rows): [] for rows in options.rows for way in ways}
    for _ in limit.rounds(1 + options.rounds):  # the first round creates kernels
        for way, rows in times:
            started = time.process_time()
            ways[way](rows)
            times[way, rows].append(1000 * (time.process_time() - started))
    best = {key: min(of_key[1:] or of_key) for key, of_key in times.items()}
    cells = [[str(rows), *(f"{best[way, rows]:.1f}" for way in ways)] for rows in options.rows]
    print(markdown(Table(["rows, milliseconds", *ways], cells)))
    write(options.output, {way: {rows: best[way, rows] for rows in options.rows} for way in ways})


if __name__ == "__main__":
    main()
