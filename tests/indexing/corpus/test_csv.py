"""CSV and TSV: fields as other programs quote them, shards that begin at rows, and problems by row."""

import csv
import gzip
import io
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from indexing.corpus.documents import CorpusSettings
from indexing.corpus.readers import read_documents
from indexing.corpus.scan import read_slice, scan_file
from indexing.store.errors import InputError
from tests.indexing.corpus.reading import only_file, read

ROWS = [
    {"id": "a", "text": 'Two lines,\r\nand "quotes".\n', "title": "A"},
    {"id": "7", "text": "第二篇\t文章。", "title": ""},
    {"id": "", "text": " leading and trailing ", "title": "C"},
]


def written(rows: list[dict[str, str]], delimiter: str = ",") -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, ["id", "text", "title"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gz", "zst"])
@pytest.mark.parametrize(("kind", "delimiter"), [(".csv", ","), (".tsv", "\t"), (".CSV", ",")])
def test_a_row_is_a_document_with_unchanged_text(tmp_path: Path, kind: str, delimiter: str, pack, bom: bytes) -> None:
    suffix = {gzip.compress: ".gz", zstandard.compress: ".zst"}.get(pack, "")
    (tmp_path / f"d{kind}{suffix}").write_bytes(pack(bom + written(ROWS, delimiter)))
    documents, problems = read(tmp_path / f"d{kind}{suffix}")
    assert [each.text for each in documents] == [row["text"] for row in ROWS]
    assert [each.id for each in documents] == ["a", "7", f"d{kind}{suffix}:3"]
    assert [each.metadata for each in documents] == [{"title": "A"}, {}, {"title": "C"}]
    assert problems == []


def test_keys_name_the_columns(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("key,body,meta.url\n1,B,x\n")
    documents, problems = read(tmp_path / "d.csv", text_key="body", id_key="key", metadata_keys=("meta.url",))
    assert [(each.id, each.text, each.metadata) for each in documents] == [("1", "B", {"meta.url": "x"})]
    assert problems == []


def test_a_field_may_be_longer_than_the_limit_of_the_module_csv(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("text\n" + "x" * 200_000)
    assert [len(each.text) for each in read(tmp_path / "d.csv")[0]] == [200_000]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(['"', '"\n', ",\r\n", "\t"])


@given(rows=st.lists(st.tuples(texts, texts), max_size=30), shard_bytes=st.integers(1, 60), packed=st.booleans())
def test_joined_slices_equal_the_whole_file(tmp_path_factory, rows, shard_bytes: int, packed: bool) -> None:
    data = written([{"text": text, "title": title} for text, title in rows])
    path = tmp_path_factory.mktemp("pieces") / ("d.csv.gz" if packed else "d.csv")
    path.write_bytes(gzip.compress(data) if packed else data)
    settings = CorpusSettings(shard_bytes=shard_bytes)
    scan = scan_file(only_file(path), settings)
    whole = read(path)[0]
    assert [each.text for each in whole] == [text for text, _ in rows if text and not text.isspace()]
    assert [each for part in scan.slices for each in read_slice(part, settings, lambda _: None)] == whole
    assert packed or all(part.offset for part in scan.slices)
    part = list(read_documents(only_file(path), settings, start=3, stop=7, on_problem=lambda _: None))
    assert part == [each for each in whole if 3 <= each.record < 7]


def test_rows_that_are_not_well_formed_are_reported_by_row_and_left_out(tmp_path: Path) -> None:
    rows = [
        b"a,good,", b"", b"b,bad \xff bytes,", b'c,"quoted"then not,', b"d,too,many,fields", b"e,few", b'f, ,', b'g,5" pipe,',
        b'h,"two\nlines",', b'i,"never closed,',
    ]  # fmt: skip
    (tmp_path / "d.csv").write_bytes(b"\r\n".join([b"id,text,title", *rows]))
    documents, problems = read(tmp_path / "d.csv")
    texts = {"a": "good", "b": "bad \ufffd bytes", "g": '5" pipe', "h": "two\nlines"}
    assert {each.id: each.text for each in documents} == texts
    assert [(each.kind, each.line) for each in problems] == [
        ("undecodable bytes", 3), ("broken record", 4), ("broken record", 5), ("broken record", 6), ("empty document", 7),
        ("broken record", 10),
    ]  # fmt: skip
    assert [problems[1].detail, problems[2].detail, problems[5].detail] == [
        "line 5 of the file: ',' expected after '\"'",
        "it has 4 fields, the header 3",
        "line 12 of the file: unexpected end of data",
    ]
    with pytest.raises(InputError, match=r"d\.csv:3: undecodable bytes.*corpus\.strict"):
        scan_file(only_file(tmp_path / "d.csv"), CorpusSettings(strict=True))


def test_a_missing_column_is_reported_with_the_columns_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("id,body\n1,x\n2,y\n")
    documents, problems = read(tmp_path / "d.csv")
    assert documents == []
    assert [(each.kind, each.line) for each in problems] == [("missing text", 1), ("missing text", 2)]
    assert "keys: id, body" in problems[0].detail
    (tmp_path / "utf16.tsv").write_bytes("id\ttext\n1\tx\n".encode("utf-16"))
    documents, problems = read(tmp_path / "utf16.tsv")
    assert documents == []
    assert "iconv -f UTF-16" in problems[0].detail


@pytest.mark.parametrize("data", [b"", b"\n\n", b"id,text\n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_has_no_document(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "d.csv").write_bytes(data)
    assert read(tmp_path / "d.csv") == ([], [])


def test_a_truncated_file_keeps_the_rows_before(tmp_path: Path) -> None:
    rows = [{"id": str(number), "text": f"{number * 7919 % 10007} text\n", "title": "x"} for number in range(3000)]
    data = gzip.compress(written(rows))
    (tmp_path / "d.csv.gz").write_bytes(data[: len(data) // 2])
    documents, problems = read(tmp_path / "d.csv.gz")
    assert [each.text for each in documents] == [row["text"] for row in rows[: len(documents)]]
    assert 1000 < len(documents) < 2000
    assert [(each.kind, each.line) for each in problems] == [("truncated file", len(documents) + 1)]


@pytest.mark.parametrize("long", [b"x" * 500, b'"' + b"x\n" * 250 + b'"', b'"' + b'""\n' * 200 + b'"'])
def test_a_row_above_the_limit_is_left_out_and_the_next_one_is_read(tmp_path: Path, long: bytes) -> None:
    (tmp_path / "d.csv").write_bytes(b"id,text\n1,first\n2," + long + b"\n3,third\n")
    documents, problems = read(tmp_path / "d.csv", max_line_bytes=50)
    assert [(each.record, each.text) for each in documents] == [(0, "first"), (2, "third")]
    assert [(each.kind, each.line) for each in problems] == [("long record", 2)]
    assert f"{len(long) + 3:,} bytes, more than corpus.max_line_bytes = 50" in problems[0].detail


def test_memory_does_not_grow_with_a_quote_that_is_never_closed(tmp_path: Path) -> None:
    most = list[int]()
    for size in (1, 20):
        (tmp_path / "d.csv").write_bytes(b'id,text\n1,"open\n' + b"2,line of text\n" * 5000 * size)
        tracemalloc.start()
        documents, problems = read(tmp_path / "d.csv", max_line_bytes=10_000)
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert documents == []
        assert [(each.kind, each.line) for each in problems] == [("long record", 1)]
    assert most[1] < most[0] + 30_000
