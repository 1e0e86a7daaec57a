"""Cost of copying from the whole datastore: the stages `suffixes` and `votes`, and votes for one token while a text is generated.

    python -m benchmarks.speed.datastore_votes CONFIG ... [--texts 20] [--built] [--model CHECKPOINT]

Builds both stages of each datastore again (its chunks must exist) and prints CPU seconds, bytes and rates by number of tokens, and
the time of `SuffixIndex.votes` for one token of held-out texts, as in generation: CPU time with the files in the page cache, and
elapsed time after all their pages were dropped from it. Then, on the first datastore, it compares a training step of the preset
`small`, and with `--model` generation, without and with copying from the datastore, in alternating rounds. All other times are CPU
times of one process.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.common import add_minutes, budget, markdown, measured_on, placement, say
from indexing.store.datastore import Datastore
from indexing.suffixes.build import stored_groups
from indexing.suffixes.search import SuffixIndex
from pipelines.cli import main as retro
from pipelines.config import Config
from pipelines.results import Table
from pipelines.settings.load import load
from retro.data.batches import TrainingData
from retro.data.loader import as_tensors
from retro.data.settings import DataSettings
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings
from retro.model.datastore_fit import fit_to
from retro.model.retro import Retro
from retro.model.settings import ModelSettings, updated
from retro.parallel.forward_backward import WholeModel
from retro.parallel.process_mesh import Processes
from retro.parallel.settings import ALONE
from retro.training.optimizer import make_optimizer
from retro.training.settings import TrainSettings
from retro.training.step import OptimizerStep

_TOKENS = 200
"""Tokens of a text that are measured one by one."""


def stage_seconds(config: str, stage: str) -> float:
    """CPU seconds of building a stage again."""
    began = time.process_time()
    assert retro(["index", config, "--stage", stage, "--rebuild"]) == 0
    return time.process_time() - began


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.npy"))


def held_out_texts(datastore: Datastore, texts: int) -> Iterator[np.ndarray]:
    """The first tokens of held-out documents in a fixed random order, [t] each."""
    split = datastore.valid
    for document in np.random.default_rng(0).permutation(split.num_documents)[:texts].tolist():
        first, stop = split.chunk_range(document)
        real = np.arange(split.chunk_length) < split.lengths.read(first, stop)[:, None]
        yield split.tokens.read(first, stop)[real][:_TOKENS]


def microseconds(datastore: Datastore, texts: int) -> np.ndarray:
    """CPU microseconds of the votes for single tokens of held-out texts, quantiles 50% and 90%."""
    index, times = SuffixIndex.open(datastore.folder), []
    for text in held_out_texts(datastore, texts):
        for end in range(1, len(text) + 1):
            began = time.process_time_ns()
            index.votes(text[:end], end - 1)
            times.append(time.process_time_ns() - began)
    return np.quantile(times, [0.5, 0.9]) / 1000


def cold_milliseconds(datastore: Datastore, texts: int) -> np.ndarray:
    """Milliseconds of the votes for the last token of held-out texts, read from the disk, quantiles 50% and 90%."""
    times = []
    for text in held_out_texts(datastore, texts):
        for file in datastore.folder.rglob("*.npy"):
            with open(file, "rb") as opened:  # pages that nothing maps any more leave the page cache
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        index = SuffixIndex.open(datastore.folder)
        began = time.perf_counter_ns()
        index.votes(text, len(text) - 1)
        times.append(time.perf_counter_ns() - began)
        del index
    return np.quantile(times, [0.5, 0.9]) / 1e6


def step_seconds(datastore: Datastore, rounds: int) -> dict[str, float]:
    """Median CPU seconds of a training step without and with votes: 4 sequences of 512 tokens, 2 neighbors."""
    place = placement()
    data = TrainingData([datastore.folder], DataSettings(k=2), retrieval=True, votes=True)
    inputs, steps = place.put(as_tensors(data.batch(range(4)))), {}
    for name, copies in (("without", False), ("with", True)):
        settings = updated(ModelSettings(preset="small"), {"copy_head.datastore": copies})
        model = Retro(fit_to(settings, datastore.manifest, datastore.folder))
        passes = WholeModel(model, Processes(ALONE, place.device), place)
        optimizer = make_optimizer([model], TrainSettings(lr=1e-4))
        step = OptimizerStep(passes, optimizer, passes.processes, place, TrainSettings(lr=1e-4, lr_schedule="constant"))
        steps[name] = partial(step, 100, [inputs if copies else inputs._replace(votes=None)])
    return medians(steps, rounds)


def generation_seconds(checkpoint: Path, datastore: Datastore, rounds: int) -> dict[str, float]:
    """Median CPU seconds for 96 greedy tokens without drafts after 200 held-out tokens, without and with the datastore; k = 4."""
    model = LanguageModel.open(checkpoint, datastore.folder)
    first, _ = datastore.valid.chunk_range(0)
    prompt = datastore.valid.tokens.read(first, first + 8).reshape(-1)[:_TOKENS].astype(np.int64)
    settings = GenerationSettings(max_tokens=96, temperature=0.0, drafts=False)
    models = {"without": replace(model, suffixes=None), "with": model}
    return medians({name: partial(_generate, one, prompt, settings) for name, one in models.items()}, rounds)


def _generate(model: LanguageModel, prompt: np.ndarray, settings: GenerationSettings) -> None:
    for _ in model.generate([prompt], settings, k=4):
        pass


def medians(work: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each function over alternating rounds, after one for warming up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds + 1):
        for name, call in work.items():
            began = time.process_time()
            call()
            times[name].append(time.process_time() - began)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> None:
    """Measure datastores in the order of their sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--texts", type=int, default=20, help="held-out texts whose tokens are measured one by one")
    parser.add_argument(
        "--built", action="store_true", help="keep the stages as they are, and measure only the time of votes"
    )
    parser.add_argument("--model", type=Path, help="a checkpoint that copies from the first datastore")
    parser.add_argument("--rounds", type=int, default=7, help="of the comparisons without and with the datastore")
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
        datastore = Datastore.open(datastore.folder)
        cold, warm = cold_milliseconds(datastore, options.texts), microseconds(datastore, options.texts)
        cells += [str(len(list(stored_groups(datastore.train)))), *(f"{value:.0f}" for value in warm)]
        rows.append([*cells, *(f"{value:.1f}" for value in cold)])
    header = [
        "tokens",
        *(f"{stage}: {name}" for stage in stages for name in columns),
        "sorted arrays",
        "votes of one token: p50, µs",
        "p90, µs",
        "from the disk: p50, ms",
        "p90, ms",
    ]
    say("\n" + markdown(Table(header, rows)))
    first = Datastore.open(load(Config, options.configs[0], [], verb="index").datastore)
    compared = {"training step": step_seconds(first, options.rounds)}
    if options.model:
        compared["generation"] = generation_seconds(options.model, first, options.rounds)
    for name, each in compared.items():
        say(
            f"{name}: {each['without']:.3f} s without, {each['with']:.3f} s with: {each['with'] / each['without']:.3f} times"
        )
    say(measured_on())


if __name__ == "__main__":
    main()
