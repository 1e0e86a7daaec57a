"""Shards of an index are searched as one index. Merged, packed or separate, they give the same candidates."""

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

from indexing.index import faiss_files
from indexing.index.faiss_files import ivf_of, num_lists, read_index, read_shard, search_index, write_index, write_shard
from indexing.index.sharded import ShardedIndex
from pipelines.executors.tasks import use_threads
from tests.indexing.index.test_build import build, clustered

_DIMENSION = 32


def written(folder: Path, key: str, shards: int = 3, rows: int = 400) -> np.ndarray:
    """Write an index with this key in several shards, each with a quantizer as earlier versions did; returns queries [50, d]."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((shards * rows, _DIMENSION), dtype=np.float32)
    index = faiss.index_factory(_DIMENSION, key)
    index.train(vectors)
    (folder / "trained").mkdir(parents=True)
    write_index(folder / "trained" / "trained.faiss", index)
    for shard in range(shards):
        index.reset()
        ids = np.arange(shard * rows, (shard + 1) * rows)
        index.add_with_ids(vectors[ids], ids)
        (folder / f"{shard:05d}").mkdir(parents=True)
        write_index(folder / f"{shard:05d}" / "vectors.faiss", index)
    return vectors[:50] + rng.standard_normal((50, _DIMENSION), dtype=np.float32) / 10


@pytest.mark.parametrize("key", ["IVF8,PQ16x4", "OPQ16_32,IVF8,PQ16x4", "IVF8,SQ8", "IVF8,PQ16x4fs"])
def test_inverted_lists_are_returned_with_their_own_type(key: str) -> None:
    index = faiss.index_factory(_DIMENSION, key)
    wanted = {"PQ16x4": faiss.IndexIVFPQ, "SQ8": faiss.IndexIVFScalarQuantizer, "PQ16x4fs": faiss.IndexIVFPQFastScan}
    assert type(ivf_of(index)) is wanted[key.rpartition(",")[2]]
    assert ivf_of(faiss.IndexFlatL2(4)) is None


@pytest.mark.parametrize("rotated", [False, True])
def test_nprobe_of_a_search_applies_to_every_part_of_a_divided_index(rotated: bool) -> None:
    vectors = np.random.default_rng(0).standard_normal((1200, _DIMENSION), dtype=np.float32)
    divided = faiss.IndexShards(_DIMENSION)  # an index on several GPUs is divided in this way
    parts = [faiss.index_factory(_DIMENSION, "IVF8,Flat") for _ in range(2)]
    for part in parts:
        part.train(vectors)
        part.add(vectors[:600])
        divided.add_shard(part)
    rotation = faiss.RandomRotationMatrix(_DIMENSION, _DIMENSION)
    rotation.init(1)
    index = faiss.IndexPreTransform(rotation, divided) if rotated else divided
    assert num_lists(index) == 8
    found = search_index(index, vectors[:20], 10, 5)
    assert [part.nprobe for part in parts] == [1, 1]
    for part in parts:
        part.nprobe = 5
    expected = index.search(vectors[:20], 10)
    assert np.array_equal(found[1], expected[1])


def test_index_without_lists_ignores_nprobe() -> None:
    flat = faiss.IndexIDMap2(faiss.IndexFlatL2(_DIMENSION))
    vectors = np.eye(_DIMENSION, dtype=np.float32)
    flat.add_with_ids(vectors, np.arange(_DIMENSION))
    assert num_lists(flat) == 1
    assert search_index(flat, vectors, 1, 5)[1][:, 0].tolist() == list(range(_DIMENSION))


@pytest.mark.parametrize("key", ["IVF8,SQ8", "IVF8,PQ16x4", "OPQ16_32,IVF8,PQ16x4fs", "IVF8_HNSW8,Flat"])
def test_threads_can_search_a_shared_index_with_different_nprobe(tmp_path, key: str) -> None:
    queries = written(tmp_path, key)
    index = ShardedIndex.open(tmp_path, range(3))
    alone = {nprobe: index.search(queries, 20, nprobe=nprobe) for nprobe in (1, 8)}
    assert not np.array_equal(alone[1], alone[8])
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda nprobe: (nprobe, index.search(queries, 20, nprobe=nprobe)), [1, 8] * 20))
    assert all(np.array_equal(ids, alone[nprobe]) for nprobe, ids in found)
    assert np.array_equal(index.search(queries, 20), alone[1])  # the nprobe of the index itself is unchanged


@pytest.mark.slow
def test_shards_of_plain_four_bit_codes_are_merged_and_packed(tmp_path) -> None:
    written(tmp_path, "IVF8,PQ16x4")
    (only,) = ShardedIndex.open(tmp_path, range(3)).indexes()
    assert isinstance(only, faiss.IndexIVFPQFastScan)
    assert only.ntotal == 1200


def test_index_loaded_in_groups_finds_the_same_neighbors(tmp_path) -> None:
    queries = written(tmp_path, "IVF8,SQ8")
    together, apart = (ShardedIndex.open(tmp_path, range(3), memory) for memory in (10**9, 1))
    assert len(list(together.indexes())) == 1
    assert len(list(apart.indexes())) == 3
    assert np.array_equal(together.search(queries, 5, nprobe=4), apart.search(queries, 5, nprobe=4))


def test_shards_are_searched_together_if_their_vectors_fit(tmp_path) -> None:
    build(tmp_path, clustered(1500), "IVF64,PQ8x4")
    size = sum((tmp_path / f"{number:05d}" / "vectors.faiss").stat().st_size for number in range(3))
    for memory, groups in ((size, 1), (size - 1, 2), (0, 3)):
        assert len(ShardedIndex.open(tmp_path, range(3), memory)._shards) == groups
        fitting = ShardedIndex.open(tmp_path, range(3), memory, only_fitting=True)
        assert fitting.num_vectors == (1500, 1000, 500)[groups - 1]


def test_index_keeps_its_quantizer_if_the_disk_is_full(tmp_path, monkeypatch) -> None:
    """It would free the one that it was written with, which is not its own."""
    build(tmp_path, clustered(1500), "IVF64,PQ8x4", num_shards=1)
    trained = read_index(tmp_path / "trained" / "trained.faiss")
    index = read_shard(tmp_path / "00000" / "vectors.faiss", trained)
    quantizer = ivf_of(index).quantizer

    def full(path: Path, index: faiss.Index) -> None:
        assert ivf_of(index).quantizer.ntotal == 0
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(faiss_files, "write_index", full)
    with pytest.raises(OSError, match="No space"):
        write_shard(tmp_path / "vectors.faiss", index)
    assert ivf_of(index).quantizer.this == quantizer.this


SHARED = ["IVF64,Flat", "IVF64,SQ8", "IVF64_HNSW8,PQ8x4", "OPQ8_32,IVF64,PQ8x4"]
OWN = ["IVF64,PQ8x4fs", "IVF64,PQ8", "IVF64,RaBitQ", "Flat"]


@pytest.mark.parametrize("key", [*SHARED, *OWN])
def test_shards_without_a_quantizer_are_searched_as_those_with_one(tmp_path, key: str) -> None:
    vectors, queries = clustered(1500), clustered(50, seed=1).astype(np.float32)
    index, _ = build(tmp_path, vectors, key)
    found = index.search(queries, 20, nprobe=8)
    trained = read_index(tmp_path / "trained" / "trained.faiss")
    for number in range(3):
        file = tmp_path / f"{number:05d}" / "vectors.faiss"
        size, whole = file.stat().st_size, read_shard(file, trained)
        write_index(file, whole)
        if key in SHARED:
            assert size < file.stat().st_size - 0.9 * 64 * 4 * 32
        else:
            assert size == file.stat().st_size
        for memory in (10**9, 0):
            again = ShardedIndex.open(tmp_path, range(3), memory)
            np.testing.assert_array_equal(again.search(queries, 20, nprobe=8), found)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    vectors = np.random.default_rng(0).standard_normal((700, 512)).astype(np.float32)
    index = faiss.index_factory(512, "IVF16,PQ16x4")
    index.train(vectors)
    index.add(vectors)
    before, found = (torch.get_num_threads(), faiss.omp_get_max_threads()), []
    for threads in (1, 2, 3, 7):
        use_threads(threads)
        results = [search_index(index, vectors[:count], 20, 8) for count in (1, 19, 50, 569)]
        found.append(b"".join(each.tobytes() for result in results for each in result))
    torch.set_num_threads(before[0])
    faiss.omp_set_num_threads(before[1])
    assert len({*found}) == 1
