"""Documents drawn uniformly from a corpus, and a datastore of them that the real stages build in a temporary folder.

corpus (or Python's documentation and sources) ─ draw_sample ─► CorpusSample ─ measure ─► Sample
"""

import heapq
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from indexing.corpus.documents import CorpusSettings, Document
from indexing.corpus.megatron import is_megatron
from indexing.corpus.python_library import write_python_corpus
from indexing.corpus.scan import list_files, scan_file, split_of_document
from indexing.embedding.settings import EmbedderSettings, from_json
from indexing.index.key import num_lists
from indexing.index.sharded import Trained, Tuned
from indexing.machine import processor_name, usable_memory
from indexing.neighbors.settings import Method
from indexing.progress import during
from indexing.store.artifact import read_manifest, stored_json
from indexing.store.datastore import Datastore, shard_name
from indexing.store.errors import InputError
from indexing.store.files import read_json
from indexing.store.stages import left_out
from pipelines.cli.planning.bytes import Workload, index_for, with_lists_for
from pipelines.config import Config
from pipelines.executors.tasks import LocalExecutor
from pipelines.stages.choices import by_embeddings, with_choices
from pipelines.stages.table import build
from pipelines.terminal.stages import StagesView, Step

SAMPLE_BYTES = 8 * 2**20
_LEAST_BYTES = 250_000
_TRANSFORMER_BYTES = 250_000  # of text that a transformer embeds; the sample takes the lexical embedder instead
_SCANNED_BYTES = 256 * 2**20  # bytes of text read for the sample
_TOKEN_BYTES = 4  # of text, about; decides only which kind of index the sample gets


@dataclass(frozen=True)
class Sample:
    """A datastore of a part of the corpus, built on this machine.

    Attributes:
        size: of the datastore.
        seconds: of each step on this machine without other work, at most: see `idle_seconds`.
        cpu_seconds: of each step, summed over all processors.
        bytes: of artifacts whose bytes depend on the
            text: `documents.parquet`, `sparse`, `ngrams`, `suffixes`, `votes`.
        token_bytes: 2 or 4.
        dimension: d of the embeddings.
        machine: processor and cores.
        memory_bytes: of the machine.
        peak_bytes: largest resident set of the measuring process.
        source: of the text.
        corpus_bytes: bytes of text in the whole corpus; 0 = unknown.
        total_seconds: that the measurement took.
    """

    size: Workload
    seconds: Mapping[str, float]
    cpu_seconds: Mapping[str, float]
    bytes: Mapping[str, int]
    token_bytes: int
    dimension: int
    machine: str
    memory_bytes: int
    peak_bytes: int
    source: str
    corpus_bytes: float
    total_seconds: float


def measure(config: Config, *, tokens: float = 0.0, sample_bytes: int | None = None) -> Sample:
    """Build a sample of the corpus in a temporary folder, with the settings of the planned datastore.

    Args:
        config: its settings. Without `corpus.paths`, or if these contain tokens, the text is Python's documentation and
            sources.
        tokens: of the datastore, which determine index and search; 0 = all of the corpus.
        sample_bytes: of text in the sample; None = `SAMPLE_BYTES`, or an eighth of a smaller corpus.

    Raises:
        InputError: a path does not exist, the corpus has no text, or its size is unknown and `tokens` is 0.
    """
    started = time.perf_counter()
    config = with_choices(config)  # those of its embedder, which the sample may replace
    with tempfile.TemporaryDirectory(prefix="retro-plan-") as folder:
        work = Path(folder)
        with during("drawing the sample"):
            drawn, source = _drawn(config, sample_bytes or SAMPLE_BYTES, work)
        if not tokens and not drawn.text_bytes:
            raise InputError(
                "tokens = 0 means the whole corpus, and its size is unknown: corpus.paths is empty, contains tokens, or has "
                "files too large for the sample. Set --tokens, for example 1e9."
            )
        limit = sum(document.size for document in drawn.documents)
        if sample_bytes is None and not tokens:
            limit = min(limit, max(_LEAST_BYTES, int(drawn.text_bytes / 8)))
        with during("building the sample"):
            embedder, of_transformer = _stand_in(config, drawn, work)
            planned = replace(config, embedder=embedder)
            whole = (tokens or drawn.text_bytes / _TOKEN_BYTES) / config.chunks.chunk_length
            key = index_for(whole, embedder.dimension, config.index).factory
            search = _search(config, whole, embedder.dimension, key)
            factory = with_lists_for(key, limit / _TOKEN_BYTES / config.chunks.chunk_length)
            planned = replace(
                planned,
                index=replace(config.index, factory=factory),
                neighbors=replace(config.neighbors, search=search, extra_datastores=()),
            )
            view = StagesView(quiet=True)
            sampled = with_text(planned, drawn.valid, _shuffled(drawn, limit), work / "sample")
            datastore = build(sampled, LocalExecutor(config.executor), view=view)
            if datastore.has("neighbors"):
                # Measured again, because the first search of a process loads libraries and may compile.
                build(sampled, LocalExecutor(config.executor), only="neighbors", rebuild=True, view=view)
        size, steps = _size(datastore), last_steps(view.steps)
        if of_transformer:
            del steps["embed: count n-grams"]
            steps["embed"] = _of_chunks(of_transformer, size.chunks)
        wide = config.tokenizer.is_trained and config.tokenizer.vocab_size > 2**16
        return Sample(
            size=size,
            seconds={name: idle_seconds(step) for name, step in steps.items()},
            cpu_seconds={name: step.cpu_seconds for name, step in steps.items()},
            bytes=_bytes_of_text(datastore.folder),
            token_bytes=4 if wide else datastore.train.tokens.shard(0).itemsize,
            dimension=embedder.dimension,
            machine=f"{processor_name()}, {os.cpu_count()} cores",
            memory_bytes=usable_memory(),
            peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            source=source,
            corpus_bytes=drawn.text_bytes,
            total_seconds=time.perf_counter() - started,
        )


# --- documents -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorpusSample:
    """Documents drawn from a corpus, and the size of the corpus.

    Attributes:
        documents: uniformly drawn, in the order of the corpus.
        valid: documents of the `valid` split; all of them if there are few, so that nprobe is tuned with the queries of
            the real build.
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

    The blocks of a `LargeText` count as documents. Of a large corpus some files are read, in random order, until
    `_SCANNED_BYTES` of text have been seen.

    Raises:
        InputError: a path does not exist, or the corpus has no text.
    """
    rng = random.Random(seed)
    files = list_files(settings)
    drawn, valid = _Drawn(sample_bytes, rng), _Drawn(sample_bytes // 10, rng)
    seen = scanned_text = scanned_stored = 0

    def look_at(document: Document) -> None:
        nonlocal seen
        into = valid if split_of_document(document, settings.split) == "valid" else drawn
        for number, text in enumerate(document.blocks()):
            is_large, block_id = document.large is not None, f"{document.id}:{number}"
            part = replace(document, id=block_id, text=text, large=None) if is_large else document
            seen += part.size
            into.offer(part)
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


_NAMED = 4
"""Paths of a corpus that a plan names."""


def _drawn(config: Config, sample_bytes: int, work: Path) -> tuple[CorpusSample, str]:
    """The documents, and their source in words."""
    paths = config.corpus.paths
    if paths and not any(is_megatron(file.name) for file in list_files(config.corpus)):
        more = [f"{len(paths) - _NAMED:,} more"] if len(paths) > _NAMED else []
        return draw_sample(config.corpus, sample_bytes), ", ".join([*paths[:_NAMED], *more])
    path = write_python_corpus(work / "python")
    drawn = draw_sample(CorpusSettings(paths=(str(path),)), sample_bytes)
    return replace(drawn, text_bytes=0.0), "Python's documentation and sources"


def _shuffled(drawn: CorpusSample, text_bytes: int) -> list[Document]:
    """Random documents of about `text_bytes`."""
    documents, taken = random.Random(0).sample(drawn.documents, len(drawn.documents)), 0
    chosen = []
    for document in documents:
        if taken < text_bytes:
            chosen.append(document)
            taken += document.size
    return chosen


# --- the datastore ---------------------------------------------------------------------------------------------------


def with_text(config: Config, valid: Sequence[Document], documents: Sequence[Document], folder: Path) -> Config:
    """Settings of a datastore of these documents in one shard, which are written to a file in a new folder."""
    folder.mkdir()
    keys = {key: key.replace(".", "_") for key in config.corpus.metadata_keys}
    with open(folder / "sample.jsonl", "w", encoding="utf-8") as file:
        for document in (*valid, *documents):
            metadata = {keys[key]: value for key, value in document.metadata.items()}
            file.write(json.dumps({**metadata, "id": document.id, "text": document.text}) + "\n")
    corpus = CorpusSettings(
        paths=(str(folder / "sample.jsonl"),),
        metadata_keys=tuple(keys.values()),
        shard_bytes=2 * sum(document.size for document in (*valid, *documents)),
        split=config.corpus.split,
    )
    return replace(config, datastore=folder / "datastore", corpus=corpus)


def _stand_in(config: Config, drawn: CorpusSample, work: Path) -> tuple[EmbedderSettings, Step | None]:
    """The lexical embedder in place of the configured one, and the step of a transformer (None without one).

    Search and index depend only on the dimension of embeddings.
    """
    settings = config.embedder
    if "embed" in left_out(config.skip_stages):
        return replace(settings, kind="lexical", path=""), None
    if settings.kind == "lexical" and settings.path:
        stored = from_json(**read_json(Path(settings.path) / "embedder" / "embedder.json"))
        return replace(stored, path=""), None
    lexical = replace(settings, kind="lexical", path="")
    if settings.kind != "transformer":
        return lexical, None
    few = with_text(config, [], _shuffled(drawn, _TRANSFORMER_BYTES), work / "transformer")
    view = StagesView(quiet=True)
    for stage in ("chunk", "embed"):
        datastore = build(few, LocalExecutor(config.executor), only=stage, view=view)
    return replace(lexical, dimension=datastore.train.embeddings.row_shape[0]), view.steps[-1]


def _of_chunks(step: Step, chunks: float) -> Step:
    """The step with another number of chunks."""
    factor = chunks / max(1, step.units)
    return replace(step, units=int(chunks), seconds=factor * step.seconds, cpu_seconds=factor * step.cpu_seconds)


def _search(config: Config, chunks: float, dimension: int, key: str) -> Method:
    """The search that `auto` stands for, if an index with lists needs few of them to reach the recall target."""
    if config.neighbors.search != "auto":
        return config.neighbors.search
    return by_embeddings(int(chunks), dimension, visited=0.0 if num_lists(key) > 1 else 1.0)


def _size(datastore: Datastore) -> Workload:
    folder, splits = datastore.folder, datastore.manifest["splits"].values()
    documents, chunks, tokens = (sum(sum(s[key]) for s in splits) for key in ("documents", "chunks", "tokens"))
    indexed = datastore.has("add")
    trained = stored_json(folder / "index/trained/index.json", Trained) if indexed else None
    tuned = stored_json(folder / "index/tuned/tuned.json", Tuned) if indexed else None
    return Workload(
        text_bytes=read_manifest(folder / "corpus")["counts"]["bytes"],  # including text that [dedup] removes
        documents=documents,
        tokens=tokens,
        chunks=chunks,
        train_chunks=datastore.train.num_chunks,
        shards=len(datastore.train.chunk_rows),
        key=trained["key"] if trained else "Flat",
        trained_on=trained["trained_on"] if trained else 0,
        tune_queries=tuned["queries"] if tuned else 0,
        search=read_manifest(folder / "neighbors" / shard_name(0))["counts"]["search"] if indexed else "index",
    )


def _bytes_of_text(folder: Path) -> dict[str, int]:
    """Bytes of `Sample.bytes`, without manifests."""
    found = {"documents.parquet": sum(file.stat().st_size for file in folder.glob("chunks/*/*/documents.parquet"))}
    for name in ("sparse", "ngrams", "suffixes", "votes"):
        if (folder / name).exists():
            found[name] = sum(file.stat().st_size for file in folder.glob(f"{name}/*/*") if file.suffix != ".json")
    return found


def last_steps(steps: Sequence[Step]) -> dict[str, Step]:
    """The last step of each name; that of `train-index` has the key of the index behind it."""
    return {"train-index" if step.name.startswith("train-index") else step.name: step for step in steps}


def idle_seconds(step: Step) -> float:
    """Time of a step on this machine without other work, at most.

    While others use the processors, a step waits for them, and takes longer than its CPU seconds. On several free
    processors it takes less than these.
    """
    return min(step.seconds, step.cpu_seconds)
