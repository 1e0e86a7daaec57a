"""The prefixes of the training documents in one order, over all shards: which orders there are, and how they are read.

    document  a b a c        prefixes, read backwards   in order
                             a, b a, a b a, c a b a     a, a b a, b a, c a b a

All prefixes that end in the same tokens are neighbors in this order, so one binary search finds every place where a
text occurs, and what follows there (infini-gram: Liu et al. 2024, arXiv 2401.17377; it sorts suffixes and asks for what
follows them).

`order_build.py` makes it.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from indexing.store.artifact import read_manifest
from indexing.store.datastore import Datastore, Split, shard_name
from indexing.store.errors import InputError
from indexing.store.files import MANIFEST
from indexing.store.paths import names_at, parts_of
from indexing.store.ranged_reads import check_array
from indexing.store.sharded_array import fetch, open_array
from indexing.suffixes.rows import spread
from indexing.suffixes.texts import Texts, numbers, view

FOLDER = "suffixes"
RUNS = "runs"
"""Folder in it with what is merged, removed after the build."""
VERSION = 5
LONGEST = 64
"""Prefixes are sorted by this many of their last tokens. Longer matches count as this long."""
PART_TOKENS = 1 << 27
"""Most prefixes of a part of an order."""
_LEAST_TOKENS, _PARTS = 1 << 21, 64  # of a part, so that many cores share an order; and parts, before they are larger
ROWS_OF_HEAD = 256
"""Sorted prefixes from one stored head to the next. Heads are small and stay in the cache. They replace the first steps
of a binary search: each of those would read a page of the prefixes and a page of the tokens."""
FAN_IN = 512
"""Runs that are merged at a time. If there are more, groups of them are merged into longer runs first, so that a build
makes one more pass over all prefixes from 513 runs on, and two from 262,145 on."""
ALL_HEADS = 1 << 64
"""Above all heads."""
TOKENS_FILE = "tokens.npy"
_WIDE_POSITIONS = range(5, 8)  # bytes of a position; with more it would not be an int64 from 0 on
_COPIES = 3  # of prefixes with tokens at a time: runs, longer ones, and the one that is kept
_NAME = re.compile(rf"{FOLDER}/(\d{{5,9}})-(\d{{5,9}})-(\d{{5,9}})")


# --- which orders, and where ------------------------------------------------------------------------------------------


def planned_orders(generations: Sequence[range], tokens: Sequence[int]) -> list[range]:
    """The shards of each order of a datastore that grew by these generations, as in a log-structured merge tree.

    A generation is merged with the order before it if that one has at most twice as many tokens, and so on. So there
    are at most log2(tokens) orders, and a token is sorted again only when its order grows by half.

    Args:
        generations: the shards of each, in order.
        tokens: training tokens of each shard.
    """
    orders: list[range] = []
    for shards in generations:
        while orders and _tokens_of(orders[-1], tokens) <= 2 * _tokens_of(shards, tokens):
            shards = range(orders.pop().start, shards.stop)
        orders.append(shards)
    return orders


def num_parts(tokens: int) -> int:
    """How many parts an order has.

    Args:
        tokens: of the order.
    """
    return max(1, min(_PARTS, tokens // _LEAST_TOKENS), -(-tokens // PART_TOKENS))


def runs_together(runs: int) -> int:
    """How many runs are merged into one longer run, before all are merged. 1: all are merged at once.

    Args:
        runs: of the order.
    """
    return min(FAN_IN, -(-runs // FAN_IN))


def carries_tokens(text_bytes: float, memory: float, room: float) -> bool:
    """Whether runs carry the tokens of each prefix: if the text does not fit into half of the memory, and the disk has
    room for them.

    A merge compares tokens all over the text. Reading them from memory is faster than reading longer runs, and reading
    them from a disk, at random, many times slower.

    Args:
        text_bytes: bytes of the tokens of an order.
        memory: bytes of a machine.
        room: free bytes of the disk.
    """
    return text_bytes > memory / 2 and room > _COPIES * (1 + LONGEST) * text_bytes


def _tokens_of(shards: range, tokens: Sequence[int]) -> int:
    return sum(tokens[shards.start : shards.stop])


def part_path(shards: range, part: int) -> str:
    """The path of a part of the order of some shards: their first and last number, and that of the part."""
    return f"{FOLDER}/{shard_name(shards[0])}-{shard_name(shards[-1])}-{shard_name(part)}"


def with_tokens(parts: Sequence[Path]) -> Sequence[Path]:
    """The folders that hold the prefixes of some parts and carry tokens, if the stage has kept them for `votes`;
    otherwise the parts."""
    kept = [part.parent / RUNS / part.name for part in parts]
    return kept if all((folder / MANIFEST).exists() for folder in kept) else parts


def shards_of(path: str) -> range | None:
    """The shards of the order that a part belongs to; None if the path is not that of a part."""
    name = _NAME.fullmatch(path)
    return range(int(name[1]), int(name[2]) + 1) if name else None


def stored_orders(split: Split) -> list[tuple[range, list[Path]]]:
    """The shards of each order of a datastore and the folders of its parts.

    Raises:
        InputError: the datastore has none, one is missing or damaged, or an older version wrote them.
    """
    orders: dict[range, list[Path]] = {}
    for name, shards in recorded_parts(Datastore.open(split.folder)):
        orders.setdefault(shards, []).append(split.folder / name)
    if sum(map(len, orders)) != len(split.chunk_rows):
        raise InputError(f"{split.folder} has other shards than when it was opened. Open it again.")
    for folders in orders.values():
        for folder in folders:
            if read_manifest(folder)["recipe"]["version"] != VERSION:
                raise _older(folder)
    return list(orders.items())


def _older(folder: Path) -> InputError:
    return InputError(
        f"An older version wrote {folder}. Run `retro index CONFIG`: it replaces these files and the votes."
    )


def recorded_parts(datastore: Datastore) -> Iterator[tuple[str, range]]:
    """The parts of orders that the manifest of a datastore names, each with the shards of its order.

    Raises:
        InputError: the stage is not finished, or an older version ran it.
    """
    datastore.require(FOLDER)
    paths = datastore.manifest["artifacts"].get(FOLDER, FOLDER)
    try:
        names = [name for part in parts_of(paths) for name in names_at(part)]
    except InputError as error:
        raise InputError(f"{datastore.folder / MANIFEST}: artifacts.{FOLDER}: {error}") from error
    if not names:
        raise InputError(
            f"{datastore.folder / MANIFEST}: artifacts.{FOLDER} = {paths!r:.50}: should name the parts of an order."
        )
    for name in names:
        if (shards := shards_of(name)) is None:
            raise _older(datastore.folder / name)
        yield name, shards


@dataclass(frozen=True)
class SortedRun:
    """Prefixes of consecutive shards in the order of their heads: a run, or a whole order.

    Attributes:
        shards: their numbers.
        folders: of its parts.
        borders: each part has heads between two of these, [parts + 1].
    """

    shards: range
    folders: Sequence[Path]
    borders: Sequence[int]

    def between(self, first: int, stop: int) -> Sequence[Path]:
        """The folders of the parts that can have heads in [first, stop)."""
        return self.folders[max(0, bisect_right(self.borders, first) - 1) : bisect_left(self.borders, stop)]


# --- read -------------------------------------------------------------------------------------------------------------


def position_bytes(positions: int) -> int:
    """Bytes of a stored position: four, or more if there are more than 2^32 positions."""
    return max(4, -(-(positions - 1).bit_length() // 8))


class Prefixes:
    """Prefixes in the order of their heads, memory-mapped: a run, or an order.

    Rows count through all parts.

    Attributes:
        texts: their texts.
        folders: of the parts that are not empty, see `write_part`.
        carried: whether their tokens are stored with them, see `carries_tokens`.
        rows: first row of each of these parts, then the number of rows.
        stored_positions: of each of these parts, [rows] uint32, or bytes [rows, 5] or more.
        stored_heads: of each of these parts, one of 256 rows, [n] uint64.
    """

    def __init__(self, texts: Texts, folders: Sequence[Path]) -> None:
        self.texts = texts
        self.carried = all((folder / TOKENS_FILE).exists() for folder in folders)
        names = ["positions.npy", "heads.npy", *[TOKENS_FILE] * self.carried]
        opened = [[open_array(folder / name) for name in names] for folder in folders]
        for folder, arrays in zip(folders, opened, strict=True):
            self._check(folder, *arrays)
        self.folders = [folder for folder, arrays in zip(folders, opened, strict=True) if len(arrays[0])]
        opened = [arrays for arrays in opened if len(arrays[0])]
        for arrays in opened:
            fetch(arrays[1])
        self.rows = np.cumsum([0, *(len(arrays[0]) for arrays in opened)]).tolist()
        self.stored_positions, self.stored_heads = ([np.asarray(arrays[file]) for arrays in opened] for file in (0, 1))
        self._tokens = [np.asarray(arrays[2]) for arrays in opened] if self.carried else []
        self._heads = [view(heads) for heads in self.stored_heads]
        self._firsts = [heads[0] for heads in self._heads]

    def _check(self, folder: Path, positions: np.ndarray, heads: np.ndarray, tokens: np.ndarray | None = None) -> None:
        """Raise DamagedFile unless the files of a part have the types and rows that `_Writer` writes."""
        is_wide = positions.ndim == 2 and positions.shape[1] in _WIDE_POSITIONS
        dtype, shape = (np.dtype(np.uint8), positions.shape[1:]) if is_wide else (np.dtype(np.uint32), ())
        check_array(folder / "positions.npy", positions, dtype, shape, 0)
        check_array(folder / "heads.npy", heads, np.uint64, (), -(-len(positions) // ROWS_OF_HEAD))
        if tokens is not None:
            check_array(folder / TOKENS_FILE, tokens, self.texts.dtype, (1 + LONGEST,), len(positions))

    def __len__(self) -> int:
        return int(self.rows[-1])

    def positions(self, first: int, stop: int, step: int = 1) -> np.ndarray:
        """The positions of every `step`-th of the rows [first, stop): [n] int64."""
        read = [_as_numbers(stored) for stored in self._stored(self.stored_positions, first, stop, step)]
        return read[0] if len(read) == 1 else np.concatenate([np.empty(0, np.int64), *read])

    def tokens(self, first: int, stop: int) -> np.ndarray:
        """The tokens after the rows [first, stop) and their last 64 tokens, see `_Writer`: [n, 65]. From the text
        unless they are carried."""
        if not self.carried:
            return self.texts.rows(self.positions(first, stop), LONGEST)
        read = self._stored(self._tokens, first, stop, 1)
        return read[0] if len(read) == 1 else np.concatenate([np.empty((0, 1 + LONGEST), self.texts.dtype), *read])

    def heads(self, first: int, stop: int) -> np.ndarray:
        """The heads of the rows [first, stop): [n] uint64."""
        return heads_of(self.tokens(first, stop)) if self.carried else self.texts.heads(self.positions(first, stop))

    def _stored(self, parts: Sequence[np.ndarray], first: int, stop: int, step: int) -> list[np.ndarray]:
        """Every `step`-th of the rows [first, stop), from each part that has some."""
        if len(parts) == 1:
            return [parts[0][first:stop:step]]
        read = []
        for start, end, stored in zip(self.rows, self.rows[1:], parts, strict=False):
            begin = (
                first if first >= start else first + -(-(start - first) // step) * step
            )  # the first wanted row of the part
            if begin < min(stop, end):
                read.append(stored[begin - start : min(stop, end) - start : step])
        return read

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The positions of rows in any order: [n] → [n] int64."""
        if len(self.stored_positions) == 1:
            return _as_numbers(self.stored_positions[0][rows])
        out, parts = np.empty(len(rows), np.int64), np.searchsorted(self.rows, rows, side="right") - 1
        for part in np.unique(parts).tolist():
            out[parts == part] = _as_numbers(self.stored_positions[part][rows[parts == part] - self.rows[part]])
        return out

    def multiples(self, first: int, stop: int, step: int) -> Iterator[range]:
        """The rows of [first, stop) that are multiples of `step`, counted from the first row of each part: a range for
        each part."""
        for start, end in pairwise(self.rows):
            if (begin := max(start, first)) < min(end, stop):
                yield range(begin + (start - begin) % step, min(end, stop), step)

    def head_before(self, head: int) -> int:
        """A row, as late as heads are stored, up to which all heads are smaller than this one; -1 if there is none."""
        if (part := bisect_left(self._firsts, head) - 1) < 0:
            return -1
        return int(self.rows[part]) + (bisect_left(self._heads[part], head) - 1) * ROWS_OF_HEAD

    def head_from(self, head: int) -> int:
        """A row, as early as heads are stored, from which on all heads are at least this one."""
        if (part := bisect_left(self._firsts, head) - 1) < 0:
            return 0
        return min(int(self.rows[part]) + bisect_left(self._heads[part], head) * ROWS_OF_HEAD, int(self.rows[part + 1]))

    def first_row(self, head: int) -> int:
        """The first row whose head is at least this one."""
        if head >= ALL_HEADS:
            return len(self)
        first, stop = self.head_before(head) + 1, self.head_from(head)
        heads = self.heads(first, stop)
        return first + int(np.searchsorted(heads, np.uint64(head)))

    def between(self, first: int, stop: int) -> range:
        """The rows whose heads are in [first, stop)."""
        return range(self.first_row(first), self.first_row(stop))

    def heads_between(self, first: int, stop: int) -> np.ndarray:
        """The stored heads that are in [first, stop), one of 256: [n] uint64."""
        found = [np.empty(0, np.uint64)]
        for heads in self.stored_heads:
            low = np.searchsorted(heads, np.uint64(first))
            high = len(heads) if stop >= ALL_HEADS else np.searchsorted(heads, np.uint64(stop))
            found.append(heads[low:high])
        return np.concatenate(found)


def sampled_rows(
    orders: Sequence[Prefixes], ranges: Sequence[tuple[int, int]], most: int, step: int
) -> list[np.ndarray]:
    """At most `most` of the rows in some ranges [first, stop), one of each order, spread evenly over all: [n] int64 for
    each order.

    They are multiples of `step`, see `rows.stride` and `Prefixes.multiples`.
    """
    pieces = [[*order.multiples(*rows, step)] for order, rows in zip(orders, ranges, strict=False)]
    places = spread(sum(len(piece) for own in pieces for piece in own), most)
    if [*map(len, pieces)] == [1]:
        return [pieces[0][0].start + step * places]
    sampled, first = list[np.ndarray](), 0
    for own in pieces:
        rows = [np.empty(0, np.int64)]
        for piece in own:
            chosen = places[np.searchsorted(places, first) : np.searchsorted(places, first + len(piece))]
            rows.append(piece.start + step * (chosen - first))
            first += len(piece)
        sampled.append(rows[-1] if len(rows) == 2 else np.concatenate(rows))
    return sampled


def _as_numbers(stored: np.ndarray) -> np.ndarray:
    """Stored positions as [n] int64."""
    if stored.ndim == 1:
        return stored.astype(np.int64)
    wide = np.zeros((len(stored), 8), np.uint8)
    wide[:, : stored.shape[1]] = stored
    return wide.view("<i8")[:, 0]


def heads_of(tokens: np.ndarray) -> np.ndarray:
    """The heads [n] uint64 of prefixes, from the tokens that runs carry, [n, 65]."""
    return numbers(tokens[:, 1 : 1 + 8 // tokens.itemsize])[:, 0]


def blocks(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` rows."""
    return (slice(start, start + size) for start in range(0, count, size))
