"""Sort the prefixes of the training documents, over all shards (`order.py`).

    each shard ─ sort by the last 8 bytes of tokens ─► a run
    more than 512 runs ─ merge groups of them, part by part ─► longer runs
    the runs ─ cut at the same heads ─► ranges of about 2^20 prefixes ─ sort by the last 64 tokens ─► the order, in parts
    a part ─► what a search reads of it (`rows.py`)

Prefixes with equal last 64 tokens stay in the order of their positions. So an order depends on the text of its shards
alone. An order is a run too: what was appended is merged with it. A part is made from the parts of runs that have its
heads, so the files that are opened grow with the prefixes times the levels of merges.

If the text is larger than half of the memory, runs carry the tokens of each prefix. Then runs are written and read in
sequence, and the text is read when the runs are made, and not by merges. The last of them is kept until `votes` has
read it.
"""

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np

from indexing.progress import Advance
from indexing.store.files import MANIFEST, NpyWriter
from indexing.suffixes.order import (
    LONGEST,
    ROWS_OF_HEAD,
    TOKENS_FILE,
    Prefixes,
    blocks,
    heads_of,
    position_bytes,
)
from indexing.suffixes.rows import RowWriter
from indexing.suffixes.texts import Texts

RANGE_TOKENS = 1 << 20
"""Prefixes that are sorted at a time. So many that only matches of one to three tokens lie on both sides of a cut."""
RUN_BYTES = 40
"""Memory for each token of a shard whose prefixes are sorted."""
_SAMPLES = 1 << 12  # heads of a shard that decide where an order is cut
_BLOCK = 1 << 18


class _Writer:
    """Appends prefixes to the files of a part.

    - `positions.npy`: of their last tokens, uint32 [n], or [n, 5] uint8, the lowest byte first, if there are more than
      2^32 positions.
    - `heads.npy` [n / 256, rounded up] uint64: the head of every 256th prefix.
    - `tokens.npy` [n, 65], if they carry tokens: the token after each prefix, and its last ones backwards, all plus 1;
      0 = none.
    """

    def __init__(self, work: Path, texts: Texts, positions: int, *, carried: bool = False) -> None:
        """`positions`: the number of positions up to the last shard, which decides how many bytes one has."""
        self._texts, self._width = texts, position_bytes(positions)
        narrow = self._width == 4
        self._positions = NpyWriter(
            work / "positions.npy", np.uint32 if narrow else np.uint8, () if narrow else (self._width,)
        )
        self._heads = NpyWriter(work / "heads.npy", np.uint64)
        self._tokens = NpyWriter(work / TOKENS_FILE, texts.dtype, (1 + LONGEST,)) if carried else None

    def append(self, positions: np.ndarray, tokens: np.ndarray | None = None) -> None:
        """Add prefixes by the positions [n] int64 of their last tokens, with their tokens [n, 65] if they are known."""
        # Of these n rows, those whose number in the part is a multiple of 256.
        stored = slice(-self._positions.rows % ROWS_OF_HEAD, None, ROWS_OF_HEAD)
        self._heads.append(self._texts.heads(positions[stored]) if tokens is None else heads_of(tokens[stored]))
        if self._tokens is not None and tokens is not None:
            self._tokens.append(tokens)
        if self._width > 4:
            # [n] int64 → [n, 5] uint8: the lowest byte is first, so the bytes that are left out are zeros.
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
    """Write the prefixes of one shard in the order of their heads, see `_Writer`; equal heads in the order of
    positions.

    Memory: `RUN_BYTES` for each token of the shard.

    Args:
        work: the folder to write to.
        texts: the split.
        shard: the shard.
        advance: called with its chunks.
        carried: whether to store the tokens of each prefix with it.
    """
    from indexing.suffixes.compiled_order import sort_heads  # numba, which takes half a second

    positions = texts.shard(shard).positions() + texts.starts[shard]
    # Positions [n] ascend, so a stable sort by heads [n] leaves prefixes with equal heads in the order of positions.
    heads = np.concatenate(
        [texts.heads(positions[block]) for block in blocks(len(positions), _BLOCK)] or [np.empty(0, np.uint64)]
    )
    order = np.empty(len(heads), np.int64)
    sort_heads(heads, order)
    positions = positions[order]
    with _Writer(work, texts, int(texts.starts[-1]), carried=carried) as file:
        for block in (positions[rows] for rows in blocks(len(positions), _BLOCK)):
            file.append(block, texts.rows(block, LONGEST) if carried else None)
    advance(texts.split.chunk_rows[shard])


def cuts(texts: Texts, shards: range, count: int) -> list[int]:
    """Heads at which the prefixes of some shards are cut into `count` parts of about the same size: [count - 1], equal
    ones are possible.

    They depend on the text alone: the heads of up to 4,096 prefixes of each shard, spread evenly, are sorted.
    """
    if count == 1:
        return []
    heads = []
    for shard in shards:
        text = texts.shard(shard)
        step = max(1, int(text.lengths.sum(dtype=np.int64)) // _SAMPLES)
        heads.append(texts.heads(text.positions(step) + texts.starts[shard]))
    # All prefixes with the same head are on one side of a cut, whatever run they are in: parts can be merged alone.
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
    """Write the prefixes of some shards whose heads are in [first, stop), see `_Writer`; equal ones in the order of
    `runs`; of an order also `rows.npy` (`rows.RowWriter`).

    The text is not read if all runs carry tokens.

    Memory: about 320 bytes for each of 2^20 prefixes, or as many as have the same head; 580 if tokens have more than 16
    bits.

    Args:
        work: the folder to write to.
        texts: of `train`.
        shards: consecutive ones.
        runs: the folders of the parts of each run that have these heads, in the order of their shards, which are all of
            `shards`.
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
            positions, tokens = _sorted_range(texts, opened, low, high, compared)
            for block in blocks(len(positions), _BLOCK):
                file.append(positions[block], tokens[block])
                if rows:
                    rows.append(tokens[block])
            written += len(positions)
            advance(len(positions))
    return written


def _sorted_range(
    texts: Texts, runs: Sequence[Prefixes], first: int, stop: int, compared: int
) -> tuple[np.ndarray, np.ndarray]:
    """The prefixes of some runs whose heads are in [first, stop), in order: positions [n], and their tokens [n, 1 +
    compared], or [n, 65] if all runs carry them."""
    rows = [(run, run.between(first, stop)) for run in runs]
    positions = np.concatenate([run.positions(own.start, own.stop) for run, own in rows])
    if all(run.carried for run in runs):
        tokens = np.concatenate([run.tokens(own.start, own.stop) for run, own in rows])
    else:
        tokens = texts.rows(positions, compared)
    tokens, order = sorted_rows(tokens, compared)
    return positions[order], tokens


def copy_part(work: Path, texts: Texts, part: Path) -> int:
    """Copy a part of a run that is a whole order, without the tokens that it carries; returns the number of prefixes.

    What a search reads is made from these tokens.
    """
    for file in part.iterdir():
        if file.name not in (MANIFEST, TOKENS_FILE):
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
    # A stored head stands for 256 rows of its run, so every 4,096th of all runs' heads is a border.
    heads = np.sort(np.concatenate([run.heads_between(first, stop) for run in runs]))
    step = max(1, RANGE_TOKENS // ROWS_OF_HEAD)
    return [head for head in np.unique(heads[step::step]).tolist() if head > first]


def sorted_rows(tokens: np.ndarray, compared: int = LONGEST) -> tuple[np.ndarray, np.ndarray]:
    """Sort prefixes by their last tokens; equal ones stay in their order. Runs among them are merged.

    Args:
        tokens: of prefixes, [n, 1 + compared or more], see `Texts.rows`.
        compared: tokens that decide.

    Returns:
        the tokens in order, and the numbers [n] of the prefixes in order.
    """
    from indexing.suffixes.compiled_order import sort_groups

    order = heads_of(tokens).argsort(kind="stable")  # of NumPy, which finds sorted runs and merges them
    rows = tokens[order]
    sort_groups(rows, compared, order)
    return rows, order
