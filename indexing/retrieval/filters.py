"""Filter searches by the metadata of documents.

    {"source": ["wiki", "news"], "lang": "en"} → matching documents of every shard → ranges of chunk ids

A filter is a set of chunk id ranges, as deletions are. One pass over the filter's columns computes them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from indexing.store.datastore import Split
from indexing.store.deletions import inside
from indexing.store.errors import InputError

Filters = Mapping[str, Any]
"""Column of `documents.parquet` → the required value, or a list of accepted values."""

_CACHED = 8  # filters whose chunks are cached


@dataclass(frozen=True)
class DocumentFilters:
    """Filters for the documents of several datastores, given by their training splits."""

    splits: tuple[Split, ...]

    @cached_property
    def columns(self) -> list[str]:
        """Metadata columns that every datastore has, usable in filters."""
        first, *others = (split.documents.columns for split in self.splits)
        return [name for name in first if all(name in columns for columns in others)]

    def chunks(self, filters: Filters) -> list[np.ndarray]:
        """The matching chunks of each datastore, as by `matching_chunks`. Those of the last filters are cached until a
        deletion.

        Raises:
            InputError: see `check_filters` and `matching_chunks`.
        """
        key = json.dumps(check_filters(filters, self.columns), sort_keys=True)
        return [self._matching(index, key, len(split.deleted)) for index, split in enumerate(self.splits)]

    @cached_property
    def _matching(self) -> Callable[[int, str, int], np.ndarray]:
        return lru_cache(maxsize=_CACHED * len(self.splits))(
            lambda index, key, _num_deleted: matching_chunks(self.splits[index], json.loads(key))
        )


def check_filters(filters: Filters, columns: Sequence[str]) -> dict[str, list[Any]]:
    """The accepted values of each column.

    Raises:
        InputError: a column is not in `columns`, or a filter is not a value or a list of values.
    """
    checked = {}
    for column, value in filters.items():
        if column not in columns:
            raise InputError(f"filters: there is no column {column!r}; accepted are {', '.join(columns)}.")
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not values or not all(isinstance(value, (str, int, float, bool)) for value in values):
            raise InputError(
                f"filters.{column} = {value!r}: must be a text, a number, true or false, or a list of these."
            )
        checked[column] = values
    return checked


def matching_chunks(split: Split, filters: Mapping[str, Sequence[object]]) -> np.ndarray:
    """The chunks of all documents that match every filter, without deleted ones: [ranges, 2] int64, sorted and
    disjoint.

    Raises:
        InputError: a value cannot be converted to the type of its column.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    matching = []
    for first, table in split.documents.scan(list(filters)):
        matches = None
        for column, values in filters.items():
            accepted = pc.is_in(table[column], value_set=_values(column, values, table.schema.field(column).type))
            matches = accepted if matches is None else pc.and_(matches, accepted)
        assert isinstance(matches, pa.ChunkedArray)
        matching.append(np.flatnonzero(matches.to_numpy()) + first)
    ranges = split.chunk_ranges(np.concatenate(matching) if matching else np.empty(0, dtype=np.int64))
    ranges = ranges[~inside(ranges[:, 0], split.deleted)]
    if not len(ranges):
        return ranges
    breaks = np.flatnonzero(ranges[1:, 0] != ranges[:-1, 1])
    return np.stack([ranges[np.r_[0, breaks + 1], 0], ranges[np.r_[breaks, len(ranges) - 1], 1]], axis=1)


def stored_examples(split: Split, column: str, count: int = 3) -> list[Any]:
    """The first different values of a column, for a message about a filter that nothing matches."""
    values: dict[Any, None] = {}
    for _, table in split.documents.scan([column]):
        for value in table[column].drop_null().unique().slice(0, count).to_pylist():
            values.setdefault(value)
        if len(values) >= count:
            break
    return list(values)[:count]


def _values(column: str, values: Sequence[object], kind: Any) -> Any:
    """The values as an array of the column's type. Metadata that is not text is stored as JSON."""
    import pyarrow as pa

    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.array([value if isinstance(value, str) else json.dumps(value) for value in values], kind)
    try:
        return pa.array([pa.scalar(value).cast(kind).as_py() for value in values], kind)
    except pa.ArrowException as error:
        raise InputError(f"filters.{column} = {list(values)!r}: the column holds values of type {kind}.") from error
