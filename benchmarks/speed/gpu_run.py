"""Part B of three on one NVIDIA GPU, in ten minutes: a datastore, a RETRO of the paper's size, and its decoder, from
text to scores.

    python -m benchmarks.speed.gpu_run CORPUS ... [--minutes 10] [--cases NAME ...] [--output FOLDER] [--work FOLDER] [--tiny]

All stages of a datastore that copying needs, each with its seconds. Then the paper's 172m with chunks of 32, which
copies from its own context, neighbors and the whole datastore, and the same decoder that copies from its own context
only: equal tokens, as many as fit into `--minutes`, by Muon. Bits per byte of held-out documents: OFF, neighbors, datastore,
all; changes are against the decoder. OUTPUT has the figures and the loss curves, WORK the datastore and the runs.
Corpora are JSON Lines, with `.zst` too. `--tiny` runs everything with little text and a small model.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import add_cases, add_minutes, budget, percent, placement
from benchmarks.deadline import Case, Figures, run_cases, selected
from indexing.corpus.chunks import ChunkSettings
from indexing.corpus.documents import CorpusSettings
from indexing.embedding.settings import EmbedderSettings
from indexing.neighbors.settings import NeighborSettings
from indexing.store.datastore import Datastore
from indexing.tokenization.settings import TokenizerSettings
from pipelines.cli.reports.training_runs import plot_runs
from pipelines.config import Config
from pipelines.executors.factory import make_executor
from pipelines.stages.table import STAGES, build
from pipelines.terminal.logger import setup_logging
from retro.checkpoints.checkpoint import load_model, open_checkpoint
from retro.data.neighbor_choice import NeighborUse
from retro.data.settings import DataSettings
from retro.evaluation.bits_per_byte import SetResult, compare
from retro.evaluation.evaluator import Evaluator
from retro.evaluation.sets import EvaluationSet
from retro.evaluation.settings import EvaluationSettings
from retro.model.presets import resolve
from retro.model_settings import CopyHeadSettings, ModelSettings, updated
from retro.training.settings import TrainSettings
from retro.training.trainer import train

MINUTES = 10.0
LEFT_OUT = ("sparse", "merge")
"""Stages that serve searches, not training."""
COPIES_ALL = CopyHeadSettings(context=True, neighbors=True, datastore=True)
MODES = {
    "OFF": NeighborUse(0),
    "neighbors": NeighborUse(2),
    "datastore": NeighborUse(0, votes=True),
    "all": NeighborUse(2, votes=True),
}
_PROBE_STEPS = 12
_TINY_BYTES = 200_000
_FILLED = 0.85
"""Part of the time left that steps take; the rest is for compilation, evaluation and the checkpoint."""
_OTHER_SECONDS = 160.0
"""Of the datastore, the scores and the picture."""
_SHARE_OF_RETRO = 0.6
"""Part of the time of training: equal tokens take the decoder less time."""


# --- the datastore ---------------------------------------------------------------------------------------------------


def beginnings(paths: Sequence[Path], folder: Path) -> tuple[str, ...]:
    """The first 200 kB of documents of each corpus, for tests, as files in a folder."""
    import pyarrow

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for path in paths:
        with pyarrow.input_stream(str(path), compression="zstd" if path.suffix == ".zst" else None) as stream:
            lines = stream.read().splitlines(keepends=True)
        ends = itertools.accumulate(map(len, lines))
        target = folder / path.name.removesuffix(".zst")
        target.write_bytes(b"".join(line for line, end in zip(lines, ends, strict=True) if end <= _TINY_BYTES))
        files.append(str(target))
    return tuple(files)


def build_stages(config: Config, paths: Sequence[Path], tiny: bool) -> Iterator[Figures]:
    """Build a datastore stage by stage; yield the seconds of each."""
    setup_logging()
    texts = beginnings(paths, config.datastore.with_name("text")) if tiny else tuple(map(str, paths))
    config = replace(config, corpus=replace(config.corpus, paths=texts))
    executor = make_executor(config.executor)
    for name in (name for name, stage in STAGES.items() if name not in LEFT_OUT and stage.included(config)):
        began = time.monotonic()
        datastore = build(config, executor, only=name)
        yield {f"{name}, seconds": round(time.monotonic() - began, 1)}
    totals = datastore.manifest["splits"]["train"]
    yield {key: int(sum(totals[key])) for key in ("documents", "chunks", "tokens")}
    yield {"held-out tokens": int(sum(datastore.manifest["splits"]["valid"]["tokens"]))}


# --- training --------------------------------------------------------------------------------------------------------


def train_within(config: Config, steps_file: Path, seconds: float, most_steps: int, tiny: bool) -> Iterator[Figures]:
    """Train a model for some seconds, and others with the same file for as many steps.

    Args:
        config: of the run. Its steps are chosen here.
        steps_file: keeps the steps that the first model chose.
        seconds: of the first model, from now.
        most_steps: at most.
        tiny: two steps.
    """
    setup_logging()
    began = time.monotonic()
    tokens_of_step = config.train.batch_size * config.data.sequence_length
    if not steps_file.exists():
        probe = replace(config, run=config.run.with_name("probe"))
        probe = replace(
            probe, train=replace(probe.train, steps=2 if tiny else _PROBE_STEPS, log_every=2 if tiny else 4)
        )
        last = [line for line in train(probe.run, probe.run_settings).metrics if "tokens_per_second" in line][-1]
        step_seconds = tokens_of_step / last["tokens_per_second"]
        left = _FILLED * (seconds - (time.monotonic() - began))
        steps = 2 if tiny else max(_PROBE_STEPS, min(most_steps, int(left / step_seconds)))
        steps_file.write_text(str(steps))
        yield {"first steps, seconds": round(time.monotonic() - began, 1)}
    steps = int(steps_file.read_text())
    yield {"steps": steps, "tokens": steps * tokens_of_step}
    settings = replace(config.train, steps=steps, checkpoint_every=max(1, steps // 3), log_every=max(1, steps // 200))
    torch._dynamo.reset()
    started = time.monotonic()
    outcome = train(config.run, replace(config, train=settings).run_settings)
    rates = sorted(line["tokens_per_second"] for line in outcome.metrics if "tokens_per_second" in line)
    yield {
        "seconds of training": round(time.monotonic() - started, 1),
        "tokens/s, median": round(rates[len(rates) // 2]),
        "last loss": [line["loss"] for line in outcome.metrics if "loss" in line][-1],
        "parameters": outcome.parameters,
    }
    if torch.cuda.is_available():
        yield {"peak memory, GB": round(torch.cuda.max_memory_allocated() / 1e9, 2)}


# --- scores ----------------------------------------------------------------------------------------------------------


def scores(config: Config, baseline: Path, tokens: int) -> Iterator[Figures]:
    """Bits per byte of both models, and changes against the decoder with intervals over documents."""
    place, held_out = placement(), EvaluationSet("valid", Datastore.open(config.datastore))
    settings = EvaluationSettings(window=config.data.sequence_length, max_tokens=tokens, batch_size=8)
    reference: SetResult | None = None
    for name, run in (("decoder", baseline), ("RETRO", config.run)):
        checkpoint = open_checkpoint(run)
        evaluator = Evaluator(load_model(checkpoint, place.device), place, settings)
        yield {f"{name}, step": checkpoint.step}
        for mode, use in MODES.items() if reference else [("own context", NeighborUse(0))]:
            result = evaluator.score(held_out, use)
            change = "" if reference is None else f"  {percent(compare(result, reference))}"
            yield {f"{name}, {mode}": f"{result.bits_per_byte:.4f}{change}"}
            reference = reference or result
    if reference is not None:
        yield {"scored": f"{reference.tokens:,} tokens, {reference.documents} documents"}


def draw_losses(runs: Sequence[Path], file: Path) -> Iterator[Figures]:
    """Draw the loss of each run by the tokens read."""
    plot_runs(runs, file)
    yield {"picture": file.name}


# --- the part --------------------------------------------------------------------------------------------------------


def config_of(work: Path, tiny: bool) -> Config:
    """Settings of the datastore and of the RETRO."""
    model = ModelSettings(preset="tiny" if tiny else "172m", copy_head=COPIES_ALL)
    if not tiny:
        model = updated(model, {"shared_embeddings": True})  # the encoder reads the decoder's table
    return Config(
        datastore=work / "datastore",
        run=work / "retro",
        corpus=CorpusSettings(split=(800, 200, 0) if tiny else (980, 20, 0)),
        tokenizer=TokenizerSettings(vocab_size=1024 if tiny else 16_384),
        chunks=ChunkSettings(chunk_length=32),
        embedder=EmbedderSettings(),
        neighbors=NeighborSettings(rerank="tokens"),
        data=DataSettings(sequence_length=64 if tiny else 2048, k=2),
        model=model,
        train=TrainSettings(
            batch_size=2 if tiny else 16,
            optimizer="muon",
            compile="no" if tiny else "auto",
            eval_every=0,
            eval_tokens=1_000 if tiny else 20_000,
            monitor_every=0,
        ),
    )


def decoder_of(config: Config) -> Config:
    """The same decoder, which copies from its own context only."""
    own = {"retrieval.cca_layers": (), "copy_head.neighbors": False, "copy_head.datastore": False}
    return replace(config, run=config.run.with_name("decoder"), model=updated(resolve(config.model), own))


def cases_of(paths: Sequence[Path], output: Path, work: Path, tiny: bool, seconds: float) -> dict[str, Case]:
    """All cases in order, for a time limit."""
    config = config_of(work, tiny)
    decoder = decoder_of(config)
    steps = work / "steps.txt"
    for_training = min(max(seconds, 2 * _OTHER_SECONDS), 60 * MINUTES) - _OTHER_SECONDS
    of_retro = _SHARE_OF_RETRO * for_training
    training = partial(train_within, steps_file=steps, seconds=of_retro, most_steps=1_600, tiny=tiny)
    tokens = 2_000 if tiny else 200_000
    work_of: dict[str, tuple[Any, float]] = {
        "datastore": (partial(build_stages, config, paths, tiny), 150),
        "train the RETRO": (partial(training, config), of_retro + 30),
        "train the decoder": (partial(training, decoder), for_training - of_retro + 40),
        "scores": (partial(scores, config, decoder.run, tokens), 90),
        # The first picture of a machine lists its fonts.
        "loss curves": (partial(draw_losses, (config.run, decoder.run), output / "loss.svg"), 30),
    }
    return {name: Case(*one) for name, one in work_of.items()}


def part_parser(about: str | None, minutes: float, name: str) -> argparse.ArgumentParser:
    """Options of a part."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path(name), help="folder of the figures")
    parser.add_argument("--work", type=Path, default=Path(".kit") / name, help="folder of the datastore and the runs")
    parser.add_argument("--tiny", action="store_true", help="little text and a small model, without a GPU too")
    add_cases(parser)
    add_minutes(parser, minutes)
    return parser


def main() -> int:
    """Print the figures and write them. Return 1 if a case failed."""
    options = part_parser(__doc__, MINUTES, "gpu-run").parse_args()
    for folder in (options.output, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    limit = budget(options)
    paths = [path.resolve() for path in options.corpora]
    cases = cases_of(paths, options.output, options.work, options.tiny, limit.seconds)
    return run_cases(selected(cases, options.cases), options.output / "gpu-run.json", limit, {"tiny": options.tiny})


if __name__ == "__main__":
    sys.exit(main())
