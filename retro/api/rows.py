"""Documents, chunks and tokens of a split as rows: `len`, indexing, slices, iteration, and tables of Arrow.

Deleted documents keep their numbers. Slices, iterations and tables leave them out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Generic, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from indexing.store.datastore import Split
from indexing.store.deletions import inside
from indexing.store.errors import InputError, NotFound
from indexing.store.remote import datastore_name
from retro.api.checks import Ids, checked_numbers

if TYPE_CHECKING:
    import pyarrow as pa

Row = TypeVar("Row")
Decode: TypeAlias = Callable[[Sequence[NDArray[np.integer]]], list[str]]
"""Token ids [t] of some texts → the texts."""
BATCH = 1024
"""Rows that are read at a time."""


@dataclass(frozen=True)
class Document:
    """A document.

    Attributes:
        number: its number in the split.
        id: its id in the corpus.
        chunks: ids of its chunks.
        metadata: its row of `documents.parquet`: id, file, title …, and numbers of bytes, tokens and chunks.
        tokens: [t] int64, begin and end of the document included.
        text: the text of the tokens.
    """

    number: int
    id: str
    chunks: range
    metadata: Mapping[str, str | int | None]
    tokens: NDArray[np.int64]
    text: str


@dataclass(frozen=True)
class Chunk:
    """A chunk.

    Attributes:
        id: its id in the split.
        document: number of its document.
        tokens: [t] int64, t ≤ m: without padding.
        text: the text of the tokens.
    """

    id: int
    document: int
    tokens: NDArray[np.int64]
    text: str


class Rows(ABC, Generic[Row]):
    """The documents or the chunks of a split, by number.

    `rows[3]` is a row and `rows[-1]` the last one, `rows[3:9]` is a list.
    """

    kind: ClassVar[str]
    at_once: ClassVar[int]
    """Rows that an iteration reads at a time."""

    def __init__(self, split: Split, decode: Decode) -> None:
        self._split, self._decode = split, decode

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows, deleted ones included."""

    @abstractmethod
    def _read(self, numbers: NDArray[np.int64]) -> list[Row]:
        """The rows of numbers that exist, at least one."""

    @abstractmethod
    def _first_chunks(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """A chunk of each row, [n]: its document decides whether the row is deleted."""

    @property
    @abstractmethod
    def schema(self) -> "pa.Schema":
        """Names and types of the columns in Arrow."""

    @abstractmethod
    def _table(self, rows: list[Row]) -> list[dict[str, object]]:
        """Rows as dictionaries, for `schema`."""

    def __repr__(self) -> str:
        return f"<{len(self):,} {self.kind}s of {datastore_name(self._split.folder)}, split '{self._split.name}'>"

    @overload
    def __getitem__(self, number: int) -> Row: ...

    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...

    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        """A row by its number, or those of a slice that are not deleted.

        Raises:
            OutOfRange: there is no such row. It is an InputError and an IndexError.
            NotFound: its document has been deleted.
        """
        if isinstance(number, slice):
            numbers = self._existing(np.arange(*number.indices(len(self))))
            return self._read(numbers) if len(numbers) else []
        return self.take([number + len(self) if -len(self) <= number < 0 else number])[0]

    def take(self, numbers: Ids) -> list[Row]:
        """The rows of these numbers, in their order.

        Raises:
            OutOfRange: there is no such row.
            NotFound: a document has been deleted.
        """
        checked = checked_numbers(numbers, len(self), self.kind, self._split)
        existing = self._existing(checked)
        if len(existing) < len(checked):
            deleted = np.setdiff1d(checked, existing)[0]
            raise NotFound(f"{self.kind} {deleted} of {datastore_name(self._split.folder)} has been deleted.")
        return self._read(checked) if len(checked) else []

    def __iter__(self) -> Iterator[Row]:
        """Every row that is not deleted, in order."""
        for start in range(0, len(self), self.at_once):
            yield from self[start : start + self.at_once]

    def batches(self, size: int = BATCH) -> Iterator["pa.RecordBatch"]:
        """Tables of at most `size` rows, in order, without deleted ones.

        Raises:
            InputError: the size is below 1.
        """
        import pyarrow as pa

        if size < 1:
            raise InputError(f"size = {size}: must be at least 1.")
        for start in range(0, len(self), size):
            if rows := self[start : start + size]:
                yield pa.RecordBatch.from_pylist(self._table(rows), schema=self.schema)

    def to_arrow(self) -> "pa.Table":
        """All rows as one table in memory; `batches` needs less memory."""
        import pyarrow as pa

        return pa.Table.from_batches(self.batches(), schema=self.schema)

    def _existing(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return numbers[~inside(self._first_chunks(numbers), self._split.deleted)]


class Chunks(Rows[Chunk]):
    """The chunks of a split. In Arrow: `chunk`, `document`, `tokens` (a list without padding) and `text`."""

    kind, at_once = "chunk", BATCH

    def __len__(self) -> int:
        return self._split.num_chunks

    @property
    def schema(self) -> "pa.Schema":
        """`chunk` and `document` int64, `tokens` list of uint16 or uint32, `text` string."""
        import pyarrow as pa

        tokens = pa.list_(pa.from_numpy_dtype(self._split.tokens.dtype))
        return pa.schema([("chunk", pa.int64()), ("document", pa.int64()), ("tokens", tokens), ("text", pa.string())])

    def _first_chunks(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return numbers

    def _read(self, numbers: NDArray[np.int64]) -> list[Chunk]:
        documents, _, _ = self._split.documents_of(numbers)
        lengths = self._split.lengths.gather(numbers).tolist()
        padded = self._split.tokens.gather(numbers).astype(np.int64)
        tokens = [row[:length] for row, length in zip(padded, lengths, strict=True)]
        return list(map(Chunk, numbers.tolist(), documents.tolist(), tokens, self._decode(tokens)))

    def _table(self, rows: list[Chunk]) -> list[dict[str, object]]:
        return [{"chunk": row.id, "document": row.document, "tokens": row.tokens, "text": row.text} for row in rows]


class Documents(Rows[Document]):
    """The documents of a split. In Arrow: `document` (its number), `first_chunk`, `text`, and the columns
    of `documents.parquet`.

    The number of a document's tokens and chunks are among these columns. Metadata of the same name as one of the first
    three is only in `Document.metadata`.
    """

    kind, at_once = "document", 64

    def __len__(self) -> int:
        return self._split.num_documents

    @property
    def schema(self) -> "pa.Schema":
        """`document` and `first_chunk` int64, `text` string, then the columns of `documents.parquet`."""
        import pyarrow as pa

        own = pa.schema([("document", pa.int64()), ("first_chunk", pa.int64()), ("text", pa.string())])
        return pa.schema([*own, *(field for field in self._split.documents.schema if field.name not in own.names)])

    def find(self, document_id: str) -> list[int]:
        """The numbers of the documents with this id in the corpus, in order; several may share one."""
        found = np.array(list(self._split.documents.find(document_id)), dtype=np.int64)
        return self._existing(found).tolist()

    def _first_chunks(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._split.chunk_ranges(numbers)[:, 0]

    def _read(self, numbers: NDArray[np.int64]) -> list[Document]:
        chunks = [range(*pair) for pair in self._split.chunk_ranges(numbers).tolist()]
        tokens = [tokens_of(self._split, one.start, one.stop) for one in chunks]
        metadata = self._split.metadata(numbers.tolist())
        names = [str(row["id"]) for row in metadata]
        return list(map(Document, numbers.tolist(), names, chunks, metadata, tokens, self._decode(tokens)))

    def _table(self, rows: list[Document]) -> list[dict[str, object]]:
        return [
            {**row.metadata, "document": row.number, "first_chunk": row.chunks.start, "text": row.text} for row in rows
        ]


_NO_RANGES = np.empty((0, 2), np.int64)


def lengths_of(split: Split, first: int, stop: int, skipped: NDArray[np.int64] = _NO_RANGES) -> NDArray[np.int64]:
    """The tokens without padding of each of the chunks [first, stop), 0 in the ranges `skipped` [n, 2] of chunks: [n]
    int64."""
    lengths = split.lengths.read(first, stop).astype(np.int64)
    lengths[inside(np.arange(first, stop), skipped)] = 0
    return lengths


def tokens_of(split: Split, first: int, stop: int, skipped: NDArray[np.int64] = _NO_RANGES) -> NDArray[np.int64]:
    """The tokens of chunks [first, stop), without padding and without the chunks in the ranges `skipped` [n, 2]: [t]
    int64."""
    lengths = lengths_of(split, first, stop, skipped)
    return split.tokens.read(first, stop)[np.arange(split.chunk_length) < lengths[:, None]].astype(np.int64)


class Tokens:
    """The tokens of a split in one row, without padding and deleted documents.

    `tokens[5]` is an int, `tokens[5:9]` an array [4] int64. A token's place here is not its position in the files. The
    first access reads the lengths of all chunks, two bytes each. Documents that are deleted later stay in.
    """

    def __init__(self, split: Split) -> None:
        self._split = split

    @cached_property
    def _skipped(self) -> NDArray[np.int64]:
        return self._split.deleted

    def _lengths(self, first: int, stop: int) -> NDArray[np.int64]:
        return lengths_of(self._split, first, stop, self._skipped)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The first token of every `BATCH`-th chunk, then the number of tokens."""
        count = self._split.num_chunks
        sums = [self._lengths(first, min(first + BATCH, count)).sum() for first in range(0, count, BATCH)]
        return np.concatenate([[0], np.cumsum(sums, dtype=np.int64)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return f"<{len(self):,} tokens of {datastore_name(self._split.folder)}, split '{self._split.name}'>"

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> NDArray[np.int64]: ...

    def __getitem__(self, place: int | slice) -> int | NDArray[np.int64]:
        """A token, or those of a slice.

        Raises:
            OutOfRange: there are fewer tokens.
        """
        if not isinstance(place, slice):
            (number,) = checked_numbers(
                [place + len(self) if -len(self) <= place < 0 else place], len(self), "token", self._split
            )
            return int(self._read(number, number + 1)[0])
        places = range(len(self))[place]
        if not places:
            return np.empty(0, np.int64)
        first, stop = min(places[0], places[-1]), max(places[0], places[-1]) + 1
        return self._read(first, stop)[:: places.step]

    def _read(self, first: int, stop: int) -> NDArray[np.int64]:
        """The tokens [first, stop), at least one."""
        chunk = BATCH * (int(np.searchsorted(self._starts, first, side="right")) - 1)
        until = min(self._split.num_chunks, BATCH * int(np.searchsorted(self._starts, stop, side="left")))
        stops = self._starts[chunk // BATCH] + np.cumsum(self._lengths(chunk, until))  # of each chunk
        begin, end = (
            int(np.searchsorted(stops, first, side="right")),
            int(np.searchsorted(stops, stop, side="left")) + 1,
        )
        skipped = first - (stops[begin - 1] if begin else self._starts[chunk // BATCH])
        tokens = tokens_of(self._split, chunk + begin, chunk + end, self._skipped)
        return tokens[skipped : skipped + stop - first]

    def __iter__(self) -> Iterator[int]:
        for first in range(0, len(self), BATCH):
            yield from self[first : first + BATCH].tolist()

    def batches(self, size: int) -> Iterator[NDArray[np.int64]]:
        """Arrays of `size` consecutive tokens, the last one shorter.

        Raises:
            InputError: the size is below 1.
        """
        if size < 1:
            raise InputError(f"size = {size}: must be at least 1.")
        for first in range(0, len(self), size):
            yield self[first : first + size]

    def to_arrow(self) -> "pa.Table":
        """All tokens as a table with the column `token`, uint16 or uint32."""
        import pyarrow as pa

        kind = pa.from_numpy_dtype(self._split.tokens.dtype)
        blocks = [pa.array(block, kind) for block in self.batches(BATCH * self._split.chunk_length)]
        return pa.table({"token": pa.chunked_array(blocks, kind)})
