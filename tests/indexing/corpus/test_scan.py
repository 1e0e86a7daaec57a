"""Files are found once, every format gives the same documents, and every problem is reported."""

import dataclasses
import gzip
import hashlib
import json
import os
import zipfile

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from indexing.corpus.documents import CorpusFile, CorpusSettings, Document, opened
from indexing.corpus.readers import read_documents
from indexing.corpus.scan import (
    list_files,
    read_slice,
    scan_file,
    strict_problem,
)
from indexing.store.errors import InputError
from tests.indexing.corpus.reading import compress, kinds, lines, only_file, read, write

SETTINGS = CorpusSettings()
ROWS = [
    {"id": "a", "text": "First.\r\n\tIndented  twice.", "title": "A", "url": "http://a"},
    {"id": 7, "text": "第二篇文章。\n", "source": "book"},
    {"text": " leading and trailing ", "title": None},
]
LONE_SURROGATE = "\ud800"


# --- settings and files


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text_key", ""),
        ("id_key", ""),
        ("paths", ("",)),
        ("shard_bytes", -1),
        ("split", (0, 1, 1)),
        ("split", (9, -1, 0)),
        ("split", (98, 2)),
        ("boundary_ids", (1, -1)),
        *(("metadata_keys", ("title", name)) for name in ("id", "file", "bytes", "tokens", "chunks", "title")),
    ],
)
def test_invalid_setting_is_refused_with_its_key(field, value):
    with pytest.raises(InputError, match=field):
        CorpusSettings(**{field: value})


def test_hidden_and_unknown_files_in_folders_are_skipped(tmp_path):
    skipped = (".git/c.txt", "a/.hidden.txt", "a/photo.png", "no.json")
    for name in ("b.md", "a/z.py", "a/y.jsonl.zst", "a/x.parquet", *skipped):
        write(tmp_path / name, b"x")
    files = list_files(CorpusSettings(paths=(str(tmp_path),)))
    assert [file.name for file in files] == ["a/x.parquet", "a/y.jsonl.zst", "a/z.py", "b.md"]
    assert dataclasses.replace(files[3], modified="") == CorpusFile(str(tmp_path / "b.md"), "b.md", 1)


def test_files_are_listed_once_and_in_the_same_order_for_every_pattern(tmp_path):
    for name in ("data/b.txt", "data/a.txt", "data/deep/er/c.txt"):
        write(tmp_path / name, name.encode())
    folder, recursive, flat = str(tmp_path / "data"), str(tmp_path / "data/**/*.txt"), str(tmp_path / "data/*.txt")
    expected = list_files(CorpusSettings(paths=(folder,)))
    assert [file.name for file in expected] == ["a.txt", "b.txt", "deep/er/c.txt"]
    assert list_files(CorpusSettings(paths=(recursive,))) == expected
    assert list_files(CorpusSettings(paths=(flat, folder + "/", recursive))) == expected
    assert [file.name for file in list_files(CorpusSettings(paths=(flat,)))] == ["a.txt", "b.txt"]


def test_file_with_several_paths_is_listed_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "sub/a.txt", b"text")
    (tmp_path / "link.txt").symlink_to(path)
    given = ("sub/a.txt", "./sub/../sub/a.txt", str(path), path.as_uri(), "link.txt", "sub", "*/*.txt", "**/a.txt")
    for one in given:
        assert [file.path for file in list_files(CorpusSettings(paths=(str(path), one)))] == [str(path)]
    assert [file.name for file in list_files(CorpusSettings(paths=given))] == ["a.txt"]


@pytest.mark.parametrize("given", ["data", "data/**/*.txt", "data/**"])
def test_links_are_followed_and_cycles_end(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    for name in ("data/z/a.txt", "data/b.txt", "elsewhere/deep/c.txt"):
        write(tmp_path / name, name.encode())
    links = {"a": "z", "far": "../elsewhere", "up": ".", "z/up": "../..", "d.txt": "../elsewhere/d.txt"}
    for link, target in links.items():
        (tmp_path / "data" / link).symlink_to(target)
    write(tmp_path / "elsewhere/d.txt", b"d")
    names = [file.name for file in list_files(CorpusSettings(paths=(given,)))]
    # If several paths lead to a file, the path without links counts.
    assert names == ["b.txt", "d.txt", "far/deep/c.txt", "z/a.txt"]
    assert [file.name for file in list_files(CorpusSettings(paths=("data/*/*.txt",)))] == ["far/d.txt", "z/a.txt"]


@pytest.mark.parametrize("given", ["data", "data/*", "data/**/*.txt"])
def test_broken_links_and_named_pipes_are_reported_and_do_not_stop_the_scan(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data/a.txt", b"text")
    (tmp_path / "data/loop.txt").symlink_to("loop.txt")
    (tmp_path / "data/ring").symlink_to("ring")
    (tmp_path / "data/gone.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "data/pipe.txt")
    files = list_files(CorpusSettings(paths=(given,)))
    problems = {file.name: scan_file(file, SETTINGS).examples for file in files}
    assert {name: [problem.kind for problem in found] for name, found in problems.items()} == {
        "a.txt": [],
        "gone.txt": ["unreadable file"],
        "loop.txt": ["unreadable file"],
        "pipe.txt": ["unreadable file"],
    }
    assert "not a regular file" in problems["pipe.txt"][0].detail


@pytest.mark.parametrize("given", ["a::b.txt", "x::y", "x::y/*.txt", "*::*.txt", "x::y/**/c::d.txt"])
def test_local_name_with_two_colons_is_read_as_a_path(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a::b.txt", b"text")
    write(tmp_path / "x::y/c::d.txt", b"text")
    assert [document.text for document in read(given)[0]] == ["text"]


def test_file_names_with_glob_characters_or_invalid_unicode_are_read(tmp_path):
    path = write(tmp_path / "[draft] what?.txt", b"text")
    assert [document.id for document in read(path)[0]] == ["[draft] what?.txt"]
    write(tmp_path / "odd" / b"caf\xe9.txt".decode(errors="surrogateescape"), b"text")
    file = only_file(tmp_path / "odd")
    assert file.name == "caf?.txt"
    assert scan_file(file, SETTINGS).documents == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [("missing", "does not exist"), ("*.txt", "no file of a known kind"), ("photo.png", r"Accepted suffixes: \.jsonl"),
     ("empty", "no file of a known kind"), ("nosuch://x", "cannot be opened")],
)  # fmt: skip
def test_path_without_documents_is_refused(tmp_path, path, message):
    write(tmp_path / "photo.png", b"x")
    write(tmp_path / "empty/photo.png", b"x")
    with pytest.raises(InputError, match=message):
        list_files(CorpusSettings(paths=(path if "://" in path else str(tmp_path / path),)))
    with pytest.raises(InputError, match=r"corpus\.paths is empty"):
        list_files(CorpusSettings())


# --- formats


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".md", ".py", ".TXT"])
def test_text_file_is_one_document_with_unchanged_text(tmp_path, kind, suffix):
    text = "\r\n a\tb \r\rc\u2028d\x00\x1c第\r\n\n"
    write(tmp_path / f"in/it{kind}{suffix}", compress(text.encode(), suffix))
    documents, problems = read(tmp_path / "in")
    assert documents == [Document(f"it{kind}{suffix}", text, {"source": f"it{kind}{suffix}"}, 0)]
    assert not problems


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".jsonl", ".ndjson"])
def test_json_lines_give_one_document_per_line(tmp_path, kind, suffix):
    path = write(tmp_path / f"d{kind}{suffix}", compress(lines(*ROWS), suffix))
    documents, problems = read(path)
    assert [document.text for document in documents] == [row["text"] for row in ROWS]
    assert [document.id for document in documents] == ["a", "7", f"d{kind}{suffix}:3"]
    assert [document.metadata for document in documents] == [{"title": "A", "url": "http://a"}, {"source": "book"}, {}]
    assert not problems


@pytest.mark.parametrize("text_type", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_gives_one_document_per_row_across_row_groups(tmp_path, text_type):
    columns = {"id": pa.array(["a", "7", None]), "meta": [{"url": "u", "n": 1}, None, {"url": None, "n": 2}]}
    texts = pa.array([str(row["text"]) for row in ROWS], pa.string()).cast(text_type)
    pq.write_table(pa.table({"text": texts, **columns}), tmp_path / "d.parquet", row_group_size=2)
    keys = ("meta.url", "meta.n", "meta", "none", "id.none")
    documents, problems = read(tmp_path / "d.parquet", metadata_keys=keys)
    assert [document.text for document in documents] == [row["text"] for row in ROWS]
    assert [document.id for document in documents] == ["a", "7", "d.parquet:3"]
    assert [document.metadata for document in documents] == [
        {"meta.url": "u", "meta.n": "1", "meta": '{"url": "u", "n": 1}'},
        {},
        {"meta.n": "2", "meta": '{"url": null, "n": 2}'},
    ]
    assert not problems


def test_key_with_dots_matches_that_exact_key_before_nested_objects(tmp_path):
    path = write(
        tmp_path / "d.jsonl",
        lines({"doc": {"body": "B", "n": 3}, "meta": {"url": "x", "tags": ["t"]}, "meta.url": "y"}),
    )
    keys = {"text_key": "doc.body", "id_key": "doc.n", "metadata_keys": ("meta.url", "meta.tags", "meta.a.b")}
    assert read(path, **keys) == ([Document("3", "B", {"meta.url": "y", "meta.tags": '["t"]'}, 0)], [])


def test_any_fsspec_url_can_be_read(memory_url):
    with fsspec.open(f"{memory_url}/sub/d.jsonl.gz", "wb") as file:
        file.write(gzip.compress(lines(*ROWS)))
    with fsspec.open(f"{memory_url}/e.parquet", "wb") as file:
        pq.write_table(pa.table({"text": ["row"]}), file)
    with fsspec.open(f"{memory_url}/all.zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("in/z.txt", "zipped")
    files = list_files(CorpusSettings(paths=(memory_url, f"{memory_url}/**/*.gz")))
    assert [file.name for file in files] == ["e.parquet", "sub/d.jsonl.gz"]
    assert sum(scan_file(file, SETTINGS).documents for file in files) == 4
    assert [document.text for document in read(f"zip://in/*.txt::{memory_url}/all.zip")[0]] == ["zipped"]


def test_zstd_file_of_several_frames_is_read_to_its_end(tmp_path):
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"
    data = b"".join(zstandard.compress(lines({"text": f"text {i}"})) + skippable for i in range(2000))
    documents, problems = read(write(tmp_path / "d.jsonl.zst", data))
    assert [document.text for document in documents] == [f"text {i}" for i in range(2000)]
    assert not problems


def test_byte_order_mark_is_not_part_of_the_text(tmp_path):
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello"))[0][0].text == "hello"
    assert read(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "hello"}'))[0][0].text == "hello"


# --- problems


def test_problems_of_json_lines_are_reported_with_their_line(tmp_path):
    data = lines(
        {"text": "good"}, b"", b"  ", b"{broken", [1], {"body": "x"}, {"text": 5}, {"text": " \n"}, {"text": None},
        b'{"text": "bad \xff\xfe bytes"}', {"text": f"x{LONE_SURROGATE}y"}, b"[" * 100_000,
        b'{"text":' + b"1" * 5000 + b"}", {"text": "last \ufffd"},
    )  # fmt: skip
    documents, problems = read(write(tmp_path / "d.jsonl", data))
    assert [document.text for document in documents] == ["good", "bad \ufffd\ufffd bytes", "x\ufffdy", "last \ufffd"]
    assert [document.id for document in documents] == ["d.jsonl:1", "d.jsonl:10", "d.jsonl:11", "d.jsonl:14"]
    assert kinds(problems) == [
        ("broken JSON", 4), ("not an object", 5), ("missing text", 6), ("missing text", 7), ("empty document", 8),
        ("missing text", 9), ("undecodable bytes", 10), ("lone surrogates", 11), ("broken JSON", 12),
        ("broken JSON", 13),
    ]  # fmt: skip
    assert "body" in problems[2].detail
    assert problems[6].detail.startswith("2 replaced")
    assert all(problem.file == str(tmp_path / "d.jsonl") for problem in problems)
    json.dumps([dataclasses.asdict(problem) for problem in problems], ensure_ascii=False).encode()


def test_undecodable_bytes_are_replaced_and_reported_with_their_line(tmp_path):
    documents, problems = read(write(tmp_path / "a.txt", "good \ufffd\nbad: ".encode() + b"\xff \xe4\xb8\n"))
    assert documents[0].text == "good \ufffd\nbad: \ufffd \ufffd\n"
    assert kinds(problems) == [("undecodable bytes", 2)]
    assert problems[0].detail == "2 replaced by U+FFFD, the first is 0xff"


def test_file_that_is_mostly_not_utf_8_is_left_out_and_reported(tmp_path):
    random = np.random.default_rng(0)
    for content in (
        random.bytes(20_000), random.bytes(400), "plain text in sixteen bits".encode("utf-16"), "你好，世界".encode("gbk"),
        b"\x7fELF" + random.bytes(50) + bytes(100) + b".shstrtab .text .data " * 10,
    ):  # fmt: skip
        documents, problems = read(write(tmp_path / "a.txt", content))
        assert (documents, kinds(problems)) == ([], [("not UTF-8", 1)])
    accents = "L'été dernier, à la forêt, nous avons rêvé près de la rivière."
    documents, problems = read(write(tmp_path / "a.txt", accents.encode("latin-1")))
    assert len(documents[0].text) == len(accents)
    assert kinds(problems) == [("undecodable bytes", 1)]


def test_empty_file_contains_no_document(tmp_path):
    for name, suffix in (("a.txt", ""), ("b.md.gz", ".gz"), ("c.rst.zst", ".zst")):
        documents, problems = read(write(tmp_path / name, compress(b" \n", suffix)))
        assert (documents, kinds(problems)) == ([], [("empty document", 1)])
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        assert read(write(tmp_path / name, b"")) == ([], [])


def test_problems_of_parquet_are_reported_with_their_row(tmp_path):
    texts = pa.array([b"good", b"bad \xff", None, b" "], pa.binary())
    pq.write_table(pa.table({"text": texts}), tmp_path / "d.parquet")
    documents, problems = read(tmp_path / "d.parquet")
    assert [document.text for document in documents] == ["good", "bad \ufffd"]
    assert kinds(problems) == [("undecodable bytes", 2), ("missing text", 3), ("empty document", 4)]
    pq.write_table(pa.table({"body": ["x", "y"], "text": [1, 2]}), tmp_path / "e.parquet")
    assert kinds(read(tmp_path / "e.parquet")[1]) == [("missing text", 1), ("missing text", 2)]
    assert kinds(read(tmp_path / "e.parquet", text_key="none")[1]) == [("missing text", 1), ("missing text", 2)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_truncated_file_keeps_its_readable_documents_and_is_reported(tmp_path, suffix):
    generator = np.random.default_rng(0)
    rows = [
        {"text": generator.bytes(300).hex()} for _ in range(2000)
    ]  # hard to compress, so the cut falls in the middle
    data = compress(lines(*rows), suffix)
    path = write(tmp_path / f"d.jsonl{suffix}", data[: len(data) // 2])
    documents, problems = read(path)
    assert [document.text for document in documents] == [row["text"] for row in rows[: len(documents)]]
    assert 700 < len(documents) < 1100
    assert kinds(problems) == [("truncated file", len(documents) + 1)]
    scan = scan_file(only_file(path), SETTINGS)
    assert scan.documents == len(documents)
    assert scan.problems == {"truncated file": 1}
    text = "\n".join(str(row["text"]) for row in rows)
    data = compress(text.encode(), suffix)
    documents, problems = read(write(tmp_path / f"t.txt{suffix}", data[: len(data) // 2]))
    assert text.startswith(documents[0].text)
    assert len(documents[0].text) > len(text) // 3
    assert kinds(problems) == [("truncated file", documents[0].text.count("\n") + 1)]


FOREIGN = b"\x00\xff neither packed nor text " * 10


def damaged_gzip(place: int, data: bytes) -> bytes:
    packed = bytearray(gzip.compress(data))
    packed[place] ^= 0xFF
    return bytes(packed)


def with_dictionary(data: bytes) -> bytes:
    dictionary = zstandard.train_dictionary(1000, [b"document %d of many" % number * 9 for number in range(1000)])
    return zstandard.ZstdCompressor(dict_data=dictionary).compress(data)


@pytest.mark.parametrize(
    ("name", "damage", "kind"),
    [
        ("d.jsonl.gz", lambda data: damaged_gzip(-6, data), "wrong checksum"),
        ("d.jsonl.gz", lambda data: damaged_gzip(-1, data), "wrong checksum"),
        ("d.jsonl.gz", lambda data: damaged_gzip(12, data), "damaged file"),
        ("d.jsonl.gz", lambda data: gzip.compress(data) + b"garbage", "foreign bytes"),
        ("d.jsonl.gz", lambda data: gzip.compress(data)[:-3], "truncated file"),
        ("d.jsonl.zst", with_dictionary, "missing dictionary"),
        ("d.jsonl.zst", lambda data: zstandard.ZstdCompressor().compress(data) + b"garbage", "foreign bytes"),
        ("d.jsonl.zst", lambda d: zstandard.ZstdCompressor(write_checksum=True).compress(d)[:-1] + b"!", "wrong checksum"),
        ("d.parquet", lambda data: data, "wrong suffix"),
        *((f"a{suffix}", lambda data: FOREIGN, "foreign bytes") for suffix in (".jsonl.gz", ".jsonl.zst", ".txt.gz", ".txt.zst")),
        ("d.parquet", lambda data: b"PAR1" + data, "truncated file"),
    ],
)  # fmt: skip
def test_damaged_files_are_reported_by_the_kind_of_damage(tmp_path, name, damage, kind):
    path = write(tmp_path / name, damage(lines(*[{"text": f"document {number}"} for number in range(1000)])))
    assert [problem.kind for problem in read(path)[1]] == [kind]
    scan = scan_file(only_file(path), SETTINGS)
    assert (scan.problems, len(scan.checksum)) == ({kind: 1}, 32)


@pytest.mark.parametrize("kind", [".jsonl", ".txt"])
@pytest.mark.parametrize(("suffix", "real"), [(".gz", ""), (".zst", ""), ("", ".gz"), ("", ".zst"), (".gz", ".zst")])
def test_compression_is_detected_by_the_first_bytes_and_wrong_suffixes_are_reported(tmp_path, kind, suffix, real):
    data = lines(*ROWS) if kind == ".jsonl" else "第一篇文章。 ".encode() * 1000
    path = write(tmp_path / f"d{kind}{suffix}", compress(data, real))
    documents, problems = read(path)
    expected = [row["text"] for row in ROWS] if kind == ".jsonl" else [data.decode()]
    assert [document.text for document in documents] == expected
    assert kinds(problems) == [("wrong suffix", 1)]
    scan = scan_file(only_file(path), CorpusSettings(shard_bytes=1))
    again = [
        document.text for piece in scan.slices for document in read_slice(piece, SETTINGS, on_problem=lambda _: None)
    ]
    assert again == expected
    assert scan.checksum == hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_corrupt_parquet_pages_are_reported_and_do_not_stop_the_run(tmp_path, compression):
    generator = np.random.default_rng(0)
    table = pa.table({"text": [generator.bytes(20).hex() for _ in range(4000)]})
    options = {"row_group_size": 1000, "compression": compression, "write_page_checksum": True}
    pq.write_table(table, tmp_path / "d.parquet", **options)
    data = bytearray((tmp_path / "d.parquet").read_bytes())
    data[len(data) // 2 + 9000] ^= 1
    documents, problems = read(write(tmp_path / "d.parquet", bytes(data)))
    assert [document.text for document in documents] == table["text"].to_pylist()[: len(documents)]
    assert 1000 <= len(documents) < 4000
    assert kinds(problems) == [("damaged file", len(documents) + 1)]


def test_missing_file_is_reported(tmp_path):
    file = CorpusFile(str(tmp_path / "gone.txt"), "gone.txt", 3)
    scan = scan_file(file, SETTINGS)
    assert (scan.documents, scan.checksum, scan.problems) == (0, "", {"unreadable file": 1})


def test_strict_mode_stops_at_the_first_problem(tmp_path):
    file = only_file(write(tmp_path / "d.jsonl", lines({"text": "good"}, b"{")))
    with pytest.raises(InputError, match=r"d\.jsonl:2.*corpus\.strict"):
        scan_file(file, CorpusSettings(strict=True))
    with pytest.raises(InputError, match=r"d\.jsonl:2: broken JSON"):
        list(read_documents(file, SETTINGS, on_problem=strict_problem))
    assert scan_file(file, SETTINGS).problems == {"broken JSON": 1}


@pytest.mark.parametrize(
    "url", ["s3://nothing/data/*.jsonl", "s3://nothing/a.jsonl", "hf://datasets/some/thing/*.jsonl"]
)
def test_url_without_network_or_credentials_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    pytest.importorskip({"s3": "s3fs", "hf": "huggingface_hub"}[url[:2]])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": "http://127.0.0.1:9", "skip_instance_cache": True})
    monkeypatch.setitem(fsspec.config.conf, "s3", {"skip_instance_cache": True})
    with pytest.raises(
        InputError, match=r"corpus\.paths: (s3|hf)://.*: .*Check the URL, the network and the credentials"
    ):
        list_files(CorpusSettings(paths=(url,)))
    with (
        pytest.raises(InputError, match=r"(s3|hf)://.*the credentials"),
        opened(CorpusFile(url.replace("*", "b"), "b.jsonl", 1, ""), print),
    ):
        pass
