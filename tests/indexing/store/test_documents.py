"""Rows of documents.parquet by number equal the rows of the whole tables, with any cache."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indexing.store import documents
from indexing.store.documents import DocumentTable
from indexing.store.errors import InputError


@pytest.fixture
def rows() -> list[dict[str, object]]:
    return [{"id": f"d{number}", "title": None if number % 3 else "t", "size": number} for number in range(250)]


@pytest.fixture
def table(tmp_path: Path, rows: list[dict[str, object]]) -> DocumentTable:
    """A table of three shards, one of them empty, with row groups of 40."""
    schema = pa.schema(
        [("id", pa.string()), ("title", pa.string()), ("size", pa.int64()), ("list", pa.list_(pa.int64()))]
    )
    cuts = [0, 100, 100, 250]
    for shard in range(3):
        part = pa.Table.from_pylist(rows[cuts[shard] : cuts[shard + 1]], schema=schema)
        pq.write_table(part, tmp_path / f"{shard}.parquet", row_group_size=40)
    return DocumentTable([tmp_path / f"{shard}.parquet" for shard in range(3)], np.diff(cuts).tolist())


def test_rows_are_those_of_the_requested_documents(table: DocumentTable, rows: list[dict[str, object]]) -> None:
    numbers = [249, 0, 100, 99, 0, 141]
    for _ in range(2):  # first from the file, then from the cache
        assert table.take(numbers) == [rows[number] | {"list": None} for number in numbers]
    table.take([7])[0]["id"] = "changed by its owner"
    assert table.take([7])[0]["id"] == "d7"
    assert table.take([]) == []


def test_cache_is_bounded_and_several_threads_can_read(
    table: DocumentTable, rows: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_ROWS_KEPT", 30)

    def read(seed: int) -> bool:
        numbers = np.random.default_rng(seed).integers(0, 250, 20).tolist()
        return [row["id"] for row in table.take(numbers)] == [rows[number]["id"] for number in numbers]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(200)))
    assert len(table._kept) <= 30


def test_scan_and_find_return_the_requested_column(table: DocumentTable) -> None:
    assert table.columns == ["id", "title", "size"]  # columns with one value per document
    seen = [
        (first + row, name) for first, part in table.scan(["id"]) for row, name in enumerate(part["id"].to_pylist())
    ]
    assert seen == [(number, f"d{number}") for number in range(250)]
    assert list(table.find("d141")) == [141]
    assert list(table.find("d250")) == []


def test_pickled_table_omits_its_cache(table: DocumentTable) -> None:
    table.take(range(250))
    copy = pickle.loads(pickle.dumps(table))
    assert not copy._kept
    assert copy.take([100]) == table.take([100])


def test_file_with_fewer_rows_than_in_the_manifest_is_refused(table: DocumentTable) -> None:
    short = DocumentTable(table.paths[:1], [101])
    with pytest.raises(InputError, match=r"100 .* 101"):
        short.take([3])
