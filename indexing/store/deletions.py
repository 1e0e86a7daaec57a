"""Deleted documents: their chunks stay in place, because ids are positions, but searches and batches skip them.

`deleted.npy` in the datastore's folder: [n, 2] int64, first and stop of the chunk ids of each document, in the `train` split, in
order. It is read again whenever it changes, so a process that has the datastore open notices. From a URL it is fetched whenever
the datastore is opened.
"""

import fcntl
import os
from functools import lru_cache
from pathlib import Path

import numpy as np

from indexing.store.errors import InputError
from indexing.store.files import DAMAGED_ARRAY, NpyWriter, sync_folder
from indexing.store.remote import publish_file

FILE = "deleted.npy"
REPAIR = "Remove it, and run `retro delete` again with the ids of all deleted documents."


def deleted_ranges(folder: Path) -> np.ndarray:
    """The chunk ranges of deleted documents: [n, 2] int64, sorted and disjoint, empty without deletions.

    Raises:
        InputError: the file is damaged.
    """
    try:
        found = (folder / FILE).stat()
    except FileNotFoundError:
        return np.empty((0, 2), dtype=np.int64)
    return _kept(folder / FILE, (found.st_mtime_ns, found.st_size, found.st_ino))


@lru_cache(maxsize=16)
def _kept(path: Path, _: tuple[int, ...]) -> np.ndarray:
    return read_ranges(path)


def read_ranges(path: Path) -> np.ndarray:
    """Read `deleted_ranges` of an existing file, without the cache.

    Raises:
        InputError: the file is damaged.
    """
    try:
        ranges: np.ndarray = np.load(path, allow_pickle=False)
    except (MemoryError, *DAMAGED_ARRAY) as error:
        raise InputError(f"{path} cannot be read: {error}. {REPAIR}") from error
    if ranges.dtype != np.int64 or ranges.ndim != 2 or ranges.shape[1] != 2:
        raise InputError(f"{path} cannot be read: its shape is {ranges.shape} of {ranges.dtype}. {REPAIR}")
    return ranges


def without_deleted(ids: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Replace chunk ids [...] int64 in one of the ranges by -1."""
    return np.where(inside(ids, ranges), -1, ids) if len(ranges) else ids


def inside(ids: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Whether each id [...] is in one of the ranges [n, 2], which are sorted and disjoint."""
    if not len(ranges):
        return np.zeros(ids.shape, dtype=bool)
    place = np.searchsorted(ranges[:, 0], ids, side="right") - 1
    return (place >= 0) & (ids < ranges[np.maximum(place, 0), 1])


def delete_ranges(folder: Path, ranges: np.ndarray) -> int:
    """Add ranges [n, 2] of whole documents to the deleted ones, with one rename; returns how many are new.

    Processes that delete at the same time wait for each other.
    """
    work = folder / f".{FILE}.tmp"
    with open(folder / f".{FILE}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        old = deleted_ranges(folder)
        merged = np.unique(np.concatenate([old, ranges]), axis=0)
        with NpyWriter(work, np.int64, (2,)) as file:
            file.append(merged)
        os.replace(work, folder / FILE)
        sync_folder(folder)
        publish_file(folder / FILE)
    return len(merged) - len(old)
