"""WARC and WET: texts and pages of records, and damaged records that do not spoil the ones after them."""

import gzip
import random
import sys
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from indexing.corpus.documents import CorpusSettings
from indexing.corpus.readers import read_documents
from indexing.corpus.scan import read_slice, scan_file, strict_problem
from indexing.store.errors import InputError
from tests.indexing.corpus.reading import only_file, read

PAGE = "<html><body><nav><a href=/>Home</a></nav><article><h1>Title</h1><p>A paragraph of the café.</p></article></body></html>"
PAGE_TEXT = "Title\n\nA paragraph of the café."


def record(content: bytes, uri: str = "", kind: str = "conversion", **headers: str) -> bytes:
    """A record as Common Crawl writes it. Keywords replace headers: `length` is Content-Length."""
    lines = [
        headers.get("version", "WARC/1.0"), f"WARC-Type: {kind}", "WARC-Date: 2026-01-02T03:04:05Z", f"WARC-Record-ID: <urn:uuid:{uri}>",
        f"Content-Length: {headers.get('length', len(content))}", "Content-Type: text/plain",
    ]  # fmt: skip
    lines += [f"WARC-Target-URI: {uri}"] if uri else []
    return "\r\n".join([*lines, "", ""]).encode() + content + b"\r\n\r\n"


def response(content: bytes, uri: str, content_type: str, status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", *(f"{name}: {headers[name]}" for name in headers)]
    return record("\r\n".join([*lines, "", ""]).encode() + content, uri, "response")


INFO = record(b"Software-Info: a crawler", kind="warcinfo")
A, B, C = (record(f"Text of {name}.\r\n第\n".encode(), f"http://{name}") for name in "abc")
ABC = {f"http://{name}": f"Text of {name}.\r\n第\n" for name in "abc"}


@pytest.mark.parametrize("name", ["d.wet", "d.warc.wet.gz", "d.wet.gz", "d.warc", "d.warc.gz", "d.WARC.WET.ZST"])
def test_a_conversion_record_is_a_document_with_unchanged_text(tmp_path: Path, name: str) -> None:
    suffix = name.lower().rpartition(".")[2]
    pack = {"gz": gzip.compress, "zst": zstandard.compress}.get(suffix, bytes)
    (tmp_path / name).write_bytes(b"".join(pack(each) for each in (INFO, A, B, C)))
    documents, problems = read(tmp_path / name, metadata_keys=("url", "WARC-Date"))
    assert {each.id: each.text for each in documents} == ABC
    assert [each.record for each in documents] == [1, 2, 3]
    assert documents[0].metadata == {"url": "http://a", "WARC-Date": "2026-01-02T03:04:05Z"}
    assert problems == []


def test_keys_of_other_formats_do_not_matter_and_a_record_without_url_keeps_its_id(tmp_path: Path) -> None:
    brackets = record(b"In brackets", "<http://b>")
    (tmp_path / "d.wet").write_bytes(record(b"No URL").replace(b"<urn:uuid:>", b"<urn:uuid:7>") + brackets)
    documents, _ = read(tmp_path / "d.wet", text_key="body", id_key="meta.key")
    assert [(each.id, each.text, each.metadata) for each in documents] == [
        ("urn:uuid:7", "No URL", {}),
        ("http://b", "In brackets", {"url": "http://b"}),
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_joined_slices_equal_the_whole_file(tmp_path: Path, packed: bool) -> None:
    records = [INFO, *(record(f"text {number}".encode(), f"http://{number}") for number in range(40)), INFO]
    path = tmp_path / ("d.wet.gz" if packed else "d.wet")
    path.write_bytes(b"".join(gzip.compress(each) if packed else each for each in records))
    settings = CorpusSettings(shard_bytes=30)
    scan, whole = scan_file(only_file(path), settings), read(path)[0]
    assert len(scan.slices) > 5
    assert [each for part in scan.slices for each in read_slice(part, settings, strict_problem)] == whole
    part = read_documents(only_file(path), settings, start=3, stop=7, on_problem=strict_problem)
    assert list(part) == whole[2:6]


# --- pages


def test_pages_are_extracted_and_plain_text_is_unchanged(tmp_path: Path) -> None:
    chunked = b"6\r\nchunk \r\n8\r\nby chunk\r\n0\r\n\r\n"
    records = [
        record(b"GET / HTTP/1.1\r\n\r\n", "http://a", "request"),
        response(PAGE.encode(), "http://a", "text/html; charset=UTF-8"),
        response(PAGE.encode("latin-1"), "http://b", "Text/HTML;charset=iso-8859-1"),
        response(PAGE.replace("<body>", '<meta charset="gbk"><body>').replace("café", "检索模型").encode("gbk"), "http://c", "text/html"),
        response("As it is,\r\n café".encode(), "http://d", "text/plain"),
        response("As it is, café".encode("latin-1"), "http://e", 'text/plain; charset="ISO-8859-1"'),
        response(gzip.compress(b"packed"), "http://f", "text/plain", **{"Content-Encoding": "gzip"}),
        response(chunked, "http://g", "text/plain", **{"Transfer-Encoding": "chunked"}),
    ]  # fmt: skip
    (tmp_path / "d.warc").write_bytes(b"".join(records))
    documents, problems = read(tmp_path / "d.warc")
    assert [(each.id, each.text) for each in documents] == [
        ("http://a", PAGE_TEXT), ("http://b", PAGE_TEXT), ("http://c", PAGE_TEXT.replace("café", "检索模型")),
        ("http://d", "As it is,\r\n café"), ("http://e", "As it is, café"), ("http://f", "packed"), ("http://g", "chunk by chunk"),
    ]  # fmt: skip
    assert problems == []


def test_records_without_the_text_of_a_page_are_skipped(tmp_path: Path) -> None:
    records = [
        response(b"\x89PNG", "http://a", "image/png"),
        response(b"not here", "http://b", "text/plain", status="404 Not Found"),
        record(b"", "http://c", "response"),
        record(b"20260102 example.org A 1.2.3.4", "dns:example.org", "response"),
        record(b"fetchTimeMs: 3", "http://d", "metadata"),
        record(b"HTTP/1.1 200 OK\r\n\r\nno type", "http://e", "response"),
    ]
    (tmp_path / "d.warc").write_bytes(b"".join(records))
    assert read(tmp_path / "d.warc") == ([], [])


def test_bytes_that_are_not_text_are_reported(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(300)
    (tmp_path / "d.warc").write_bytes(record(noise, "http://a") + response(noise, "http://b", "text/plain") + A)
    documents, problems = read(tmp_path / "d.warc")
    assert [each.id for each in documents] == ["http://a"]
    assert [(each.kind, each.line) for each in problems] == [("not UTF-8", 1), ("not UTF-8", 2)]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("warcio.statusandheaders", r"need the package warcio: pip install 'retro\[warc\]'"),
        ("resiliparse.extract.html2text", r"d\.warc holds HTML pages.*pip install 'retro\[html\]'.*WET files"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path: Path, module: str, message: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "d.warc").write_bytes(response(PAGE.encode(), "http://a", "text/html"))
    with pytest.raises(InputError, match=message):
        read(tmp_path / "d.warc")


# --- damage


@pytest.mark.parametrize(
    ("damaged", "read_ids", "kind", "line"),
    [
        (A + record(b"A longer text\nof two lines", "http://b", length="4") + C, "ac", "broken record", 2),
        (A + record(b"A longer text\n\nof two lines", "http://b", length="13") + C, "ac", "broken record", 2),
        (A + record(b"Short", "http://b", length="60") + INFO + C, "ac", "broken record", 2),
        (A + record(b"Short", "http://b", length="60000") + C, "a", "truncated file", 2),
        (A + record(b"Short", "http://b", length="-5") + C, "ac", "broken record", 2),
        (A + record(b"Short", "http://b", length="five") + C, "ac", "broken record", 2),
        (A + record(b"Short", "http://b", length="9" * 5000) + C, "ac", "broken record", 2),
        (A + B.replace(b"Content-Length", b"Length") + C, "ac", "broken record", 2),
        (A + record(b"Short", "http://b", version="WARC/9.9") + C, "ac", "broken record", 2),
        (A + B[:60], "a", "broken record", 2),
        (A + B[:-8], "a", "truncated file", 2),
        (A + record(b"Mostly text \xff", "http://b"), "ab", "undecodable bytes", 2),
        (b"GIF89a" + A, "", "wrong suffix", 1),
        (gzip.compress(A) + gzip.compress(B)[:-30], "a", "truncated file", 2),
        (gzip.compress(A) + gzip.compress(B) + b"garbage", "ab", "foreign bytes", 3),
    ],
)
def test_a_damaged_record_is_reported_and_the_others_are_read(
    tmp_path: Path, damaged: bytes, read_ids: str, kind: str, line: int
) -> None:
    path = tmp_path / ("d.wet.gz" if damaged.startswith(b"\x1f\x8b") else "d.wet")
    path.write_bytes(damaged)
    documents, problems = read(path)
    assert [each.id for each in documents] == [f"http://{name}" for name in read_ids]
    assert [(each.kind, each.line) for each in problems][:1] == [(kind, line)]
    with pytest.raises(InputError, match=rf"{path.name}:{line}: {kind}"):
        scan_file(only_file(path), CorpusSettings(strict=True))


@pytest.mark.parametrize("data", [b"", b"\r\n\r\n"])
def test_an_empty_file_has_no_document(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "d.wet").write_bytes(data)
    assert read(tmp_path / "d.wet") == ([], [])


def test_a_record_above_the_limit_is_left_out_and_the_next_one_is_read(tmp_path: Path) -> None:
    bomb = response(gzip.compress(b"x" * 5000), "http://x", "text/plain", **{"Content-Encoding": "gzip"})
    (tmp_path / "d.wet").write_bytes(record(b"x" * 5000, "http://x") + A + bomb)
    documents, problems = read(tmp_path / "d.wet", max_line_bytes=1000)
    assert [each.id for each in documents] == ["http://a"]
    assert [(each.kind, each.line) for each in problems] == [("long record", 1), ("long record", 3)]


def test_memory_does_not_grow_with_a_record_or_a_header(tmp_path: Path) -> None:
    most = list[int]()
    for size in (1, 20):
        long_header = b"WARC/1.0\r\nx: " + b"y" * 2 * 10**6 * size + b"\r\n"
        (tmp_path / "d.wet.gz").write_bytes(gzip.compress(record(b"x" * 10**6 * size, "http://x") + long_header + A, 1))
        tracemalloc.start()
        documents, problems = read(tmp_path / "d.wet.gz", max_line_bytes=10_000)
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert [each.id for each in documents] == ["http://a"] * len(documents)
        assert [(each.kind, each.line) for each in problems] == [("long record", 1), ("broken record", 2)]
    assert most[1] < most[0] + 2**21  # two blocks
