"""The header of a GGUF file: what it has, and what it claims to have and the file cannot hold."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexing.store.errors import InputError
from retro.huggingface.gguf_header import TensorInfo, read_header
from tests.retro.huggingface.small_gguf import FFW, LAYERS, WIDTH, write_gguf

gguf = pytest.importorskip("gguf")

UINT8, UINT32, STRING, ARRAY = 0, 4, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def array(kind: int, number: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, number) + content


def write(
    file: Path, *keys: tuple[str, int, bytes], num_keys: int | None = None, tensors: bytes = b"", version: int = 3
) -> Path:
    content = b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in keys)
    counts = struct.pack("<IQQ", version, bool(tensors), len(keys) if num_keys is None else num_keys)
    file.write_bytes(b"GGUF" + counts + content + tensors)
    return file


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0, dimensions: int | None = None) -> bytes:
    number = len(shape) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", number, *shape[::-1], kind, offset)


def test_keys_and_tensors_are_those_that_the_package_gguf_reads(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", "qwen2", quantization="Q8_0", tokenizer__ggml__add_bos_token=False, x=3.5)
    ours, theirs = read_header(file), gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.fields == fields
    assert {name: one.kind for name, one in ours.tensors.items()} == {
        one.name: one.tensor_type for one in theirs.tensors
    }
    assert ours.tensors["blk.1.ffn_up.weight"] == TensorInfo((FFW, WIDTH), gguf.GGMLQuantizationType.Q8_0)
    assert len(ours.tensors) == 2 + LAYERS * 12


NESTED = array(ARRAY, 1) * 5000 + array(UINT8, 1, b"a")


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        ([("a", ARRAY, array(UINT8, 2**60))], {}, "its arrays have more than"),
        ([("a", ARRAY, array(STRING, 2**22))], {}, "8 bytes are expected at byte"),
        ([("a", ARRAY, NESTED)], {}, "an array has values of the type 9"),
        ([("a", ARRAY, array(ARRAY, 2**60))], {}, "an array has values of the type 9"),
        ([("a", STRING, struct.pack("<Q", 2**62))], {}, "4,611,686,018,427,387,904 bytes are expected"),
        ([("a", 99, b"")], {}, "unknown type 99"),
        ([("a", UINT32, b"abcd")], {"num_keys": 2**63}, "8 bytes are expected"),
        ([("a", UINT32, b"abcd")] * 2, {}, "the key 'a' twice"),
        ([("general.alignment", UINT32, struct.pack("<I", 0))], {}, "general.alignment is 0"),
        ([], {"version": 1}, "its version is 1; accepted: 2, 3"),
        ([], {"tensors": tensor("a", (2**40, 2**20))}, "its tensors need 4,611,686,018,427,388,000 bytes"),
        ([], {"tensors": tensor("a", (4,), offset=2**63)}, "its tensors need"),
        ([], {"tensors": tensor("a", (4,), dimensions=2**31)}, "a has 2,147,483,648 dimensions"),
        ([], {"tensors": tensor("a", (4,), kind=77)}, "a has the unknown type 77"),
        (
            [],
            {"tensors": tensor("a", (4, 33), kind=8)},
            r"a has the shape \[4, 33\], and its rows are stored in blocks of 32",
        ),
        ([], {"tensors": tensor("a", (0, 32))}, "a has the shape"),
    ],
)
def test_a_header_that_claims_more_than_the_file_holds_is_refused(
    tmp_path: Path, keys: Any, options: Any, message: str
) -> None:
    file = write(tmp_path / "a.gguf", *keys, **options)
    with pytest.raises(InputError, match=message) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_any_changed_byte_of_a_header_is_read_or_refused(tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "a.gguf").read_bytes()
    random, file = np.random.default_rng(0), tmp_path / "b.gguf"
    for place in random.integers(4, 7000, 300):
        changed = bytearray(content)
        changed[place : place + 8] = random.bytes(8)
        file.write_bytes(changed)
        try:
            read_header(file)
        except InputError:
            continue
