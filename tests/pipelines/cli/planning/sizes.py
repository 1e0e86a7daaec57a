"""Sizes and samples that tests of the plan share."""

from dataclasses import replace
from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from pipelines.cli.planning.bytes import Layout, Workload
from pipelines.cli.planning.datastore import Measured, Sample

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
    parquet_bytes=3000.0,
    measured={"sparse": (60.0, 5000.0)},
)


def larger(factor: int, **changes) -> Workload:
    """The size of the same corpus repeated `factor` times."""
    names = ("text_bytes", "documents", "tokens", "chunks", "train_chunks", "trained_on")
    return replace(SIZE, **{name: getattr(SIZE, name) * factor for name in names} | changes)


def seconds_of(size: Workload) -> dict[str, float]:
    """Seconds with fixed and growing parts."""
    return {
        "scan": 1e-8 * size.text_bytes,
        "tokenizer": 2 + 1e-7 * size.text_bytes,
        "chunk": 1e-7 * size.text_bytes,
        "embed": 1.5 + 1e-5 * size.chunks,
        "train-index": 7 + 1e-8 * size.trained_on * size.lists,
        "add": (5e-6 + 4e-9 * size.lists) * size.train_chunks,
        "tune nprobe": 1e-7 * size.train_chunks * size.tune_queries,
        "neighbors": 1e-8 * size.chunks**1.5,
    }


def measured(**changes) -> Measured:
    """Samples of two sizes whose seconds and bytes follow formulas."""
    small, large = (
        Sample(
            size,
            seconds_of(size),
            {name: 2 * took for name, took in seconds_of(size).items()},  # two threads
            16,
            int(100 * size.documents + 9000),
            {"sparse": int(60 * size.train_chunks + 5000)},
        )
        for size in (larger(1, shards=1), larger(4, shards=1, key="IVF512,PQ16x4fs"))
    )
    return replace(Measured(small, large, "machine", 10**10, 10**9, 2, 32, "index", "text", 8e8, 60.0), **changes)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def assert_bytes_close(datastore: Datastore, planned: dict[str, float]) -> None:
    for name, value in planned.items():
        assert value == pytest.approx(folder_bytes(datastore.folder / name), rel=0.05), name
