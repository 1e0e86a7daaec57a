"""Undo the codings of an HTTP body, last one first, in bounded memory.

    Content-Encoding: gzip, br   Transfer-Encoding: chunked      applied in this order
    body ──chunked──► ──br──► ──gzip──► contents

Names have any case, and `x-gzip` is `gzip`. Many crawlers store a body without its codings, and keep the headers: a
body that cannot be decoded but is text stays as it is.
"""

import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterable

from indexing.corpus.documents import BinaryValue, ProblemKind, marked
from indexing.corpus.streams import DAMAGED, damage_of
from indexing.corpus.text_bytes import BLOCK_BYTES
from indexing.corpus.zstd_frames import ZstdReader

_CHUNK_SIZE = re.compile(rb"[ \t]*([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n]*)?\r?\n")
_LINE_END = re.compile(rb"\r?\n")


class CodingProblem(Exception):
    """A body cannot be decoded: kind and detail of the problem."""

    def __init__(self, kind: ProblemKind, detail: str) -> None:
        self.kind, self.detail = kind, detail


class _NotCoded(Exception):
    """A body does not have the coding that its headers name, or a coding is not known."""


def decoded_body(body: bytes, headers: Iterable[tuple[str, str]], limit: int) -> bytes:
    """Undo the codings of a body.

    Args:
        body: as stored.
        headers: names and values of the HTTP headers. One name may occur several times.
        limit: most bytes of the contents.

    Raises:
        CodingProblem: a coding is not known, its package is missing, the body is damaged, or its contents are longer
            than the limit.
    """
    values: dict[str, list[str]] = {"content-encoding": [], "transfer-encoding": []}
    for name, value in headers:
        values.get(name.strip().lower(), []).extend(value.split(","))
    names = [_normal(name) for named in values.values() for name in named]
    for name in reversed(names):
        if name not in ("", "identity"):
            body = _undone(name, body, limit)
    return body


def _normal(name: str) -> str:
    return name.partition(";")[0].strip().strip("\"'").lower().removeprefix("x-")


def _undone(name: str, body: bytes, limit: int) -> bytes:
    """A body without one coding."""
    try:
        if name not in _DECODERS:
            raise _NotCoded(f"accepted: {', '.join(_DECODERS)}")
        return _DECODERS[name](body, limit)
    except _NotCoded as error:
        if not body or not isinstance(marked(body), BinaryValue):
            return body
        kind: ProblemKind = "broken record" if name in _DECODERS else "unknown coding"
        raise CodingProblem(kind, f"its coding {name[:40]!r} cannot be undone: {error}") from error


def _up_to(stream: io.BufferedIOBase | io.RawIOBase, limit: int) -> bytes:
    """Read a stream of at most `limit` bytes. Bytes of another format after the compressed ones are left out, as
    browsers do."""
    contents = bytearray()
    try:
        while block := stream.read(BLOCK_BYTES):
            contents += block
            _check_limit(len(contents), limit)
    except DAMAGED as error:
        if not contents:
            raise _NotCoded(str(error)) from error
        if damage_of(error) != "foreign bytes":
            raise _damaged(str(error)) from error
    return bytes(contents)


def _damaged(problem: str) -> CodingProblem:
    return CodingProblem("broken record", f"its compressed content is damaged: {problem}")


def _check_limit(size: int, limit: int) -> None:
    if size > limit:
        raise CodingProblem("long record", f"decompressed more bytes than corpus.max_line_bytes = {limit:,}")


def _gunzip(body: bytes, limit: int) -> bytes:
    return _up_to(gzip.GzipFile(fileobj=io.BytesIO(body)), limit)


def _unzstd(body: bytes, limit: int) -> bytes:
    return _up_to(ZstdReader(io.BytesIO(body)), limit)


def _inflate(body: bytes, limit: int) -> bytes:
    """`deflate` is the format of zlib. Some servers leave its header out."""
    problem = ""
    for window_bits in (zlib.MAX_WBITS, -zlib.MAX_WBITS):
        decompressor = zlib.decompressobj(window_bits)
        try:
            contents = decompressor.decompress(body, limit + 1)
        except zlib.error as error:
            problem = str(error)
            continue
        _check_limit(len(contents), limit)
        if decompressor.eof:
            return contents
        problem = "it ends inside the compressed content"
        if contents:
            raise _damaged(problem)
    raise _NotCoded(problem)


def _unbrotli(body: bytes, limit: int) -> bytes:
    try:
        import brotli

        decompressor = brotli.Decompressor()
        bounded = {"output_buffer_limit": limit + 1}
        decompressor.process(b"", **bounded)
    except (ImportError, TypeError) as error:  # before 1.2, memory was not bounded
        advice = "pip install 'brotli>=1.2'"
        raise CodingProblem("unknown coding", f"its coding 'br' needs the package brotli: {advice}") from error
    contents, problem = bytearray(), "it ends inside the compressed content"
    try:
        block = decompressor.process(body, **bounded)
        while block:
            contents += block
            _check_limit(len(contents), limit)
            block = decompressor.process(b"", **bounded) if not decompressor.is_finished() else b""
        if decompressor.is_finished():
            return bytes(contents)
    except brotli.error as error:
        problem = str(error)
    if contents:
        raise _damaged(problem)
    raise _NotCoded(problem)


def _join_chunks(body: bytes, limit: int) -> bytes:
    """Join the chunks of a body: each has a line with its size before it, and the last has none."""
    contents, at = bytearray(), 0
    while match := _CHUNK_SIZE.match(body, at):
        size, begin = int(match[1], 16), match.end()
        if not size:
            return bytes(contents)
        contents += body[begin : begin + size]
        end = _LINE_END.match(body, begin + size) if begin + size <= len(body) else None
        if end is None:
            break
        at = end.end()
    if not at and not match:
        raise _NotCoded("it does not begin with the size of a chunk")
    raise CodingProblem("broken record", f"its chunks end at byte {at:,}, before the last one")


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gunzip, "deflate": _inflate, "br": _unbrotli, "zstd": _unzstd, "chunked": _join_chunks,
}  # fmt: skip
