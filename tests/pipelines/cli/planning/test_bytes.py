"""Planned bytes are close to those of real datastores, and the planned index is that of `retro index`."""

import json
from dataclasses import replace

import pytest

from indexing.index.build import IndexSettings
from indexing.store.datastore import Datastore
from pipelines.cli.planning.bytes import (
    Layout,
    Workload,
    artifact_bytes,
    index_bytes,
    key_for,
    memory_bytes,
)
from tests.conftest import build_local, tiny_config
from tests.pipelines.cli.planning.sizes import LAYOUT, SIZE, assert_bytes_close


def planned_bytes(datastore: Datastore, stored: int, materialized: int = 0) -> dict[str, float]:
    """Bytes that the formulas give for a finished datastore from its counts and the sizes of its Parquet files."""
    rows = [
        (sum(totals["chunks"]), sum(totals["documents"]), sum(totals["tokens"]), sum(totals["bytes"]))
        for totals in datastore.manifest["splits"].values()
    ]
    chunks, documents, tokens, text_bytes = map(sum, zip(*rows, strict=True))
    index = json.loads((datastore.folder / "index/trained/index.json").read_text())
    size = Workload(
        text_bytes, documents, tokens, chunks, datastore.train.num_chunks, len(datastore.train.chunk_rows),
        index["key"], index["trained_on"], 100,
    )  # fmt: skip
    parquet = sum(path.stat().st_size for path in datastore.folder.glob("chunks/*/*/*.parquet"))
    dtype = datastore.train.tokens.shard(0).dtype
    lists = sum(file.stat().st_size for file in datastore.folder.glob("sparse/*/*") if file.suffix != ".json")
    layout = Layout(
        datastore.chunk_length,
        dtype.itemsize,
        index["dimension"],
        stored,
        materialized,
        parquet / documents,
        {"sparse": lists / datastore.train.num_chunks},
    )
    return artifact_bytes(size, layout)


def test_planned_bytes_are_close_to_those_of_a_datastore_with_an_exact_index(tiny_datastore: Datastore) -> None:
    planned = planned_bytes(tiny_datastore, stored=6)
    assert_bytes_close(tiny_datastore, planned)
    assert set(planned) == {"chunks", "embeddings", "index", "sparse", "neighbors"}


@pytest.mark.parametrize(
    "key",
    [
        "IVF16,PQ16x4fs",
        "IVF8,SQ8",
        "IVF64_HNSW8,Flat",
        pytest.param("OPQ8_16,IVF8,PQ8x4", marks=pytest.mark.slow),
    ],
)
def test_planned_bytes_are_close_to_those_of_a_datastore_with_inverted_lists(tmp_path, tiny_corpus, key: str) -> None:
    config = tiny_config(tmp_path, tiny_corpus, index=IndexSettings(factory=key))
    datastore = build_local(config)
    assert_bytes_close(datastore, planned_bytes(datastore, stored=6))


def test_planned_bytes_are_close_to_those_of_materialized_neighbors(tmp_path, tiny_corpus) -> None:
    config = tiny_config(tmp_path, tiny_corpus)
    datastore = build_local(replace(config, neighbors=replace(config.neighbors, materialized=2)))
    planned = planned_bytes(datastore, stored=6, materialized=2)
    assert "materialized" in planned
    assert_bytes_close(datastore, planned)


def test_bytes_per_chunk_are_those_of_the_file_format() -> None:
    """docs/reference/file-formats.md: tokens and a length; float16; a code and an id; id and distance of each neighbor."""
    small, large = (
        artifact_bytes(SIZE, LAYOUT),
        artifact_bytes(replace(SIZE, chunks=17_000, train_chunks=16_000), LAYOUT),
    )
    grown = {name: (large[name] - small[name]) / 1000 for name in small}
    assert grown == pytest.approx(
        {"chunks": 64 * 2 + 2, "embeddings": 2 * 32, "index": 8 + 8, "sparse": 60, "neighbors": 16 * 12}
    )


def test_memory_of_neighbors_workers_is_twice_the_index_up_to_a_limit() -> None:
    memory = memory_bytes(SIZE, LAYOUT, base=1e9)
    code, _, empty = index_bytes(SIZE.key, 32)
    assert memory["neighbors"] - 1e9 == 2 * ((code + 8) * SIZE.train_chunks + 2 * empty)
    assert memory["add"] < memory["neighbors"]
    assert memory_bytes(replace(SIZE, train_chunks=10**12, shards=10**4), LAYOUT, base=1e9)["neighbors"] == 9e9
    assert memory_bytes(replace(SIZE, search="exact"), LAYOUT, base=1e9)["neighbors"] == 1e9
    by_ngrams = [replace(SIZE, search="ngrams", train_chunks=10**n, shards=10 ** (n - 8)) for n in (12, 13)]
    small, large = (memory_bytes(size, LAYOUT, base=0)["neighbors"] for size in by_ngrams)
    assert 2 * (code + 8) * 10**8 < small == large < 100e9


def test_planned_index_is_that_of_retro_index_with_more_memory_if_none_fits() -> None:
    assert key_for(5000, 256, IndexSettings()) == ("Flat", IndexSettings())
    assert key_for(100_000, 256, IndexSettings())[0] == "IVF1024,PQ128x4"
    key, settings = key_for(28e9, 256, IndexSettings())
    assert key.startswith("IVF131072_HNSW32,PQ128x4")
    assert settings.memory == "512GB"
