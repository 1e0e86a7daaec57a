"""Read CSV and TSV: a document for each row below a header that names the columns.

    lines ──csv.reader──► rows ──► fields by column ──► Document, or a CorpusProblem with the row

Fields are quoted as `csv` and pandas quote them: a quoted field may hold delimiters, line breaks and doubled quotes.
Whether a line begins a row depends on all lines before it, so the scan notes the byte at which each shard begins.
"""

import csv
import io
from collections.abc import Iterator
from typing import Any

from indexing.corpus.documents import Document, ProblemKind, ReadRequest, decode, record_document
from indexing.corpus.streams import DAMAGED, damage_of
from indexing.corpus.text_bytes import BLOCK_BYTES, BOM

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
CSV_SUFFIXES = tuple(_DELIMITERS)


def csv_rows(stream: io.BufferedIOBase, suffix: str, request: ReadRequest, has_offsets: bool) -> Iterator[Document]:
    """Yield the documents of the requested rows, and report problems by row, counted from 1 below the header.

    Args:
        stream: the contents of the file from the first byte; without compression an `io.BufferedReader` of a
            `StoredReader`.
        suffix: one of `CSV_SUFFIXES`.
        request: its `offset` is the byte at which row `start` begins, or 0.
        has_offsets: whether documents get the byte at which their row begins; not for a compressed file.
    """
    lines = _Lines(stream, request.settings.max_line_bytes)
    rows = _rows(lines, _DELIMITERS[suffix])
    record = request.start if request.offset else 0
    try:
        _, header = next(rows, (0, []))
        if isinstance(header, tuple):
            request.report(*header)
            return
        names = [decode(name, 1, request) for name in header]
        if request.offset:
            lines.jump(request.offset)
        for position, row in rows:
            if request.stop is not None and record >= request.stop:
                return
            if record >= request.start:
                yield from _row_document(row, names, request, record, position if has_offsets else 0)
            record += 1
    except DAMAGED as error:
        request.report(damage_of(error), record + 1, str(error))


_Problem = tuple[ProblemKind, int, str]  # kind, line, detail


def _row_document(
    row: list[bytes] | _Problem, names: list[str], request: ReadRequest, record: int, offset: int
) -> Iterator[Document]:
    if isinstance(row, tuple):
        kind, line, detail = row
        request.report(kind, record + 1, f"line {line} of the file: {detail}")
    elif row and len(row) != len(names):
        request.report("broken record", record + 1, f"it has {len(row)} fields, the header {len(names)}")
    elif row:
        fields = {
            name: value for name, value in zip(names, row, strict=True) if value or name == request.settings.text_key
        }
        yield from record_document(fields, request, record, offset, names)


def _rows(lines: "_Lines", delimiter: str) -> Iterator[tuple[int, list[bytes] | _Problem]]:
    """Yield the byte at which each row begins, and its fields. A row that is not well-formed ends with its line.

    Raises:
        the exceptions `DAMAGED`.
    """
    csv.field_size_limit(2**31 - 1)  # a limit of the process; `_Lines` limits whole rows
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        position, line = lines.begin_row()
        try:
            yield position, [field.encode("latin-1") for field in next(rows)]
        except StopIteration:
            return
        except csv.Error as error:
            yield position, ("broken record", line, str(error).partition(" - ")[0])
        except _LongRow:
            detail = f"{lines.skip_row():,} bytes, more than corpus.max_line_bytes = {lines.limit:,}"
            yield position, ("long record", line, f"{detail}; it is left out. A closing quote may be missing")


class _LongRow(Exception):
    """A row has more bytes than the limit."""


class _Lines:
    """Lines for `csv.reader`, which counts characters, not bytes: as Latin-1, every byte is a character.

    Attributes:
        limit: bytes of the longest row.
        position, number: bytes and lines that have been read.
    """

    def __init__(self, stream: Any, limit: int) -> None:
        self.stream, self.limit = stream, limit
        self.position = self.number = self._row_bytes = self._row_quotes = 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        is_first = not self.position
        line = self._read(self.limit + 1 - self._row_bytes) if self._row_bytes <= self.limit else b""
        if self._row_bytes > self.limit and not line.endswith(b"\n"):
            raise _LongRow
        if not line:
            raise StopIteration
        return (line.removeprefix(BOM) if is_first else line).decode("latin-1")

    def begin_row(self) -> tuple[int, int]:
        """Begin a row; returns its first byte and its first line, counted from 1."""
        self._row_bytes = self._row_quotes = 0
        return self.position, self.number + 1

    def skip_row(self) -> int:
        """Skip the rest of the row; returns its bytes."""
        while line := self._read(BLOCK_BYTES):
            if line.endswith(b"\n") and self._row_quotes % 2 == 0:
                break
        return self._row_bytes

    def jump(self, position: int) -> None:
        """Continue at a byte of an uncompressed file."""
        raw = self.stream.detach()
        raw.stored.seek(position)
        self.stream, self.position = io.BufferedReader(raw, 1 << 20), position

    def _read(self, size: int) -> bytes:
        """Read up to the end of a line, at most `size` bytes."""
        line = self.stream.readline(size)
        self.position += len(line)
        self.number += line.endswith(b"\n")
        self._row_bytes += len(line)
        self._row_quotes += line.count(b'"')
        return line
