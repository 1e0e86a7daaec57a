"""The header of a GGUF file: keys with values, and name, shape and type of each tensor.

    "GGUF", version, number of tensors, number of keys ─► keys ─► tensors ─► (aligned) data of the tensors

Numbers in the header are checked: arrays are read only if the file is long enough for them, and the data of every
tensor is inside of the file.
"""

import struct
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

from indexing.store.errors import InputError

_VERSIONS = (2, 3)
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Format of `struct` by type of a value."""
_STRING, _ARRAY = 8, 9
_MOST_VALUES = 2**22
"""Values of all arrays. The largest vocabularies have a million, with scores, types and merges."""
_MOST_DIMENSIONS = 4


class _Damaged(Exception):
    """The header contradicts itself, or the file."""


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor.

    Attributes:
        shape: rows first, as in PyTorch.
        kind: number of its type, `gguf.GGMLQuantizationType`.
    """

    shape: tuple[int, ...]
    kind: int


@dataclass(frozen=True)
class Header:
    """Keys and values, and tensors by name."""

    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(file: Path) -> Header:
    """Read the header of a GGUF file.

    Raises:
        InputError: the file is not a GGUF file of version 2 or 3, or it is cut or damaged.
    """
    with open(file, "rb") as opened:
        if opened.read(4) != b"GGUF":
            raise InputError(f"{file} is not a GGUF file: it does not begin with GGUF.")
        try:
            return _Reader(opened, file.stat().st_size).header()
        except (_Damaged, UnicodeDecodeError) as error:
            size = f"{file.stat().st_size:,} bytes"
            raise InputError(f"{file}, {size}, is cut or damaged: {error}. Download it again.") from error


class _Reader:
    def __init__(self, opened: BufferedReader, size: int) -> None:
        self._opened, self._size, self._values = opened, size, 0

    def header(self) -> Header:
        (version,) = self._numbers("I", 1)
        if version not in _VERSIONS:
            raise _Damaged(f"its version is {version}; accepted: {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_keys = self._numbers("Q", 2)
        fields: dict[str, Any] = {}
        for _ in range(num_keys):  # ends with the file, because each key needs bytes
            key = self._string()
            if key in fields:
                raise _Damaged(f"it has the key {key!r} twice")
            fields[key] = self._value(self._numbers("I", 1)[0])
        tensors, ends = dict[str, TensorInfo](), [0]
        for _ in range(num_tensors):
            name = self._string()
            if name in tensors:
                raise _Damaged(f"it has the tensor {name!r} twice")
            (dimensions,) = self._numbers("I", 1)
            if dimensions > _MOST_DIMENSIONS:
                raise _Damaged(f"{name} has {dimensions:,} dimensions")
            shape = self._numbers("Q", dimensions)[::-1]
            kind, offset = self._numbers("I", 1)[0], self._numbers("Q", 1)[0]
            tensors[name] = TensorInfo(shape, kind)
            ends.append(offset + _num_bytes(name, shape, kind))
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise _Damaged(f"general.alignment is {alignment!r}; accepted: a power of two")
        data = -(-self._opened.tell() // alignment) * alignment
        if data + max(ends) > self._size:
            raise _Damaged(f"its tensors need {data + max(ends):,} bytes")
        return Header(fields, tensors)

    def _read(self, num_bytes: int) -> bytes:
        if num_bytes > self._size - self._opened.tell():
            raise _Damaged(f"{num_bytes:,} bytes are expected at byte {self._opened.tell():,}")
        return self._opened.read(num_bytes)

    def _numbers(self, form: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{form}"
        return struct.unpack(form, self._read(struct.calcsize(form)))

    def _string(self) -> str:
        return self._read(self._numbers("Q", 1)[0]).decode()

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], 1)[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise _Damaged(f"a key has a value of the unknown type {kind}")
        inner, count = self._numbers("I", 1)[0], self._numbers("Q", 1)[0]
        self._values += count
        if inner not in _SCALARS and inner != _STRING:
            raise _Damaged(f"an array has values of the type {inner}; accepted: numbers, strings")
        if self._values > _MOST_VALUES:
            raise _Damaged(f"its arrays have more than {_MOST_VALUES:,} values")
        return [*self._numbers(_SCALARS[inner], count)] if inner in _SCALARS else [self._string() for _ in range(count)]


def _num_bytes(name: str, shape: tuple[int, ...], kind: int) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as error:
        raise _Damaged(f"{name} has the unknown type {kind}") from error
    if not shape or 0 in shape or shape[-1] % values:
        raise _Damaged(f"{name} has the shape {list(shape)}, and its rows are stored in blocks of {values}")
    return prod(shape) // values * size
