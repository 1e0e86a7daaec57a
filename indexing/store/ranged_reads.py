"""Read rows of `.npy` files by ranges of bytes: for network file systems and object storage, where memory-mapping is
slow.

    ids → sorted and unique → runs with small gaps → one read for each run → rows in the requested order

Local files are read with `os.pread`, files at a URL by HTTP ranges (`remote.py`).
"""

import io
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from indexing.store import remote
from indexing.store.artifact import damaged, reading

Reading = Literal["mmap", "pread"]
"""`mmap`: memory-map files. `pread`: read only the requested byte ranges."""

GAP_BYTES = 64 << 10
"""Rows with fewer bytes than this between them are read together, because another request would cost more."""

_HEADER_BYTES = 1024  # upper bound for the header of a .npy file, usually 128 bytes
_MOST_OPEN = 64  # descriptors kept per array; a process can usually open 1,024 files
_HAS_ADVICE = hasattr(os, "posix_fadvise")  # not on macOS


@dataclass(frozen=True)
class Header:
    """The header of a `.npy` file: number of rows, shape and dtype of a row, and the offset of the first row."""

    rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    @classmethod
    def parse(cls, data: bytes) -> "Header":
        """Parse the header at the start of a file; raises ValueError if there is none."""
        stream = io.BytesIO(data)
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read(stream)
        if fortran_order or not shape or dtype.hasobject:
            raise ValueError("not an array of rows")
        return cls(shape[0], shape[1:], dtype, stream.tell())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * math.prod(self.row_shape)


class RangedArray:
    """Rows of several `.npy` files by ranges of bytes, without memory-mapping.

    Args:
        paths: the files, in order.
        starts: [files + 1] int64, the id of each file's first row, and the number of all rows.
        gap_bytes: see `GAP_BYTES`.
    """

    def __init__(self, paths: Sequence[Path], starts: np.ndarray, gap_bytes: int = GAP_BYTES) -> None:
        self.paths, self.starts, self.gap_bytes = list(paths), starts, gap_bytes
        self._headers: dict[int, Header] = {}
        self._files = RangedFiles()

    def headers(self, shards: Sequence[int]) -> list[Header]:
        """The headers of some files, each read once.

        Raises:
            InputError: a file is missing, is not a `.npy` file, or has fewer rows than in the datastore's manifest.
        """
        unknown = [shard for shard in shards if shard not in self._headers]
        blocks = self._files.read([(self.paths[shard], 0, _HEADER_BYTES) for shard in unknown])
        for shard, data in zip(unknown, blocks, strict=True):
            with reading(self.paths[shard]):
                header = Header.parse(data)
            rows = int(self.starts[shard + 1] - self.starts[shard])
            check_rows(self.paths[shard], header.rows, rows)
            self._check_size(self.paths[shard], header.offset + rows * header.row_bytes)
            self._headers[shard] = header
        return [self._headers[shard] for shard in shards]

    def _check_size(self, path: Path, expected: int) -> None:
        """Raise DamagedFile if a local file ends before its rows: a header can claim rows of any size."""
        if not remote.is_away(path) and (size := path.stat().st_size) < expected:
            raise damaged(path, f"{path} has {size:,} bytes, fewer than the {expected:,} of its rows")

    def gather(self, ids: np.ndarray) -> np.ndarray:
        """Rows by id, in the order of `ids`: ids [n] int64 → [n, …].

        Raises:
            InputError: a file is missing or ends before one of the rows.
        """
        rows: np.ndarray = np.unique(ids)
        if not len(rows):
            header = self.headers([0])[0]
            return np.empty((0, *header.row_shape), header.dtype)
        shard_of = np.searchsorted(self.starts, rows, side="right") - 1
        self.headers(np.unique(shard_of).tolist())  # requests all unknown headers together
        row_bytes = self._headers[int(shard_of[0])].row_bytes
        far = (np.diff(rows) - 1) * row_bytes > self.gap_bytes
        breaks = np.flatnonzero(far | (np.diff(shard_of) > 0)) + 1
        runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, breaks)]
        block = self._read(runs, shard_of[np.r_[0, breaks]].tolist())
        read = np.concatenate([np.arange(*run) for run in runs])  # the id of each row of the block
        return block[np.searchsorted(read, ids)]

    def _read(self, runs: Sequence[tuple[int, int]], shards: Sequence[int]) -> np.ndarray:
        """The rows of runs of ids [first, stop), each in one shard: [rows, …]."""
        ranges = []
        for run, shard in zip(runs, shards, strict=True):
            header, first = self._headers[shard], int(self.starts[shard])
            start, stop = (header.offset + (row - first) * header.row_bytes for row in run)
            ranges.append((self.paths[shard], start, stop))
        blocks = self._files.read(ranges)
        for (path, start, stop), block in zip(ranges, blocks, strict=True):
            if len(block) != stop - start:
                raise damaged(path, f"{path} ends at byte {start + len(block):,}, before one of its rows")
        header = self._headers[shards[0]]
        return np.frombuffer(b"".join(blocks), header.dtype).reshape(-1, *header.row_shape)


def check_rows(path: Path, rows: int, expected: int) -> None:
    """Raise DamagedFile if an array has fewer rows than expected."""
    if rows < expected:
        raise damaged(path, f"{path} has {rows} rows, the datastore's manifest says {expected}")


def check_array(path: Path, array: np.ndarray, dtype: np.dtype | type, row_shape: tuple[int, ...], rows: int) -> None:
    """Raise DamagedFile unless an array has at least `rows` rows of this type and shape, one after another in memory.

    Compiled loops read it by its address, so its header must be right.
    """
    check_rows(path, len(array) if array.ndim else 0, rows)
    expected = np.dtype(dtype).newbyteorder("="), (len(array) if array.ndim else 0, *row_shape)
    if (array.dtype, array.shape) != expected or not array.flags.c_contiguous:
        raise damaged(path, f"{path} has another type or shape ({array.dtype}, {array.shape}) than when it was written")


class RangedFiles:
    """Reads bytes of files by range, and keeps the descriptors of the most recent files."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __reduce__(self) -> tuple[type["RangedFiles"], tuple[()]]:
        """A copy, in this or another process, opens its own files."""
        return RangedFiles, ()

    def read(self, ranges: Sequence[tuple[Path, int, int]]) -> list[bytes]:
        """The bytes [start, stop) of each file; fewer if the file ends before.

        Raises:
            InputError: a file is missing or cannot be read.
        """
        away = {path for path in {path for path, _, _ in ranges} if remote.is_away(path)}
        fetched = iter(remote.read_ranges([piece for piece in ranges if piece[0] in away]) if away else ())
        local = iter(self._read_local([piece for piece in ranges if piece[0] not in away]))
        return [next(fetched if path in away else local) for path, _, _ in ranges]

    def _read_local(self, ranges: Sequence[tuple[Path, int, int]]) -> Iterator[bytes]:
        """Announce a block of ranges to the kernel before reading it, so that the disk works on all of them at once."""
        for first in range(0, len(ranges), _MOST_OPEN):
            block = ranges[first : first + _MOST_OPEN]
            for path, start, stop in block if _HAS_ADVICE and len(block) > 1 else ():
                os.posix_fadvise(self._descriptor(path), start, stop - start, os.POSIX_FADV_WILLNEED)
            yield from (self._pread(*piece) for piece in block)

    def _pread(self, path: Path, start: int, stop: int) -> bytes:
        descriptor = self._descriptor(path)
        parts = [os.pread(descriptor, stop - start, start)]
        while parts[-1] and (got := sum(map(len, parts))) < stop - start:  # one call reads at most 2 GB
            parts.append(os.pread(descriptor, stop - start - got, start + got))
        return b"".join(parts) if parts[1:] else parts[0]

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            while len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                self._open[path] = os.open(path, os.O_RDONLY)
            except FileNotFoundError as error:
                raise damaged(path, f"{path} is missing") from error
            # Read-ahead by the kernel would fetch rows that nobody requested.
            if _HAS_ADVICE:
                os.posix_fadvise(self._open[path], 0, 0, os.POSIX_FADV_RANDOM)
        return self._open[path]

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
