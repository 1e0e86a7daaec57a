"""Speed of making batches in one process, relative to a bare copy. Cases alternate within one run.

    python -m benchmarks.speed.data_path DATASTORE [--rounds 5]

The floor is a bare copy of as many tokens from the memory-mapped files as the batches with retrieval ON (k = 2)
contain.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import add_minutes, budget, say, seconds, write
from retro.data.batches import TrainingData
from retro.data.settings import DataSettings

BATCH, LENGTH, BATCHES = 8, 512, 50

CASES: dict[str, dict[str, Any]] = {
    "OFF": {"k": 0},
    "k 2": {"k": 2},
    "k 2, random": {"k": 2, "neighbor_source": "random"},
    "k 2, max_overlap 0.5": {"k": 2, "max_overlap": 0.5},
    "k 10": {"k": 10},
}


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-data-path.json"))
    options = parser.parse_args()
    limit = budget(options)
    data = {
        name: TrainingData([options.datastore], DataSettings(sequence_length=LENGTH, **case), retrieval=True)
        for name, case in CASES.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in (*CASES, "floor")}
    for number in limit.rounds(options.rounds + 1):
        for name in rates:
            took = _copies(data["k 2"], number) if name == "floor" else batches(data[name], number)
            if number:  # the first round warms up
                rates[name].append(BATCHES * BATCH * LENGTH / took)
    rows = []
    for name, values in rates.items():
        rate = statistics.median(values)
        fraction = statistics.median(one / floor for one, floor in zip(values, rates["floor"], strict=True))
        rows.append(
            {"case": name, "tokens_per_second": rate, "sequences_per_second": rate / LENGTH, "of_floor": fraction}
        )
        say(f"{name:22} {rate:12,.0f} tokens/s  {rate / LENGTH:8,.0f} sequences/s  {fraction:6.3f} of the floor")
    write(options.output, {"rows": rows})


def batches(data: TrainingData, number: int) -> float:
    """Return the seconds for the batches of a round."""
    firsts = range(number * BATCHES * BATCH, (number + 1) * BATCHES * BATCH, BATCH)
    return seconds(lambda: [data.batch(range(first, first + BATCH)).tokens.size for first in firsts])


def _copies(data: TrainingData, number: int) -> float:
    """Return the seconds for copying as many random rows as the batches of a round: chunks, and two per neighbor."""
    train, rows = data.datastores[0].train, BATCH * data.num_chunks * (1 + 2 * 2)
    ids = np.random.default_rng(number).integers(0, train.num_chunks, (BATCHES, rows))
    return seconds(lambda: [train.tokens.gather(batch).astype(np.int64).size for batch in ids])


if __name__ == "__main__":
    main()
