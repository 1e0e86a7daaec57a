"""Read documents from files, local or remote: the suffix of a name decides the format, and text formats may be
compressed.

    file ──opened (fsspec)──► stored bytes ──unpacked──► contents ──► Document, or a CorpusProblem with file and line

Text, JSON Lines and Megatron tokens are read here, other formats in `tables`, `csv_rows` and `web_archives`. Memory
holds one document at a time, whatever the size of a file, and of a large text file (`LargeText`) only a block.
"""

import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from indexing.corpus.csv_rows import CSV_SUFFIXES, csv_rows
from indexing.corpus.documents import (
    BINARY_FILE,
    UNREADABLE,
    CorpusFile,
    CorpusProblem,
    CorpusSettings,
    Document,
    LargeText,
    ReadRequest,
    decode,
    opened,
    record_document,
)
from indexing.corpus.megatron import INDEX_SUFFIX, SUFFIX, is_megatron, open_index
from indexing.corpus.streams import (
    COMPRESSION_SUFFIXES,
    DAMAGED,
    StoredReader,
    compression_suffix,
    damage_of,
    uncompressed,
    unpacked,
)
from indexing.corpus.tables import ARROW_SUFFIX, PARQUET_SUFFIX, arrow_rows, parquet_rows
from indexing.corpus.text_bytes import BLOCK_BYTES, BOM, MOST_OTHER_BYTES, TextSeen, encoding_of, text_blocks
from indexing.corpus.web_archives import WARC_SUFFIXES, warc_records
from indexing.store.errors import InputError
from indexing.store.files import parse_json

# One document per file; its id is the file's name. `.json` is not accepted: it can hold a document, a list of documents
# or settings, and a wrong guess would go unnoticed.
WHOLE_FILE_SUFFIXES = (
    ".txt", ".md", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx",
    ".hpp", ".cu", ".cuh", ".js", ".mjs", ".jsx", ".ts", ".tsx", ".java", ".kt", ".scala", ".go", ".rs", ".rb",
    ".php", ".pl", ".lua", ".r", ".jl", ".swift", ".m", ".cs", ".fs", ".hs", ".ml", ".ex", ".erl", ".clj", ".lisp",
    ".sh", ".bash", ".bat", ".ps1", ".sql", ".css", ".scss", ".toml", ".yaml", ".yml", ".ini", ".cmake", ".proto",
)  # fmt: skip
LINE_SUFFIXES = (".jsonl", ".ndjson")  # one document per line
_COMPRESSIBLE = (*LINE_SUFFIXES, *CSV_SUFFIXES, *WARC_SUFFIXES, *WHOLE_FILE_SUFFIXES)
ACCEPTED = (
    f"Accepted suffixes: {', '.join(_COMPRESSIBLE)}, each also with {' or '.join(COMPRESSION_SUFFIXES)}; {PARQUET_SUFFIX}; "
    f"{ARROW_SUFFIX}; and {SUFFIX} with its {INDEX_SUFFIX} (Megatron). For a corpus, corpus.suffixes adds other text files."
)
_LARGE_BYTES = 1 << 24  # text of a larger file is read block by block, again for every use
_BLOCK_DOCUMENTS = 1 << 16  # documents of a Megatron file whose positions are in memory at a time


def is_known(name: str) -> bool:
    """Whether the suffix of a name is one that is read without `corpus.suffixes`."""
    name = name.lower()
    return (
        uncompressed(name).endswith(_COMPRESSIBLE) or name.endswith((PARQUET_SUFFIX, ARROW_SUFFIX)) or is_megatron(name)
    )


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


def read(raw: Any, request: ReadRequest) -> Iterator[Document]:
    name = request.file.name.lower()
    if name.endswith(PARQUET_SUFFIX):
        yield from parquet_rows(raw, request)
        return
    if is_megatron(name):
        yield from _token_documents(raw, request)
        return
    if name.endswith(ARROW_SUFFIX):
        yield from arrow_rows(io.BufferedReader(raw, 1 << 20), request)
        return
    # None is a file that `corpus.suffixes` admits.
    content_suffix = next((suffix for suffix in _COMPRESSIBLE if uncompressed(name).endswith(suffix)), None)
    if request.offset and content_suffix in LINE_SUFFIXES:  # only uncompressed files have offsets
        raw.stored.seek(request.offset)
        yield from _json_lines(io.BufferedReader(raw, 1 << 20), request, has_offsets=True)
        return
    stream, compression = unpacked(raw, name)
    if compression != compression_suffix(name):
        if content_suffix is None:  # an archive, or a format that is compressed inside
            request.report(BINARY_FILE, 1, "its content is compressed, and its name does not say so; it is skipped")
            return
        content = {".gz": "compressed by gzip", ".zst": "compressed by zstd", "": "not compressed"}[compression]
        request.report("wrong suffix", 1, f"its content is {content} and was read as such; rename the file")
    if content_suffix in LINE_SUFFIXES:
        yield from _json_lines(stream, request, has_offsets=not compression)
    elif content_suffix in CSV_SUFFIXES:
        yield from csv_rows(stream, content_suffix, request, has_offsets=not compression)
    elif content_suffix in WARC_SUFFIXES:
        yield from warc_records(stream, request)
    elif request.start == 0 and request.stop != 0:
        yield from _whole_file(stream, request, is_text=content_suffix is not None)


def _whole_file(stream: io.BufferedIOBase, request: ReadRequest, is_text: bool) -> Iterator[Document]:
    """Read a file in one pass. The text is kept while it is small; `LargeText` reads it again.

    `is_text`: whether its suffix says so. Otherwise a file with a NUL in its first block is binary, as for Git, and is
    skipped.
    """
    seen, texts, is_whole = TextSeen(), list[str](), False
    try:
        for data in text_blocks(stream):
            text = seen.decoded(data)
            if not is_text and b"\0" in seen.head and not encoding_of(seen.head, request.file.name):
                request.report(BINARY_FILE, 1, "it holds NUL bytes; it is skipped")
                return
            if seen.size <= _LARGE_BYTES:
                texts.append(text)
            else:
                texts.clear()
        is_whole = True
    except DAMAGED as error:
        request.report(damage_of(error), seen.lines + 1, str(error))
    if seen.is_binary:
        share = f"{100 * seen.other_bytes / seen.stored:.0f}% of its bytes, more than {100 * MOST_OTHER_BYTES:.0f}%"
        guess = encoding_of(seen.head, request.file.name)
        if not is_text and not guess:
            request.report(BINARY_FILE, 1, f"bytes that are not UTF-8 are {share}; it is skipped")
            return
        guess = guess or "it is binary or has another encoding"
        request.report("not UTF-8", 1, f"{share}: {guess}, and is left out")
        return
    if seen.longest_run > request.settings.max_line_bytes:
        limit = f"corpus.max_line_bytes = {request.settings.max_line_bytes:,}"
        detail = (
            f"about {seen.longest_run:,} bytes without a single blank or line end, more than {limit}; it is left out"
        )
        request.report("long line", 1, detail)
        return
    if seen.undecodable:
        first = f"the first is 0x{seen.first_undecodable:02x}"
        request.report("undecodable bytes", seen.first_line, f"{seen.undecodable} replaced by U+FFFD, {first}")
    if not seen.is_blank:
        large = LargeText(request.file, seen.size, seen.digest.digest()) if seen.size > _LARGE_BYTES else None
        yield Document(request.file.name, "".join(texts), {"source": request.file.name}, 0, large=large)
    elif is_whole:
        request.report("empty document", 1, "no text in the file")


def _json_lines(stream: io.BufferedIOBase, request: ReadRequest, has_offsets: bool) -> Iterator[Document]:
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
                yield from record_document(fields, request, record, position if has_offsets else 0)
        position += size
        record += 1


def _skip_line(stream: io.BufferedIOBase) -> int:
    """Skip the rest of a line; returns its bytes."""
    size = 0
    while part := stream.readline(BLOCK_BYTES):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _parse(line: bytes, line_number: int, request: ReadRequest) -> dict[str, Any] | None:
    text = decode(line, line_number, request)
    try:
        value = parse_json(text)
    except ValueError as error:  # also for integers of over 4300 digits
        request.report("broken JSON", line_number, str(error))
        return None
    if not isinstance(value, dict):
        request.report("not an object", line_number, f"found {type(value).__name__}, a line must be a JSON object")
        return None
    return value


def _token_documents(raw: StoredReader, request: ReadRequest) -> Iterator[Document]:
    """Read documents of a Megatron file in one pass from the first requested one."""
    name, path = request.file.name, request.file.path
    try:
        index = open_index(path, raw.stored.seek(0, io.SEEK_END))
    except UNREADABLE as error:
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
