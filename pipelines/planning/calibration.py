"""Calibration of a machine: build samples of the corpus, of two sizes, with the real stages.

    corpus (or Python's documentation and sources) ── uniform sample ──► warm up, a quarter, all of it ── build ──► Observation of each

The samples are built in a temporary folder. Two sizes separate fixed costs (opening a model, training codes) from growing ones, and
show how nprobe grows with the number of chunks. `planning/datastore.py` predicts from the observations.
"""

import heapq
import itertools
import json
import os
import platform
import random
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from indexing.corpus.megatron import is_megatron
from indexing.corpus.python_library import write_python_corpus
from indexing.corpus.readers import CorpusSettings, Document
from indexing.corpus.scan import list_files, scan_file, split_of
from indexing.embedders import EmbedderSettings
from indexing.memory import usable_memory
from indexing.neighbors.search import Method
from indexing.progress import status
from indexing.store.artifact import read_manifest
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json
from pipelines.config import Config
from pipelines.executors.tasks import LocalExecutor
from pipelines.planning.bytes import Workload, key_for, with_lists_for
from pipelines.planning.datastore import Calibration, models_of
from pipelines.planning.seconds import Observation, StepModel, coefficients
from pipelines.stages.table import build
from pipelines.terminal import StagesView, Step, progress

_WARM_UP_BYTES = 250_000
_AGAIN_SECONDS, _MOST_SECONDS = (
    30,
    60,
)  # shorter calibrations run again, to average out noise, if that ends within a minute
_SCANNED_BYTES = 256 * 2**20  # bytes of text read for the sample


@dataclass(frozen=True)
class CorpusSample:
    """Documents drawn from a corpus, and the size of the corpus.

    Attributes:
        documents: uniformly drawn, in the order of the corpus.
        valid: documents of the `valid` split; all of them if there are few, so that nprobe is tuned with the queries of the real
            build.
        text_bytes: UTF-8 bytes in the whole corpus, estimated if only a part was read; 0 = unknown.
    """

    documents: list[Document]
    valid: list[Document]
    text_bytes: float


class _Enough(Exception):
    """Enough of the corpus has been read."""


class _Drawn:
    """Keeps about `limit` bytes of documents: those with the smallest random numbers."""

    def __init__(self, limit: int, rng: random.Random) -> None:
        self.limit, self.rng = limit, rng
        self.held = self.offered = 0
        self.kept: list[tuple[float, int, Document]] = []

    def offer(self, document: Document) -> None:
        self.offered += 1
        self.held += document.size
        heapq.heappush(self.kept, (-self.rng.random(), self.offered, document))
        while self.held - self.kept[0][2].size >= self.limit:
            self.held -= heapq.heappop(self.kept)[2].size

    def documents(self) -> list[Document]:
        return [document for _, _, document in sorted(self.kept, key=lambda entry: entry[1])]


def draw_sample(settings: CorpusSettings, sample_bytes: int, seed: int = 0) -> CorpusSample:
    """Draw documents of about `sample_bytes` of text, and a tenth as much held-out text.

    Of a large corpus some files are read, in random order, until `_SCANNED_BYTES` of text have been seen.

    Raises:
        InputError: a path does not exist, or the corpus has no text.
    """
    rng = random.Random(seed)
    files = list_files(settings)
    drawn, valid = _Drawn(sample_bytes, rng), _Drawn(sample_bytes // 10, rng)
    seen = scanned_text = scanned_stored = 0

    def look_at(document: Document) -> None:
        nonlocal seen
        seen += document.size
        (valid if split_of(document.text, settings.split) == "valid" else drawn).offer(document)
        if seen >= _SCANNED_BYTES:
            raise _Enough

    for file in rng.sample(files, len(files)):
        try:
            scanned_text += scan_file(file, settings, look_at).text_bytes
        except _Enough:
            break
        scanned_stored += file.size
    if not drawn.kept:
        raise InputError(f"corpus.paths = {settings.paths}: {len(files)} files contain no training document with text.")
    total = sum(file.size for file in files)
    text_bytes = scanned_text * total / scanned_stored if scanned_stored else 0.0
    return CorpusSample(drawn.documents(), valid.documents(), text_bytes)


def calibrate(config: Config, *, tokens: float = 0.0, sample_bytes: int = 8 * 2**20) -> Calibration:
    """Build samples of the corpus in a temporary folder, with the settings of the planned datastore.

    Args:
        config: its settings. Without `corpus.paths`, or if these contain tokens, the text is Python's documentation and sources.
        tokens: of the datastore, which determine the kind of index; 0 = all of the corpus.
        sample_bytes: of text in the largest sample.

    Raises:
        InputError: a path does not exist, the corpus has no text, or its size is unknown and `tokens` is 0.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="retro-calibration-") as work:
        status("drawing the sample")
        sample, text = _sample(config, sample_bytes, Path(work))
        if not tokens and not sample.text_bytes:
            raise InputError(
                "tokens = 0 means the whole corpus, and its size is unknown: corpus.paths is empty, contains tokens, or has files "
                "too large for the calibration. Set --tokens, for example 1e9."
            )
        bench = _Bench(config, Path(work), sample)
        transformer = bench.embed_with_model() if config.embedder.kind == "transformer" else None
        first = bench.build(_WARM_UP_BYTES)[0].workload  # loads every library, and gives the number of chunks per byte
        chunks = (tokens / first.tokens or sample.text_bytes / first.text_bytes) * first.chunks
        bench.kind = key_for(chunks, bench.embedder.dimension, config.index)[0]
        whole = sum(document.size for document in sample.documents)
        several = chunks / first.chunks * first.text_bytes > 1.5 * config.corpus.shard_bytes
        sizes = [(whole // 4, 1), *([(whole // 4, 4)] if several else []), (whole, 1)]
        observations: list[Observation] = []
        elapsed = round_seconds = 0.0
        with progress("calibrate", total=sum(size for size, _ in sizes), unit="bytes") as advance:
            while not observations or (elapsed < _AGAIN_SECONDS and elapsed + round_seconds < _MOST_SECONDS):
                before = time.perf_counter()
                for size, shards in sizes:
                    observations += bench.build(size, shards)
                    advance(size)
                elapsed, round_seconds = time.perf_counter() - started, time.perf_counter() - before
        if transformer is not None:
            observations = [_embedded_with(transformer, each) for each in observations]
        return Calibration(
            machine=f"{_processor()}, {os.cpu_count()} cores",
            memory_bytes=usable_memory(),
            peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            observations=tuple(observations),
            token_bytes=bench.token_bytes,
            dimension=bench.embedder.dimension,
            text=text,
            corpus_bytes=sample.text_bytes,
            seconds=time.perf_counter() - started,
        )


def _sample(config: Config, sample_bytes: int, work: Path) -> tuple[CorpusSample, str]:
    """The sample, and its source in words."""
    paths = config.corpus.paths
    if paths and not any(is_megatron(file.name) for file in list_files(config.corpus)):
        return draw_sample(config.corpus, sample_bytes), ", ".join(paths)
    path = write_python_corpus(work / "python")
    sample = draw_sample(CorpusSettings(paths=(str(path),)), sample_bytes)
    return replace(sample, text_bytes=0.0), "Python's documentation and sources"


class _Bench:
    """Builds samples of one corpus, each in its own folder.

    Args:
        config: of the planned datastore.
        work: the temporary folder.
        sample: of its text.
    """

    def __init__(self, config: Config, work: Path, sample: CorpusSample) -> None:
        self.config, self.work = config, work
        # Shuffled, so that a smaller sample is uniform too. All samples have the same held-out documents and queries.
        self.documents, self.valid = random.Random(0).sample(sample.documents, len(sample.documents)), sample.valid
        self.kind = "IVF128,Flat"
        self.embedder = _lexical(config.embedder)
        self.chunk_bytes = 4.0 * config.chunks.chunk_length  # of text; an estimate until the first build
        self.token_bytes = 2
        self.numbers = itertools.count()

    def build(self, text_bytes: int, shards: int = 1) -> list[Observation]:
        """Build a sample of about `text_bytes`, and search it with every method that the build could choose.

        The last observation is that of the whole build.
        """
        config = self._config(text_bytes, shards, self.valid)
        key = with_lists_for(self.kind, text_bytes / self.chunk_bytes)
        config = replace(config, embedder=self.embedder, index=replace(config.index, factory=key))
        wanted = self.config.neighbors.search
        ways: list[Method] = ["index", "exact", "lists"] if wanted == "auto" else [wanted]
        config = _searched_by(ways[0], config)
        view = StagesView(quiet=True)
        datastore = build(config, LocalExecutor(config.executor), view=view)
        observed = _observed(config, ways[0], datastore, view.steps)
        others = []
        for way in ways[1:]:
            config, view = _searched_by(way, config), StagesView(quiet=True)
            build(config, LocalExecutor(config.executor), only="neighbors", rebuild=True, view=view)
            others.append(_observed(config, way, datastore, view.steps))
        self.chunk_bytes = observed.workload.text_bytes / observed.workload.chunks
        wide = self.config.tokenizer.is_trained and self.config.tokenizer.vocab_size > 2**16
        self.token_bytes = 4 if wide else datastore.train.tokens.shard(0).itemsize
        return [*others, observed]

    def embed_with_model(self) -> np.ndarray:
        """Seconds [2] to open the configured transformer, and to embed a chunk. Sets the dimension of embeddings."""
        drivers, seconds = [], []
        for text_bytes in (_WARM_UP_BYTES // 4, _WARM_UP_BYTES):
            config, view = self._config(text_bytes, 1, []), StagesView(quiet=True)
            for stage in ("chunk", "embed"):
                datastore = build(config, LocalExecutor(config.executor), only=stage, view=view)
            drivers.append([1.0, float(view.steps[-1].units)])
            seconds.append(view.steps[-1].seconds)
            self.embedder = replace(self.embedder, dimension=datastore.train.embeddings.row_shape[0])
        return coefficients(np.array(drivers), np.array(seconds))

    def _config(self, text_bytes: int, shards: int, valid: Sequence[Document]) -> Config:
        """Write a sample of about `text_bytes` and these held-out documents to a file; returns its settings."""
        folder = self.work / str(next(self.numbers))
        folder.mkdir()
        sizes = itertools.accumulate((document.size for document in self.documents), initial=0)
        taken = [document for document, before in zip(self.documents, sizes, strict=False) if before < text_bytes]
        keys = {key: key.replace(".", "_") for key in self.config.corpus.metadata_keys}
        with open(folder / "sample.jsonl", "w", encoding="utf-8") as file:
            for document in (*valid, *taken):
                metadata = {keys[key]: value for key, value in document.metadata.items()}
                file.write(json.dumps({**metadata, "id": document.id, "text": document.text}) + "\n")
        size = sum(document.size for document in (*valid, *taken))
        corpus = CorpusSettings(
            paths=(str(folder / "sample.jsonl"),),
            metadata_keys=tuple(keys.values()),
            shard_bytes=2 * size if shards == 1 else size // shards,
            split=self.config.corpus.split,
        )
        neighbors = replace(self.config.neighbors, extra_datastores=())
        return replace(self.config, datastore=folder / "datastore", corpus=corpus, neighbors=neighbors)


def _searched_by(search: Method, config: Config) -> Config:
    return replace(config, neighbors=replace(config.neighbors, search=search))


def _lexical(settings: EmbedderSettings) -> EmbedderSettings:
    """The lexical embedder for the calibration: search and index depend only on the dimension of embeddings."""
    if settings.kind == "lexical" and settings.path:
        stored = EmbedderSettings(**read_json(Path(settings.path) / "embedder" / "embedder.json"))
        return replace(stored, path="")
    return replace(settings, kind="lexical", path="")


def _embedded_with(seconds: np.ndarray, observation: Observation) -> Observation:
    """An observation with the times of another embedder: seconds [2] to open it, and to embed a chunk."""
    if "embed" not in observation.seconds:
        return observation
    kept = {name: value for name, value in observation.seconds.items() if name != "embed: count n-grams"}
    kept["embed"] = float(seconds @ [1.0, observation.workload.chunks])
    return replace(observation, seconds=kept)


def _observed(config: Config, search: Method, datastore: Datastore, steps: list[Step]) -> Observation:
    totals = {
        key: sum(sum(rows[key]) for rows in datastore.manifest["splits"].values())
        for key in ("documents", "chunks", "tokens")
    }
    folder = datastore.folder
    tuned, trained = read_json(folder / "index/tuned/tuned.json"), read_json(folder / "index/trained/index.json")
    models = models_of(config)
    return Observation(
        workload=Workload(
            text_bytes=read_manifest(folder / "corpus")["counts"]["bytes"],  # including text that [dedup] removes
            documents=totals["documents"],
            tokens=totals["tokens"],
            chunks=totals["chunks"],
            train_chunks=datastore.train.num_chunks,
            shards=len(datastore.train.chunk_rows),
            key=trained["key"],
            nprobe=tuned["nprobe"],
            list_nprobe=tuned.get("lists", tuned)["nprobe"],
            trained_on=trained["trained_on"],
            tune_queries=tuned["queries"],
            search=search,
        ),
        seconds={name_in(models, step.name): step.seconds for step in steps},
        crossing=crossing(tuned["curve"], config.index.recall_target) or tuned["nprobe"],
        parquet_bytes=sum(file.stat().st_size for file in folder.glob("chunks/*/*/documents.parquet")),
        sparse_bytes=sum(file.stat().st_size for file in folder.glob("sparse/*/*") if file.suffix != ".json"),
    )


def name_in(models: Mapping[str, StepModel], name: str) -> str:
    """The step model of a step: the longest model name that the step's name begins with (`train-index IVF512,…`), or the step's name."""
    return max((model for model in models if name.startswith(model)), key=len, default=name)


def crossing(curve: Sequence[tuple[int, float]], target: float) -> float:
    """The nprobe at which a curve of (nprobe, recall) reaches the target, log-interpolated between points; 0 = never."""
    for (low, before), (high, after) in itertools.pairwise(curve):
        if before < target <= after:
            return float(low * (high / low) ** ((target - before) / (after - before)))
    return float(curve[0][0]) if curve[0][1] >= target else 0.0


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
