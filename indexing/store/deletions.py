"""Deleted documents, by id. Chunk ids are positions, so chunks stay in place until a rebuild, and every reader skips
them.

`deleted.json` in the datastore's folder:

    documents   id → number of shards when it was deleted; shards made later leave the document out, 0 = all shards
    chunks      split → first and stop of the chunk ids of each deleted document that is in the shards, in order

No rebuild removes it. It is read again whenever it changes, so a process that has the datastore open notices: every
reader takes `Split.deleted` for each read and keeps no copy. A rebuild gives the ids to other chunks, so from its
beginning on `Split.deleted` raises DatastoreChanged in processes that had the datastore open. From a URL both files are
fetched whenever the datastore is opened.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from indexing.store import remote
from indexing.store.errors import InputError
from indexing.store.files import read_checked, write_checked
from indexing.store.schemas import MOST_SHARDS, Bytes, parsed

FILE = "deleted.json"


class _Stored(TypedDict):
    documents: dict[str, Annotated[int, Field(ge=0, le=MOST_SHARDS)]]
    chunks: dict[str, list[Annotated[list[Bytes], Field(min_length=2, max_length=2)]]]


@dataclass(frozen=True)
class Deletions:
    """The content of `deleted.json`.

    Attributes:
        documents: deleted ids, each with the number of shards that may hold the document.
        chunks: split → [n, 2] int64 ranges of chunk ids, sorted and disjoint.
    """

    documents: Mapping[str, int] = field(default_factory=dict)
    chunks: Mapping[str, np.ndarray] = field(default_factory=dict)


def read_deletions(folder: Path) -> Deletions:
    """The deleted documents of a datastore.

    Raises:
        InputError: the file is damaged, or the deletions were recorded by a version that did not record ids.
    """
    try:
        stat = os.stat(f"{folder}/{FILE}")  # quicker than a Path: searches ask for every token
    except FileNotFoundError:
        if os.path.exists(f"{folder}/deleted.npy"):
            raise InputError(
                f"{folder / 'deleted.npy'} was written by an earlier version and names no ids. Remove it and run `retro delete` "
                "again with the ids of all deleted documents."
            ) from None
        return Deletions()
    return _kept(folder / FILE, (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@lru_cache(maxsize=16)
def _kept(path: Path, _: tuple[int, ...]) -> Deletions:
    try:
        stored = parsed(_Stored, read_checked(path), path)
        return Deletions(stored["documents"], {name: _ranges(name, rows) for name, rows in stored["chunks"].items()})
    except ValueError as error:
        raise InputError(
            f"{path} has changed since it was written ({error}). Restore it from a copy, or remove it and run `retro delete` "
            "again with the ids of all deleted documents."
        ) from error


def _ranges(split: str, rows: list[list[int]]) -> np.ndarray:
    """Stored ranges of chunk ids as [n, 2] int64; raises ValueError unless they are sorted and disjoint, as `inside`
    needs them."""
    ranges = np.array(rows, dtype=np.int64).reshape(-1, 2)
    if (ranges[:, 0] >= ranges[:, 1]).any() or (np.diff(ranges.ravel()) < 0).any():
        raise ValueError(f"chunks of {split}: the ranges are not in order")
    return ranges


def deleted_ranges(folder: Path, split: str = "train") -> np.ndarray:
    """The chunk ranges of the deleted documents of a split: [n, 2] int64, sorted and disjoint, empty without deletions.

    Raises:
        InputError: the file is damaged.
    """
    return read_deletions(folder).chunks.get(split, np.empty((0, 2), dtype=np.int64))


def left_out(folder: Path, first_shard: int) -> list[str]:
    """The ids of deleted documents that shards from this one on are made without, sorted."""
    return sorted(name for name, shards in read_deletions(folder).documents.items() if shards <= first_shard)


def without_deleted(ids: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Replace chunk ids [...] int64 in one of the ranges by -1."""
    return np.where(inside(ids, ranges), -1, ids) if len(ranges) else ids


def with_range(ranges: np.ndarray, first: int, stop: int) -> np.ndarray:
    """Add a range [first, stop) to ranges [n, 2], which are sorted and disjoint and stay so.

    One of them may contain it, as that of a deleted document does; none overlaps a part of it.
    """
    if len(ranges) and inside(np.array(first), ranges):
        return ranges
    return np.insert(ranges, np.searchsorted(ranges[:, 0], first), (first, stop), axis=0)


def inside(ids: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Whether each id [...] is in one of the ranges [n, 2], which are sorted and disjoint."""
    if not len(ranges):
        return np.zeros(ids.shape, dtype=bool)
    position = np.searchsorted(ranges[:, 0], ids, side="right") - 1
    return (position >= 0) & (ids < ranges[np.maximum(position, 0), 1])


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Change the deletions or the shards of a datastore alone. The newest deletions are there, also those made at its
    URL."""
    with open(folder / f".{FILE}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remote.refresh(folder, (FILE,))
        yield


def write_deletions(folder: Path, deletions: Deletions) -> None:
    """Replace `deleted.json` with one rename; the caller holds the lock."""
    chunks = {name: ranges.tolist() for name, ranges in deletions.chunks.items()}
    write_checked(folder / FILE, {"documents": dict(deletions.documents), "chunks": chunks})
    remote.publish_file(folder / FILE)
