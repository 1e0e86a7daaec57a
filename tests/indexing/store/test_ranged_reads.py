"""Reading ranges of bytes gives the rows of the memory map, in few reads, and fails if a file is incomplete."""

import gc
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexing.store.errors import DamagedFile, InputError
from indexing.store.files import NpyWriter
from indexing.store.ranged_reads import Header, RangedArray
from indexing.store.sharded_array import ShardedArray

ROWS = [40, 0, 1, 59]
WHOLE = np.random.default_rng(0).integers(0, 60_000, (100, 3)).astype(np.uint16)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("reading")
    paths = [folder / f"{number}.npy" for number in range(len(ROWS))]
    for path, part in zip(paths, np.split(WHOLE, np.cumsum(ROWS)[:-1]), strict=True):
        with NpyWriter(path, np.uint16, (3,)) as writer:
            writer.append(part)
    return paths


def ranged(files: list[Path], gap_bytes: int) -> RangedArray:
    return RangedArray(files, np.concatenate([[0], np.cumsum(ROWS)]), gap_bytes)


@given(ids=st.lists(st.integers(0, 99), max_size=60), gap_bytes=st.sampled_from([0, 6, 30, 10_000]))
def test_gather_equals_indexing_the_whole_for_every_gap(files, ids: list[int], gap_bytes: int) -> None:
    found = ranged(files, gap_bytes).gather(np.array(ids, dtype=np.int64))
    assert found.dtype == np.uint16
    assert np.array_equal(found, WHOLE[ids].reshape(-1, 3))


@pytest.mark.parametrize(("gap_bytes", "reads"), [(5, 4), (6, 3), (18, 2), (1000, 2)])
def test_rows_with_small_gaps_are_read_together_within_one_file(files, monkeypatch, gap_bytes, reads) -> None:
    """Rows have 6 bytes. The gap between rows 4 and 6 is 6 bytes, between 6 and 10 18 bytes; row 40 is in another file."""
    array, asked, pread = ranged(files, gap_bytes), [], os.pread
    array.headers(range(4))

    def counting(*arguments: int) -> bytes:
        asked.append(arguments)
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", counting)
    ids = [10, 4, 40, 6, 4]
    assert np.array_equal(array.gather(np.array(ids)), WHOLE[ids])
    assert len(asked) == reads
    assert all(size <= (10 - 4 + 1) * 6 for _, size, _ in asked)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice on reading")
def test_a_batch_of_reads_is_announced_before_the_first(files, monkeypatch) -> None:
    """So the disk works on all of them at once."""
    array, calls, pread, advise = ranged(files, gap_bytes=5), [], os.pread, os.posix_fadvise
    array.headers(range(4))

    def reading(descriptor: int, size: int, start: int) -> bytes:
        calls.append(("read", start, size))
        return pread(descriptor, size, start)

    def advising(descriptor: int, start: int, size: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            calls.append(("announced", start, size))
        advise(descriptor, start, size, advice)

    monkeypatch.setattr(os, "pread", reading)
    monkeypatch.setattr(os, "posix_fadvise", advising)
    array.gather(np.array([10, 4, 41, 6]))
    kinds, places = [kind for kind, *_ in calls], [place for _, *place in calls]
    assert kinds == ["announced"] * 4 + ["read"] * 4
    assert places[:4] == places[4:]


def test_ranged_reads_do_not_map_files_into_memory(files: list[Path]) -> None:
    def mapped() -> bool:
        return str(files[0].resolve()) in Path("/proc/self/maps").read_text()

    array = ShardedArray(files, ROWS, "pread")
    array.gather(np.arange(100))
    array.read(3, 9)
    assert array.row_shape == (3,)
    assert not mapped()
    by_map = ShardedArray(files, ROWS)
    by_map.gather(np.arange(3))
    assert mapped()  # shows that the check can fail


def test_number_of_open_files_is_bounded(tmp_path) -> None:
    paths = [tmp_path / f"{number}.npy" for number in range(150)]
    for number, path in enumerate(paths):
        np.save(path, np.full((2, 2), number))
    before = len(os.listdir("/proc/self/fd"))
    array = ShardedArray(paths, [2] * 150, "pread")
    assert np.array_equal(array.gather(np.arange(300))[:, 0], np.arange(150).repeat(2))
    assert len(os.listdir("/proc/self/fd")) - before <= 64
    del array
    assert len(os.listdir("/proc/self/fd")) == before


def test_numpy_headers_of_row_arrays_are_read_and_others_refused(tmp_path) -> None:
    for array in (np.zeros(3, ">i4"), np.zeros((2, 5), np.float16), np.zeros((1, *[1] * 30), np.int8)):
        np.save(tmp_path / "x.npy", array)
        data = (tmp_path / "x.npy").read_bytes()
        header = Header.parse(data)
        assert (header.rows, header.row_shape, header.dtype) == (len(array), array.shape[1:], array.dtype)
        assert header.offset + header.rows * header.row_bytes == len(data)
    for wrong in (np.array(1), np.asfortranarray(np.zeros((3, 4)))):
        np.save(tmp_path / "x.npy", wrong)
        with pytest.raises(InputError, match=r"x\.npy cannot be read"):
            ShardedArray([tmp_path / "x.npy"], [1], "pread").gather(np.array([0]))


@pytest.mark.parametrize("shape", ["(4, 1000000000000)", "(4, 1000000000, 1000000000)"])
def test_header_that_claims_more_bytes_than_the_file_has_is_refused_before_a_read(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    path = tmp_path / "lying.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(100))
    lying = RangedArray([path], np.array([0, 4]))
    with pytest.raises(DamagedFile, match=r"lying\.npy has .* bytes, fewer than the"):
        lying.gather(np.array([0]))


def test_a_copy_in_another_process_opens_its_own_files(files: list[Path]) -> None:
    """Descriptors are numbers of this process: another one would read and close files of its own by them."""
    array = ranged(files, 6)
    array.gather(np.arange(100))
    sent = pickle.dumps(array)
    others = [os.open(path, os.O_RDONLY) for path in files]  # as files of the other process
    received = pickle.loads(sent)
    assert np.array_equal(received.gather(np.arange(100)), WHOLE)
    del received
    gc.collect()
    assert np.array_equal(array.gather(np.arange(100)), WHOLE)
    for descriptor in others:
        os.close(descriptor)
