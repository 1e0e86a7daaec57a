"""Plan of a datastore: bytes of every artifact, seconds of every step, memory and cost, from a calibration.

    Observation (builds on this machine, of two or more sizes) ─┐
    Workload (the planned datastore) ───────────────────────────┴─► artifact_bytes, step_seconds, memory ──► Plan

docs/explanation/plan.md explains the method. This file measures nothing.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from indexing.index.build import sample_size
from indexing.neighbors.search import Method
from indexing.neighbors.search_cost import SearchSize, cheapest, compared_centroids
from indexing.tokenization.tokenizer import TokenizerSettings
from pipelines.config import Config
from pipelines.planning.bytes import NUM_SPLITS, Layout, Workload, artifact_bytes, index_bytes, key_for, memory_bytes
from pipelines.planning.seconds import (
    UNKNOWN,
    Observation,
    StepModel,
    coefficients,
    reading_seconds,
    step_models,
    step_seconds,
)
from pipelines.stages.neighbors import hardware_of

PAPER_CHUNKS = 28e9  # section 2.3: 28 billion keys, 64 tokens each, of the 1.75 trillion tokens that the paper calls 2


@dataclass(frozen=True)
class Calibration:
    """Observations on one machine.

    Attributes:
        machine: processor or GPU, cores, memory.
        memory_bytes: of the machine.
        peak_bytes: largest resident set of the calibrating process.
        observations: two or more, the largest one last.
        token_bytes: 2 or 4.
        dimension: d of the embeddings.
        text: source of the sample.
        corpus_bytes: bytes of text in the whole corpus; 0 = unknown.
        seconds: duration of the calibration.
    """

    machine: str
    memory_bytes: int
    peak_bytes: int
    observations: tuple[Observation, ...]
    token_bytes: int
    dimension: int
    text: str
    corpus_bytes: float
    seconds: float


# --- size ------------------------------------------------------------------------------------------------------------


def per_byte(name: str, text_bytes: float, observations: Sequence[Observation], tokenizer: TokenizerSettings) -> float:
    """Tokens, chunks or documents per byte of text, in a corpus of `text_bytes`.

    A tokenizer trained on little text fits that text better than a larger one. The gain falls with the square root of the
    sample size (docs/explanation/plan.md), and is estimated from two sizes.
    """
    first, last = observations[0].workload, observations[-1].workload
    low, high = (getattr(size, name) / size.text_bytes for size in (first, last))
    if name == "documents" or not tokenizer.is_trained or first.text_bytes >= last.text_bytes:
        return float(high)
    small, large, wanted = (
        min(size, tokenizer.sample_bytes) ** -0.5 for size in (first.text_bytes, last.text_bytes, text_bytes)
    )
    gain = max(0.0, (high - low) / (small - large)) if small > large else 0.0
    return float(high + gain * (large - wanted))


def text_of(tokens: float, observations: Sequence[Observation], tokenizer: TokenizerSettings) -> float:
    """Bytes of text with this number of tokens."""
    text_bytes = tokens * observations[-1].workload.text_bytes / observations[-1].workload.tokens
    for _ in range(20):  # fixed-point iteration; the density hardly changes
        text_bytes = tokens / per_byte("tokens", text_bytes, observations, tokenizer)
    return text_bytes


# --- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepPlan:
    """Time, memory and cost of a step.

    Attributes:
        name: of the step.
        seconds: work of one machine.
        shared: whether several machines can share the step.
        machines: number of machines that work on it.
        wall_seconds: from start to end.
        memory_bytes: of a worker.
        cost: of the working machines, at the given price.
    """

    name: str
    seconds: float
    shared: bool
    machines: int
    wall_seconds: float
    memory_bytes: float
    cost: float


@dataclass(frozen=True)
class Plan:
    """Plan of a datastore.

    Attributes:
        size: of the datastore and its index.
        bytes: of every artifact.
        steps: in order.
        settings: those that must differ from the given ones, by name.
        calibrated_nprobe: the nprobe that reached the recall target in the largest sample.
        calibrated_seconds: of `neighbors` with that nprobe; faster, but with a lower recall if more chunks need a larger nprobe.
    """

    size: Workload
    bytes: dict[str, float]
    steps: list[StepPlan]
    settings: dict[str, str]
    calibrated_nprobe: float
    calibrated_seconds: float

    @property
    def wall_seconds(self) -> float:
        """Sum over all steps, which run one after the other."""
        return sum(step.wall_seconds for step in self.steps)


def machines_within(steps: Sequence[StepPlan], seconds: float) -> int | None:
    """Number of machines that finish all steps in this time; None if the steps of a single machine take longer."""
    alone = sum(step.seconds for step in steps if not step.shared)
    shared = sum(step.seconds for step in steps if step.shared)
    return max(1, math.ceil(shared / (seconds - alone))) if seconds > alone else None


def extrapolated(chunks: float, lists: int, needed: Sequence[tuple[float, float]]) -> float:
    """Extrapolate the nprobe that reaches the recall target in an index of this size.

    Between the two sizes, log(nprobe) grew in proportion to log(chunks). The extrapolation uses the same slope, clamped to 0 to
    0.5: with 4·√N lists, 0.5 is a constant fraction of all lists.

    Args:
        chunks: in the index.
        lists: of it.
        needed: (chunks, nprobe) of several sizes, the largest last.
    """
    (few, low), (many, high) = needed[0], needed[-1]
    ratio = math.log2(many / few)
    slope = math.log2(high / low) / ratio if ratio else 0.0
    return float(min(lists, max(1.0, high * (chunks / many) ** min(0.5, max(0.0, slope)))))


def power_of_two(nprobe: float) -> int:
    """The next power of two, as `nprobe` is tuned."""
    return int(2 ** math.ceil(round(math.log2(nprobe), 6)))


def corpus_tokens(config: Config, calibration: Calibration) -> float:
    """Tokens of the corpus of the calibration; 0 = unknown."""
    text_bytes = calibration.corpus_bytes
    return (
        text_bytes * per_byte("tokens", text_bytes, calibration.observations, config.tokenizer) if text_bytes else 0.0
    )


def plan_for(
    config: Config,
    calibration: Calibration,
    tokens: float,
    machines: int = 1,
    price: float = 0.0,
    nprobe: int = 0,
    *,
    paper: bool = False,
) -> Plan:
    """Plan a datastore of this number of tokens.

    Args:
        config: its settings.
        calibration: of a machine like those that will build it.
        tokens: including the tokens that begin and end each document.
        machines: that work in parallel.
        price: of a machine for an hour.
        nprobe: visited lists; 0 = extrapolated from the calibration.
        paper: every chunk is full and tokens take 4 bytes, as with the paper's vocabulary of 128,000.

    Raises:
        InputError: no index of this size exists, or Faiss does not understand `index.factory`.
    """
    seen = calibration.observations
    text_bytes = text_of(tokens, seen, config.tokenizer)
    full = tokens / config.chunks.chunk_length
    chunks = full if paper else text_bytes * per_byte("chunks", text_bytes, seen, config.tokenizer)
    train_chunks = chunks * config.corpus.split[0] / sum(config.corpus.split)
    key, index = key_for(train_chunks, calibration.dimension, config.index)
    size = Workload(
        text_bytes=text_bytes,
        documents=text_bytes * per_byte("documents", text_bytes, seen, config.tokenizer),
        tokens=tokens,
        chunks=chunks,
        train_chunks=train_chunks,
        shards=math.ceil(text_bytes / config.corpus.shard_bytes),
        key=key,
        nprobe=1,
        trained_on=sample_size(int(train_chunks), key, index),
        tune_queries=min(index.tune_queries, int(train_chunks)),
    )
    lists = size.lists
    by_codes = [(each.workload.train_chunks, each.crossing) for each in seen]
    by_lists = [(each.workload.train_chunks, each.workload.list_nprobe) for each in seen]
    size = replace(
        size,
        nprobe=min(lists, nprobe or power_of_two(extrapolated(train_chunks, lists, by_codes))),
        list_nprobe=min(lists, nprobe or extrapolated(train_chunks, lists, by_lists)),
    )
    size = replace(size, search=_search(config, size, calibration.dimension))
    document_bytes, parquet_bytes = _parts(
        [(each.workload.documents, each.workload.shards * NUM_SPLITS, each.parquet_bytes) for each in seen]
    )
    sparse_bytes, terms_bytes = _parts(
        [(each.workload.train_chunks, each.workload.shards, each.sparse_bytes) for each in seen]
    )
    layout = Layout(
        chunk_length=config.chunks.chunk_length,
        token_bytes=4 if paper else calibration.token_bytes,
        dimension=calibration.dimension,
        stored=config.neighbors.stored,
        materialized=config.neighbors.materialized,
        document_bytes=document_bytes,
        parquet_bytes=parquet_bytes,
        sparse_bytes=sparse_bytes,
        terms_bytes=terms_bytes,
    )
    last = seen[-1].workload
    less = replace(size, nprobe=min(last.nprobe, lists), list_nprobe=min(last.list_nprobe, lists))
    alike = step_seconds(less, seen, models_of(config))
    changed = {"index.memory": index.memory} if index.memory != config.index.memory else {}
    return Plan(
        size=size,
        bytes=artifact_bytes(size, layout),
        steps=_steps(config, calibration, size, layout, machines, price),
        settings=changed | ({"corpus.shard_bytes": str(config.corpus.shard_bytes)} if paper else {}),
        calibrated_nprobe=less.visited,
        calibrated_seconds=alike.get("neighbors", 0.0),
    )


def _search(config: Config, size: Workload, dimension: int) -> Method:
    """The search method that `retro index` would choose."""
    if config.neighbors.search != "auto":
        return config.neighbors.search
    searched = SearchSize(
        num_vectors=int(size.train_chunks),
        dimension=dimension,
        nlist=size.lists,
        nprobe=int(size.nprobe),
        centroids=compared_centroids(size.lists, "HNSW" in size.key),
        code_bytes=index_bytes(size.key, dimension)[0],
        fast_scan=bool(re.search(r"PQ\d+x4", size.key)),
        list_nprobe=math.ceil(size.list_nprobe),
        candidates=config.neighbors.candidates,
        precise_candidates=config.neighbors.precise_candidates,
    )
    return cheapest(searched, hardware_of(config.executor))


def _parts(measured: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Bytes of a row, and of a file without rows, from (rows, files, bytes) of several sizes."""
    table = np.array(measured, dtype=float)  # [sizes, 3]
    of_a_row, of_a_file = coefficients(table[:, :2], table[:, 2])
    return float(of_a_row), float(of_a_file)


def _steps(
    config: Config, calibration: Calibration, size: Workload, layout: Layout, machines: int, price: float
) -> list[StepPlan]:
    models = models_of(config)
    seconds = step_seconds(size, calibration.observations, models)
    if "tokenizer" in seconds and config.tokenizer.is_trained:
        seconds["tokenizer"] += reading_seconds(size, seconds["scan"], config.tokenizer.sample_bytes)
    memory = memory_bytes(size, layout, calibration.peak_bytes)
    out = []
    for name, value in seconds.items():
        shared = models.get(name, UNKNOWN).shared
        working = min(machines, size.shards) if shared else 1
        needed = memory.get(name, float(calibration.peak_bytes))
        out.append(StepPlan(name, value, shared, working, value / working, needed, price * value / 3600))
    return out


def models_of(config: Config) -> dict[str, StepModel]:
    """`step_models` for these settings."""
    return step_models(config.tokenizer.sample_bytes, config.embedder.fit_chunks)


def paper_config(config: Config) -> Config:
    """These settings at the paper's size: chunks of 64 tokens, an index chosen for it, shards of 16 GiB of text."""
    return replace(
        config,
        chunks=replace(config.chunks, chunk_length=64),
        corpus=replace(config.corpus, shard_bytes=max(config.corpus.shard_bytes, 16 * 2**30)),
        index=replace(config.index, factory=""),
    )
