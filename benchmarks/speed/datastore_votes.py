"""Cost of copying from the whole datastore: the stages `suffixes` and `votes`, and votes for one token while a text is generated.

    python -m benchmarks.speed.datastore_votes CONFIG ... [--texts 20] [--built]

Builds both stages of each datastore again (its chunks must exist) and prints CPU seconds, bytes and rates by number of tokens, and
the time of `SuffixIndex.votes` for one token of held-out texts, as in generation. Times are CPU times of one process.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np

from benchmarks.common import add_minutes, budget, markdown, measured_on, say
from indexing.store.datastore import Datastore
from indexing.suffixes.search import SuffixIndex
from pipelines.cli import main as retro
from pipelines.config import Config
from pipelines.results import Table
from pipelines.settings.load import load

_TOKENS = 200
"""Tokens of a text that are measured one by one."""


def stage_seconds(config: str, stage: str) -> float:
    """CPU seconds of building a stage again."""
    began = time.process_time()
    assert retro(["index", config, "--stage", stage, "--rebuild"]) == 0
    return time.process_time() - began


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.npy"))


def microseconds(datastore: Datastore, texts: int) -> np.ndarray:
    """CPU microseconds of the votes for single tokens of held-out texts, quantiles 50% and 90%."""
    split, index, times = datastore.valid, SuffixIndex.open(datastore.folder), []
    for document in np.random.default_rng(0).permutation(split.num_documents)[:texts].tolist():
        first, stop = split.chunk_range(document)
        real = np.arange(split.chunk_length) < split.lengths.read(first, stop)[:, None]
        text = split.tokens.read(first, stop)[real][:_TOKENS]
        for end in range(1, len(text) + 1):
            began = time.process_time_ns()
            index.votes(text[:end], end - 1)
            times.append(time.process_time_ns() - began)
    return np.quantile(times, [0.5, 0.9]) / 1000


def main() -> None:
    """Measure datastores in the order of their sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--texts", type=int, default=20, help="held-out texts whose tokens are measured one by one")
    parser.add_argument(
        "--built", action="store_true", help="keep the stages as they are, and measure only the time of votes"
    )
    add_minutes(parser)
    options = parser.parse_args()
    stages, columns = () if options.built else ("suffixes", "votes"), ("CPU s", "tokens/s", "exponent", "bytes/token")
    limit, rows, known = budget(options), [], dict[str, tuple[int, float]]()
    for config in limit.each(options.configs, "datastore"):
        datastore = Datastore.open(load(Config, config, [], verb="index").datastore)
        tokens = int(sum(datastore.manifest["splits"]["train"]["tokens"]))
        cells = [f"{tokens:,}"]
        for stage in stages:
            seconds = stage_seconds(config, stage)
            before = known.get(stage)
            exponent = f"{math.log(seconds / before[1]) / math.log(tokens / before[0]):.2f}" if before else ""
            known[stage] = tokens, seconds
            size = bytes_of(datastore.folder / stage) / tokens
            cells += [f"{seconds:.1f}", f"{tokens / seconds:,.0f}", exponent, f"{size:.1f}"]
        quantiles = microseconds(Datastore.open(datastore.folder), options.texts)
        rows.append([*cells, *(f"{value:.0f}" for value in quantiles)])
    header = [
        "tokens",
        *(f"{stage}: {name}" for stage in stages for name in columns),
        "votes of one token: p50, µs",
        "p90, µs",
    ]
    say("\n" + markdown(Table(header, rows)))
    say(measured_on())


if __name__ == "__main__":
    main()
