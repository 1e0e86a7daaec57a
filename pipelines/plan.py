"""What a datastore takes: bytes of every artefact, seconds of every step, memory and cost, from a calibration.

    Observation (what this machine did, at two sizes or more) ─┐
    Workload (the datastore that is planned) ──────────────────┴─► artefact_bytes, step_seconds, memory ──► Plan

Bytes follow from the format (docs/format.md). The seconds of a step are a sum of what drives it (`STEPS`), each times a coefficient
that fits what was observed. docs/plan.md explains both. Nothing here measures anything.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from indexing.index import IndexSettings, choose_key, sample_size
from indexing.search_cost import Method, Searched, cheaper
from indexing.sharded_index import MEMORY
from indexing.store.errors import InputError
from indexing.tokenizer import TokenizerSettings
from pipelines.config import Config
from pipelines.neighbor_stage import hardware_of

PAPER_CHUNKS = 28e9  # section 2.3: 28 billion keys, 64 tokens each, of the 1.75 trillion tokens that the paper calls 2
_SPLITS = 3
_NPY_HEADER = 128
_INDEX_HEADER = 200  # of a `.faiss` file, about
_MANIFEST_BYTES = {
    "chunks": 1800,
    "embeddings": 570,
    "index": 370,
    "neighbors": 1300,
    "materialised": 1300,
}  # of a shard's artefact, about
_BLOCK = 32  # vectors of a fast-scan list are stored in blocks


@dataclass(frozen=True)
class Workload:
    """A datastore's size, and that of its index.

    Attributes:
        text_bytes: UTF-8 bytes of all documents.
        documents: in all splits.
        tokens: in all splits, with the beginning and end of each document.
        chunks: in all splits: these are embedded and get neighbors.
        train_chunks: those in the index.
        shards: of every stage.
        key: Faiss factory string of the index.
        nprobe: lists visited for a query.
        trained_on: vectors that the index is trained on.
        tune_queries: for which `nprobe` is tuned.
        search: how the neighbors of all chunks are found.
    """

    text_bytes: float
    documents: float
    tokens: float
    chunks: float
    train_chunks: float
    shards: int
    key: str
    nprobe: float
    trained_on: int
    tune_queries: int
    search: Method = "index"

    @property
    def lists(self) -> int:
        """Inverted lists; 1 for an index without."""
        return lists_of(self.key)

    @property
    def coarse(self) -> float:
        """Work of finding a vector's list: all centroids, or the steps down a graph."""
        return math.log2(self.lists) if "HNSW" in self.key else self.lists

    @property
    def compared(self) -> float:
        """Codes, or vectors, that a query is compared with."""
        if self.search == "exact":
            return self.train_chunks
        return self.train_chunks * min(1.0, self.nprobe / self.lists)


@dataclass(frozen=True)
class Observation:
    """What a build took.

    Attributes:
        workload: what was built.
        seconds: of each step, by its name in `step_models`; of `neighbors` alone where only the search was another one.
        crossing: the nprobe, between powers of two, at which the recall target was reached.
        parquet_bytes: of `documents.parquet` in all shards and splits.
    """

    workload: Workload
    seconds: Mapping[str, float]
    crossing: float
    parquet_bytes: int


@dataclass(frozen=True)
class Calibration:
    """What was observed on one machine.

    Attributes:
        machine: processor or GPU, cores, memory.
        memory_bytes: of the machine.
        peak_bytes: largest resident set of the process that did everything.
        observations: two or more, the largest last.
        token_bytes: 2 or 4.
        dimension: d of the embeddings.
        text: where the sample comes from.
        corpus_bytes: of text in the whole corpus; 0 = unknown.
        seconds: that all of it took.
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


@dataclass(frozen=True)
class Layout:
    """What the bytes of a chunk depend on.

    Attributes:
        chunk_length: m.
        token_bytes: 2 or 4.
        dimension: d of the embeddings.
        k: neighbors stored.
        materialised: of them, with their tokens.
        document_bytes: of a document's row in `documents.parquet`.
        parquet_bytes: of such a file without rows.
    """

    chunk_length: int
    token_bytes: int
    dimension: int
    k: int
    materialised: int
    document_bytes: float
    parquet_bytes: float


# --- index -----------------------------------------------------------------------------------------------------------


def lists_of(key: str) -> int:
    """Inverted lists of a Faiss factory string; 1 for an index without."""
    found = re.search(r"IVF(\d+)", key)
    return int(found[1]) if found else 1


def with_lists_for(key: str, chunks: float) -> str:
    """The same kind of index for fewer chunks: 4·√chunks lists, as a power of two, and not more than it has."""
    wanted = 2 ** math.floor(math.log2(4 * math.sqrt(max(1.0, chunks))))
    return re.sub(r"IVF\d+", f"IVF{min(wanted, lists_of(key))}", key)


def key_for(chunks: float, dimension: int, settings: IndexSettings) -> tuple[str, IndexSettings]:
    """The index that `retro index` would choose, and the settings with `index.memory` raised until one fits."""
    for power in range(60):
        try:
            return choose_key(int(chunks), dimension, settings), settings
        except InputError:
            settings = replace(settings, memory=f"{2**power}GB")
    raise InputError(f"index: no index of {chunks:,.0f} × {dimension} is proposed at any index.memory.")


def index_bytes(key: str, dimension: int) -> tuple[int, int]:
    """Bytes of a stored vector without its id, and of the trained index, which every shard holds a copy of.

    Raises:
        InputError: Faiss does not understand the key.
    """
    import faiss

    index: Any
    try:
        index = faiss.index_factory(dimension, key, faiss.METRIC_L2)
    except RuntimeError as error:
        raise InputError(f"index.factory = {key!r} with dimension {dimension}: {error}") from error
    trained, inner = _INDEX_HEADER, index  # `index` owns what the others are parts of
    if isinstance(index, faiss.IndexPreTransform):
        chain: Any = index.chain
        transforms = [faiss.downcast_VectorTransform(chain.at(number)) for number in range(chain.size())]
        trained += sum(4 * each.d_in * each.d_out for each in transforms)
        inner = faiss.downcast_index(index.index)
    if lists_of(key) > 1:
        trained += 4 * inner.d * inner.nlist + (16 if "fs" in key else 8) * inner.nlist
        if graph := re.search(
            r"HNSW(\d+)", key
        ):  # 2 M neighbors at the bottom, M in each level above, of 1/M of the nodes
            trained += inner.nlist * (4 * 2 * int(graph[1]) + 16)
    if hasattr(inner, "pq"):
        trained += 4 * inner.pq.d * inner.pq.ksub
    return int(getattr(inner, "code_size", 0) or inner.sa_code_size()), trained


# --- size ------------------------------------------------------------------------------------------------------------


def per_byte(name: str, text_bytes: float, observations: Sequence[Observation], tokenizer: TokenizerSettings) -> float:
    """Tokens, chunks or documents of a byte of text, in a corpus of so many bytes.

    A tokenizer trained on little text fits that text better than it will fit more: what it gains falls with the root of the size of
    its sample (docs/plan.md), which two sizes tell.
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
    """Bytes of text that have so many tokens."""
    text_bytes = tokens * observations[-1].workload.text_bytes / observations[-1].workload.tokens
    for _ in range(20):  # a fixed point, and the density hardly changes
        text_bytes = tokens / per_byte("tokens", text_bytes, observations, tokenizer)
    return text_bytes


# --- bytes -----------------------------------------------------------------------------------------------------------


def artefact_bytes(size: Workload, layout: Layout) -> dict[str, float]:
    """Bytes of the folders of a datastore that grow with it."""
    code, trained = index_bytes(size.key, layout.dimension)
    files = size.shards * _SPLITS
    documents = (8 + layout.document_bytes) * size.documents + (8 + layout.parquet_bytes) * files
    # A list's last block of fast-scan codes is half empty on average.
    padding = size.shards * size.lists * (_BLOCK - 1) / 2 * code if "fs" in size.key else 0.0
    arrays = {
        "chunks": (layout.chunk_length * layout.token_bytes + 2) * size.chunks + documents + 3 * files * _NPY_HEADER,
        "embeddings": 2.0 * layout.dimension * size.chunks + files * _NPY_HEADER,
        "index": (code + 8) * size.train_chunks + padding + (size.shards + 1) * trained,
        "neighbors": (8.0 + 4.0) * layout.k * size.chunks + 2 * files * _NPY_HEADER,
    }
    if layout.materialised:
        neighbor = 2 * layout.chunk_length * layout.token_bytes + 4  # with its continuation, and its length
        arrays["materialised"] = layout.materialised * neighbor * size.chunks + 2 * files * _NPY_HEADER
    return {name: value + size.shards * _MANIFEST_BYTES[name] for name, value in arrays.items()}


def memory_bytes(size: Workload, layout: Layout, base: float) -> dict[str, float]:
    """Resident memory of one worker in each step: the process with all libraries, plus what grows with the datastore.

    Memory-mapped embeddings are not counted; re-ranking reads them at random, so they should fit into the page cache. An index that is
    larger than `sharded_index.MEMORY` is searched in groups of shards, each group as it is stored and as it searches fastest.
    """
    code, trained = index_bytes(size.key, layout.dimension)
    whole = (code + 8) * size.train_chunks + size.shards * trained
    shard = whole / size.shards
    group = max(shard, min(whole, MEMORY))
    sample = size.trained_on * layout.dimension
    return {
        "scan": base + 16 * size.documents,  # hashes and lines of ids, in the process that starts the build
        "train-index": base + (2 + 4 + 4) * sample + trained,
        "add": base + shard + trained,
        "tune nprobe": base + 2 * group,
        "neighbors": base + (2 * group if size.search != "exact" else 0.0),
    }


# --- seconds ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepModel:
    """How the seconds of a step grow.

    Attributes:
        drivers: of a workload: amounts whose weighted sum the seconds are, first the one that they grow with.
        shared: whether all machines work on it; otherwise one does.
    """

    drivers: Callable[[Workload], tuple[float, ...]]
    shared: bool = True


def step_models(sample_bytes: int, fit_chunks: int) -> dict[str, StepModel]:
    """The model of every step, by its name; `tokenizer.sample_bytes` and `embedder.fit_chunks` bound two of them."""

    def of_queries(size: Workload) -> tuple[float, ...]:
        return size.tune_queries * size.train_chunks, size.tune_queries

    def of_neighbors(size: Workload) -> tuple[float, ...]:
        return size.chunks * size.compared, size.chunks, size.chunks * (size.shards - 1)

    return {
        "scan": StepModel(lambda size: (size.text_bytes,)),
        "tokenizer": StepModel(lambda size: (min(size.text_bytes, sample_bytes), 1.0), shared=False),
        "chunk": StepModel(lambda size: (size.text_bytes,)),
        "embed: count n-grams": StepModel(lambda size: (min(size.train_chunks, fit_chunks),), shared=False),
        "embed": StepModel(lambda size: (size.chunks, 1.0)),
        "train-index": StepModel(lambda size: (float(size.trained_on) * size.lists, 1.0), shared=False),
        "add": StepModel(lambda size: (size.train_chunks, size.train_chunks * size.coarse)),
        "tune nprobe": StepModel(of_queries, shared=False),
        "neighbors": StepModel(of_neighbors),
    }


_UNKNOWN = StepModel(lambda size: (size.chunks,))


def coefficients(drivers: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients [d], none negative, of drivers [n, d] that fit the seconds [n] with the least relative error.

    Measurements are noisy, and differences between them noisier: a driver whose coefficient would be negative is left out. The first
    one never is: it is what the step is known to grow with, and a plan errs on the side of more.
    """
    kept = [column for column in range(drivers.shape[1]) if drivers[:, column].any()]
    found = np.zeros(drivers.shape[1])
    scale = np.maximum(seconds, 1e-9)[:, None]
    while kept:
        columns = drivers[:, kept]
        units = columns.max(axis=0)  # drivers differ by many orders of magnitude
        solved = np.linalg.lstsq(columns / units / scale, seconds / scale[:, 0], rcond=None)[0]
        if solved.min() >= 0:
            found[kept] = solved / units
            break
        kept.pop(1 + int(np.argmin(solved[1:])))  # the only coefficient of one driver is never negative
    return found


def step_seconds(
    size: Workload, observations: Sequence[Observation], models: Mapping[str, StepModel]
) -> dict[str, float]:
    """Seconds that one machine like the calibrated one would work on each step."""
    out = {}
    for name in observations[-1].seconds:
        model = models.get(name, _UNKNOWN)
        seen = [each for each in observations if name in each.seconds]
        if name == "neighbors":
            seen = [each for each in seen if each.workload.search == size.search]
        drivers = np.array([model.drivers(each.workload) for each in seen], dtype=np.float64)
        fitted = coefficients(drivers, np.array([each.seconds[name] for each in seen]))
        out[name] = float(fitted @ np.array(model.drivers(size)))
    return out


def reading_seconds(size: Workload, scan_seconds: float, sample_bytes: int) -> float:
    """What drawing the tokenizer's sample takes beyond training on it: every text is read, as in the scan."""
    return scan_seconds * max(0.0, 1 - sample_bytes / size.text_bytes)


# --- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepPlan:
    """What a step takes.

    Attributes:
        name: of the step.
        seconds: that one machine would work.
        shared: whether several machines work on it.
        machines: that work on it.
        wall_seconds: from its beginning to its end.
        memory_bytes: of a worker.
        cost: of the machines that work, at the price given.
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
    """What a datastore takes.

    Attributes:
        size: of it and of its index.
        bytes: of every artefact.
        steps: in order.
        settings: those that have to differ from what was given, by name.
        calibrated_nprobe: the one that reached the recall target in the largest sample.
        calibrated_seconds: of `neighbors`, with that one: less, for a lower recall where more chunks need a larger one.
    """

    size: Workload
    bytes: dict[str, float]
    steps: list[StepPlan]
    settings: dict[str, str]
    calibrated_nprobe: float
    calibrated_seconds: float

    @property
    def wall_seconds(self) -> float:
        """Of all steps, one after the other."""
        return sum(step.wall_seconds for step in self.steps)


def machines_within(steps: Sequence[StepPlan], seconds: float) -> int | None:
    """Machines with which all steps are done within this time; None if those that one machine does take longer."""
    alone = sum(step.seconds for step in steps if not step.shared)
    shared = sum(step.seconds for step in steps if step.shared)
    return max(1, math.ceil(shared / (seconds - alone))) if seconds > alone else None


def extrapolated_nprobe(chunks: float, lists: int, observations: Sequence[Observation]) -> int:
    """The power of two at which the recall target will be reached among this many chunks in so many lists.

    From one size to the other the logarithm of what was needed has grown by a share of that of the number of chunks; it goes on
    like that. The share is held between 0 and a half: with 4·√N lists, a half is a constant share of all lists.
    """
    first, last = observations[0], observations[-1]
    ratio = math.log2(last.workload.train_chunks / first.workload.train_chunks)
    slope = math.log2(last.crossing / first.crossing) / ratio if ratio else 0.0
    growth = min(0.5, max(0.0, slope)) * math.log2(chunks / last.workload.train_chunks)
    wanted = 2 ** math.ceil(round(math.log2(last.crossing) + growth, 6))
    return int(min(lists, max(1, wanted)))


def corpus_tokens(config: Config, calibration: Calibration) -> float:
    """Tokens of the corpus that was calibrated on; 0 = unknown."""
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
    """The plan of a datastore of this many tokens.

    Args:
        config: its settings.
        calibration: of a machine like those that will build it.
        tokens: with the beginning and end of each document.
        machines: that work side by side.
        price: of a machine for an hour.
        nprobe: lists visited; 0 = extrapolated from the calibration.
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
    size = replace(size, nprobe=min(nprobe, lists) or extrapolated_nprobe(train_chunks, lists, seen))
    size = replace(size, search=_search(config, size, calibration.dimension))
    document_bytes, parquet_bytes = _parquet(seen)
    layout = Layout(
        chunk_length=config.chunks.chunk_length,
        token_bytes=4 if paper else calibration.token_bytes,
        dimension=calibration.dimension,
        k=config.neighbors.k,
        materialised=config.neighbors.materialised,
        document_bytes=document_bytes,
        parquet_bytes=parquet_bytes,
    )
    calibrated_nprobe = min(seen[-1].workload.nprobe, lists)
    alike = step_seconds(replace(size, nprobe=calibrated_nprobe), seen, models_of(config))
    changed = {"index.memory": index.memory} if index.memory != config.index.memory else {}
    return Plan(
        size=size,
        bytes=artefact_bytes(size, layout),
        steps=_steps(config, calibration, size, layout, machines, price),
        settings=changed | ({"corpus.shard_bytes": str(config.corpus.shard_bytes)} if paper else {}),
        calibrated_nprobe=calibrated_nprobe,
        calibrated_seconds=alike.get("neighbors", 0.0),
    )


def _search(config: Config, size: Workload, dimension: int) -> Method:
    """The way of searching that `retro index` would take."""
    if config.neighbors.search != "auto":
        return config.neighbors.search
    searched = Searched(
        num_vectors=int(size.train_chunks),
        dimension=dimension,
        nlist=size.lists,
        nprobe=int(size.nprobe),
        code_bytes=index_bytes(size.key, dimension)[0],
        fast_scan=bool(re.search(r"PQ\d+x4", size.key)),
        candidates=config.neighbors.candidates,
    )
    return cheaper(searched, hardware_of(config.executor))


def _parquet(observations: Sequence[Observation]) -> tuple[float, float]:
    """Bytes of a document's row in `documents.parquet`, and of a file without rows."""
    drivers = [[each.workload.documents, each.workload.shards * _SPLITS] for each in observations]
    found = coefficients(np.array(drivers), np.array([float(each.parquet_bytes) for each in observations]))
    return float(found[0]), float(found[1])


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
        shared = models.get(name, _UNKNOWN).shared
        working = min(machines, size.shards) if shared else 1
        needed = memory.get(name, float(calibration.peak_bytes))
        out.append(StepPlan(name, value, shared, working, value / working, needed, price * value / 3600))
    return out


def models_of(config: Config) -> dict[str, StepModel]:
    """`step_models` for these settings."""
    return step_models(config.tokenizer.sample_bytes, config.embedder.fit_chunks)


def paper_config(config: Config) -> Config:
    """The same settings for the paper's size: 64 tokens in a chunk, an index chosen for it, shards of 16 GiB of text."""
    return replace(
        config,
        chunks=replace(config.chunks, chunk_length=64),
        corpus=replace(config.corpus, shard_bytes=max(config.corpus.shard_bytes, 16 * 2**30)),
        index=replace(config.index, factory=""),
    )
