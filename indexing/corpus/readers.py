"""Read documents from files: text, JSON Lines, Parquet and Megatron tokens; compressed or not, local or remote.

    file ──opened (fsspec)──► bytes ──unpacked──► lines, rows or tokens ──► Document, or a CorpusProblem with file and line

Text is not changed: line ends, blanks and control characters stay. Bytes that are not UTF-8 and lone surrogates in JSON become
U+FFFD. Such a replacement, and every document that is left out, is reported as a `CorpusProblem`. Memory holds one document at a
time, whatever the size of a file, and of a large text file (`LargeText`) only a block.
"""

import contextlib
import errno
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from indexing.corpus.megatron import INDEX_SUFFIX, SUFFIX, is_megatron, open_index
from indexing.corpus.streams import (
    COMPRESSION_SUFFIXES,
    DAMAGED,
    StoredReader,
    compression_suffix,
    damage_of,
    filesystem_of,
    uncompressed,
    unpacked,
)
from indexing.corpus.text_bytes import (
    BLOCK_BYTES,
    BOM,
    MOST_OTHER_BYTES,
    TextSeen,
    encoding_of,
    num_undecodable,
    text_blocks,
)
from indexing.store.errors import InputError
from indexing.store.files import parse_json
from indexing.store.remote import named_errors
from indexing.store.settings import Text, settings

# One document per file; its id is the file's name. `.json` is not accepted: it can hold a document, a list of documents or
# settings, and a wrong guess would go unnoticed.
WHOLE_FILE_SUFFIXES = (
    ".txt", ".md", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx",
    ".hpp", ".cu", ".cuh", ".js", ".mjs", ".jsx", ".ts", ".tsx", ".java", ".kt", ".scala", ".go", ".rs", ".rb",
    ".php", ".pl", ".lua", ".r", ".jl", ".swift", ".m", ".cs", ".fs", ".hs", ".ml", ".ex", ".erl", ".clj", ".lisp",
    ".sh", ".bash", ".bat", ".ps1", ".sql", ".css", ".scss", ".toml", ".yaml", ".yml", ".ini", ".cmake", ".proto",
)  # fmt: skip
LINE_SUFFIXES = (".jsonl", ".ndjson")  # one document per line
PARQUET_SUFFIX = ".parquet"  # one document per row
ACCEPTED = (
    f"Accepted suffixes: {', '.join((*LINE_SUFFIXES, PARQUET_SUFFIX, *WHOLE_FILE_SUFFIXES))}, and {SUFFIX} with its "
    f"{INDEX_SUFFIX} (Megatron). Text and JSON Lines may be compressed: {' or '.join(COMPRESSION_SUFFIXES)} after the suffix."
)
# Columns of every document in addition to metadata.
TEXT_COLUMNS, NUMBER_COLUMNS = ("id", "file"), ("bytes", "tokens", "chunks")
_TOKEN_TEXT_BYTES = 4  # estimated bytes of text per token, if only the tokens are known
_LARGE_BYTES = 1 << 24  # text of a larger file is read block by block, again for every use
TEXT_BLOCK = 1 << 20
"""Characters in a block of a `LargeText`."""
_NAMED_KEYS = 20  # in a message about a missing one
_BLOCK_DOCUMENTS = 1 << 16  # documents of a Megatron file whose positions are in memory at a time

ProblemKind = Literal[
    "undecodable bytes", "lone surrogates", "empty document", "broken JSON", "not an object", "missing text",
    "duplicate id", "truncated file", "damaged file", "wrong checksum", "missing dictionary", "foreign bytes",
    "unreadable file", "wrong suffix", "not UTF-8", "long line",
    "binary value",
]  # fmt: skip


@settings
class CorpusSettings:
    """Which text is read, and how it is divided."""

    paths: tuple[Text, ...] = ()
    """Files, folders (with all subfolders; links are followed), globs such as `data/**/*.jsonl.zst`, or fsspec URLs. For a Megatron
    corpus name the `.bin` or the `.idx`."""
    text_key: Text = "text"
    """Key (JSON Lines) or column (Parquet) of the text. Dots lead into nested objects: `content.body`."""
    id_key: Text = "id"
    """Key or column of the document's id. A document without one gets the id `file:line`."""
    metadata_keys: tuple[Text, ...] = ("title", "url", "source")
    """Keys or columns to keep with each document that has them."""
    shard_bytes: PositiveInt = 64 * 2**20
    """Approximate bytes of text per shard. A Megatron token counts as 4."""
    max_line_bytes: PositiveInt = 64 * 2**20
    """Bytes of the longest JSON line. A longer one is left out and reported. Memory holds several copies of a line."""
    split: tuple[PositiveInt, NonNegativeInt, NonNegativeInt] = (980, 20, 0)
    """Weights of train, valid and test. A hash of its text assigns each document to a split. valid and test are held out."""
    boundary_ids: tuple[NonNegativeInt, ...] = ()
    """Token ids (bos, eod) at the ends of documents in Megatron files. One is removed at each end."""
    strict: bool = False
    """Stop at the first problem in the data. The default reports problems and continues."""

    def __post_init__(self) -> None:
        for column in (*TEXT_COLUMNS, *NUMBER_COLUMNS):
            if column in self.metadata_keys:
                raise InputError(
                    f"corpus.metadata_keys has {column!r}, which is a column of every document "
                    f"({', '.join((*TEXT_COLUMNS, *NUMBER_COLUMNS))}). Remove it, or rename the key in the data."
                )
        if len(set(self.metadata_keys)) < len(self.metadata_keys):
            raise InputError(f"corpus.metadata_keys = {self.metadata_keys}: each key must be named once.")


@dataclass(frozen=True)
class CorpusFile:
    """One file of the corpus. A Megatron pair is its `.bin`, with the size and the time of both files.

    Attributes:
        path: fsspec path.
        name: path relative to the folder or glob that found it, the same on every machine; prefix of document ids.
        size: bytes as stored; 0 if the file system does not report it.
        modified: time of the last change as the file system reports it. Size and time detect an edited file.
    """

    path: str
    name: str
    size: int
    modified: str = ""


@dataclass(frozen=True)
class LargeText:
    """The text of a large file, which is never in memory as a whole.

    Attributes:
        file: the file. It holds this text alone.
        size: UTF-8 bytes of the text.
        digest: the hash of the text that decides its split, see `split_of`.
    """

    file: CorpusFile
    size: int
    digest: bytes

    def blocks(self) -> Iterator[str]:
        """Read the text in blocks of `TEXT_BLOCK` characters; the last one may be shorter.

        Raises:
            InputError: the file has changed since it was read first.
        """
        text, size = "", 0
        for block in _decoded_file(self.file):
            size += len(block.encode())
            text += block
            while len(text) >= TEXT_BLOCK:
                yield text[:TEXT_BLOCK]
                text = text[TEXT_BLOCK:]
        if text:
            yield text
        if size != self.size:
            raise InputError(
                f"{printable(self.file.path)} has changed while it was read. Run again when it is written."
            )


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        id: unique in a well-formed corpus; `find_duplicates` checks.
        text: never empty or blank, without surrogates; empty if the document is large, or stored as tokens.
        metadata: the values at `metadata_keys`; nested values as JSON.
        record: 0-based line (JSON Lines), row (Parquet) or number (Megatron) in its file, including records left out.
        offset: byte at which its line starts in an uncompressed JSON Lines file, else 0.
        tokens: [tokens] as stored in a Megatron file, at least one; None if the document is stored as text.
        large: its text, if that is large.
    """

    id: str
    text: str
    metadata: dict[str, str]
    record: int
    offset: int = 0
    tokens: np.ndarray | None = None
    large: LargeText | None = None

    def blocks(self) -> Iterator[str]:
        """The text in one block, or in many if it is large."""
        return iter((self.text,)) if self.large is None else self.large.blocks()

    @property
    def size(self) -> int:
        """UTF-8 bytes of its text; an estimate if it is stored as tokens."""
        if self.large is not None:
            return self.large.size
        return len(self.text.encode()) if self.tokens is None else _TOKEN_TEXT_BYTES * len(self.tokens)


@dataclass(frozen=True)
class CorpusProblem:
    """A problem in the data. `line` is 1-based: a line, a row (Parquet) or a document (Megatron)."""

    kind: ProblemKind
    file: str
    line: int
    detail: str


def printable(text: str) -> str:
    """Replace what is not valid Unicode in a name or message: Linux file names are bytes and need not be UTF-8."""
    return text.encode(errors="replace").decode()


def is_known(name: str) -> bool:
    name = name.lower()
    is_text = uncompressed(name).endswith((*LINE_SUFFIXES, *WHOLE_FILE_SUFFIXES))
    return is_text or name.endswith(PARQUET_SUFFIX) or is_megatron(name)


def read_documents(
    file: CorpusFile,
    settings: CorpusSettings,
    *,
    start: int = 0,
    stop: int | None = None,
    offset: int = 0,
    on_problem: Callable[[CorpusProblem], None],
) -> Iterator[Document]:
    """Read the documents among the records [start, stop) of a file, in order, and report problems to `on_problem`.

    `offset` is the byte of record `start` as found by `scan_file`. It saves reading the lines before.
    """
    with opened(file, on_problem) as stored:
        if stored is not None:
            raw = stored if file.name.lower().endswith(PARQUET_SUFFIX) else StoredReader(stored)
            yield from read(raw, ReadRequest(file, settings, on_problem, start, stop, offset))


@contextlib.contextmanager
def opened(file: CorpusFile, on_problem: Callable[[CorpusProblem], None]) -> Iterator[Any]:
    """Open the stored bytes of a file; yields None after reporting that it cannot be opened."""
    try:
        filesystem, path = filesystem_of(file.path)
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise PermissionError(f"{path} is a named pipe, a socket or a device, not a regular file")
        with named_errors(file.path, passed=_UNREADABLE) if "://" in file.path else contextlib.nullcontext():
            opened = filesystem.open(path, "rb")
    except OSError as error:
        if not isinstance(error, _UNREADABLE) and error.errno != errno.ELOOP:  # a link to itself
            raise
        on_problem(CorpusProblem("unreadable file", printable(file.path), 1, str(error)))
        yield None
        return
    with opened:
        yield opened


@dataclass(frozen=True)
class ReadRequest:
    """Which records of a file to read, and where to report problems."""

    file: CorpusFile
    settings: CorpusSettings
    on_problem: Callable[[CorpusProblem], None]
    start: int = 0
    stop: int | None = None
    offset: int = 0

    def report(self, kind: ProblemKind, line: int, detail: str) -> None:
        self.on_problem(CorpusProblem(kind, printable(self.file.path), line, printable(detail)))


_UNREADABLE = (FileNotFoundError, PermissionError, IsADirectoryError)
_PARQUET_MAGIC = b"PAR1"


def read(raw: Any, request: ReadRequest) -> Iterator[Document]:
    name = request.file.name.lower()
    if name.endswith(PARQUET_SUFFIX):
        yield from _parquet_rows(raw, request)
        return
    if is_megatron(name):
        yield from _token_documents(raw, request)
        return
    if request.offset:  # only uncompressed files have offsets
        raw.stored.seek(request.offset)
        yield from _json_lines(io.BufferedReader(raw, 1 << 20), request, has_offsets=True)
        return
    stream, compression = unpacked(raw, name)
    if compression != compression_suffix(name):
        content = {".gz": "compressed by gzip", ".zst": "compressed by zstd", "": "not compressed"}[compression]
        request.report("wrong suffix", 1, f"its content is {content} and was read as such; rename the file")
    if uncompressed(name).endswith(LINE_SUFFIXES):
        yield from _json_lines(stream, request, has_offsets=not compression)
    elif request.start == 0 and request.stop != 0:
        yield from _whole_file(stream, request)


def _whole_file(stream: Any, request: ReadRequest) -> Iterator[Document]:
    """Read a file in one pass. The text is kept while it is small; `LargeText` reads it again."""
    seen, texts, is_whole = TextSeen(), list[str](), False
    try:
        for data in text_blocks(stream):
            text = seen.decoded(data)
            if seen.size <= _LARGE_BYTES:
                texts.append(text)
            else:
                texts.clear()
        is_whole = True
    except DAMAGED as error:
        request.report(damage_of(error), seen.lines + 1, str(error))
    if seen.is_binary:
        share = f"{100 * seen.other_bytes / seen.stored:.0f}% of its bytes, more than {100 * MOST_OTHER_BYTES:.0f}%"
        guess = encoding_of(seen.head, request.file.name) or "it is binary or has another encoding"
        request.report("not UTF-8", 1, f"{share}: {guess}, and is left out")
        return
    if seen.undecodable:
        first = f"the first is 0x{seen.first_undecodable:02x}"
        request.report("undecodable bytes", seen.first_line, f"{seen.undecodable} replaced by U+FFFD, {first}")
    if not seen.is_blank:
        large = LargeText(request.file, seen.size, seen.digest.digest()) if seen.size > _LARGE_BYTES else None
        yield Document(request.file.name, "".join(texts), {"source": request.file.name}, 0, large=large)
    elif is_whole:
        request.report("empty document", 1, "no text in the file")


def _decoded_file(file: CorpusFile) -> Iterator[str]:
    """The text of a text file as `_whole_file` reads it, without reporting problems again."""
    with opened(file, lambda problem: None) as stored:
        if stored is not None:
            stream = unpacked(StoredReader(stored), file.name.lower())[0]
            with contextlib.suppress(*DAMAGED):
                for data in text_blocks(stream):
                    yield data.decode(errors="replace")


def _json_lines(stream: Any, request: ReadRequest, has_offsets: bool) -> Iterator[Document]:
    record, position = (request.start, request.offset) if request.offset else (0, 0)
    limit = request.settings.max_line_bytes
    while request.stop is None or record < request.stop:
        try:
            line = stream.readline(limit + 1)
            is_long = len(line) > limit and not line.endswith(b"\n")
            size = len(line) + (_skip_line(stream) if is_long else 0)
        except DAMAGED as error:
            request.report(damage_of(error), record + 1, str(error))
            return
        if not line:
            return
        if is_long and record >= request.start:
            detail = f"{size:,} bytes, more than corpus.max_line_bytes = {limit:,}; it is left out"
            request.report("long line", record + 1, detail)
        content = line.removeprefix(BOM) if record == 0 else line
        if record >= request.start and not is_long and content and not content.isspace():
            fields = _parse(content, record + 1, request)
            if fields is not None:
                yield from _document(fields, request, record, position if has_offsets else 0)
        position += size
        record += 1


def _skip_line(stream: Any) -> int:
    """Skip the rest of a line; returns its bytes."""
    size = 0
    while part := stream.readline(BLOCK_BYTES):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _parse(line: bytes, line_number: int, request: ReadRequest) -> dict[str, Any] | None:
    text = _decode(line, line_number, request)
    try:
        value = parse_json(text)
    except ValueError as error:  # also for integers of over 4300 digits
        request.report("broken JSON", line_number, str(error))
        return None
    if not isinstance(value, dict):
        request.report("not an object", line_number, f"found {type(value).__name__}, a line must be a JSON object")
        return None
    return value


def _parquet_rows(stored: Any, request: ReadRequest) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    settings = request.settings
    keys = (settings.text_key, settings.id_key, *settings.metadata_keys)
    record = 0
    if stored.read(len(_PARQUET_MAGIC)) not in (_PARQUET_MAGIC, b""):
        request.report("wrong suffix", 1, "its content is not Parquet; rename the file")
        return
    try:
        parquet = pq.ParquetFile(stored, page_checksum_verification=True)
        sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
        first = 0
        while first < len(sizes) and record + sizes[first] <= request.start:
            record += sizes[first]
            first += 1
        names = parquet.schema_arrow.names
        columns = [key for key in dict.fromkeys(keys) if key in names or key.split(".")[0] in names]
        for batch in parquet.iter_batches(256, row_groups=list(range(first, len(sizes))), columns=columns):
            values = {key: _column(batch, key) for key in keys}
            for row in range(batch.num_rows):
                if request.stop is not None and record >= request.stop:
                    return
                if record >= request.start:
                    fields = {key: column[row] for key, column in values.items() if column is not None}
                    yield from _document(fields, request, record, 0, names)
                record += 1
    except pa.ArrowNotImplementedError as error:
        request.report("unreadable file", record + 1, str(error))
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise  # a disk or network error; Arrow's own errors about contents are plain OSErrors without a number
        is_short = any(words in str(error) for words in ("not found in footer", "file size is"))
        request.report("truncated file" if is_short else "damaged file", record + 1, str(error))


def _column(batch: Any, key: str) -> list[Any] | None:
    """A column, or a field of a struct column, as Python values. Strings stay bytes, because Arrow does not validate them.

    So do values of a column of bytes, which some writers use for text; `_Binary` marks those that are not text.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    path = [key] if key in batch.schema.names else key.split(".")
    if path[0] not in batch.schema.names:
        return None
    column = batch.column(path[0])
    for part in path[1:]:
        if not pa.types.is_struct(column.type) or column.type.get_field_index(part) < 0:
            return None
        column = pc.struct_field(column, part)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    elif pa.types.is_string_view(column.type):
        column = column.cast(pa.binary_view())
    elif any(test(column.type) for test in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)) or (
        pa.types.is_fixed_size_binary(column.type)
    ):
        return [value if value is None else _marked(value) for value in column.to_pylist()]
    elif getattr(column.type, "unit", "") == "ns":  # Python's times have microseconds
        times = {
            pa.types.is_timestamp: lambda: pa.timestamp("us", column.type.tz),
            pa.types.is_time: lambda: pa.time64("us"),
        }
        kind = next((make() for test, make in times.items() if test(column.type)), pa.duration("us"))
        column = column.cast(kind, safe=False)
    return column.to_pylist()


class _Binary(bytes):
    """A value that is not text."""


def _marked(value: bytes) -> bytes:
    """The same bytes, as `_Binary` if more of them than in a text file are not UTF-8 text."""
    seen = TextSeen()
    seen.decoded(value)
    return _Binary(value) if seen.is_binary else value


def _plain(value: Any) -> str:
    """A value that JSON does not have as text: times in ISO 8601, decimals as their digits."""
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        return f"{len(value)} bytes" if isinstance(_marked(value), _Binary) else value.decode(errors="replace")
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _token_documents(raw: StoredReader, request: ReadRequest) -> Iterator[Document]:
    """Read documents of a Megatron file in one pass from the first requested one."""
    name, path = request.file.name, request.file.path
    try:
        index = open_index(path, raw.stored.seek(0, io.SEEK_END))
    except _UNREADABLE as error:
        request.report("unreadable file", 1, f"its index cannot be opened: {error}")
        raw.stored.seek(0)
        return
    raw.include(index.stored)
    stop = index.num_documents if request.stop is None else min(request.stop, index.num_documents)
    stream = None
    for first in range(request.start, stop, _BLOCK_DOCUMENTS):
        positions = index.positions(first, min(first + _BLOCK_DOCUMENTS, stop)).tolist()
        if stream is None:
            raw.stored.seek(positions[0])
            stream = io.BufferedReader(raw, 1 << 20)
        for record, (begin, end) in enumerate(itertools.pairwise(positions), first):
            data = stream.read(end - begin)
            if len(data) != end - begin:
                raise InputError(f"{path} became shorter while it was read. Wait until it is written, and run again.")
            tokens = _without_boundaries(np.frombuffer(data, index.dtype), request.settings.boundary_ids)
            if len(tokens):
                yield Document(f"{name}:{record + 1}", "", {}, record, tokens=tokens)
            else:
                request.report("empty document", record + 1, "no token in it")


def _without_boundaries(tokens: np.ndarray, boundary_ids: tuple[int, ...]) -> np.ndarray:
    if len(tokens) and tokens[0] in boundary_ids:
        tokens = tokens[1:]
    return tokens[:-1] if len(tokens) and tokens[-1] in boundary_ids else tokens


def _document(
    fields: dict[str, Any], request: ReadRequest, record: int, offset: int, names: Sequence[str] = ()
) -> Iterator[Document]:
    """Yield the document of a line or row, or report why there is none. `names`: columns of the file, if not all were read."""
    settings, line = request.settings, record + 1

    def find(key: str) -> Any:
        value: Any = fields
        for part in [key] if key in fields else key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, _Binary):
            if key != settings.text_key:
                request.report("binary value", line, f"'{key}' holds {len(value)} bytes, not text; it is left out")
            return None if key != settings.text_key else value
        return _decode(value, line, request) if isinstance(value, bytes) else value

    def clean(value: Any) -> str:
        if isinstance(value, str):
            text = value
        elif value is None or isinstance(value, bool | int | float | list | dict):
            text = json.dumps(value, ensure_ascii=False, default=_plain)
        else:
            text = _plain(value)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            text, count = re.subn("[\ud800-\udfff]", "\ufffd", text)
            request.report("lone surrogates", line, f"{count} replaced by U+FFFD, the first at character {error.start}")
        return text

    text = find(settings.text_key)
    if not isinstance(text, str):
        keys = ", ".join(list(names or fields)[:_NAMED_KEYS])
        if isinstance(text, _Binary):
            description = f"{len(text)} bytes that are not text"
        else:
            description = f"nothing; keys: {keys}" if text is None else f"a value of type {type(text).__name__}"
        request.report("missing text", line, f"corpus.text_key = '{settings.text_key}' leads to {description}")
        return
    if not text or text.isspace():
        request.report("empty document", line, f"'{settings.text_key}' holds no text")
        return
    found_id = find(settings.id_key)
    document_id = f"{request.file.name}:{line}" if found_id is None or found_id == "" else clean(found_id)
    metadata = {key: clean(value) for key in settings.metadata_keys if (value := find(key)) is not None}
    yield Document(document_id, clean(text), metadata, record, offset)


def _decode(data: bytes, first_line: int, request: ReadRequest) -> str:
    """Decode UTF-8. Invalid bytes become U+FFFD and are reported with the line of the first."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        text = data.decode(errors="replace")
        count = num_undecodable(data, text)
        line = first_line + data.count(b"\n", 0, error.start)
        detail = f"{count} replaced by U+FFFD, the first is 0x{data[error.start]:02x}"
        reason = encoding_of(data, request.file.name)
        request.report("undecodable bytes", line, f"{detail}: {reason}" if reason else detail)
        return text
