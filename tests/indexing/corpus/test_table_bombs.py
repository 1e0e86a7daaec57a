"""Tables that claim far more memory than they store: refused, or read row by row in memory that does not grow with the rows."""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.indexing.corpus.reading import read
from tests.indexing.corpus.test_arrow import write_arrow

BIG = "some words " * 900_000  # 10 MB
ROWS = 100
PROGRAM = """
import resource, sys
import pyarrow.parquet
from tests.indexing.corpus.reading import read_all
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(*read_all(sys.argv[1]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def write_parquet(path: Path, table: pa.Table, **options: object) -> Path:
    pq.write_table(table, path, compression="zstd", **options)
    return path


def repeated(kind: pa.DataType) -> pa.Table:
    """One value in all rows, stored once."""
    numbers = pa.array([0] * ROWS, pa.int32())
    return pa.table({"text": pa.DictionaryArray.from_arrays(numbers, pa.array([BIG], kind))})


def views() -> pa.Table:
    """One value in all rows, stored once, without a dictionary."""
    one = pa.array([BIG], pa.string()).cast(pa.string_view())
    _, view, *data = one.buffers()
    rows = pa.Array.from_buffers(pa.string_view(), ROWS, [None, pa.py_buffer(view.to_pybytes()[:16] * ROWS), *data])
    return pa.table({"text": rows})


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_parquet(path / "d.parquet", repeated(pa.string())),
        lambda path: write_parquet(path / "d.parquet", repeated(pa.string()), data_page_version="2.0"),
        lambda path: write_arrow(path / "d.arrow", repeated(pa.string()), compression="zstd"),
        lambda path: write_arrow(path / "d.arrow", repeated(pa.large_string()), compression="lz4"),
        lambda path: write_arrow(path / "d.arrow", views(), compression="zstd"),
    ],
    ids=["parquet", "parquet pages 2.0", "arrow zstd", "arrow lz4", "arrow views"],
)
def test_memory_does_not_grow_with_rows_that_share_a_value(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    path = write(tmp_path)
    assert path.stat().st_size < 1 << 18
    output = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=True)
    documents, problems, kilobytes = map(int, output.stdout.split())
    assert (documents, problems) == (ROWS, 0)
    assert kilobytes < 320 << 10  # of 1 GB of text


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_batch_that_claims_more_than_its_bytes_can_hold_is_refused(
    tmp_path: Path, suffix: str, compression: str
) -> None:
    table = pa.table({"text": [BIG] * (16 if compression == "zstd" else 64)})
    if suffix == ".parquet":
        pq.write_table(table, tmp_path / "d.parquet", compression=compression, use_dictionary=False)
    else:
        write_arrow(tmp_path / "d.arrow", table, compression=compression)
    documents, problems = read(tmp_path / f"d{suffix}")
    assert documents == []
    assert [(each.kind, each.line) for each in problems] == [("damaged file", 1)]
    assert "stored bytes claim to hold" in problems[0].detail


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_row_above_the_limit_is_left_out_and_reported_by_row(tmp_path: Path, suffix: str) -> None:
    texts = ["a", "b" * 90, "c" * 101, "d", "e" * 60]
    table = pa.table({"text": texts, "tags": [["x"], ["y"], [], None, ["f" * 30, "g" * 30]]})
    if suffix == ".parquet":
        write_parquet(tmp_path / "d.parquet", table)
    else:
        write_arrow(tmp_path / "d.arrow", table)
    documents, problems = read(tmp_path / f"d{suffix}", max_line_bytes=100, metadata_keys=("tags",))
    assert [each.text for each in documents] == ["a", "b" * 90, "d"]
    assert [(each.kind, each.line) for each in problems] == [("long record", 3), ("long record", 5)]
    assert problems[0].detail == "101 bytes, more than corpus.max_line_bytes = 100; it is left out"


@pytest.mark.parametrize("nested", ["list", "struct of lists"])
def test_a_row_that_repeats_a_shared_value_is_left_out_before_it_exists(tmp_path: Path, nested: str) -> None:
    shared = pa.DictionaryArray.from_arrays(pa.array([0, 1] + [1] * 200_000, pa.int32()), [b"tag", b"x" * 100_000])
    tags = pa.ListArray.from_arrays([0, 2, len(shared)], shared)  # 100 kB, and 20 GB
    column = tags if nested == "list" else pa.StructArray.from_arrays([tags], ["tags"])
    write_arrow(tmp_path / "d.arrow", pa.table({"text": ["a", "b"], "tags": column}))
    documents, problems = read(tmp_path / "d.arrow", metadata_keys=("tags",))
    assert [each.text for each in documents] == ["a"]
    assert [(each.kind, each.line) for each in problems] == [("long record", 2)]
    assert "20,000,000,000 bytes" in problems[0].detail


def test_a_damaged_footer_is_reported_and_never_raised(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", pa.table({"text": ["some", "words"] * 20, "id": range(40)}))
    data, generator = path.read_bytes(), random.Random(0)
    footer = int.from_bytes(data[-8:-4], "little")
    for _ in range(300):
        damaged = bytearray(data)
        damaged[generator.randrange(len(data) - footer - 8, len(data))] ^= generator.randrange(1, 256)
        path.write_bytes(damaged)
        documents, _ = read(path)
        assert len(documents) <= 40


def test_rows_of_any_sizes_are_equal_in_slices_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{number} " * (number % 97) + "." for number in range(1000)]
    encoded = pa.array(["x", None, "longer"] * 333 + ["y"]).dictionary_encode()
    table = pa.table({"text": texts, "title": encoded, "meta": pa.StructArray.from_arrays([encoded], ["url"])})
    write_parquet(tmp_path / "d.parquet", table, row_group_size=300)
    write_arrow(tmp_path / "d.arrow", table)
    expected = read(tmp_path / "d.arrow", metadata_keys=("title", "meta", "meta.url"))
    assert [each.text for each in expected[0]] == texts
    assert [each.metadata.get("title") for each in expected[0]] == encoded.to_pylist()
    for size in (1, 700, 20_000):
        monkeypatch.setattr("indexing.corpus.tables._SLICE_BYTES", size)
        for name in ("d.arrow", "d.parquet"):
            documents, problems = read(tmp_path / name, metadata_keys=("title", "meta", "meta.url"))
            assert [(each.text, each.metadata) for each in documents] == [
                (each.text, each.metadata) for each in expected[0]
            ]
            assert problems == []
