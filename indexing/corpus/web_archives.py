"""Read web archives: a document for each text of a WET file, and for each page of a WARC file.

    decompressed bytes ──warcio──► headers, content ──► text ──► Document, or a CorpusProblem with the record

    conversion   text that a crawler extracted from a page (WET)
    response     an HTTP response with status 200 (WARC): text/plain as it is, HTML through the extractor of resiliparse

Other records hold no text of a page and are skipped. A record whose Content-Length is wrong is left out, and reading
continues at the next line that begins a record. Memory holds one record.
"""

import codecs
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from indexing.corpus.content_codings import CodingProblem, decoded_body
from indexing.corpus.documents import BinaryValue, Document, ProblemKind, ReadRequest, marked, record_document
from indexing.corpus.html_pages import TooNested, main_text
from indexing.corpus.streams import DAMAGED, damage_of
from indexing.corpus.text_bytes import BLOCK_BYTES, is_noise
from indexing.store.errors import InputError

WARC_SUFFIXES = (".warc", ".wet")
_MAGIC, _VERSIONS = b"WARC/", ("WARC/1.1", "WARC/1.0", "WARC/0.18", "WARC/0.17")
_LINE_BYTES, _HEADER_BYTES = 1 << 16, 1 << 20  # of a line between two records, of the headers of a record
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_ESCAPES = ("idna", "punycode", "unicode-escape", "raw-unicode-escape")


class _LeftOut(Exception):
    """A record is left out: kind and detail of the problem."""

    def __init__(self, kind: ProblemKind, detail: str) -> None:
        self.kind, self.detail = kind, f"{detail}; it is left out"


def warc_records(stream: io.BufferedIOBase, request: ReadRequest) -> Iterator[Document]:
    """Yield the documents among the requested records, and report problems by record, counted from 1.

    The keys of a record are its WARC headers and `url`. Its id is the URL, or the WARC-Record-ID if it has none.

    Args:
        stream: the decompressed contents of the file.
        request: which records.

    Raises:
        InputError: the package that parses records, or the one that extracts text from HTML, is not installed.
    """
    settings, number = request.settings, 0
    try:
        for number, record in enumerate(_records(stream, settings.max_line_bytes), 1):
            if request.stop is not None and number > request.stop:
                return
            if number <= request.start:
                continue
            try:
                text = _text_of(record, settings.max_line_bytes, request.file.path)
            except _LeftOut as problem:
                request.report(problem.kind, number, problem.detail)
                continue
            if text is not None:
                url, record_id = record.uri("WARC-Target-URI"), record.uri("WARC-Record-ID")
                fields = dict(record.headers.headers) | {"url": url, settings.id_key: url or record_id}
                yield from record_document(fields | {settings.text_key: text}, request, number - 1, 0)
    except DAMAGED as error:
        request.report(damage_of(error), number + 1, str(error))


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass
class _Record:
    """One record.

    Attributes:
        headers: of warcio; None if they cannot be parsed.
        length: Content-Length, in bytes.
        content: the bytes; empty if there are more than the limit.
        problem: why it is left out, if it is damaged.
    """

    headers: Any = None
    length: int = 0
    content: bytes = b""
    problem: _LeftOut | None = None

    def uri(self, name: str) -> str | None:
        """A header with a URI, without the brackets that the format writes around ids, and some programs around
        URLs."""
        return self.headers.get_header(name, "").removeprefix("<").removesuffix(">") or None


def _records(stream: io.BufferedIOBase, limit: int) -> Iterator[_Record]:
    """Yield every record. Content of more than `limit` bytes is skipped.

    Raises:
        the exceptions `DAMAGED`.
    """
    line = _next_line(stream)
    if line and not line.startswith(_MAGIC):
        yield _Record(problem=_LeftOut("wrong suffix", f"its content begins with {_shown(line)} and is not WARC"))
        return
    while line:
        record = _Record()
        try:
            record.headers, record.length = _parse_headers(stream, line)
            record.content = _read_content(stream, record.length, limit)
        except _LeftOut as problem:
            record.problem = problem
        damage = None
        try:
            line = _next_line(stream)
            if line and not line.startswith(_MAGIC):
                found = (
                    f"{_shown(line)} where its Content-Length of {record.length:,} bytes ends and a record must begin"
                )
                record.problem = record.problem or _LeftOut("broken record", found)
            while line and not line.startswith(_MAGIC):
                line = stream.readline(_LINE_BYTES)
        except DAMAGED as error:  # after the record
            line, damage = b"", error
        yield record
        if damage is not None:
            raise damage


def _next_line(stream: io.BufferedIOBase) -> bytes:
    """The next line that is not blank, or its beginning; empty at the end of the file."""
    while (line := stream.readline(_LINE_BYTES)).isspace():
        pass
    return line


def _shown(line: bytes) -> str:
    return repr(line[:40].decode(errors="replace"))


def _parse_headers(stream: io.BufferedIOBase, first_line: bytes) -> tuple[Any, int]:
    """Read the headers of a record; returns them and its Content-Length.

    Raises:
        _LeftOut: the version of the format or the Content-Length is not valid.
    """
    try:
        from warcio.statusandheaders import StatusAndHeadersParser, StatusAndHeadersParserException
    except ImportError as error:
        raise InputError("WARC and WET files need the package warcio: pip install 'retro[warc]'.") from error

    try:
        headers = StatusAndHeadersParser(_VERSIONS).parse(_HeaderLines(stream), first_line)
    except StatusAndHeadersParserException:
        raise _LeftOut(
            "broken record", f"it begins with {_shown(first_line)}; accepted: {', '.join(_VERSIONS)}"
        ) from None
    length = headers.get_header("Content-Length", "")
    if not re.fullmatch("[0-9]{1,18}", length):
        raise _LeftOut("broken record", f"Content-Length = {length[:40]!r} is not a number of bytes")
    return headers, int(length)


class _HeaderLines:
    """Lines of a stream, which end after `_HEADER_BYTES`: memory stays bounded if no blank line ends the headers."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        self.stream, self.left = stream, _HEADER_BYTES

    def readline(self) -> bytes:
        line = self.stream.readline(self.left)
        self.left -= len(line)
        return line


def _read_content(stream: io.BufferedIOBase, length: int, limit: int) -> bytes:
    """Read the content of a record; skips it if it has more than `limit` bytes.

    Raises:
        _LeftOut: the file ends before.
    """
    size, kept = 0, list[bytes]()
    while size < length and (block := stream.read(min(BLOCK_BYTES, length - size))):
        size += len(block)
        if length <= limit:
            kept.append(block)
    if size < length:
        raise _LeftOut("truncated file", f"the file ends after {size:,} of its Content-Length of {length:,} bytes")
    return b"".join(kept)


# --- text ------------------------------------------------------------------------------------------------------------


def _text_of(record: _Record, limit: int, path: str) -> str | bytes | None:
    """The text of a record, as UTF-8 if it is bytes; None if records of its type hold no text.

    Raises:
        _LeftOut: the record is damaged, or has more than `limit` bytes.
    """
    if record.problem:
        raise record.problem
    record_type = record.headers.get_header("WARC-Type", "").lower()
    if record_type not in ("conversion", "response"):
        return None
    if record.length > limit:
        raise _LeftOut("long record", f"{record.length:,} bytes, more than corpus.max_line_bytes = {limit:,}")
    text = marked(record.content) if record_type == "conversion" else _text_of_response(record, limit, path)
    if isinstance(text, BinaryValue):
        raise _LeftOut("not UTF-8", f"{len(text):,} bytes that are binary or have another encoding")
    return text


def _text_of_response(record: _Record, limit: int, path: str) -> str | bytes | None:
    from warcio.statusandheaders import StatusAndHeadersParser

    stream = io.BytesIO(record.content)
    try:
        http = StatusAndHeadersParser([], verify=False).parse(stream)
    except EOFError:  # it has no content
        return None
    content_type = http.get_header("Content-Type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if not http.protocol.startswith("HTTP/") or http.get_statuscode() != "200":
        return None
    if media_type != "text/plain" and media_type not in _HTML_TYPES:
        return None
    try:
        body = decoded_body(stream.read(), http.headers, limit)
    except CodingProblem as problem:
        raise _LeftOut(problem.kind, problem.detail) from problem
    charset = re.search(r"charset\s*=\s*[\"']?([\w.:-]+)", content_type, re.IGNORECASE)
    if media_type in _HTML_TYPES:
        return _text_of_html(body, charset and charset[1], path)
    try:
        return _checked(body.decode(charset[1]), body) if charset and _is_charset(charset[1]) else marked(body)
    except ValueError:  # it has another charset
        return marked(body)


def _is_charset(name: str) -> bool:
    """Whether Python has a charset, and not only an escape of other text with this name."""
    try:
        return codecs.lookup(name).name.replace("_", "-") not in _ESCAPES
    except (LookupError, ValueError):
        return False


def _checked(text: str, body: bytes) -> str | bytes:
    """The text; the body as `BinaryValue` if it is not text. Most charsets have a character for every byte."""
    return BinaryValue(body) if is_noise(text) else text


def _text_of_html(body: bytes, charset: str | None, path: str) -> str | bytes:
    """The main text of an HTML page; the body as `BinaryValue` if it is not text.

    Raises:
        _LeftOut: its tags are nested too deeply.
    """
    try:
        import resiliparse.extract.html2text  # noqa: F401 (`main_text` needs it)
        from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5
    except ImportError as error:
        raise InputError(
            f"{path} holds HTML pages, and extracting their text needs the package resiliparse: pip install 'retro[html]'. "
            "Or name the WET files (.wet, .wet.gz) of the crawl, which hold extracted text."
        ) from error
    encoding = map_encoding_to_html5(charset) if charset else detect_encoding(body, from_html_meta=True)
    page = _checked(bytes_to_str(body, encoding or "utf-8", errors="replace"), body)
    try:
        return main_text(page) if isinstance(page, str) else page
    except TooNested as error:
        raise _LeftOut("nested page", str(error)) from error
