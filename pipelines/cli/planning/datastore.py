"""Plan of a datastore: bytes of artifacts from the file formats, and times of every step from one sample, linearly.

    Sample (a build on this machine) ─┐
    Workload (the planned datastore) ─┴─► artifact_bytes, seconds_of, memory_bytes ──► Plan

`sample.py` builds the sample; this file measures nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from indexing.corpus.scan import shard_size
from indexing.embedding.settings import FIT_CHUNKS
from indexing.index.build import TUNE_QUERIES, sample_size
from indexing.index.coarse_quantizer import comparisons
from indexing.ngrams.index import num_passes
from indexing.store.stages import left_out
from indexing.suffixes.votes import vote_dtype
from pipelines.cli.planning.bytes import Layout, Workload, artifact_bytes, index_for, memory_bytes
from pipelines.cli.planning.sample import Sample
from pipelines.config import Config
from pipelines.terminal.units import human_bytes, human_count, human_seconds, long_time

ALONE = ("tokenizer", "embed: count n-grams", "train-index", "tune nprobe")
"""Steps that one machine runs; all machines share the others."""

_VOTES_GROWTH = 0.05
"""The compressed votes of a token grow with this power of the tokens, as more tokens have a vote at more lengths.
Measured: 0.07 from 0.5 to 1.6 million tokens of Ethereum's improvement proposals, 0.03 from 10 to 311 million of a
trigram model."""

_STAGES = {"embeddings": "embed", "index": "add", "neighbors": "neighbors"}
"""Stages of the artifacts whose bytes are computed and not measured; chunks are always there."""


@dataclass(frozen=True)
class StepPlan:
    """Time and memory of a step.

    Attributes:
        name: of the step.
        seconds: work of one machine that has no other work.
        cpu_seconds: work, summed over all processors.
        machines: number of machines that work on it.
        memory_bytes: of a worker.
    """

    name: str
    seconds: float
    cpu_seconds: float
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
        settings: those that must differ from the given ones, by name.
    """

    size: Workload
    bytes: dict[str, float]
    steps: list[StepPlan]
    settings: dict[str, str]

    @property
    def wall_seconds(self) -> float:
        """Sum over all steps, which run one after the other."""
        return sum(step.wall_seconds for step in self.steps)


def size_of(config: Config, sample: Sample, tokens: float = 0.0) -> Workload:
    """Size of a datastore of this number of tokens, or else of the whole corpus, with the densities of a sample."""
    own = sample.size
    text_bytes = tokens * own.text_bytes / own.tokens if tokens else sample.corpus_bytes
    times = text_bytes / own.text_bytes
    train_chunks = times * own.chunks * config.corpus.split[0] / sum(config.corpus.split)
    key = index_for(train_chunks, sample.dimension, config.index).factory
    return Workload(
        text_bytes=text_bytes,
        documents=times * own.documents,
        tokens=times * own.tokens,
        chunks=times * own.chunks,
        train_chunks=train_chunks,
        shards=math.ceil(text_bytes / shard_size(config.corpus, int(text_bytes))),
        key=key,
        trained_on=sample_size(int(train_chunks), key),
        tune_queries=min(TUNE_QUERIES, int(train_chunks)),
        search=own.search,
    )


def seconds_of(
    size: Workload, sample: Sample, config: Config, of_sample: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Seconds of each step: those of the sample (None = `sample.seconds`), times the growth of one quantity.

    It is the number of chunks, except where a step reads only a part of them. Tokenizer, embedder and index are trained
    on samples. A constant time, such as the start of a process, is scaled too, so the plan of a large datastore is
    rather too long.
    """

    def quantity(name: str, size: Workload) -> float:
        """The quantity with which a step grows."""
        return {
            "scan": size.text_bytes,
            "chunk": size.text_bytes,
            "tokenizer": min(size.text_bytes, config.tokenizer.sample_bytes),
            "embed: count n-grams": min(size.train_chunks, FIT_CHUNKS),
            "train-index": size.trained_on * comparisons(size.lists),
            "tune nprobe": size.tune_queries * size.train_chunks,
            "ngrams": num_passes(size.train_chunks, config.chunks.chunk_length) * size.chunks,
            "neighbors": size.chunks ** (2 if size.search == "exact" else 1),
        }.get(name, size.chunks)

    measured = sample.seconds if of_sample is None else of_sample
    seconds = {name: took * quantity(name, size) / quantity(name, sample.size) for name, took in measured.items()}
    if "tokenizer" in seconds and config.tokenizer.is_trained:  # reads all of the text once more, to draw its sample
        seconds["tokenizer"] += seconds["scan"] * max(0.0, 1 - config.tokenizer.sample_bytes / size.text_bytes)
    return seconds


def _votes_bytes(size: Workload, sample: Sample) -> float:
    """Bytes of the votes of all splits, which compress less in a larger datastore, and at most to their records."""
    of_token = sample.bytes["votes"] / sample.size.tokens * (size.tokens / sample.size.tokens) ** _VOTES_GROWTH
    return min(of_token, vote_dtype(np.dtype(f"u{sample.token_bytes}")).itemsize) * size.tokens


def plan_for(config: Config, sample: Sample, tokens: float = 0.0, machines: int = 1) -> Plan:
    """Plan a datastore.

    Args:
        config: its settings.
        sample: measured on a machine like those that will build it.
        tokens: including those that begin and end each document; 0 = all of the corpus.
        machines: that work in parallel.

    Raises:
        InputError: no index of this size exists, or Faiss does not understand `index.factory`.
    """
    size, own = size_of(config, sample, tokens), sample.size
    layout = Layout(
        chunk_length=config.chunks.chunk_length,
        token_bytes=sample.token_bytes,
        dimension=sample.dimension,
        stored=config.neighbors.stored,
        materialized=config.neighbors.materialized,
        document_bytes=sample.bytes["documents.parquet"] / own.documents,
        measured={  # all in bytes of a chunk of `train`
            name: _votes_bytes(size, sample) / size.train_chunks if name == "votes" else value / own.train_chunks
            for name, value in sample.bytes.items()
            if name != "documents.parquet"
        },
    )
    memory, steps = memory_bytes(size, layout, sample.peak_bytes), []
    cpu_seconds = seconds_of(size, sample, config, sample.cpu_seconds)
    for name, seconds in seconds_of(size, sample, config).items():
        working = 1 if name in ALONE else min(machines, size.shards)
        steps.append(StepPlan(name, seconds, cpu_seconds[name], working, memory.get(name, float(sample.peak_bytes))))
    index, out = index_for(size.train_chunks, sample.dimension, config.index), left_out(config.skip_stages)
    changed = {"index.memory": index.memory} if index.memory != config.index.memory and "add" not in out else {}
    artifacts = artifact_bytes(size, layout).items()
    return Plan(size, {name: value for name, value in artifacts if _STAGES.get(name) not in out}, steps, changed)


def plan_tables(plan: Plan, sample: Sample, machines: int) -> list[list[list[str]]]:
    """Four tables: the sample, the datastore, its bytes, and its steps."""
    size, large, total = plan.size, sample.size, sum(plan.bytes.values())
    source = [
        ["measured on", f"{sample.machine}, {human_bytes(sample.memory_bytes)}"],
        [
            "with",
            f"{human_bytes(large.text_bytes)} of text, {large.chunks:,.0f} chunks, in "
            f"{human_seconds(sample.total_seconds)}, from {sample.source}",
        ],
    ]
    what = [
        ["tokens", f"{human_count(round(size.tokens))}, {human_bytes(size.text_bytes)} of text"],
        ["chunks", f"{size.chunks:,.0f}, {size.train_chunks:,.0f} of them for training; shards: {size.shards:,}"],
        *([["index", f"{size.key}, trained on {size.trained_on:,} vectors"]] if "index" in plan.bytes else []),
        *([["neighbors", f"search: {size.search}"]] if "neighbors" in plan.bytes else []),
        *([["needs", ", ".join(f"{key} = {value}" for key, value in plan.settings.items())]] if plan.settings else []),
    ]
    artifacts = [
        ["artifact", "bytes", "per chunk"],
        *([name, human_bytes(value), f"{value / size.chunks:.0f} B"] for name, value in plan.bytes.items()),
        ["all", human_bytes(total), f"{total / size.chunks:.0f} B"],
    ]
    steps = [["step", "CPU time", "machines", "time when idle", "memory of a worker"]]
    for step in plan.steps:
        times = long_time(step.cpu_seconds), f"{step.machines:,}", long_time(step.wall_seconds)
        steps.append([step.name, *times, human_bytes(step.memory_bytes)])
    work = long_time(sum(step.cpu_seconds for step in plan.steps))
    steps.append(["all", work, f"{machines:,}", long_time(plan.wall_seconds), ""])
    return [source, what, artifacts, steps]


def scaling(plan: Plan, sample: Sample) -> str:
    """How the times were measured and scaled."""
    factor = plan.size.chunks / sample.size.chunks
    cpu, idle = (human_seconds(sum(times.values())) for times in (sample.cpu_seconds, sample.seconds))
    return (
        f"Times are those of the sample, scaled to {factor:,.3g} times the chunks. CPU time: of all processors together, "
        f"{cpu} for the sample.\nTime when idle: of a machine like this one without other work, at most the CPU time and the "
        f"time that the sample took here, {idle}."
    )


def as_json(sample: Sample, plan: Plan) -> dict[str, Any]:
    """Sample and plan as plain values, in bytes and seconds."""
    return {"sample": asdict(sample), "plan": asdict(plan)}
