"""Files: arrays that grow, JSON that is never half written."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexing.store.files import NpyWriter, checksum, read_json, write_json


@given(blocks=st.lists(st.integers(0, 5), max_size=5), width=st.integers(1, 4))
def test_appended_rows_read_back_with_numpy(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[int], width: int
) -> None:
    path = tmp_path_factory.mktemp("npy") / "rows.npy"
    rows = np.arange(sum(blocks) * width, dtype=np.int64).reshape(-1, width)
    with NpyWriter(path, np.int64, (width,)) as writer:
        done = 0
        for block in blocks:
            writer.append(rows[done : done + block])
            done += block
    loaded = np.load(path, allow_pickle=False)
    assert loaded.dtype == np.int64
    assert np.array_equal(loaded, rows)


def test_written_array_can_be_memory_mapped(tmp_path) -> None:
    with NpyWriter(tmp_path / "x.npy", np.float16) as writer:
        writer.append(np.arange(7))
    assert np.load(tmp_path / "x.npy", mmap_mode="r")[3] == 3


def test_failed_json_write_leaves_the_old_file(tmp_path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_checksum_tells_one_changed_byte(tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    (tmp_path / "b").write_bytes(b"x" * 2_999_999 + b"y")
    assert checksum(tmp_path / "a") != checksum(tmp_path / "b")
