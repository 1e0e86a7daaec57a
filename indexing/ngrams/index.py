"""The n-grams of the training chunks of a datastore, sorted: `ngrams/` of a datastore.

    chunks of each shard → bigrams and 4-grams → hashes in order, block by block                ngrams/runs/00000/   (temporary)
    a range of hashes of all runs → hashes in order, offsets, chunks                            ngrams/00000/

The n shards of a generation divide the range of hashes into n equal parts. So an n-gram is in one place, its document
frequency is that of the generation, and both steps are linear. Frequencies of several generations and datastores are
added up when they are searched.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from indexing.progress import Advance
from indexing.splitmix64 import finalize
from indexing.store.artifact import damaged, reading, recorded
from indexing.store.datastore import Datastore, Split, shard_name
from indexing.store.errors import DoesNotFit, InputError
from indexing.store.files import MANIFEST, NpyWriter, save_array
from indexing.store.ranged_reads import check_array
from indexing.store.retrieval_set import RetrievalSet
from indexing.store.sharded_array import open_array

FOLDER = "ngrams"  # of a datastore
RUNS = "runs"  # in this folder
MOST_CHUNKS = 256
"""Chunks of the datastore that hold an n-gram that counts."""
LEAST_CHUNKS = 2
"""An n-gram of fewer chunks is not stored."""

Counted = Callable[[np.ndarray], np.ndarray]
"""Ids [n] int64 of chunks → whether their n-grams count [n] bool."""

# A hash h of 46 bits is at the place h · shards / 2^14: the shard, and 32 bits that `hashes.npy` holds.
_HASH_BITS, _PLACE_BITS = 46, 32
_LOW = np.uint64((1 << _PLACE_BITS) - 1)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_ROW_BITS = 16
_BLOCK_ROWS = 1 << _ROW_BITS  # chunks sorted at a time
_PART_NGRAMS = 2**24  # n-grams merged at a time
_MOST_SHARDS = 1 << (64 - _HASH_BITS)
_MOST_TOGETHER = 1 << (63 - _PLACE_BITS - _ROW_BITS)  # shards whose keys fit into 64 bits
_RUN_BYTES = 2**34  # of runs on disk at a time, if they are made in at most four passes
_MOST_PASSES = 4  # over the chunks of a generation


def ngrams(tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bigrams and 4-grams of chunks [n, m]: rows and hashes, both [n-grams] uint64. A repeated n-gram is
    repeated."""
    bigrams = _pairs(tokens[:, :-1].astype(np.uint64), tokens[:, 1:].astype(np.uint64))
    rows, hashes = [], []
    for order, values in ((2, bigrams), (4, _pairs(bigrams[:, :-2], bigrams[:, 2:]))):
        row, column = np.nonzero(np.arange(values.shape[1]) + order <= lengths[:, None])
        rows.append(row.astype(np.uint64))
        hashes.append(values[row, column] >> np.uint64(64 - _HASH_BITS))
    return np.concatenate(rows), np.concatenate(hashes)


def _pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Hashes of pairs of uint64 values."""
    return finalize(first * _FACTOR + second)


def changes(values: np.ndarray) -> np.ndarray:
    """Where a sorted array has another value than before: [n] bool, True at the start."""
    out = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=out[1:])
    return out


def _places(hashes: np.ndarray, num_shards: int) -> np.ndarray:
    """The shard of each hash, above 32 bits, and its place in the shard: both [n] uint64."""
    return (hashes * np.uint64(num_shards)) >> np.uint64(_HASH_BITS - _PLACE_BITS)


# --- write ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation:
    """The shards of a generation of a datastore: those of its chunks, and equally many of its n-grams.

    Attributes:
        train: the training split.
        shards: their numbers.
    """

    train: Split
    shards: range

    def __post_init__(self) -> None:
        if len(self.shards) > _MOST_SHARDS or self.num_chunks > 2**32:
            raise InputError(
                f"neighbors.search = 'ngrams' takes at most {_MOST_SHARDS:,} shards and {2**32:,} training chunks at a time; the "
                f"corpus has {len(self.shards):,} and {self.num_chunks:,}. Add parts of it with --append."
            )

    @property
    def num_chunks(self) -> int:
        """Training chunks."""
        return sum(self.train.chunk_rows[self.shards.start : self.shards.stop])

    @property
    def first_chunk(self) -> int:
        """Id of the first training chunk."""
        return int(self.train.tokens.starts[self.shards.start])

    @property
    def parts(self) -> int:
        """Parts of a shard of n-grams, merged one after another. A chunk has fewer than 2m n-grams."""
        return 1 + self.num_chunks * 2 * self.train.chunk_length // len(self.shards) // _PART_NGRAMS

    def passes(self) -> Iterator[range]:
        """Yield shards of n-grams that are made together, with one pass over the chunks; see `num_passes`."""
        size = min(_MOST_TOGETHER, -(-len(self.shards) // num_passes(self.num_chunks, self.train.chunk_length)))
        for first in range(0, len(self.shards), size):
            yield self.shards[first : first + size]


def num_passes(num_chunks: float, chunk_length: int) -> int:
    """Passes over the chunks of a generation, so that the runs of one have 16 GB, or a quarter of all runs if that is
    more."""
    run_bytes = 8 * num_chunks * 2 * chunk_length
    return min(_MOST_PASSES, 1 + int(run_bytes // _RUN_BYTES))


def write_run(
    work: Path, generation: Generation, shard: int, group: range, advance: Advance, counted: Counted | None = None
) -> None:
    """Write the n-grams of the chunks of one shard that belong to the `group` of shards of n-grams; of all chunks, or
    of those that are `counted`.

    - `keys.npy` [n-grams] uint64: place of the hash from the first of these shards on, then 16 bits for the chunk.
      Sorted within each block of 65,536 chunks.
    - `borders.npy` [blocks, parts + 1] int64: the first n-gram of each part, and the stop of the last one.

    Memory: 16 bytes for each of 2m n-grams of 65,536 chunks, a few times.
    """
    first, stop = (int(row) for row in generation.train.tokens.starts[shard : shard + 2])
    num_parts, borders, written = len(group) * generation.parts, [], 0
    limits = (np.arange(num_parts + 1, dtype=np.uint64) << np.uint64(_PLACE_BITS)) // np.uint64(generation.parts)
    with NpyWriter(work / "keys.npy", np.uint64) as file:
        for start in range(first, stop, _BLOCK_ROWS):
            end = min(start + _BLOCK_ROWS, stop)
            lengths = generation.train.lengths.read(start, end)
            if counted is not None:
                lengths = np.where(counted(np.arange(start, end)), lengths, 0)
            rows, hashes = ngrams(generation.train.tokens.read(start, end), lengths)
            places = _places(hashes, len(generation.shards))
            shards = (places >> np.uint64(_PLACE_BITS)).astype(np.int64) + generation.shards.start
            in_group = (shards >= group.start) & (shards < group.stop)
            offset = np.uint64((group.start - generation.shards.start) << _PLACE_BITS)
            keys = ((places[in_group] - offset) << np.uint64(_ROW_BITS)) | rows[in_group]
            keys.sort()
            keys = keys[changes(keys)]
            file.append(keys)
            borders.append(written + np.searchsorted(keys, limits << np.uint64(_ROW_BITS)))
            written += len(keys)
            advance(end - start)
    save_array(work / "borders.npy", np.array(borders, dtype=np.int64).reshape(-1, num_parts + 1))


def write_ngrams(work: Path, generation: Generation, runs: Path, group: range, shard: int) -> dict[str, int]:
    """Merge the runs of a generation into one shard of n-grams, one of the `group`.

    - `hashes.npy` [n-grams] uint32, in order: the place of the n-gram in the shard.
    - `offsets.npy` [n-grams + 1] uint32: its first entry. An n-gram of more than 256 chunks has no entries.
    - `chunks.npy` [entries] uint32: its chunks in order, counted from the first one of the generation.

    Memory: 16 bytes for each n-gram of a part, a few times.

    Returns:
        counts: ngrams and entries.
    """
    written, entries = 0, 0
    with (
        NpyWriter(work / "hashes.npy", np.uint32) as hash_file,
        NpyWriter(work / "offsets.npy", np.uint32) as offset_file,
        NpyWriter(work / "chunks.npy", np.uint32) as chunk_file,
    ):
        offset_file.append(np.zeros(1, dtype=np.uint32))
        for part in range(generation.parts):
            keys = _merged(generation, runs, (shard - group.start) * generation.parts + part)
            hashes = keys >> np.uint64(_PLACE_BITS)
            starts = np.flatnonzero(changes(hashes))
            counts = np.diff(np.append(starts, len(keys)))
            is_stored = counts >= LEAST_CHUNKS
            is_listed = is_stored & (counts <= MOST_CHUNKS)
            chunk_file.append(keys[np.repeat(is_listed, counts)] & _LOW)
            hash_file.append(hashes[starts[is_stored]])
            listed = np.where(is_listed, counts, 0)
            offset_file.append(entries + np.cumsum(listed[is_stored]))
            written += int(is_stored.sum())
            entries += int(listed.sum())
    return {"ngrams": written, "entries": entries}


def _merged(generation: Generation, runs: Path, part: int) -> np.ndarray:
    """The n-grams of one part of all runs, sorted: [n-grams] uint64, 32 bits of the place and 32 of the chunk."""
    parts = [np.empty(0, dtype=np.uint64)]
    for shard in generation.shards:
        borders, keys = (open_array(runs / shard_name(shard) / f"{name}.npy") for name in ("borders", "keys"))
        first = int(generation.train.tokens.starts[shard]) - generation.first_chunk
        for block, (start, stop) in enumerate(borders[:, part : part + 2].tolist()):
            some = np.asarray(keys[start:stop])
            chunks = (some & np.uint64(_BLOCK_ROWS - 1)) + np.uint64(first + block * _BLOCK_ROWS)
            parts.append(((some >> np.uint64(_ROW_BITS)) & _LOW) << np.uint64(_PLACE_BITS) | chunks)
    out = np.concatenate(parts)
    out.sort()
    return out


# --- read -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NgramLists:
    """The n-grams of a generation, memory-mapped.

    Attributes:
        first: position of its first chunk among all chunks of the retrieval set.
        num_chunks: its training chunks.
        folders: the shards.
        arrays: hashes, offsets and chunks of each shard, see `write_ngrams`.
    """

    first: int
    num_chunks: int
    folders: tuple[Path, ...]
    arrays: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]

    @classmethod
    def of(cls, retrieval: RetrievalSet) -> "tuple[NgramLists, ...]":
        """Open all generations of all datastores.

        Raises:
            InputError: a datastore has no n-grams, or a file is damaged.
        """
        opened: list[NgramLists] = []
        for split in retrieval.splits:
            for generation in _generations(split):
                first = sum(lists.num_chunks for lists in opened)
                opened.append(cls._open(split.folder / FOLDER, generation, first))
        return tuple(opened)

    @classmethod
    def of_part(cls, retrieval: RetrievalSet, counted: Sequence[Counted], folder: Path) -> "tuple[NgramLists, ...]":
        """Write the lists of some chunks of each datastore to a folder, as if there were no others, and open them.

        Raises:
            InputError: a datastore has no n-grams, which show its generations.
        """
        opened: list[NgramLists] = []
        for split, some in zip(retrieval.splits, counted, strict=True):
            for generation in _generations(split):
                work = folder / str(len(opened))
                for group in generation.passes():
                    for shard in generation.shards:
                        write_run(
                            _made(work / RUNS / shard_name(shard)), generation, shard, group, lambda _: None, some
                        )
                    for shard in group:
                        write_ngrams(_made(work / shard_name(shard)), generation, work / RUNS, group, shard)
                    shutil.rmtree(work / RUNS)
                opened.append(cls._open(work, generation, sum(lists.num_chunks for lists in opened)))
        return tuple(opened)

    @classmethod
    def _open(cls, folder: Path, generation: Generation, first: int) -> "NgramLists":
        shards = tuple(folder / shard_name(shard) for shard in generation.shards)
        arrays = []
        for shard in shards:
            paths = [shard / f"{name}.npy" for name in ("hashes", "offsets", "chunks")]
            hashes, offsets, chunks = map(open_array, paths)
            for path, array, rows in zip(paths, (hashes, offsets, chunks), (0, 1, 0), strict=True):
                check_array(path, array, np.uint32, (), rows)
            with reading(shard):
                if len(offsets) != len(hashes) + 1 or offsets[-1] != len(chunks):
                    raise DoesNotFit("its arrays do not fit together")
            arrays.append((hashes, offsets, chunks))
        return cls(first, generation.num_chunks, shards, tuple(arrays))

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first entry of the list of each n-gram, hashes [n] uint64 in order, and its document frequency: both [n]
        int64.

        The frequency is 0 if the n-gram is not stored, and 257 if it has no list. `read` takes both.
        """
        starts, frequencies = np.zeros((2, len(hashes)), dtype=np.int64)
        position = _places(hashes, len(self.arrays))
        limits = np.arange(len(self.arrays) + 1, dtype=np.uint64) << np.uint64(_PLACE_BITS)
        borders, low = np.searchsorted(position, limits), position.astype(np.uint32)
        for shard in np.flatnonzero(np.diff(borders)):
            stored, offsets, _ = self.arrays[shard]
            if not len(stored):
                continue
            some = slice(borders[shard], borders[shard + 1])
            row = np.minimum(np.searchsorted(stored, low[some]), len(stored) - 1)
            starts[some], stops = offsets[row], offsets[row + 1].astype(np.int64)
            counts = np.where(stops > starts[some], stops - starts[some], MOST_CHUNKS + 1)
            frequencies[some] = np.where(stored[row] == low[some], counts, 0)
        return starts, frequencies

    def read(self, hashes: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """The chunks of some n-grams, hashes [n] uint64 in order with the first entries and frequencies that `find`
        gives: one list after another [entries] int64, positions in the retrieval set."""
        limits = np.arange(len(self.arrays) + 1, dtype=np.uint64) << np.uint64(_PLACE_BITS)
        borders = np.searchsorted(_places(hashes, len(self.arrays)), limits)
        chunks = [np.empty(0, dtype=np.int64)]
        for shard in np.flatnonzero(np.diff(borders)):
            some = slice(borders[shard], borders[shard + 1])
            entries = starts[some].repeat(sizes[some]) + within(sizes[some])
            stored, folder = self.arrays[shard][2], self.folders[shard]
            if entries.max(initial=-1) >= len(stored):
                path = folder / "offsets.npy"
                raise damaged(path, f"{path} names entries from {len(stored):,} on, which it does not have")
            listed = stored[entries].astype(np.int64)
            if listed.max(initial=-1) >= self.num_chunks:
                path = folder / "chunks.npy"
                raise damaged(path, f"{path} names chunks from {self.num_chunks:,} on")
            chunks.append(listed + self.first)
        return chunks[-1] if len(chunks) == 2 else np.concatenate(chunks)


class _Recorded(TypedDict):
    """Settings in the recipe of a shard: how many its generation has."""

    shards: Annotated[int, Field(ge=1, le=_MOST_SHARDS)]


def _generations(split: Split) -> Iterator[Generation]:
    """Yield the generations of a datastore with n-grams."""
    Datastore.open(split.folder).require("ngrams")
    shard = 0
    while shard < len(split.chunk_rows):
        folder = split.folder / FOLDER / shard_name(shard)
        shards = recorded(folder, "settings", _Recorded)["shards"]
        if shards > len(split.chunk_rows) - shard:
            raise InputError(
                f"{folder / MANIFEST}: recipe.settings.shards = {shards}: the datastore has {len(split.chunk_rows) - shard} shards from "
                f"this one on. Restore the file, or run `retro index CONFIG --stage {FOLDER} --rebuild`."
            )
        yield Generation(split, range(shard, shard + shards))
        shard += shards


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def within(sizes: np.ndarray) -> np.ndarray:
    """0, 1, … for each of some lists one after another, lengths [n] int64."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
