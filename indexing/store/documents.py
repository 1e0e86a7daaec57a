"""Rows of `documents.parquet`: the metadata of each document, by its number.

    document number → shard and row group → the group, read once and cached → its row as a dictionary

Row groups hold ten thousand documents and more, so neither a lookup nor a scan of a column needs a shard in memory.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from indexing.store.artifact import damaged, reading
from indexing.store.first_use import first_use
from indexing.store.remote import present

_GROUPS_KEPT = 64  # cached row groups, about a megabyte each
_ROWS_KEPT = 65_536


class DocumentTable:
    """The `documents.parquet` of several shards read as one table. Several threads may read at once.

    Args:
        paths: the files, in order.
        rows: documents in each.
    """

    def __init__(self, paths: Sequence[Path], rows: Sequence[int]) -> None:
        self.paths, self.rows = tuple(paths), tuple(rows)
        self.starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]).astype(np.int64)
        self._file = lru_cache(maxsize=None)(self._open_file)
        self._group = lru_cache(maxsize=_GROUPS_KEPT)(self._read_group)
        self._kept: dict[int, dict[str, Any]] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return DocumentTable, (self.paths, self.rows)  # without caches

    @property
    def schema(self) -> Any:
        """Names and types of the columns, a `pyarrow.Schema`; empty without files."""
        import pyarrow as pa

        return self._file(0)[0] if self.paths else pa.schema([])

    @property
    def columns(self) -> list[str]:
        """Names of the columns with one value per document."""
        import pyarrow as pa

        return [field.name for field in self.schema if not pa.types.is_nested(field.type)]

    def take(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of these documents, each a new dictionary."""
        kept = self._kept
        rows = {document: kept[document] for document in set(map(int, numbers)) if document in kept}
        missing = np.array(sorted(set(map(int, numbers)) - rows.keys()), dtype=np.int64)
        if len(missing):
            rows |= (new := self._read(missing))
            if len(kept) + len(new) > _ROWS_KEPT:
                kept = self._kept = {}  # a thread that still reads the old cache is not affected
            kept |= new
        return [dict(rows[int(document)]) for document in numbers]

    def scan(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield for each row group the number of its first document, and some columns as a pyarrow table."""
        for shard, start in enumerate(self.starts[:-1].tolist()):
            first_rows = self._file(shard)[1]
            for group, (row, stop) in enumerate(pairwise(first_rows)):
                if row < stop:  # Arrow's functions may crash on columns without chunks
                    yield start + row, self._read_group(shard, group, list(columns))

    def find(self, document_id: str) -> Iterator[int]:
        """Yield the numbers of the documents with this id, in order. Reads the id column only as far as needed."""
        import pyarrow as pa
        import pyarrow.compute as pc

        for first, table in self.scan(["id"]):
            matches = pc.is_in(table["id"], value_set=pa.array([document_id], table["id"].type))
            yield from (np.flatnonzero(matches.to_numpy()) + first).tolist()

    def _open_file(self, shard: int) -> tuple[Any, list[int]]:
        """Schema, and first row of each row group followed by the number of all rows."""
        parquet = self._parquet(shard)
        sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
        if sum(sizes) < self.rows[shard]:
            problem = f"has {sum(sizes)} rows, the datastore's manifest says {self.rows[shard]}"
            raise damaged(self.paths[shard], f"{self.paths[shard]} {problem}")
        return parquet.schema_arrow, np.cumsum([0, *sizes]).tolist()

    def _parquet(self, shard: int) -> Any:
        # Opened for each read, because two threads must not read one ParquetFile at once.
        import pyarrow.parquet as pq

        path = first_use(present(self.paths[shard]))
        with reading(path):
            return pq.ParquetFile(path)

    def _read_group(self, shard: int, group: int, columns: Sequence[str] | None = None) -> Any:
        with reading(self.paths[shard]):
            return self._parquet(shard).read_row_group(group, columns=columns)

    def _read(self, numbers: np.ndarray) -> dict[int, dict[str, Any]]:
        """Rows by number; the numbers are sorted and read row group by row group."""
        out: dict[int, dict[str, Any]] = {}
        shards = np.searchsorted(self.starts, numbers, side="right") - 1
        for shard in np.unique(shards).tolist():
            local = numbers[shards == shard] - self.starts[shard]
            first_rows = self._file(shard)[1]
            groups = np.searchsorted(first_rows, local, side="right") - 1
            for group in np.unique(groups).tolist():
                rows = local[groups == group]
                with reading(self.paths[shard]):  # Arrow does not check strings until they are taken
                    taken = self._group(shard, group).take(rows - first_rows[group]).to_pylist()
                out |= dict(zip((rows + self.starts[shard]).tolist(), taken, strict=True))
        return out
