"""Plan of a datastore: bytes of every artifact, and seconds of every step, scaled from samples of the corpus.

    Sample (builds on this machine, of two sizes) ─┐
    Workload (the planned datastore) ──────────────┴─► artifact_bytes, seconds_of, memory_bytes ──► Plan

`measure.py` builds the samples; this file measures nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from indexing.embedding.settings import FIT_CHUNKS
from indexing.index.build import TUNE_QUERIES, sample_size
from indexing.index.coarse_quantizer import comparisons
from indexing.index.key import num_lists
from indexing.neighbors.search import Method
from indexing.ngrams.index import num_passes
from indexing.tokenization.tokenizer import TokenizerSettings
from pipelines.cli.planning.bytes import (
    NUM_SPLITS,
    Layout,
    Workload,
    artifact_bytes,
    key_for,
    memory_bytes,
)
from pipelines.config import Config
from pipelines.stages.choices import by_embeddings, without_ngrams
from pipelines.terminal.units import human_bytes, human_count, human_seconds, long_time

ALONE = ("tokenizer", "embed: count n-grams", "train-index", "tune nprobe")
"""Steps that one machine runs; all machines share the others."""


@dataclass(frozen=True)
class Sample:
    """A build of a part of the corpus.

    Attributes:
        size: of the build.
        seconds: of each step.
        cpu_seconds: of all threads in each step. Other work on the machine hardly changes them.
        list_nprobe: lists that a search by embeddings visits to reach the recall target.
        parquet_bytes: of `documents.parquet` in all splits.
        measured_bytes: of artifacts without a formula, by name: `sparse`, `ngrams`, `suffixes`, `votes`.
    """

    size: Workload
    seconds: Mapping[str, float]
    cpu_seconds: Mapping[str, float]
    list_nprobe: int
    parquet_bytes: int
    measured_bytes: Mapping[str, int]


@dataclass(frozen=True)
class Measured:
    """Samples of a corpus, built on one machine.

    Attributes:
        small, large: the samples.
        machine: processor and cores.
        memory_bytes: of the machine.
        peak_bytes: largest resident set of the measuring process.
        token_bytes: 2 or 4.
        dimension: d of the embeddings.
        search: method that finds the neighbors of the samples and of the datastore.
        source: of the text.
        corpus_bytes: bytes of text in the whole corpus; 0 = unknown.
        seconds: that the measurement took.
    """

    small: Sample
    large: Sample
    machine: str
    memory_bytes: int
    peak_bytes: int
    token_bytes: int
    dimension: int
    search: Method
    source: str
    corpus_bytes: float
    seconds: float


@dataclass(frozen=True)
class StepPlan:
    """Time and memory of a step.

    Attributes:
        name: of the step.
        seconds: work of one machine.
        machines: number of machines that work on it.
        memory_bytes: of a worker.
    """

    name: str
    seconds: float
    machines: int
    memory_bytes: float

    @property
    def wall_seconds(self) -> float:
        """From start to end."""
        return self.seconds / self.machines


@dataclass(frozen=True)
class Plan:
    """Plan of a datastore.

    Attributes:
        size: of the datastore and its index.
        bytes: of every artifact.
        steps: in order.
        exponent: of the number of chunks in the time of `neighbors`.
        settings: those that must differ from the given ones, by name.
    """

    size: Workload
    bytes: dict[str, float]
    steps: list[StepPlan]
    exponent: float
    settings: dict[str, str]

    @property
    def wall_seconds(self) -> float:
        """Sum over all steps, which run one after the other."""
        return sum(step.wall_seconds for step in self.steps)


# --- size ------------------------------------------------------------------------------------------------------------


def per_byte(name: str, text_bytes: float, samples: Sequence[Sample], tokenizer: TokenizerSettings) -> float:
    """Tokens, chunks or documents per byte of text, in a corpus of `text_bytes`.

    A tokenizer trained on little text fits that text better than a larger one. The gain falls with the square root of the
    size of its sample, and is estimated from two sizes.
    """
    first, last = samples[0].size, samples[-1].size
    low, high = (getattr(size, name) / size.text_bytes for size in (first, last))
    if name == "documents" or not tokenizer.is_trained:
        return float(high)
    small, large, planned = (
        min(x, tokenizer.sample_bytes) ** -0.5 for x in (first.text_bytes, last.text_bytes, text_bytes)
    )
    gain = max(0.0, (high - low) / (small - large)) if small > large else 0.0
    return float(high + gain * (large - planned))


def size_of(
    config: Config,
    samples: Sequence[Sample],
    dimension: int,
    *,
    tokens: float = 0.0,
    text_bytes: float = 0.0,
    search: Method = "index",
) -> Workload:
    """Size of a datastore of this number of tokens, or else of this much text, like some samples (the largest last)."""
    if tokens:
        text_bytes = tokens / per_byte("tokens", math.inf, samples, config.tokenizer)
        for _ in range(20):  # fixed-point iteration; the density hardly changes
            text_bytes = tokens / per_byte("tokens", text_bytes, samples, config.tokenizer)
    documents, chunks, tokens = (
        text_bytes * per_byte(name, text_bytes, samples, config.tokenizer) for name in ("documents", "chunks", "tokens")
    )
    train_chunks = chunks * config.corpus.split[0] / sum(config.corpus.split)
    key, _ = key_for(train_chunks, dimension, config.index)
    return Workload(
        text_bytes=text_bytes,
        documents=documents,
        tokens=tokens,
        chunks=chunks,
        train_chunks=train_chunks,
        shards=math.ceil(text_bytes / config.corpus.shard_bytes),
        key=key,
        trained_on=sample_size(int(train_chunks), key),
        tune_queries=min(TUNE_QUERIES, int(train_chunks)),
        search=search,
    )


def search_of(config: Config, size: Workload, sample: Sample, dimension: int) -> Method:
    """The search that `retro index` would choose, if queries visit the same share of lists as in a sample."""
    if config.neighbors.search != "auto":
        return config.neighbors.search
    if not without_ngrams(config):
        return "ngrams"
    return by_embeddings(int(size.train_chunks), dimension, sample.list_nprobe / num_lists(sample.size.key))


def _measured_bytes(name: str, size: Workload, small: Sample, large: Sample) -> tuple[float, float]:
    """Bytes of a chunk of `train` and of a shard in an artifact.

    As a corpus grows, n-grams become too frequent to be listed. So those of a chunk fall along the logarithm of the number of
    chunks, where the samples fall (docs/results/scale.md).
    """
    (few, low), (many, high) = ((s.size.train_chunks, float(s.measured_bytes[name])) for s in (small, large))
    if name == "votes":  # of all splits
        return high / large.size.chunks * size.chunks / size.train_chunks, 0.0
    if name != "ngrams" or few == many:
        return line((few, low), (many, high))
    slope = min(0.0, high / many - low / few) / math.log(many / few)
    return max(high / many / 2, high / many + slope * math.log(size.train_chunks / many)), 0.0


# --- scaling ---------------------------------------------------------------------------------------------------------


def line(small: tuple[float, float], large: tuple[float, float]) -> tuple[float, float]:
    """Slope and start, neither negative, of the line through two points (x, y); it always passes through the larger one."""
    (x, y), (x2, y2) = small, large
    slope = min(max(0.0, (y2 - y) / (x2 - x)), y2 / x2) if x2 > x else 0.0
    return slope, y2 - slope * x2


def exponent_of(small: Sample, large: Sample) -> float:
    """Exponent of the number of chunks in the time of `neighbors`: from two sizes, between 1 and 2."""
    if "neighbors" not in large.seconds or large.size.chunks <= small.size.chunks:
        return 1.0
    times = max(large.cpu_seconds["neighbors"], 1e-9) / max(small.cpu_seconds["neighbors"], 1e-9)
    return min(2.0, max(1.0, math.log(times) / math.log(large.size.chunks / small.size.chunks)))


def seconds_of(size: Workload, measured: Measured, config: Config) -> dict[str, float]:
    """Seconds of each step on one machine like the measured one: those of the larger sample, times the growth of CPU seconds.

    CPU seconds grow with one quantity, along the line through both samples; those of `add` for each vector, with the lists that it is
    compared with; those of `ngrams` for each pass over the chunks; those of `neighbors` with a power of the chunks.
    """

    small, large = measured.small, measured.large

    def growing(name: str, size: Workload) -> tuple[float, float]:
        """How often a step repeats its work, and the quantity with which one repetition grows."""
        lists = math.log2(size.lists) if "HNSW" in size.key else float(size.lists)
        return {
            "scan": (1.0, size.text_bytes),
            "chunk": (1.0, size.text_bytes),
            "tokenizer": (1.0, min(size.text_bytes, config.tokenizer.sample_bytes)),
            "embed: count n-grams": (1.0, min(size.train_chunks, FIT_CHUNKS)),
            "train-index": (1.0, size.trained_on * comparisons(size.lists)),
            "add": (size.train_chunks, lists),
            "tune nprobe": (1.0, size.tune_queries * size.train_chunks),
            "ngrams": (float(num_passes(size.train_chunks, config.chunks.chunk_length)), size.chunks),
        }.get(name, (1.0, size.chunks))

    def growth(name: str) -> float:
        if name == "neighbors":
            return float((size.chunks / large.size.chunks) ** exponent_of(small, large))
        (few, x), (many, x2), (repeated, quantity) = (growing(name, one) for one in (small.size, large.size, size))
        cpu, cpu2 = (sample.cpu_seconds.get(name, 0.0) for sample in (small, large))
        slope, start = line((x, cpu / few), (x2, cpu2 / many))
        return repeated * (start + slope * quantity) / max(cpu2, 1e-9)

    seconds = {name: took * growth(name) for name, took in large.seconds.items()}
    if "tokenizer" in seconds and config.tokenizer.is_trained:  # reads all of the text once more, to draw its sample
        seconds["tokenizer"] += seconds["scan"] * max(0.0, 1 - config.tokenizer.sample_bytes / size.text_bytes)
    return seconds


# --- the plan --------------------------------------------------------------------------------------------------------


def plan_for(config: Config, measured: Measured, tokens: float = 0.0, machines: int = 1) -> Plan:
    """Plan a datastore.

    Args:
        config: its settings.
        measured: on a machine like those that will build it.
        tokens: including those that begin and end each document; 0 = all of the corpus.
        machines: that work in parallel.

    Raises:
        InputError: no index of this size exists, or Faiss does not understand `index.factory`.
    """
    small, large = measured.small, measured.large
    text_bytes, search = measured.corpus_bytes, measured.search
    size = size_of(config, (small, large), measured.dimension, tokens=tokens, text_bytes=text_bytes, search=search)
    document_bytes, parquet = line(*((s.size.documents, float(s.parquet_bytes)) for s in (small, large)))
    layout = Layout(
        chunk_length=config.chunks.chunk_length,
        token_bytes=measured.token_bytes,
        dimension=measured.dimension,
        stored=config.neighbors.stored,
        materialized=config.neighbors.materialized,
        document_bytes=document_bytes,
        parquet_bytes=parquet / NUM_SPLITS,
        measured={name: _measured_bytes(name, size, small, large) for name in large.measured_bytes},
    )
    memory, steps = memory_bytes(size, layout, measured.peak_bytes), []
    for name, seconds in seconds_of(size, measured, config).items():
        working = 1 if name in ALONE else min(machines, size.shards)
        steps.append(StepPlan(name, seconds, working, memory.get(name, float(measured.peak_bytes))))
    index = key_for(size.train_chunks, measured.dimension, config.index)[1]
    changed = {"index.memory": index.memory} if index.memory != config.index.memory else {}
    return Plan(size, artifact_bytes(size, layout), steps, exponent_of(small, large), changed)


def plan_tables(plan: Plan, measured: Measured, machines: int) -> list[list[list[str]]]:
    """Four tables: the sample, the datastore, its bytes, and its steps."""
    size, large, total = plan.size, measured.large.size, sum(plan.bytes.values())
    sample = [
        ["measured on", f"{measured.machine}, {human_bytes(measured.memory_bytes)}"],
        [
            "with",
            f"{human_bytes(large.text_bytes)} of text, {large.chunks:,.0f} chunks, in "
            f"{human_seconds(measured.seconds)}, from {measured.source}",
        ],
    ]
    what = [
        ["tokens", f"{human_count(round(size.tokens))}, {human_bytes(size.text_bytes)} of text"],
        ["chunks", f"{size.chunks:,.0f}, {size.train_chunks:,.0f} of them in the index; shards: {size.shards:,}"],
        ["index", f"{size.key}, trained on {size.trained_on:,} vectors"],
        ["neighbors", f"search: {size.search}"],
        *([["needs", ", ".join(f"{key} = {value}" for key, value in plan.settings.items())]] if plan.settings else []),
    ]
    artifacts = [
        ["artifact", "bytes", "per chunk"],
        *([name, human_bytes(value), f"{value / size.chunks:.0f} B"] for name, value in plan.bytes.items()),
        ["all", human_bytes(total), f"{total / size.chunks:.0f} B"],
    ]
    steps = [["step", "machine time", "machines", "time", "memory of a worker"]]
    for step in plan.steps:
        times = long_time(step.seconds), f"{step.machines:,}", long_time(step.wall_seconds)
        steps.append([step.name, *times, human_bytes(step.memory_bytes)])
    work = long_time(sum(step.seconds for step in plan.steps))
    steps.append(["all", work, f"{machines:,}", long_time(plan.wall_seconds), ""])
    return [sample, what, artifacts, steps]


def scaling(plan: Plan, measured: Measured) -> str:
    """How the times were scaled, in one line."""
    factor = plan.size.chunks / measured.large.size.chunks
    return (
        f"Times are those of the sample, scaled to {factor:,.3g} times the chunks: linearly, neighbors with the power "
        f"{plan.exponent:.2f} of two sizes."
    )


def as_json(measured: Measured, plan: Plan) -> dict[str, Any]:
    """Samples and plan as plain values, in bytes and seconds."""
    return {"measured": asdict(measured), "plan": asdict(plan)}
