"""Several `.npy` files read as one array, from memory maps or by ranges of bytes."""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from indexing.machine import usable_memory
from indexing.store import remote
from indexing.store.artifact import damaged, reading
from indexing.store.mapped import map_array
from indexing.store.ranged_reads import RangedArray, Reading, check_rows

_AROUND = 131_072
"""Bytes that Linux reads around a missing page of a file that is read in sequence."""


def open_array(path: Path) -> np.ndarray:
    """Memory-map a `.npy` file; a file at a URL is fetched first.

    Raises:
        InputError: it is missing or damaged.
    """
    path = remote.present(path)
    with reading(path):
        array = map_array(path)
    if array.ndim == 0:
        raise damaged(path, f"{path} has no rows")
    return array


def fetch(array: np.ndarray, first: int = 0) -> None:
    """Begin to read the rows of a memory-mapped file from `first` on, which many small reads will need. They stay as
    long as memory allows."""
    mapped: Any = array
    if first < len(array):
        begin = array[first:].ctypes.data - array.ctypes.data + mapped.offset % mmap.ALLOCATIONGRANULARITY
        begin -= begin % mmap.PAGESIZE
        mapped._mmap.madvise(mmap.MADV_WILLNEED, begin, len(mapped._mmap) - begin)


def read_scattered(array: np.ndarray) -> None:
    """Read of a memory-mapped file, or of a view of one, what is asked for and no pages around it. Most would be
    unused, and would displace used ones."""
    mapped: Any = array
    while not hasattr(mapped, "_mmap"):
        mapped = mapped.base
    mapped._mmap.madvise(mmap.MADV_RANDOM)


class ShardedArray:
    """Rows of several `.npy` files read as one array. Files are opened on first use.

    Args:
        paths: the files, in order.
        rows: rows in each file.
        reading: read rows from memory maps or by ranges of bytes.
    """

    def __init__(self, paths: Sequence[Path], rows: Sequence[int], reading: Reading = "mmap") -> None:
        self.paths = list(paths)
        self.starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]).astype(np.int64)
        self._open: dict[int, np.ndarray] = {}
        self._open_scattered: dict[int, np.ndarray] = {}
        self.reading = reading
        self._ranged = RangedArray(self.paths, self.starts)

    def __reduce__(self) -> tuple[type["ShardedArray"], tuple[Sequence[Path], Sequence[int], Reading]]:
        """A copy, in this or another process, opens its own files: maps would be sent with all their bytes."""
        return ShardedArray, (self.paths, np.diff(self.starts).tolist(), self.reading)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def shard(self, shard: int) -> np.ndarray:
        """Memory-map the array of one shard, regardless of `reading`. A file at a URL is fetched whole.

        Raises:
            InputError: the file is missing or does not have as many rows as in the manifest.
        """
        if shard not in self._open:
            self._open[shard] = self._opened(shard)
        return self._open[shard]

    def _opened(self, shard: int) -> np.ndarray:
        array = open_array(self.paths[shard])
        check_rows(self.paths[shard], len(array), int(self.starts[shard + 1] - self.starts[shard]))
        return array

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row, from the header of the first file. From a URL, only the header is read."""
        return self._ranged.headers([0])[0].row_shape

    @property
    def dtype(self) -> np.dtype:
        """The type of the values, from the header of the first file."""
        return self._ranged.headers([0])[0].dtype

    def gather(self, ids: np.ndarray) -> np.ndarray:
        """Rows by id, in the order of `ids`: ids [n] int64 → [n, …]."""
        if self.reading == "pread":
            return self._ranged.gather(ids)
        shards = np.searchsorted(self.starts, ids, side="right") - 1
        counts = np.bincount(shards, minlength=1)
        present = np.flatnonzero(counts)
        if len(present) == 1:
            rows = ids - self.starts[present[0]]
            return self._map_for(int(present[0]), rows).take(rows, axis=0)
        first = self.shard(int(present[0]) if len(present) else 0)
        out = np.empty((len(ids), *first.shape[1:]), dtype=first.dtype)
        # Small unsigned integers are sorted in linear time.
        order = np.argsort(shards.astype(np.min_scalar_type(len(self.paths))), kind="stable")
        for shard, places in zip(present, np.split(order, np.cumsum(counts[present])), strict=False):
            rows = ids[places] - self.starts[shard]
            out[places] = self._map_for(int(shard), rows).take(rows, axis=0)
        return out

    def _map_for(self, shard: int, rows: np.ndarray) -> np.ndarray:
        """A map of one shard for some of its rows.

        If the array does not fit into half of the memory, and the rows are far apart, this is another map than for
        reading in sequence, see `read_scattered`.
        """
        array = self.shard(shard)
        row_bytes = array[:1].nbytes
        if len(self) * row_bytes <= usable_memory() / 2 or _is_dense(rows, row_bytes):
            return array
        return self.scattered(shard)

    def scattered(self, shard: int) -> np.ndarray:
        """As `shard`, for reads at places far apart."""
        if shard not in self._open_scattered:
            again = self._opened(shard)
            read_scattered(again)
            self._open_scattered[shard] = again
        return self._open_scattered[shard]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop): a view if they are in one memory-mapped shard, else a copy."""
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        if self.reading == "mmap" and shard < len(self.paths) and stop <= self.starts[shard + 1]:
            return self.shard(shard)[start - self.starts[shard] : stop - self.starts[shard]]
        return self.gather(np.arange(start, stop, dtype=np.int64))


def _is_dense(rows: np.ndarray, row_bytes: int) -> bool:
    """Whether the span of some rows of a file has at least two of them for each part that is read around a missing
    page."""
    span = (int(rows.max()) - int(rows.min()) + 1) * row_bytes if len(rows) else 0
    return len(rows) >= 2 * (1 + span / _AROUND)
