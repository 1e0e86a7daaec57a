"""Planned bytes are close to those of real datastores, and the planned index is that of `retro index`."""

from dataclasses import replace

import pytest

from indexing.index.build import IndexSettings
from indexing.store.datastore import Datastore
from pipelines.cli.planning.bytes import Layout, artifact_bytes, index_bytes, index_for, memory_bytes
from pipelines.cli.planning.sample import _bytes_of_text, _size
from tests.conftest import build_local, tiny_config
from tests.pipelines.cli.planning.sizes import LAYOUT, SIZE, assert_bytes_close


def planned_bytes(datastore: Datastore, stored: int, materialized: int = 0) -> dict[str, float]:
    """Bytes that the formulas give for a finished datastore from its counts and the sizes of its Parquet files and terms."""
    size, of_text = _size(datastore), _bytes_of_text(datastore.folder)
    layout = Layout(
        chunk_length=datastore.chunk_length,
        token_bytes=datastore.train.tokens.shard(0).itemsize,
        dimension=datastore.train.embeddings.row_shape[0],
        stored=stored,
        materialized=materialized,
        document_bytes=of_text["documents.parquet"] / size.documents,
        measured={"sparse": of_text["sparse"] / size.train_chunks},
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
    """docs/reference/file-formats.md: tokens and a length; float16; a code and an id; the id of each neighbor."""
    small, large = (
        artifact_bytes(SIZE, LAYOUT),
        artifact_bytes(replace(SIZE, chunks=17_000, train_chunks=16_000), LAYOUT),
    )
    grown = {name: (large[name] - small[name]) / 1000 for name in small}
    assert grown == pytest.approx(
        {"chunks": 64 * 2 + 2, "embeddings": 2 * 32, "index": 8 + 8, "sparse": 60, "neighbors": 16 * 8}
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
    assert index_for(5000, 256, IndexSettings()) == IndexSettings(factory="Flat")
    assert index_for(100_000, 256, IndexSettings()) == IndexSettings(factory="IVF1024,PQ128x4")
    large = index_for(28e9, 256, IndexSettings())
    assert large.factory.startswith("IVF131072_HNSW32,PQ128x4")
    assert large.memory == "512GB"
