"""Documents of a corpus, the settings and files they come from, and the problems that readers report.

    bytes ──a reader──► fields of a record ──record_document──► Document, or a CorpusProblem with file and line

Text is not changed: line ends, blanks and control characters stay. Bytes that are not UTF-8 and lone surrogates in JSON
become U+FFFD. Such a replacement, and every document that is left out, is reported as a `CorpusProblem`.
"""

import contextlib
import errno
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from indexing.corpus.streams import COMPRESSION_SUFFIXES, DAMAGED, StoredReader, check_regular, filesystem_of, unpacked
from indexing.corpus.text_bytes import TextSeen, encoding_of, num_undecodable, text_blocks
from indexing.store.errors import InputError
from indexing.store.remote import named_errors
from indexing.store.settings import Text, settings

# Columns of every document in addition to metadata.
TEXT_COLUMNS, NUMBER_COLUMNS = ("id", "file"), ("bytes", "tokens", "chunks")
_TOKEN_TEXT_BYTES = 4  # estimated bytes of text per token, if only the tokens are known
TEXT_BLOCK = 1 << 20
"""Characters in a block of a `LargeText`."""
_NAMED_KEYS = 20  # in a message about a missing one
# A file that cannot be opened is a problem in the data, like its contents.
UNREADABLE = (FileNotFoundError, PermissionError, IsADirectoryError)

ProblemKind = Literal[
    "undecodable bytes", "lone surrogates", "empty document", "broken JSON", "not an object", "missing text",
    "duplicate id", "truncated file", "damaged file", "wrong checksum", "missing dictionary", "foreign bytes",
    "unreadable file", "wrong suffix", "not UTF-8", "long line",
    "binary value", "broken record", "long record", "nested page", "unknown coding", "binary file",
]  # fmt: skip
BINARY_FILE: ProblemKind = "binary file"
"""A file that only `corpus.suffixes` admits and that is not text: skipped and counted by suffix."""


@settings
class CorpusSettings:
    """Text of the corpus, and its division into shards and splits."""

    paths: tuple[Text, ...] = ()
    """Files, folders (with all subfolders; links are followed), globs such as `data/**/*.jsonl.zst`, or fsspec URLs, of
    text, source code, JSON Lines, CSV, TSV, Parquet, Arrow, WARC and WET files, or folders that Hugging Face `datasets`
    saved. For a Megatron corpus name the `.bin` or the `.idx`."""
    suffixes: tuple[Text, ...] = ()
    """More files of folders and globs to read as text, one document each: suffixes (`.dts`), names (`Makefile`,
    `Kconfig*`), or `*` for all files. Upper and lower case are equal. Binary files among them are skipped and
    counted."""
    exclude: tuple[Text, ...] = ()
    """Globs of files and folders to skip, such as `node_modules`, `*.min.js` or `drivers/gpu/**`. One without `/` is
    compared with every name of a path, others with the path below the folder of `corpus.paths`, and with the whole path
    if they begin with `/` or hold `://`."""
    text_key: Text = "text"
    """Key (JSON Lines) or column (CSV, Parquet, Arrow) of the text. Dots lead into nested objects: `content.body`. WARC
    and WET files need none."""
    id_key: Text = "id"
    """Key or column of the document's id. A document without one gets the id `file:line`."""
    metadata_keys: tuple[Text, ...] = ("title", "url", "source")
    """Keys or columns to keep with each document that has them."""
    shard_bytes: NonNegativeInt = 0
    """Approximate bytes of text per shard. A Megatron token counts as 4. 0 = a 64th of the text, so that many cores
    share the work, but from 4 MiB to 64 MiB."""
    max_line_bytes: PositiveInt = 64 * 2**20
    """Bytes of the longest JSON line, row (CSV, Parquet, Arrow) or WARC record. A longer one is left out and reported.
    Memory holds several copies of one."""
    split: tuple[PositiveInt, NonNegativeInt, NonNegativeInt] = (980, 20, 0)
    """Weights of train, valid and test. A hash of its text assigns each document to a split. valid and test are held
    out."""
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
        for one in self.suffixes:
            if "/" in one or one.lower() in COMPRESSION_SUFFIXES:
                raise InputError(
                    f"corpus.suffixes has {one!r}; accepted: a suffix such as .dts, a file name such as Makefile or Kconfig*, or *. Each also "
                    f"names its compressed files ({' and '.join(COMPRESSION_SUFFIXES)})."
                )
        for one in self.exclude:
            if "**" in one and any("**" in part and part != "**" for part in one.split("/")):
                raise InputError(f"corpus.exclude has {one!r}; `**` must be a whole part of a path: 'a/**/b'.")
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
        record: 0-based line (JSON Lines), row (CSV, Parquet, Arrow) or number (WARC, Megatron) in its file, including
            records left out.
        offset: byte at which its line or row starts in an uncompressed JSON Lines or CSV file, else 0.
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
    """A problem in the data. `line` is 1-based: a line, a row (CSV, Parquet, Arrow), a record (WARC) or a
    document (Megatron)."""

    kind: ProblemKind
    file: str
    line: int
    detail: str


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


def printable(text: str) -> str:
    """Replace what is not valid Unicode in a name or message: Linux file names are bytes and need not be UTF-8."""
    return text.encode(errors="replace").decode()


@contextlib.contextmanager
def opened(file: CorpusFile, on_problem: Callable[[CorpusProblem], None]) -> Iterator[Any]:
    """Open the stored bytes of a file; yields None after reporting that it cannot be opened."""
    try:
        filesystem, path = filesystem_of(file.path)
        check_regular(path)
        with named_errors(file.path, passed=UNREADABLE) if "://" in file.path else contextlib.nullcontext():
            opened = filesystem.open(path, "rb")
    except OSError as error:
        if not isinstance(error, UNREADABLE) and error.errno != errno.ELOOP:  # a link to itself
            raise
        on_problem(CorpusProblem("unreadable file", printable(file.path), 1, str(error)))
        yield None
        return
    with opened:
        yield opened


def _decoded_file(file: CorpusFile) -> Iterator[str]:
    """The text of a text file as `_whole_file` reads it, without reporting problems again."""
    with opened(file, lambda problem: None) as stored:
        if stored is not None:
            stream = unpacked(StoredReader(stored), file.name.lower())[0]
            with contextlib.suppress(*DAMAGED):
                for data in text_blocks(stream):
                    yield data.decode(errors="replace")


def record_document(
    fields: dict[str, Any], request: ReadRequest, record: int, offset: int, names: Sequence[str] = ()
) -> Iterator[Document]:
    """Yield the document of a line or row, or report why there is none. `names`: columns of the file, if not all were
    read."""
    settings, line = request.settings, record + 1

    def find(key: str) -> Any:
        value: Any = fields
        for part in [key] if key in fields else key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, BinaryValue):
            if key != settings.text_key:
                request.report("binary value", line, f"'{key}' holds {len(value)} bytes, not text; it is left out")
            return None if key != settings.text_key else value
        return decode(value, line, request) if isinstance(value, bytes) else value

    def clean(value: object) -> str:
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
        if isinstance(text, BinaryValue):
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


def decode(data: bytes, first_line: int, request: ReadRequest) -> str:
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


class BinaryValue(bytes):
    """A value that is not text."""


def marked(value: bytes) -> bytes:
    """The same bytes, as `BinaryValue` if more of them than in a text file are not UTF-8 text."""
    seen = TextSeen()
    seen.decoded(value)
    return BinaryValue(value) if seen.is_binary else value


def _plain(value: object) -> str:
    """A value that JSON does not have as text: times in ISO 8601, decimals as their digits."""
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        return f"{len(value)} bytes" if isinstance(marked(value), BinaryValue) else value.decode(errors="replace")
    return value.isoformat() if isinstance(value, date | time) else str(value)
