"""Files: arrays that grow, and JSON that is written atomically."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexing.store.errors import InputError
from indexing.store.files import NpyWriter, parse_json, read_checked, read_json, write_checked, write_json


@settings(deadline=None)
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


def test_failed_json_write_keeps_the_old_file(tmp_path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


VALUE = {"counts": {"documents": 12, "recall": 0.1}, "files": {"caf\udce9 文.npy": "0" * 32}, "extra_datastores": []}


def test_checked_object_is_read_back_and_every_changed_byte_is_detected(tmp_path) -> None:
    path = tmp_path / "x.json"
    write_checked(path, VALUE)
    whole = path.read_bytes()
    assert read_checked(path) == VALUE
    assert json.loads(whole).keys() == {*VALUE, "checksum"}
    write_checked(path, json.loads(whole))  # the old checksum is ignored
    assert path.read_bytes() == whole
    changed = [
        whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
        for place in range(len(whole))
        for bit in (0, 3, 5)
    ]
    write_json(path, VALUE)
    for data in (*changed, *(whole[:place] for place in range(len(whole))), whole + b"\n", path.read_bytes()):
        path.write_bytes(data)
        with pytest.raises(ValueError):
            read_checked(path)


def test_file_names_that_are_not_utf8_are_escaped_and_read_back(tmp_path) -> None:
    path, name = tmp_path / "x.json", b"caf\xe9".decode(errors="surrogateescape")
    write_json(path, [name])
    assert read_json(path) == [name]
    assert b"caf\\udce9" in path.read_bytes()


@pytest.mark.parametrize(
    "data", [b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b"[" * 150 + b"]" * 150, b"1" * 5000, b"\xff"]
)
def test_json_that_cannot_be_read_is_refused_by_both_readers_with_its_reason(tmp_path, data: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"x\.json cannot be read"):
        read_json(path)
    with pytest.raises(ValueError):
        read_checked(path)


def test_json_of_a_hundred_levels_is_read() -> None:
    assert parse_json("[" * 100 + "]" * 100)
