"""Codings of HTTP bodies are undone in reverse order, and what cannot be undone is reported, never indexed."""

import gzip
import random
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from indexing.corpus.content_codings import CodingProblem, decoded_body
from indexing.corpus.documents import CorpusSettings
from indexing.corpus.scan import scan_file
from tests.indexing.corpus.reading import only_file, read
from tests.indexing.corpus.test_web_archives import PAGE, PAGE_TEXT, response

brotli = pytest.importorskip("brotli")
LIMIT = 10**6


def chunked(body: bytes, size: int = 7) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%X;name=value\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nTrailer: x\r\n\r\n"


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress, "x-gzip": gzip.compress, "GZip": gzip.compress, "deflate": zlib.compress, "Deflate": raw_deflate,
    "br": brotli.compress, "BR": brotli.compress, "zstd": zstandard.compress, "identity": bytes, "": bytes,
}  # fmt: skip


@pytest.mark.parametrize("transfer", ["", "chunked", "Chunked", "gzip, chunked"])
@pytest.mark.parametrize("names", [*([name] for name in ENCODERS), ["gzip", "gzip"], ["gzip", "identity"], ["br", "zstd", "deflate"]])  # fmt: skip
def test_codings_of_any_case_are_undone_in_reverse_order(names: list[str], transfer: str) -> None:
    body = PAGE.encode()
    for name in names:
        body = ENCODERS[name](body)
    body = gzip.compress(body) if "gzip" in transfer else body
    body = chunked(body) if transfer else body
    headers = [("content-ENCODING", ", ".join(names)), ("Transfer-Encoding", transfer), ("Via", "gzip")]
    assert decoded_body(body, headers, LIMIT) == PAGE.encode()
    split = [*(("Content-Encoding", name) for name in names), headers[1]]
    assert decoded_body(body, split, LIMIT) == PAGE.encode()


@pytest.mark.parametrize("name", ["gzip", "deflate", "br", "zstd", "chunked", "compress", "none", "utf-8"])
@pytest.mark.parametrize("body", [b"", b"A body that the crawler stored without its coding. " * 20])
def test_text_that_was_stored_without_its_coding_is_kept(name: str, body: bytes) -> None:
    assert decoded_body(body, [("Content-Encoding", name)], LIMIT) == body


NOISE = random.Random(0).randbytes(4000)


@pytest.mark.parametrize(
    ("name", "body", "kind"),
    [
        *((name, NOISE, "broken record") for name in ("gzip", "deflate", "br", "zstd", "chunked")),
        *((name, ENCODERS[name](NOISE)[:-20], "broken record") for name in ("gzip", "deflate", "br", "zstd")),
        ("br", brotli.compress(b"some text " * 9, quality=0)[:-1], "broken record"),
        ("compress", NOISE, "unknown coding"),
        ("dcb", NOISE, "unknown coding"),
        ("chunked", chunked(b"text that is cut somewhere")[:40], "broken record"),
        ("chunked", chunked(b"text that is cut somewhere")[:-16], "broken record"),
        ("chunked", b"5\r\nhello\r\nno size\r\n", "broken record"),
        ("chunked", b"ffffffffffff\r\nhello", "broken record"),
        *((name, ENCODERS[name](b"x" * (LIMIT + 1)), "long record") for name in ("gzip", "deflate", "Deflate", "br", "zstd")),
    ],
)  # fmt: skip
def test_what_cannot_be_undone_is_a_problem(name: str, body: bytes, kind: str) -> None:
    with pytest.raises(CodingProblem) as caught:
        decoded_body(body, [("Content-Encoding", name)], LIMIT)
    assert caught.value.kind == kind


@pytest.mark.parametrize("name", ["gzip", "deflate", "br", "zstd"])
def test_memory_of_a_body_that_expands_is_bounded_by_the_limit(name: str) -> None:
    body = brotli.compress(b"x" * 5 * 10**7, quality=1) if name == "br" else ENCODERS[name](b"x" * 5 * 10**7)
    tracemalloc.start()
    with pytest.raises(CodingProblem, match="max_line_bytes"):
        decoded_body(body, [("Content-Encoding", name)], LIMIT)
    assert tracemalloc.get_traced_memory()[1] < 8 * LIMIT
    tracemalloc.stop()


@pytest.mark.parametrize("content_type", ["text/html; charset=utf-8", "text/html", "text/plain", "text/plain; charset=latin-1"])  # fmt: skip
def test_without_brotli_a_page_is_reported_with_the_command_and_the_others_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content_type: str
) -> None:
    monkeypatch.setitem(sys.modules, "brotli", None)
    coded = response(brotli.compress(PAGE.encode()), "http://a", content_type, **{"Content-Encoding": "br"})
    (tmp_path / "d.warc").write_bytes(coded + response(PAGE.encode(), "http://b", "text/html; charset=utf-8"))
    documents, problems = read(tmp_path / "d.warc")
    assert [(each.id, each.text) for each in documents] == [("http://b", PAGE_TEXT)]
    assert [(each.kind, each.line) for each in problems] == [("unknown coding", 1)]
    assert "pip install 'brotli>=1.2'" in problems[0].detail


CHARSETS = ("", "utf-8", "latin-1", "windows-1252", "gbk", "shift_jis", "utf-16", "koi8-r", "big5", "no-such", "idna", "punycode")  # fmt: skip


@pytest.mark.parametrize("media_type", ["text/html", "text/plain"])
@pytest.mark.parametrize("charset", CHARSETS)
@pytest.mark.parametrize("coding", ["compress", ""])
def test_bytes_that_are_not_text_are_no_page_in_any_charset(
    tmp_path: Path, media_type: str, charset: str, coding: str
) -> None:
    content_type = f"{media_type}; charset={charset}" if charset else media_type
    (tmp_path / "d.warc").write_bytes(response(NOISE, "http://a", content_type, **{"Content-Encoding": coding}))
    documents, problems = read(tmp_path / "d.warc")
    assert (documents, len(problems)) == ([], 1)


def test_no_response_ends_the_scan(tmp_path: Path) -> None:
    """Random damage of headers and bodies: the last page is always read."""
    rng, records = random.Random(1), list[bytes]()
    for number in range(400):
        name = rng.choice(list(ENCODERS))
        body = bytearray(ENCODERS[name](PAGE.encode()))
        for _ in range(rng.randrange(3)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        kind = f"text/{rng.choice(('html', 'plain'))}; charset={rng.choice(CHARSETS)}"
        header = bytearray(
            response(b"", f"http://{number}", kind, **{"Content-Encoding": name}).partition(b"HTTP")[2][:-4]
        )
        for _ in range(rng.randrange(2)):
            header[rng.randrange(len(header))] = rng.randrange(256)
        content = b"HTTP" + bytes(header) + bytes(body)
        records.append(
            b"WARC/1.0\r\nWARC-Type: response\r\nContent-Length: %d\r\n\r\n%b\r\n\r\n" % (len(content), content)
        )
    (tmp_path / "d.warc").write_bytes(b"".join(records) + response(PAGE.encode(), "http://last", "text/html"))
    seen = list[str]()
    scan_file(only_file(tmp_path / "d.warc"), CorpusSettings(), lambda document: seen.append(document.id))
    assert seen[-1] == "http://last"
    assert len(seen) > 100
