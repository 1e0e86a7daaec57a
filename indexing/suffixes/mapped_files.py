"""Opens the sorted prefixes of a datastore, and its texts when they are needed, for the compiled loops of
`compiled_search.py`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from indexing.machine import usable_memory
from indexing.store.artifact import damaged
from indexing.store.errors import InputError
from indexing.store.ranged_reads import check_array
from indexing.store.sharded_array import read_scattered
from indexing.suffixes import order
from indexing.suffixes.compiled_search import (
    PART_COLUMNS,
    SHARD_COLUMNS,
    DamagedRows,
    DamagedText,
    Files,
    NotOpen,
)
from indexing.suffixes.order import Prefixes
from indexing.suffixes.rows import FAN_OUT, open_rows
from indexing.suffixes.texts import Texts

ADJACENT = 4096
"""Rows among which the one that shares most with a text is found without reading other texts. Each halving of more
rows reads the disk twice; these are 16 to 32 KiB in a row."""
_READ_AHEAD = 1 / 16
"""Share of the memory that every 32nd row of all parts may take. If it is more, every 1,024th row is read ahead."""
LOOKED_AT = 8
"""If some of many occurrences are wanted, whether they are deleted is read at this many times as many of them, spread
evenly."""


class MappedFiles:
    """Some orders, whose files are memory-mapped.

    Attributes:
        texts: of their documents.
        orders: the orders.
        files: their addresses.
    """

    def __init__(self, texts: Texts, orders: Sequence[Prefixes], scattered: bool = False) -> None:
        """Open some orders.

        Args:
            texts: of their documents.
            orders: the orders.
            scattered: searches follow no order, so no pages around what is needed are read. Some disks read megabytes
                around each.
        """
        self._scattered = scattered
        self.texts, self.orders, self._mapped = texts, orders, list[np.ndarray]()
        self._token_dtype = np.dtype(np.uint16 if texts.split.tokens.dtype.itemsize == 2 else np.uint32)
        self._damaged = np.zeros(1, np.int64)
        self._shards = np.zeros((len(texts.starts), SHARD_COLUMNS), np.int64)
        self._shards[:, 0] = texts.starts
        row_bytes = sum(map(len, orders)) * (texts.dtype.itemsize + 2)
        level = 1 if row_bytes / FAN_OUT <= _READ_AHEAD * usable_memory() else 2
        rows = [[self._part(prefixes, number, level) for number in range(len(prefixes.folders))] for prefixes in orders]
        self._folders = [folder for prefixes in orders for folder in prefixes.folders]
        parts = np.array([part for own in rows for part in own], np.int64).reshape(-1, PART_COLUMNS)
        first_parts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        first_heads = np.array([heads[0] for prefixes in orders for heads in prefixes.stored_heads], np.uint64)
        self._mapped += [parts, first_heads, first_parts]
        self.files = Files(
            shards=self._shards.ctypes.data,
            parts=parts.ctypes.data,
            first_heads=first_heads.ctypes.data,
            orders=first_parts.ctypes.data,
            num_shards=len(texts.starts) - 1,
            num_parts=len(parts),
            num_orders=len(orders),
            chunk_length=texts.split.chunk_length,
            vocabulary=texts.split.vocab_size,
            token_bytes=self._token_dtype.itemsize,
            columns=1 + texts.dtype.itemsize // 2,
            head_tokens=texts.head_tokens,
            rows_of_head=order.ROWS_OF_HEAD,
            adjacent=ADJACENT,
            looked_at=LOOKED_AT,
            damaged=self._damaged.ctypes.data,
        )

    def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a compiled function, whose last argument are the files, and open the texts that it needs.

        Raises:
            InputError: a text is missing or damaged.
        """
        while True:
            try:
                return function(*arguments, self.files)
            except NotOpen as needed:
                self._open_text(needed.args[0])
            except DamagedRows as error:
                path = self._folders[self._damaged[0]] / "rows.npy"
                raise damaged(path, f"{path} has content that no build writes") from error
            except DamagedText as error:
                folder = self.texts.split.tokens.paths[self._damaged[0]].parent
                raise damaged(folder, f"{folder} has content that no build writes") from error

    def _part(self, prefixes: Prefixes, number: int, level: int) -> list[int]:
        """The row of `Files.parts` of a part of an order, whose rows are read ahead from a level on."""
        folder, positions = prefixes.folders[number], prefixes.stored_positions[number]
        heads = prefixes.stored_heads[number]
        rows = open_rows(folder, len(positions), self.texts.dtype, level)
        if self._scattered:
            positions = order.open_array(folder / "positions.npy")  # a map of its own: others read it in sequence
            read_scattered(rows)
            read_scattered(positions)
        self._mapped += [rows, positions, heads]
        return [
            prefixes.rows[number],
            len(positions),
            rows.ctypes.data,
            len(rows),
            positions.ctypes.data,
            heads.ctypes.data,
            -(-len(positions) // order.ROWS_OF_HEAD),
            positions[:1].nbytes,
        ]

    def _open_text(self, shard: int) -> None:
        split, m = self.texts.split, self.texts.split.chunk_length
        if shard == len(split.chunk_rows):
            raise InputError(
                f"The sorted prefixes of {split.folder} are damaged: a position is behind all texts. Run `retro verify`."
            )
        files = split.tokens, split.lengths, split.document_offsets
        dtypes: tuple[np.dtype, ...] = (self._token_dtype, np.dtype(np.uint16), np.dtype(np.int64))
        shapes: tuple[tuple[int, ...], ...] = ((m,), (), ())
        arrays = [file.shard(shard) for file in files]
        if self._scattered:
            arrays[0] = split.tokens.scattered(shard)
        for file, array, dtype, shape in zip(files, arrays, dtypes, shapes, strict=True):
            check_array(file.paths[shard], array, dtype, shape, 0)
        self._mapped += arrays
        # The address of the tokens comes last: other threads take it for the sign that all are there.
        self._shards[shard, 2:] = arrays[1].ctypes.data, arrays[2].ctypes.data, len(arrays[2]) - 1
        self._shards[shard, 1] = arrays[0].ctypes.data
