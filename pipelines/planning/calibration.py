"""What a machine does in a second: a sample of the corpus is built, with the project's own stages, at two sizes.

    corpus (or what Python carries) ── uniform sample ──► warm up, a quarter, all of it ── build ──► Observation of each

The sample goes to a temporary folder and is removed. Two sizes tell what is fixed (opening a model, training codes) from what
grows, and how far the inverted lists have to be searched deeper when there are more chunks. `plan.py` makes predictions of it.
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
from indexing.neighbors.search_cost import Method
from indexing.store.artifact import read_manifest
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json
from pipelines.config import Config
from pipelines.executors.tasks import Advance, LocalExecutor
from pipelines.planning.bytes import Workload, key_for, with_lists_for
from pipelines.planning.datastore import Calibration, models_of
from pipelines.planning.seconds import Observation, StepModel, coefficients
from pipelines.stages.table import build
from pipelines.terminal import StagesView, Step, progress

_WARM_UP_BYTES = 250_000
_AGAIN_SECONDS = 30  # what took less than this is done once more: noise evens out
_SCANNED_BYTES = 256 * 2**20  # of text looked through for the sample


@dataclass(frozen=True)
class Sample:
    """Documents drawn from a corpus, and how much there is of it.

    Attributes:
        documents: uniformly drawn, in the order of the corpus.
        valid: documents of the `valid` split, all of them where they are few: the queries for which nprobe is tuned are those
            of the real build then.
        text_bytes: UTF-8 bytes in the whole corpus, estimated where not all of it was looked through; 0 = unknown.
    """

    documents: list[Document]
    valid: list[Document]
    text_bytes: float


class _Enough(Exception):
    """Enough of the corpus has been looked through."""


class _Drawn:
    """Documents of about `limit` bytes of text: those with the smallest random numbers of all that were offered."""

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


def draw_sample(settings: CorpusSettings, sample_bytes: int, seed: int = 0) -> Sample:
    """Draw documents of about `sample_bytes` of text, and a tenth as much of those held out for validation.

    Of a large corpus some files, in random order, are looked through until `_SCANNED_BYTES` of text have been seen.

    Raises:
        InputError: a path does not exist, or there is no text.
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
        raise InputError(
            f"corpus.paths = {settings.paths}: {len(files)} files hold no document with text to calibrate on that is not held out."
        )
    total = sum(file.size for file in files)
    text_bytes = scanned_text * total / scanned_stored if scanned_stored else 0.0
    return Sample(drawn.documents(), valid.documents(), text_bytes)


def calibrate(config: Config, *, tokens: float = 0.0, sample_bytes: int = 8 * 2**20) -> Calibration:
    """Build samples of the corpus in a temporary folder, with the settings of the datastore that is planned.

    Args:
        config: its settings. Without `corpus.paths`, or where these hold tokens, the text is what Python carries.
        tokens: of the datastore; 0 = all of the corpus. It decides which kind of index is calibrated.
        sample_bytes: of text in the largest sample.

    Raises:
        InputError: a bad path, a corpus without text, or one of unknown size when `tokens` is 0.
    """
    started = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="retro-calibration-") as work,
        progress("calibrate", total=None, unit="bytes") as advance,
    ):
        sample, text = _sample(config, sample_bytes, Path(work))
        if not tokens and not sample.text_bytes:
            raise InputError(
                "tokens = 0 stands for the whole corpus, whose size is not known: there is no corpus.paths, or it holds tokens, "
                "or its files are too large to be looked through. Give --tokens, for example 1e9."
            )
        bench = _Bench(config, Path(work), sample, advance)
        transformer = bench.embed_with_model() if config.embedder.kind == "transformer" else None
        first = bench.build(_WARM_UP_BYTES)[0].workload  # loads every library, and tells how many chunks there will be
        chunks = (tokens / first.tokens or sample.text_bytes / first.text_bytes) * first.chunks
        bench.kind = key_for(chunks, bench.embedder.dimension, config.index)[0]
        whole = sum(document.size for document in sample.documents)
        several = chunks / first.chunks * first.text_bytes > 1.5 * config.corpus.shard_bytes
        sizes = [(whole // 4, 1), *([(whole // 4, 4)] if several else []), (whole, 1)]
        observations: list[Observation] = []
        while not observations or time.perf_counter() - started < _AGAIN_SECONDS:
            observations += [each for size, shards in sizes for each in bench.build(size, shards)]
        if transformer is not None:
            observations = [_embedded_with(transformer, each) for each in observations]
        return Calibration(
            machine=f"{_processor()}, {os.cpu_count()} cores",
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            observations=tuple(observations),
            token_bytes=bench.token_bytes,
            dimension=bench.embedder.dimension,
            text=text,
            corpus_bytes=sample.text_bytes,
            seconds=time.perf_counter() - started,
        )


def _sample(config: Config, sample_bytes: int, work: Path) -> tuple[Sample, str]:
    """The sample, and in words where it is from."""
    paths = config.corpus.paths
    if paths and not any(is_megatron(file.name) for file in list_files(config.corpus)):
        return draw_sample(config.corpus, sample_bytes), ", ".join(paths)
    path = write_python_corpus(work / "python")
    sample = draw_sample(CorpusSettings(paths=(str(path),)), sample_bytes)
    return replace(sample, text_bytes=0.0), "Python's documentation and sources"


class _Bench:
    """Builds samples of one corpus, each in a folder of its own.

    Args:
        config: of the datastore that is planned.
        work: the temporary folder.
        sample: of its text.
        advance: told of the text that has been built.
    """

    def __init__(self, config: Config, work: Path, sample: Sample, advance: Advance) -> None:
        self.config, self.work, self.advance = config, work, advance
        # Shuffled, so that a smaller sample is uniform too. Each has the same held-out documents: the same queries.
        self.documents, self.valid = random.Random(0).sample(sample.documents, len(sample.documents)), sample.valid
        self.kind = "IVF128,Flat"
        self.embedder = _lexical(config.embedder)
        self.chunk_bytes = 4.0 * config.chunks.chunk_length  # of text, about; known after the first build
        self.token_bytes = 2
        self.numbers = itertools.count()

    def build(self, text_bytes: int, shards: int = 1) -> list[Observation]:
        """Build a sample of about this much text in as many shards, and search it in each way that may be chosen.

        The observation of the whole build is the last.
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
        self.advance(text_bytes)
        self.chunk_bytes = observed.workload.text_bytes / observed.workload.chunks
        wide = self.config.tokenizer.is_trained and self.config.tokenizer.vocab_size > 2**16
        self.token_bytes = 4 if wide else datastore.train.tokens.shard(0).itemsize
        return [*others, observed]

    def embed_with_model(self) -> np.ndarray:
        """What opening the configured transformer takes, and what a chunk: seconds [2]. Sets the width of embeddings."""
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
        """Settings for a sample of about this much text and these held-out documents, which is written to a file."""
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
    """The lexical embedder that stands in for these: search and index depend on the width of embeddings, not on their maker."""
    if settings.kind == "lexical" and settings.path:
        stored = EmbedderSettings(**read_json(Path(settings.path) / "embedder" / "embedder.json"))
        return replace(stored, path="")
    return replace(settings, kind="lexical", path="")


def _embedded_with(seconds: np.ndarray, observation: Observation) -> Observation:
    """An observation with the time of another embedder: seconds [2] to open it, and for a chunk."""
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
            text_bytes=read_manifest(folder / "corpus")["counts"]["bytes"],  # with what [dedup] leaves out
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
    )


def name_in(models: Mapping[str, StepModel], name: str) -> str:
    """The model that a step belongs to: the longest that its name begins with (`train-index IVF512,…`), or the name itself."""
    return max((model for model in models if name.startswith(model)), key=len, default=name)


def crossing(curve: Sequence[tuple[int, float]], target: float) -> float:
    """The nprobe at which a curve of (nprobe, recall) reaches the target, between two points by its logarithm; 0 = never."""
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
