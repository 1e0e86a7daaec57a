"""Read documents from files: text, JSON Lines, Parquet and Megatron tokens; compressed or not, local or remote.

    file ──opened (fsspec)──► bytes ──unpacked──► lines, rows or tokens ──► Document, or a CorpusProblem with file and line

Text is not changed: line ends, blanks and control characters stay. Bytes that are not UTF-8 and lone surrogates in JSON become
U+FFFD. Such a replacement, and every document that is left out, is reported as a `CorpusProblem`. Memory holds one document at a
time, whatever the size of a file.
"""

import contextlib
import errno
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
# Share of a text file; 0.12 to 0.14 in Latin-1 with many accents, 0.3 and more in programs and images.
_MOST_OTHER_BYTES = 0.2
_BLOCK_DOCUMENTS = 1 << 16  # documents of a Megatron file whose positions are in memory at a time

ProblemKind = Literal[
    "undecodable bytes", "lone surrogates", "empty document", "broken JSON", "not an object", "missing text",
    "duplicate id", "truncated file", "damaged file", "wrong checksum", "missing dictionary", "foreign bytes",
    "unreadable file", "wrong suffix", "not UTF-8",
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
class Document:
    """One document.

    Attributes:
        id: unique in a well-formed corpus; `find_duplicates` checks.
        text: never empty or blank, without surrogates; empty if the document is stored as tokens.
        metadata: the values at `metadata_keys`; nested values as JSON.
        record: 0-based line (JSON Lines), row (Parquet) or number (Megatron) in its file, including records left out.
        offset: byte at which its line starts in an uncompressed JSON Lines file, else 0.
        tokens: [tokens] as stored in a Megatron file, at least one; None if the document is stored as text.
    """

    id: str
    text: str
    metadata: dict[str, str]
    record: int
    offset: int = 0
    tokens: np.ndarray | None = None

    @property
    def size(self) -> int:
        """UTF-8 bytes of its text; an estimate if it is stored as tokens."""
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
_BOM = b"\xef\xbb\xbf"
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
    data = bytearray()
    is_whole = False
    try:
        while block := stream.read1(1 << 20):
            data += block
        is_whole = True
    except DAMAGED as error:
        request.report(damage_of(error), data.count(b"\n") + 1, str(error))
    content = bytes(data.removeprefix(_BOM))
    if (share := _other_bytes(content)) > _MOST_OTHER_BYTES:
        detail = f"{100 * share:.0f}% of its bytes, more than {100 * _MOST_OTHER_BYTES:.0f}%: it is binary or has another encoding"
        request.report("not UTF-8", 1, f"{detail}, and is left out")
        return
    text = _decode(content, 1, request)
    if text and not text.isspace():
        yield Document(request.file.name, text, {"source": request.file.name}, 0)
    elif is_whole:
        request.report("empty document", 1, "no text in the file")


def _json_lines(stream: Any, request: ReadRequest, has_offsets: bool) -> Iterator[Document]:
    record, position = (request.start, request.offset) if request.offset else (0, 0)
    while request.stop is None or record < request.stop:
        try:
            line = stream.readline()
        except DAMAGED as error:
            request.report(damage_of(error), record + 1, str(error))
            return
        if not line:
            return
        content = line.removeprefix(_BOM) if record == 0 else line
        if record >= request.start and content and not content.isspace():
            fields = _parse(content, record + 1, request)
            if fields is not None:
                yield from _document(fields, request, record, position if has_offsets else 0)
        position += len(line)
        record += 1


def _parse(line: bytes, number: int, request: ReadRequest) -> dict[str, Any] | None:
    text = _decode(line, number, request)
    try:
        value = parse_json(text)
    except ValueError as error:  # also for integers of over 4300 digits
        request.report("broken JSON", number, str(error))
        return None
    if not isinstance(value, dict):
        request.report("not an object", number, f"found {type(value).__name__}, a line must be a JSON object")
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
                    yield from _document(fields, request, record, 0)
                record += 1
    except pa.ArrowNotImplementedError as error:
        request.report("unreadable file", record + 1, str(error))
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise  # a disk or network error; Arrow's own errors about contents are plain OSErrors without a number
        is_short = any(words in str(error) for words in ("not found in footer", "file size is"))
        request.report("truncated file" if is_short else "damaged file", record + 1, str(error))


def _column(batch: Any, key: str) -> list[Any] | None:
    """A column, or a field of a struct column, as Python values. Strings stay bytes, because Arrow does not validate them."""
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
    return column.to_pylist()


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


def _document(fields: dict[str, Any], request: ReadRequest, record: int, offset: int) -> Iterator[Document]:
    """Yield the document of a line or row, or report why there is none."""
    settings, line = request.settings, record + 1

    def find(key: str) -> Any:
        value: Any = fields
        for part in [key] if key in fields else key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return _decode(value, line, request) if isinstance(value, bytes) else value

    def clean(value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            text, count = re.subn("[\ud800-\udfff]", "\ufffd", text)
            request.report("lone surrogates", line, f"{count} replaced by U+FFFD, the first at character {error.start}")
        return text

    text = find(settings.text_key)
    if not isinstance(text, str):
        keys = ", ".join(list(fields)[:10])
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
        count = _undecodable(data, text)
        line = first_line + data.count(b"\n", 0, error.start)
        request.report("undecodable bytes", line, f"{count} replaced by U+FFFD, the first is 0x{data[error.start]:02x}")
        return text


def _undecodable(data: bytes, text: str) -> int:
    """Number of replacements in `data` decoded as `text`. A U+FFFD that the file itself contains is ordinary text."""
    return text.count("\ufffd") - data.count("\ufffd".encode())


def _other_bytes(data: bytes) -> float:
    """Share of the bytes that text in UTF-8 does not have: undecodable ones, and NUL."""
    return (_undecodable(data, data.decode(errors="replace")) + data.count(0)) / max(1, len(data))
