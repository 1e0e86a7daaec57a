"""Sort the prefixes of the training documents, over all shards.

    document  a b a c        prefixes, read backwards   in order
                             a, b a, a b a, c a b a     a, a b a, b a, c a b a

All prefixes that end in the same tokens are neighbors in this order, so one binary search finds every place where a text occurs,
and what follows there (infini-gram: Liu et al. 2024, arXiv 2401.17377; it sorts suffixes and asks for what follows them).

    each shard ─ sort by the last 8 bytes of tokens ─► a run
    more than 512 runs ─ merge groups of them, part by part ─► longer runs
    the runs ─ cut at the same heads ─► ranges of about 2^20 prefixes ─ sort by the last 64 tokens ─► the order, in parts
    a part ─► what a search reads of it (`rows.py`)

Prefixes with equal last 64 tokens stay in the order of their positions. So an order depends on the text of its shards alone.
An order is a run too: what was appended is merged with it. A part is made from the parts of runs that have its heads, so the files that
are opened grow with the prefixes times the levels of merges.

If the text is larger than half of the memory, runs carry the tokens of each prefix. Then runs are written and read in sequence, and the text
is read when the runs are made, and not by merges. The last of them is kept until `votes` has read it.
"""

import re
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from indexing.progress import Advance
from indexing.store.artifact import read_manifest
from indexing.store.datastore import Datastore, Split, shard_name
from indexing.store.errors import InputError
from indexing.store.files import MANIFEST, NpyWriter
from indexing.store.paths import names_at, parts_of
from indexing.store.sharded_array import fetch, open_array
from indexing.suffixes.rows import RowWriter, spread
from indexing.suffixes.texts import Texts, numbers, view

FOLDER = "suffixes"
RUNS = "runs"
"""Folder in it with what is merged, removed after the build."""
VERSION = 5
LONGEST = 64
"""Prefixes are sorted by this many of their last tokens. Longer matches count as this long."""
PART_TOKENS = 1 << 27
"""Prefixes of a part of an order."""
RANGE_TOKENS = 1 << 20
"""Prefixes that are sorted at a time. So many that only matches of one to three tokens lie on both sides of a cut."""
ROWS_OF_HEAD = 256
"""Sorted prefixes from one stored head to the next. Heads are small and stay in the cache. They replace the first steps of a binary
search: each of those would read a page of the prefixes and a page of the tokens."""
FAN_IN = 512
"""Runs that are merged at a time. If there are more, groups of them are merged into longer runs first, so that a build makes one more pass
over all prefixes from 513 runs on, and two from 262,145 on."""
RUN_BYTES = 32
"""Memory for each token of a shard whose prefixes are sorted."""
ALL_HEADS = 1 << 64
"""Above all heads."""
_TOKENS = "tokens.npy"
_COPIES = 3  # of prefixes with tokens at a time: runs, longer ones, and the one that is kept
_SAMPLES = 1 << 12  # heads of a shard that decide where an order is cut
_BLOCK = 1 << 18
_NAME = re.compile(rf"{FOLDER}/(\d{{5,9}})-(\d{{5,9}})-(\d{{5,9}})")


# --- which orders, and where ------------------------------------------------------------------------------------------


def planned_orders(generations: Sequence[range], tokens: Sequence[int]) -> list[range]:
    """The shards of each order of a datastore that grew by these generations, as in a log-structured merge tree.

    A generation is merged with the order before it if that one has at most twice as many tokens, and so on. So there are at most
    log2(tokens) orders, and a token is sorted again only when its order grows by half.

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
    return max(1, -(-tokens // PART_TOKENS))


def runs_together(runs: int) -> int:
    """How many runs are merged into one longer run, before all are merged. 1: all are merged at once.

    Args:
        runs: of the order.
    """
    return min(FAN_IN, -(-runs // FAN_IN))


def carries_tokens(text_bytes: float, memory: float, room: float) -> bool:
    """Whether runs carry the tokens of each prefix: if the text does not fit into half of the memory, and the disk has room for them.

    A merge compares tokens all over the text. Reading them from memory is faster than reading longer runs, and reading them from a disk,
    at random, many times slower.

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
    """The folders that hold the prefixes of some parts and carry tokens, if the stage has kept them for `votes`; otherwise the parts."""
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
    paths = datastore.manifest.get("artifacts", {}).get(FOLDER)
    for name in [name for part in parts_of(paths) for name in names_at(part)] if paths else [FOLDER]:
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

    Rows count through all parts. Single positions are read from memory views: Python reads a number from them several times as fast as
    from an array.

    Attributes:
        texts: their texts.
        folders: of the parts that are not empty, see `write_part`.
        carried: whether their tokens are stored with them, see `carries_tokens`.
        rows: first row of each of these parts, then the number of rows.
    """

    def __init__(self, texts: Texts, folders: Sequence[Path]) -> None:
        self.texts = texts
        self.carried = all((folder / _TOKENS).exists() for folder in folders)
        names = ["positions.npy", "heads.npy", *[_TOKENS] * self.carried]
        opened = [[open_array(folder / name) for name in names] for folder in folders]
        self.folders = [folder for folder, arrays in zip(folders, opened, strict=True) if len(arrays[0])]
        opened = [arrays for arrays in opened if len(arrays[0])]
        for arrays in opened:
            fetch(arrays[1])
        self.rows = np.cumsum([0, *(len(arrays[0]) for arrays in opened)]).tolist()
        self._positions, self._head_arrays = ([np.asarray(arrays[file]) for arrays in opened] for file in (0, 1))
        self._tokens = [np.asarray(arrays[2]) for arrays in opened] if self.carried else []
        self._heads = [view(heads) for heads in self._head_arrays]
        self._firsts = [heads[0] for heads in self._heads]
        self.position = self._reader()
        """`position(row)`: the position of the last token of a prefix."""

    def __len__(self) -> int:
        return int(self.rows[-1])

    def _reader(self) -> Callable[[int], int]:
        readers, rows = list(map(_reader_of, self._positions)), self.rows
        if len(readers) == 1:
            return readers[0]

        def position(row: int) -> int:
            part = bisect_right(rows, row) - 1
            return readers[part](row - rows[part])

        return position

    def positions(self, first: int, stop: int, step: int = 1) -> np.ndarray:
        """The positions of every `step`-th of the rows [first, stop): [n] int64."""
        read = [_as_numbers(stored) for stored in self._stored(self._positions, first, stop, step)]
        return read[0] if len(read) == 1 else np.concatenate([np.empty(0, np.int64), *read])

    def tokens(self, first: int, stop: int) -> np.ndarray:
        """The tokens after the rows [first, stop) and their last 64 tokens, see `_Writer`: [n, 65]. From the text unless they are carried."""
        if not self.carried:
            return _tokens_of_prefixes(self.texts, self.positions(first, stop))
        read = self._stored(self._tokens, first, stop, 1)
        return read[0] if len(read) == 1 else np.concatenate([np.empty((0, 1 + LONGEST), self.texts.dtype), *read])

    def heads(self, first: int, stop: int) -> np.ndarray:
        """The heads of the rows [first, stop): [n] uint64."""
        return _heads_of(self.tokens(first, stop)) if self.carried else self.texts.heads(self.positions(first, stop))

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
        if len(self._positions) == 1:
            return _as_numbers(self._positions[0][rows])
        out, parts = np.empty(len(rows), np.int64), np.searchsorted(self.rows, rows, side="right") - 1
        for part in np.unique(parts).tolist():
            out[parts == part] = _as_numbers(self._positions[part][rows[parts == part] - self.rows[part]])
        return out

    def multiples(self, first: int, stop: int, step: int) -> Iterator[range]:
        """The rows of [first, stop) that are multiples of `step`, counted from the first row of each part: a range for each part."""
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

    def stored_heads(self, first: int, stop: int) -> np.ndarray:
        """The stored heads that are in [first, stop), one of 256: [n] uint64."""
        found = [np.empty(0, np.uint64)]
        for heads in self._head_arrays:
            low = np.searchsorted(heads, np.uint64(first))
            high = len(heads) if stop >= ALL_HEADS else np.searchsorted(heads, np.uint64(stop))
            found.append(heads[low:high])
        return np.concatenate(found)


def sampled_rows(
    orders: Sequence[Prefixes], ranges: Sequence[tuple[int, int]], most: int, step: int
) -> list[np.ndarray]:
    """At most `most` of the rows in some ranges [first, stop), one of each order, spread evenly over all: [n] int64 for each order.

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


def _reader_of(positions: np.ndarray) -> Callable[[int], int]:
    """Reads a single one of stored positions."""
    if positions.ndim == 1:
        return view(positions).__getitem__
    width, stored = positions.shape[1], view(positions.reshape(-1))
    return lambda row: int.from_bytes(stored[row * width : (row + 1) * width], "little")


def _as_numbers(stored: np.ndarray) -> np.ndarray:
    """Stored positions as [n] int64."""
    if stored.ndim == 1:
        return stored.astype(np.int64)
    wide = np.zeros((len(stored), 8), np.uint8)
    wide[:, : stored.shape[1]] = stored
    return wide.view("<i8")[:, 0]


# --- write ------------------------------------------------------------------------------------------------------------


class _Writer:
    """Appends prefixes to the files of a part.

    - `positions.npy`: of their last tokens, uint32 [n], or [n, 5] uint8, the lowest byte first, if there are more than 2^32 positions.
    - `heads.npy` [n / 256, rounded up] uint64: the head of every 256th prefix.
    - `tokens.npy` [n, 65], if they carry tokens: the token after each prefix, and its last ones backwards, all plus 1; 0 = none.
    """

    def __init__(self, work: Path, texts: Texts, positions: int, *, carried: bool = False) -> None:
        """`positions`: the number of positions up to the last shard, which decides how many bytes one has."""
        self._texts, self._width = texts, position_bytes(positions)
        narrow = self._width == 4
        self._positions = NpyWriter(
            work / "positions.npy", np.uint32 if narrow else np.uint8, () if narrow else (self._width,)
        )
        self._heads = NpyWriter(work / "heads.npy", np.uint64)
        self._tokens = NpyWriter(work / _TOKENS, texts.dtype, (1 + LONGEST,)) if carried else None

    def append(self, positions: np.ndarray, tokens: np.ndarray | None = None) -> None:
        """Add prefixes by the positions [n] int64 of their last tokens, with their tokens [n, 65] if they are known."""
        stored = slice(-self._positions.rows % ROWS_OF_HEAD, None, ROWS_OF_HEAD)
        self._heads.append(self._texts.heads(positions[stored]) if tokens is None else _heads_of(tokens[stored]))
        if self._tokens is not None and tokens is not None:
            self._tokens.append(tokens)
        if self._width > 4:
            positions = positions.astype("<i8").view(np.uint8).reshape(-1, 8)[:, : self._width]
        self._positions.append(positions)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for file in (self._positions, self._heads, self._tokens):
            if file is not None:
                file.__exit__(error)


def write_run(
    work: Path, texts: Texts, shard: int, advance: Advance = lambda units: None, *, carried: bool = False
) -> None:
    """Write the prefixes of one shard in the order of their heads, see `_Writer`; equal heads in the order of positions.

    Memory: `RUN_BYTES` for each token of the shard.

    Args:
        work: the folder to write to.
        texts: the split.
        shard: the shard.
        advance: called with its chunks.
        carried: whether to store the tokens of each prefix with it.
    """
    positions = texts.shard(shard).positions() + texts.starts[shard]
    heads = np.concatenate(
        [texts.heads(positions[block]) for block in blocks(len(positions), _BLOCK)] or [np.empty(0, np.uint64)]
    )
    positions = positions[np.argsort(heads, kind="stable")]
    with _Writer(work, texts, int(texts.starts[-1]), carried=carried) as file:
        for block in (positions[rows] for rows in blocks(len(positions), _BLOCK)):
            file.append(block, _tokens_of_prefixes(texts, block) if carried else None)
    advance(texts.split.chunk_rows[shard])


def cuts(texts: Texts, shards: range, count: int) -> list[int]:
    """Heads at which the prefixes of some shards are cut into `count` parts of about the same size: [count - 1], equal ones are possible.

    They depend on the text alone: the heads of up to 4,096 prefixes of each shard, spread evenly, are sorted.
    """
    if count == 1:
        return []
    heads = []
    for shard in shards:
        text = texts.shard(shard)
        step = max(1, int(text.lengths.sum(dtype=np.int64)) // _SAMPLES)
        heads.append(texts.heads(text.positions(step) + texts.starts[shard]))
    ordered = np.sort(np.concatenate(heads))
    return [int(ordered[len(ordered) * number // count]) for number in range(1, count)] if len(ordered) else []


def write_part(
    work: Path,
    texts: Texts,
    shards: range,
    runs: Sequence[Sequence[Path]],
    first: int,
    stop: int,
    advance: Advance,
    *,
    compared: int = LONGEST,
    carried: bool = False,
) -> int:
    """Write the prefixes of some shards whose heads are in [first, stop), see `_Writer`; equal ones in the order of `runs`; of an order also
    `rows.npy` (`rows.RowWriter`).

    The text is not read if all runs carry tokens.

    Memory: about 60 bytes for each of 2^20 prefixes, or as many as have the same head; 300 if runs carry tokens of 16 bits.

    Args:
        work: the folder to write to.
        texts: of `train`.
        shards: consecutive ones.
        runs: the folders of the parts of each run that have these heads, in the order of their shards, which are all of `shards`.
        first: smallest head.
        stop: above the largest head.
        advance: called with the number of prefixes that were written.
        compared: tokens by which prefixes are sorted; those of a head for a run.
        carried: whether to store the tokens of each prefix with it; all runs carry them.

    Returns:
        the number of prefixes.
    """
    opened, written, is_order = [Prefixes(texts, folders) for folders in runs], 0, compared == LONGEST and not carried
    with (
        _Writer(work, texts, int(texts.starts[shards.stop]), carried=carried) as file,
        RowWriter(work, texts.dtype) if is_order else nullcontext() as rows,
    ):
        for low, high in pairwise([first, *_borders(opened, first, stop), stop]):
            positions, order, tokens = _sorted_range(texts, opened, low, high, compared)
            for block in (order[part] for part in blocks(len(order), _BLOCK)):
                file.append(positions[block], None if tokens is None else tokens[block])
                if rows:
                    rows.append(_tokens_of_prefixes(texts, positions[block]) if tokens is None else tokens[block])
            written += len(positions)
            advance(len(positions))
    return written


def _sorted_range(
    texts: Texts, runs: Sequence[Prefixes], first: int, stop: int, compared: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The prefixes of some runs whose heads are in [first, stop): positions [n], their order [n], and tokens [n, 65] if all runs carry them."""
    rows = [(run, run.between(first, stop)) for run in runs]
    positions = np.concatenate([run.positions(own.start, own.stop) for run, own in rows])
    if not all(run.carried for run in runs):
        return positions, order_of_prefixes(texts, positions, compared), None
    tokens = np.concatenate([run.tokens(own.start, own.stop) for run, own in rows])
    return positions, order_of_windows(tokens[:, 1:], compared), tokens


def copy_part(work: Path, texts: Texts, part: Path) -> int:
    """Copy a part of a run that is a whole order, without the tokens that it carries; returns the number of prefixes.

    What a search reads is made from these tokens.
    """
    for file in part.iterdir():
        if file.name not in (MANIFEST, _TOKENS):
            shutil.copyfile(file, work / file.name)
    prefixes = Prefixes(texts, [part])
    _write_rows(work, prefixes)
    return len(prefixes)


def write_chosen(work: Path, prefixes: Prefixes, documents: np.ndarray) -> Prefixes:
    """Write the prefixes of some documents, [documents] bool, in their order, as `write_part` does, and open them."""
    work.mkdir(parents=True)
    with _Writer(work, prefixes.texts, int(prefixes.texts.starts[-1])) as file:
        for rows in blocks(len(prefixes), _BLOCK):
            positions = prefixes.positions(rows.start, min(rows.stop, len(prefixes)))
            file.append(positions[documents[prefixes.texts.documents(positions)]])
    part = Prefixes(prefixes.texts, [work])
    _write_rows(work, part)
    return part


def _write_rows(work: Path, part: Prefixes) -> None:
    """Write what a search reads of a part, from its tokens."""
    with RowWriter(work, part.texts.dtype) as file:
        for rows in blocks(len(part), _BLOCK):
            file.append(part.tokens(rows.start, min(rows.stop, len(part))))


def _borders(runs: Sequence[Prefixes], first: int, stop: int) -> list[int]:
    """Heads inside of (first, stop) that divide the rows of some runs into ranges of about 2^20."""
    heads = np.sort(np.concatenate([run.stored_heads(first, stop) for run in runs]))
    step = max(1, RANGE_TOKENS // ROWS_OF_HEAD)
    return [head for head in np.unique(heads[step::step]).tolist() if head > first]


def order_of_prefixes(texts: Texts, positions: np.ndarray, compared: int = LONGEST) -> np.ndarray:
    """The order [n] of prefixes by their last tokens; equal ones stay in their order. Tokens are read as far back as they decide."""

    available = texts.available(positions)

    def keys(rows: np.ndarray, column: int) -> np.ndarray:
        return texts.words(positions[rows], available[rows], column * texts.head_tokens)

    return order_of(len(positions), keys, compared // texts.head_tokens)


def order_of_windows(windows: np.ndarray, compared: int = LONGEST) -> np.ndarray:
    """The order [n] of prefixes by their last tokens, which are [n, 64], see `ShardText.windows`; equal ones stay in their order."""
    width = 8 // windows.itemsize

    def keys(rows: np.ndarray, column: int) -> np.ndarray:
        return numbers(windows[rows, column * width : (column + 1) * width])[:, 0]

    return order_of(len(windows), keys, compared // width)


def _tokens_of_prefixes(texts: Texts, positions: np.ndarray) -> np.ndarray:
    """The tokens of prefixes that runs carry, see `_Writer`: [n] int64 → [n, 65]."""
    following = (texts.following(positions) + 1).astype(texts.dtype)
    return np.concatenate([following[:, None], texts.windows(positions, LONGEST)], axis=1)


def _heads_of(tokens: np.ndarray) -> np.ndarray:
    """The heads [n] uint64 of prefixes, from the tokens that runs carry, [n, 65]."""
    return numbers(tokens[:, 1 : 1 + 8 // tokens.itemsize])[:, 0]


def order_of(count: int, keys: Callable[[np.ndarray, int], np.ndarray], columns: int) -> np.ndarray:
    """The order [n] of rows that are compared column by column; equal rows stay in their order.

    Args:
        count: number of rows.
        keys: gives the numbers [r] uint64 of some rows [r] in a column. Columns after the first are read for ties only.
        columns: number of columns.
    """
    values = keys(np.arange(count), 0)
    order = np.argsort(values, kind="stable")
    values = values[order]
    tied = values[1:] == values[:-1]  # with the row before
    for column in range(1, columns):
        places = np.flatnonzero(np.append(tied, False) | np.append(False, tied))
        if not len(places):
            break
        group = np.cumsum(~np.append(False, tied))[places]
        values = keys(order[places], column)
        inner = np.lexsort((values, group))
        order[places], values = order[places][inner], values[inner]
        tied[:] = False
        tied[places[:-1][(group[1:] == group[:-1]) & (values[1:] == values[:-1])]] = True
    return order


def blocks(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` rows."""
    return (slice(start, start + size) for start in range(0, count, size))
