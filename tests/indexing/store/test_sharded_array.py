"""Reads across shards equal reads of the whole array, scattered ones without their surroundings if memory is short."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexing.store import sharded_array
from indexing.store.errors import InputError
from indexing.store.sharded_array import ShardedArray


@pytest.fixture(scope="module", params=["mmap", "pread"])
def sharded(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardedArray, np.ndarray]:
    folder, rows = tmp_path_factory.mktemp("sharded"), [3, 0, 5, 1]
    whole = np.arange(18).reshape(9, 2)
    for number, part in enumerate(np.split(whole, np.cumsum(rows)[:-1])):
        np.save(folder / f"{number}.npy", part)
    return ShardedArray([folder / f"{number}.npy" for number in range(4)], rows, request.param), whole


@given(ids=st.lists(st.integers(0, 8), max_size=20), bounds=st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_reads_equal_reads_of_the_whole(sharded, ids: list[int], bounds: tuple[int, int]) -> None:
    array, whole = sharded
    start, stop = sorted(bounds)
    assert np.array_equal(array.gather(np.array(ids, dtype=np.int64)), whole[ids].reshape(-1, 2))
    assert np.array_equal(array.read(start, stop), whole[start:stop])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not show its advice for maps")
@pytest.mark.parametrize(("memory", "around", "advised"), [(159, 159, True), (160, 159, False), (159, 160, False)])
def test_few_rows_of_an_array_beyond_half_of_the_memory_are_read_without_their_surroundings(
    tmp_path, monkeypatch, memory: int, around: int, advised: bool
) -> None:
    whole, path = np.arange(10).reshape(5, 2), tmp_path / "x.npy"  # 80 bytes
    np.save(path, whole)
    monkeypatch.setattr(sharded_array, "_AROUND", around)
    monkeypatch.setattr(sharded_array, "usable_memory", lambda: memory)
    array, ids = ShardedArray([path], [5]), np.array([4, 0, 4])
    assert np.array_equal(array.gather(ids), whole[ids])
    assert np.array_equal(array.read(1, 3), whole[1:3])
    flags = [each.partition("VmFlags:")[2].split("\n")[0].split() for each in map_entries(path)]
    assert any("rr" in each for each in flags) == advised  # MADV_RANDOM
    assert any("rr" not in each for each in flags)  # reading in sequence keeps its read-ahead


def map_entries(path: Path) -> list[str]:
    """What the kernel says of each map of a file in this process."""
    entries = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return [entry for entry in entries if str(path) in entry]


@pytest.mark.parametrize("reading", ["mmap", "pread"])
@pytest.mark.parametrize("size", [-1, 0, 50, 128, 128 + 8 * 90, 128 + 8 * 99])
def test_missing_or_truncated_file_is_named(tmp_path, size: int, reading: str) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros(99 if size == 128 + 8 * 99 else 100))  # an intact file with too few rows
    data = path.read_bytes()
    path.unlink() if size < 0 else path.write_bytes(data[:size])
    with pytest.raises(InputError, match=r"x\.npy"):
        ShardedArray([path], [100], reading).gather(np.arange(100))
