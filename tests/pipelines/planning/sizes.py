"""Sizes and observations that tests of the plan share."""

from dataclasses import replace
from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from pipelines.planning.bytes import (
    Layout,
    Workload,
)
from pipelines.planning.datastore import (
    Calibration,
)
from pipelines.planning.seconds import Observation

SIZE = Workload(
    text_bytes=4e6,
    documents=100,
    tokens=1e6,
    chunks=16_000,
    train_chunks=15_000,
    shards=2,
    key="IVF256,PQ16x4fs",
    nprobe=16,
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
    sparse_bytes=60.0,
    terms_bytes=5000.0,
)


def larger(factor: int, **changes) -> Workload:
    """The size of the same corpus repeated `factor` times."""
    names = ("text_bytes", "documents", "tokens", "chunks", "train_chunks", "trained_on")
    return replace(SIZE, **{name: getattr(SIZE, name) * factor for name in names} | changes)


def seconds_of(size: Workload) -> dict[str, float]:
    """Seconds that follow the cost models exactly."""
    return {
        "scan": 1e-8 * size.text_bytes,
        "tokenizer": 2 + 1e-7 * size.text_bytes,
        "chunk": 1e-7 * size.text_bytes,
        "embed": 1.5 + 1e-5 * size.chunks,
        "train-index": 7 + 1e-8 * size.trained_on * size.lists,
        "add": (1e-5 + 1e-8 * size.lists) * size.train_chunks,
        "tune nprobe": (1e-3 + 1e-7 * size.train_chunks * size.nprobe / size.lists) * size.tune_queries,
        "neighbors": (1e-4 + 1e-8 * size.compared + 2e-5 * (size.shards - 1)) * size.chunks,
    }


def calibrated() -> Calibration:
    seen = [
        larger(1, shards=1),
        larger(1, shards=4),
        larger(4, shards=1, key="IVF512,PQ16x4fs", nprobe=32),
    ]
    observations = tuple(
        Observation(size, seconds_of(size), size.nprobe, int(100 * size.documents + 9000 * size.shards), 0)
        for size in seen
    )
    return Calibration("machine", 10**10, 10**9, observations, 2, 32, "text", 8e8, 60.0)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def assert_bytes_close(datastore: Datastore, planned: dict[str, float]) -> None:
    for name, value in planned.items():
        assert value == pytest.approx(folder_bytes(datastore.folder / name), rel=0.05), name
