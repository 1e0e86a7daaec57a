"""The merged index, with its lists on disk, finds the same neighbors as the shards, also after its folder moves."""

import numpy as np
import pytest

from indexing.index.build import IndexSettings
from indexing.index.floats import to_float32
from indexing.index.merged import merge_shards, open_merged
from indexing.index.sharded import ShardedIndex
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from tests.conftest import build_local, contents, tiny_config, write_corpus
from tests.indexing.index.test_build import build, clustered


@pytest.mark.parametrize("key", ["IVF16,PQ8x4", "IVF16,Flat", "OPQ8_32,IVF16,PQ8"])
def test_merged_lists_give_the_same_results_as_the_shards(tmp_path, key: str) -> None:
    vectors = clustered(1500)
    index, _ = build(tmp_path / "index", vectors, key)
    shards = [tmp_path / "index" / f"{number:05d}" for number in range(3)]
    (tmp_path / "merged").mkdir()
    total = merge_shards(tmp_path / "merged", tmp_path / "index" / "trained", shards, advance=lambda _: None)
    assert total == 1500
    moved = (tmp_path / "merged").rename(tmp_path / "elsewhere")
    merged = ShardedIndex([open_merged(moved)], 16)
    queries = clustered(50, seed=1).astype(np.float32)
    ours, theirs = merged.search(queries, 20), index.search(queries, 20, nprobe=16)
    same = [len(set(a) & set(b)) / 20 for a, b in zip(ours, theirs, strict=True)]
    assert np.mean(same) > 0.95  # packed four-bit codes round their lookup tables


def test_fast_scan_lists_and_indexes_without_lists_are_refused(tmp_path) -> None:
    for key in ("Flat", "IVF16,PQ8x4fs"):
        build(tmp_path / key, clustered(2000), key, num_shards=1)
        with pytest.raises(InputError, match="plain codes"):
            merge_shards(tmp_path, tmp_path / key / "trained", [tmp_path / key / "00000"], advance=lambda _: None)


def test_two_merges_in_different_folders_are_equal_byte_for_byte(tmp_path) -> None:
    build(tmp_path / "index", clustered(1500), "IVF16,PQ8x4")
    shards = [tmp_path / "index" / f"{number:05d}" for number in range(3)]
    for folder in (tmp_path / "one", tmp_path / "another" / "folder"):
        folder.mkdir(parents=True)
        merge_shards(folder, tmp_path / "index" / "trained", shards, advance=lambda _: None)
    for name in ("merged.faiss", "merged.ivfdata"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "another" / "folder" / name).read_bytes()


def test_a_datastore_with_a_merged_index_is_rebuilt_to_the_same_bytes_and_searched_after_a_move(tmp_path) -> None:
    config = tiny_config(
        tmp_path, write_corpus(tmp_path / "corpus.jsonl", 20), index=IndexSettings(factory="IVF4,Flat")
    )
    build_local(config, only="chunk")
    for stage in ("embed", "train-index", "add", "merge"):
        build_local(config, only=stage)
    merged = config.datastore / "index" / "merged"
    before = contents(merged)
    build_local(config, only="merge", rebuild=True)
    assert contents(merged) == before
    moved = config.datastore.rename(tmp_path / "moved")
    train = Datastore.open(moved).train
    queries = to_float32(train.embeddings.read(0, 20))
    shards = range(len(train.chunk_rows))
    from_disk = ShardedIndex.open(moved / "index", shards, memory=0).search(queries, 5)
    np.testing.assert_array_equal(from_disk, ShardedIndex.open(moved / "index", shards).search(queries, 5))
