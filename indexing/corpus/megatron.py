"""Token corpora of Megatron-LM: `x.bin` holds token ids, `x.idx` the positions of sequences and documents.

    x.idx   header (34 bytes)  lengths [S] int32  pointers [S] int64  documents [D + 1] int64
    x.bin   the tokens of S sequences, concatenated, of the type in the header

All numbers are little-endian. A length counts tokens. A pointer is the byte at which a sequence begins. Document d is
the sequences [documents[d], documents[d + 1]): usually one; several if sentences were split. The format is defined by
`megatron/core/datasets/indexed_dataset.py` in NVIDIA/Megatron-LM, version 1. Its older `mmap` datasets share it.
"""

import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from indexing.corpus.streams import check_regular, filesystem_of
from indexing.store.errors import InputError
from indexing.store.mapped import map_bytes

SUFFIX, INDEX_SUFFIX = ".bin", ".idx"
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, S, D + 1
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are floating point


def is_megatron(name: str) -> bool:
    """True if a file name is that of a `.bin` or `.idx`."""
    return name.lower().endswith((SUFFIX, INDEX_SUFFIX))


def pair_of(path: str) -> tuple[str, str]:
    """The `.bin` and the `.idx` that `path` belongs to, also in an archive: `zip://x.bin::archive.zip`."""
    inner, *outer = path.split("::")
    stem = inner[: -len(SUFFIX)]
    data, index = ("::".join([stem + suffix, *outer]) for suffix in (SUFFIX, INDEX_SUFFIX))
    return data, index


@dataclass(frozen=True, eq=False)
class MegatronIndex:
    """A `.idx` file, memory-mapped if it is on a local disk.

    Attributes:
        path: path of the `.idx`.
        dtype: type of the tokens.
        data_bytes: size of the `.bin`.
        stored: all bytes of the file.
        lengths: [S] int32.
        pointers: [S] int64.
        documents: [D + 1] int64.
    """

    path: str
    dtype: np.dtype
    data_bytes: int
    stored: np.ndarray = field(repr=False)
    lengths: np.ndarray = field(repr=False)
    pointers: np.ndarray = field(repr=False)
    documents: np.ndarray = field(repr=False)

    @property
    def num_documents(self) -> int:
        """D, including documents without tokens."""
        return len(self.documents) - 1

    def positions(self, start: int, stop: int) -> np.ndarray:
        """Bytes [stop - start + 1] int64 of the `.bin` at which the documents [start, stop) begin, and where the last
        one ends.

        Raises:
            InputError: sequences or documents are not contiguous.
        """
        ends = np.asarray(self.documents[start : stop + 1])
        first, last = int(ends[0]), int(ends[-1])
        if first < 0 or last > len(self.lengths) or (np.diff(ends) < 0).any():
            raise _broken(self.path, f"documents {start + 1} to {stop} are sequences out of order")
        lengths = self.lengths[first:last].astype(np.int64)
        pointers = np.append(self.pointers[first : last + 1], self.data_bytes)[: last - first + 1]
        expected = pointers[0] + self.dtype.itemsize * np.concatenate([[0], np.cumsum(lengths)])
        wrong = (pointers != expected) | np.append(lengths < 0, False)
        if wrong.any():
            sequence = first + int(np.argmax(wrong)) + 1
            raise _broken(
                self.path, f"sequence {sequence} has a negative length, or does not begin where the last one ends"
            )
        return expected[ends - first]


def open_index(data_path: str, data_bytes: int) -> MegatronIndex:
    """Open the index of the `.bin` at `data_path`, which has `data_bytes`.

    Raises:
        FileNotFoundError, PermissionError: there is none, or it is no regular file.
        InputError: the file is not an index, has another version or type, or belongs to another `.bin`.
    """
    path = pair_of(data_path)[1]
    stored = _bytes_of(path)
    magic = stored[: len(_MAGIC)].tobytes()
    if magic != _MAGIC or len(stored) < _HEADER.size:
        raise InputError(
            f"{path} begins with {magic!r} and has {len(stored):,} bytes; the index of a Megatron corpus begins with "
            f"{_MAGIC!r} and has {_HEADER.size} or more. Write it with Megatron's tools/preprocess_data.py (in old "
            "versions: --dataset-impl mmap), or leave it out of corpus.paths."
        )
    _, version, code, num_sequences, num_boundaries = _HEADER.unpack(stored[: _HEADER.size].tobytes())
    if version != _VERSION:
        raise InputError(f"{path} is of version {version}; accepted: {_VERSION}. Write it again with Megatron-LM.")
    if code not in _TYPES:
        accepted = ", ".join(f"{code} ({name})" for code, name in _TYPES.items())
        raise InputError(
            f"{path} names type {code} for its tokens; accepted: {accepted}. Write it again with whole numbers as tokens."
        )
    dtype = np.dtype(_TYPES[code]).newbyteorder("<")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if len(stored) != expected:
        raise _broken(
            path,
            f"it has {len(stored):,} bytes; {num_sequences:,} sequences and {num_boundaries - 1:,} documents take "
            f"{expected:,}; multimodal data, which has modes too, is not accepted",
        )
    parts = np.split(stored[_HEADER.size :], [4 * num_sequences, 12 * num_sequences])
    lengths, pointers, documents = (part.view(kind) for part, kind in zip(parts, ("<i4", "<i8", "<i8"), strict=True))
    if not len(documents) or documents[0] != 0 or documents[-1] != num_sequences:
        covered = f"{documents[0]} to {documents[-1]}" if len(documents) else "none"
        raise _broken(path, f"its documents take the sequences {covered}; accepted: 0 to {num_sequences}, all of them")
    if num_sequences and pointers[0] != 0:
        raise _broken(path, f"sequence 1 begins at byte {pointers[0]:,}; accepted: 0")
    expected_bytes = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize if num_sequences else 0
    if expected_bytes != data_bytes:
        raise InputError(
            f"{data_path} has {data_bytes:,} bytes; its index {path} expects {expected_bytes:,}. Copy both files again."
        )
    return MegatronIndex(path, dtype, data_bytes, stored, lengths, pointers, documents)


def _broken(path: str, problem: str) -> InputError:
    return InputError(f"{path} is damaged: {problem}. Copy it again, or write it again with Megatron-LM.")


def _bytes_of(path: str) -> np.ndarray:
    """All bytes of a file [n] uint8: memory-mapped if it is local, else read (an index has 20 bytes per document)."""
    from fsspec.implementations.local import LocalFileSystem

    filesystem, root = filesystem_of(path)
    check_regular(root)
    if isinstance(filesystem, LocalFileSystem) and filesystem.size(root):
        return np.frombuffer(map_bytes(Path(root)), np.uint8)
    with filesystem.open(root, "rb") as file:
        return np.frombuffer(file.read(), np.uint8)
