"""Build a sample of the corpus with the real stages, in a temporary folder, at two sizes.

    corpus (or Python's documentation and sources) ── uniform sample ──► warm up, a quarter, all of it ──► Sample of each

The warm-up loads every library, and shows which search the planned datastore gets. `datastore.py` scales the two others.
"""

import contextlib
import itertools
import json
import os
import platform
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from indexing.corpus.megatron import is_megatron
from indexing.corpus.python_library import write_python_corpus
from indexing.corpus.readers import CorpusSettings, Document
from indexing.corpus.scan import list_files
from indexing.embedding.settings import EmbedderSettings, from_json
from indexing.machine import usable_memory
from indexing.neighbors.search import Method
from indexing.progress import during
from indexing.store.artifact import read_manifest
from indexing.store.errors import InputError
from indexing.store.files import read_json
from pipelines.cli.planning.bytes import Workload, with_lists_for
from pipelines.cli.planning.datastore import Measured, Sample, line, search_of, size_of
from pipelines.cli.planning.sample import CorpusSample, draw_sample
from pipelines.config import Config
from pipelines.executors.tasks import LocalExecutor
from pipelines.stages.choices import with_choices
from pipelines.stages.table import build
from pipelines.terminal.progress import progress
from pipelines.terminal.stages import StagesView, Step

SAMPLE_BYTES = 8 * 2**20
_LEAST_BYTES = 250_000
_TRANSFORMER_BYTES = (62_500, 250_000)  # of text; the stages of a sample take the lexical embedder instead


def measure(config: Config, *, tokens: float = 0.0, sample_bytes: int | None = None) -> Measured:
    """Build samples of the corpus in a temporary folder, with the settings of the planned datastore.

    Args:
        config: its settings. Without `corpus.paths`, or if these contain tokens, the text is Python's documentation and
            sources.
        tokens: of the datastore, which determine index and search; 0 = all of the corpus.
        sample_bytes: of text in the larger sample; None = `SAMPLE_BYTES`, or an eighth of a smaller corpus.

    Raises:
        InputError: a path does not exist, the corpus has no text, or its size is unknown and `tokens` is 0.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="retro-plan-") as work:
        with during("drawing the sample"):
            drawn, source = _drawn(config, sample_bytes or SAMPLE_BYTES, Path(work))
        if not tokens and not drawn.text_bytes:
            raise InputError(
                "tokens = 0 means the whole corpus, and its size is unknown: corpus.paths is empty, contains tokens, or has "
                "files too large for the sample. Set --tokens, for example 1e9."
            )
        builds = _Builds(config, Path(work), drawn)
        embedding = builds.transformer() if config.embedder.kind == "transformer" else {}
        whole = sum(document.size for document in drawn.documents)
        if sample_bytes is None and not tokens:  # all builds together read three times `whole`
            whole = min(whole, max(_LEAST_BYTES, int(drawn.text_bytes / 8)))
        with progress("plan datastore", total=whole // 4 * 3 + whole * 2, unit="bytes") as advance:
            first = builds.sample(whole // 4, "IVF65536,Flat", "index")
            advance(whole // 4)
            size = size_of(config, [first], builds.dimension, tokens=tokens, text_bytes=drawn.text_bytes)
            search = search_of(config, size, first, builds.dimension)
            samples = []
            for text_bytes in (whole // 4, whole):
                twice = []
                for _ in range(2):
                    twice.append(builds.sample(text_bytes, size.key, search))
                    advance(text_bytes)
                samples.append(_faster(*twice))
        small, large = (_with_transformer(sample, embedding) for sample in samples)
        return Measured(
            small=small,
            large=large,
            machine=f"{_processor()}, {os.cpu_count()} cores",
            memory_bytes=usable_memory(),
            peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            token_bytes=builds.token_bytes,
            dimension=builds.dimension,
            search=search,
            source=source,
            corpus_bytes=drawn.text_bytes,
            seconds=time.perf_counter() - started,
        )


def _drawn(config: Config, sample_bytes: int, work: Path) -> tuple[CorpusSample, str]:
    """The documents, and their source in words."""
    paths = config.corpus.paths
    if paths and not any(is_megatron(file.name) for file in list_files(config.corpus)):
        return draw_sample(config.corpus, sample_bytes), ", ".join(paths)
    path = write_python_corpus(work / "python")
    drawn = draw_sample(CorpusSettings(paths=(str(path),)), sample_bytes)
    return replace(drawn, text_bytes=0.0), "Python's documentation and sources"


class _Builds:
    """Builds samples of one corpus, each in its own folder.

    Args:
        config: of the planned datastore.
        work: the temporary folder.
        drawn: text of the samples.
    """

    def __init__(self, config: Config, work: Path, drawn: CorpusSample) -> None:
        self.config, self.work = config, work
        # Shuffled, so that a smaller sample is uniform too. All samples have the same held-out documents and queries.
        self.documents, self.valid = random.Random(0).sample(drawn.documents, len(drawn.documents)), drawn.valid
        self.embedder = _lexical(config.embedder)
        self.chunk_bytes = 4.0 * config.chunks.chunk_length  # of text; an estimate until the first build
        self.token_bytes = 2
        self.numbers = itertools.count()

    @property
    def dimension(self) -> int:
        """Dimension of the embeddings."""
        return self.embedder.dimension

    def sample(self, text_bytes: int, key: str, search: Method) -> Sample:
        """Build a sample of about `text_bytes` with this kind of index and this search."""
        config = with_choices(self._config(text_bytes, self.valid))  # those of its embedder, which a sample may replace
        config = replace(
            config,
            embedder=self.embedder,
            index=replace(config.index, factory=with_lists_for(key, text_bytes / self.chunk_bytes)),
            neighbors=replace(config.neighbors, search=search),
        )
        view = _TimedView()
        datastore = build(config, LocalExecutor(config.executor), view=view)
        folder, splits = datastore.folder, datastore.manifest["splits"].values()
        documents, chunks, tokens = (sum(sum(s[key]) for s in splits) for key in ("documents", "chunks", "tokens"))
        tuned, trained = read_json(folder / "index/tuned/tuned.json"), read_json(folder / "index/trained/index.json")
        size = Workload(
            text_bytes=read_manifest(folder / "corpus")["counts"]["bytes"],  # including text that [dedup] removes
            documents=documents,
            tokens=tokens,
            chunks=chunks,
            train_chunks=datastore.train.num_chunks,
            shards=len(datastore.train.chunk_rows),
            key=trained["key"],
            trained_on=trained["trained_on"],
            tune_queries=tuned["queries"],
            search=search,
        )
        self.chunk_bytes = size.text_bytes / size.chunks
        wide = self.config.tokenizer.is_trained and self.config.tokenizer.vocab_size > 2**16
        self.token_bytes = 4 if wide else datastore.train.tokens.shard(0).itemsize
        return Sample(
            size=size,
            seconds=seconds_by_step(view.steps),
            cpu_seconds=view.cpu_seconds,
            list_nprobe=tuned.get("lists", tuned)["nprobe"],
            parquet_bytes=sum(file.stat().st_size for file in folder.glob("chunks/*/*/documents.parquet")),
            measured_bytes={
                name: sum(file.stat().st_size for file in folder.glob(f"{name}/*/*") if file.suffix != ".json")
                for name in ("sparse", "ngrams", "suffixes", "votes")
                if (folder / name).exists()
            },
        )

    def transformer(self) -> dict[int, float]:
        """Seconds to embed with the configured transformer, by number of chunks. Sets the dimension of embeddings."""
        seconds = {}
        for text_bytes in _TRANSFORMER_BYTES:
            config, view = self._config(text_bytes, []), StagesView(quiet=True)
            for stage in ("chunk", "embed"):
                datastore = build(config, LocalExecutor(config.executor), only=stage, view=view)
            seconds[view.steps[-1].units] = view.steps[-1].seconds
            self.embedder = replace(self.embedder, dimension=datastore.train.embeddings.row_shape[0])
        return seconds

    def _config(self, text_bytes: int, valid: Sequence[Document]) -> Config:
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
        corpus = CorpusSettings(
            paths=(str(folder / "sample.jsonl"),),
            metadata_keys=tuple(keys.values()),
            shard_bytes=2 * sum(document.size for document in (*valid, *taken)),
            split=self.config.corpus.split,
        )
        neighbors = replace(self.config.neighbors, extra_datastores=())
        return replace(self.config, datastore=folder / "datastore", corpus=corpus, neighbors=neighbors)


class _TimedView(StagesView):
    """Records the CPU seconds of each step too, of all threads and of finished child processes."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.cpu_seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self, name: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        """See `StagesView.step`."""
        before = _cpu_seconds()
        with super().step(name, total, unit) as advance:
            yield advance
        self.cpu_seconds[_without_key(name)] = _cpu_seconds() - before


def _cpu_seconds() -> float:
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _faster(one: Sample, other: Sample) -> Sample:
    """A sample with the smaller times of each step: other work on the machine only adds to a time."""

    def smaller(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
        return {name: min(seconds, theirs[name]) for name, seconds in ours.items()}

    return replace(
        one,
        seconds=smaller(one.seconds, other.seconds),
        cpu_seconds=smaller(one.cpu_seconds, other.cpu_seconds),
    )


def seconds_by_step(steps: Sequence[Step]) -> dict[str, float]:
    """Seconds of each step by its name."""
    return {_without_key(step.name): step.seconds for step in steps}


def _without_key(name: str) -> str:
    """The name of a step without the key of the index, which `train-index` has behind it."""
    return "train-index" if name.startswith("train-index") else name


def _lexical(settings: EmbedderSettings) -> EmbedderSettings:
    """The lexical embedder for the samples: search and index depend only on the dimension of embeddings."""
    if settings.kind == "lexical" and settings.path:
        stored = from_json(**read_json(Path(settings.path) / "embedder" / "embedder.json"))
        return replace(stored, path="")
    return replace(settings, kind="lexical", path="")


def _with_transformer(sample: Sample, embedding: dict[int, float]) -> Sample:
    """A sample with the seconds of the transformer (by number of chunks) in place of the lexical embedder's."""
    if not embedding:
        return sample
    few, many = sorted(embedding.items())
    rate, start = line(few, many)
    embed = {"embed": start + rate * sample.size.chunks}
    seconds, cpu_seconds = (
        {name: value for name, value in times.items() if name != "embed: count n-grams"} | embed
        for times in (sample.seconds, sample.cpu_seconds)
    )
    return replace(sample, seconds=seconds, cpu_seconds=cpu_seconds)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
