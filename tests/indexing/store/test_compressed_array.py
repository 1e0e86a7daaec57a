"""Rows that were compressed in blocks are read again, in any order, from memory maps and by ranges of bytes."""

from pathlib import Path

import numpy as np
import pytest

from indexing.store.artifact import Recipe, create
from indexing.store.compressed_array import CompressedArray, rows_of_block, write_compressed
from indexing.store.errors import DamagedFile
from indexing.store.ranged_reads import Reading

_DTYPE = np.dtype([("length", "u1"), ("tokens", "<u2", (3,))])
_ROWS = (10, 0, 7, 1)


def write_shards(folder: Path, block: int) -> tuple[list[Path], np.ndarray]:
    """Shards of random rows [rows, 5] in artifacts, and all rows."""
    random, parts = np.random.default_rng(0), []
    for shard, rows in enumerate(_ROWS):
        parts.append(np.frombuffer(random.bytes(rows * 5 * _DTYPE.itemsize), _DTYPE).reshape(rows, 5))
        with create(folder / f"{shard:05d}", Recipe("test", 1)) as (work, _):
            write_compressed(work / "train", parts[-1], block)
    return [folder / f"{shard:05d}" / "train" for shard in range(len(_ROWS))], np.concatenate(parts)


@pytest.mark.parametrize("reading", ["mmap", "pread"])
@pytest.mark.parametrize("block", [1, 3, 100])
def test_rows_are_read_again(tmp_path: Path, reading: Reading, block: int) -> None:
    paths, expected = write_shards(tmp_path, block)
    array, random = CompressedArray(paths, _ROWS, block, reading), np.random.default_rng(1)
    for ids in (np.arange(sum(_ROWS)), np.array([17, 3, 3, 9, 10]), random.permutation(18)[:6], np.array([], np.int64)):
        found = array.gather(ids, _DTYPE, 5)
        assert found.shape == (len(ids), 5)
        assert np.array_equal(found, expected[ids])


def test_a_file_is_one_of_zstandard(tmp_path: Path) -> None:
    import zstandard

    paths, expected = write_shards(tmp_path, 3)
    with open(paths[0].with_suffix(".zst"), "rb") as file:
        data = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    assert data == expected[:10].tobytes()


@pytest.mark.parametrize("reading", ["mmap", "pread"])
@pytest.mark.parametrize("suffix", [".zst", ".npy"])
@pytest.mark.parametrize("damage", ["missing", "changed", "short"])
def test_a_damaged_file_is_named(tmp_path: Path, reading: Reading, suffix: str, damage: str) -> None:
    paths, _ = write_shards(tmp_path, 3)
    file = paths[2].with_suffix(suffix)
    if damage == "missing":
        file.unlink()
    else:
        data = file.read_bytes()
        file.write_bytes(data[:-20] if damage == "short" else b"\xff" * len(data))
    with pytest.raises(DamagedFile, match=rf"00002/train\{suffix}"):
        CompressedArray(paths, _ROWS, 3, reading).gather(np.arange(18), _DTYPE, 5)


def bomb(size: int) -> bytes:
    """A frame of zeros that is a thousand times smaller."""
    import zstandard

    return zstandard.ZstdCompressor().compress(bytes(size))


@pytest.mark.parametrize("reading", ["mmap", "pread"])
@pytest.mark.parametrize(("block", "claimed"), [(bomb(1 << 20), "claims 1,048,576 bytes"), (b"not one", "not one of")])
def test_a_frame_of_another_size_than_its_rows_is_not_decompressed(
    tmp_path: Path, reading: Reading, block: bytes, claimed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the manifest has the checksum of the file, as that of somebody else's datastore can."""
    monkeypatch.setattr("indexing.store.artifact._damage_at", lambda *_: None)
    paths, _ = write_shards(tmp_path, 3)
    paths[2].with_suffix(".zst").write_bytes(block)
    np.save(paths[2].with_suffix(".npy"), np.array([0, len(block), len(block), len(block)]))
    with pytest.raises(DamagedFile, match=rf"00002/train\.zst has a frame that .*{claimed}"):
        CompressedArray(paths, _ROWS, 3, reading).gather(np.array([10]), _DTYPE, 5)


@pytest.mark.parametrize("reading", ["mmap", "pread"])
@pytest.mark.parametrize("offsets", [[0, 1 << 40, 1 << 41, 1 << 42], [9, 3, 2, 1], [-9, 0, 1, 2]])
def test_no_more_is_read_for_a_block_than_it_can_have(
    tmp_path: Path, reading: Reading, offsets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexing.store.artifact._damage_at", lambda *_: None)
    paths, _ = write_shards(tmp_path, 3)
    np.save(paths[2].with_suffix(".npy"), np.array(offsets))
    with pytest.raises(DamagedFile, match=r"00002/train\.npy claims a frame of the bytes"):
        CompressedArray(paths, _ROWS, 3, reading).gather(np.array([10]), _DTYPE, 5)


def test_a_block_holds_about_2048_tokens() -> None:
    assert [rows_of_block(length) for length in (2, 32, 64, 100, 2048, 65_535)] == [1024, 64, 32, 20, 1, 1]
