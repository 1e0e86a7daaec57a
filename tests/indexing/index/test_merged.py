"""The merged index, with its lists on disk, finds the same neighbors as the shards, also after its folder moves."""

import numpy as np
import pytest

from indexing.index.merged import merge_shards, open_merged
from indexing.index.sharded import ShardedIndex
from indexing.store.errors import InputError
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
