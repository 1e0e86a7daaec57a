"""Sizes and samples that tests of the plan share."""

from dataclasses import replace
from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from pipelines.cli.planning.bytes import Layout, Workload
from pipelines.cli.planning.sample import Sample

SIZE = Workload(
    text_bytes=4e6,
    documents=100,
    tokens=1e6,
    chunks=16_000,
    train_chunks=15_000,
    shards=2,
    key="IVF256,PQ16x4fs",
    trained_on=15_000,
    tune_queries=500,
)
LAYOUT = Layout(
    chunk_length=64,
    token_bytes=2,
    dimension=32,
    stored=16,
    materialized=0,
    document_bytes=100.0,
    measured={"sparse": 60.0},
)


def larger(factor: int, **changes) -> Workload:
    """The size of the same corpus repeated `factor` times."""
    names = ("text_bytes", "documents", "tokens", "chunks", "train_chunks", "trained_on")
    return replace(SIZE, **{name: getattr(SIZE, name) * factor for name in names} | changes)


SECONDS = {
    "scan": 0.5,
    "tokenizer": 3.0,
    "chunk": 2.0,
    "embed": 4.0,
    "train-index": 7.0,
    "add": 1.0,
    "tune nprobe": 2.0,
    "neighbors": 8.0,
}


def measured(**changes) -> Sample:
    """A sample in one shard."""
    sample = Sample(
        size=larger(1, shards=1),
        seconds=SECONDS,
        cpu_seconds=SECONDS,
        bytes={"documents.parquet": 10_000, "sparse": 60 * SIZE.train_chunks},
        token_bytes=2,
        dimension=32,
        machine="machine",
        memory_bytes=10**10,
        peak_bytes=10**9,
        source="text",
        corpus_bytes=8e8,
        total_seconds=60.0,
    )
    return replace(sample, **changes)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def assert_bytes_close(datastore: Datastore, planned: dict[str, float], within: float = 0.05) -> None:
    for name, value in planned.items():
        assert value == pytest.approx(folder_bytes(datastore.folder / name), rel=within), name
