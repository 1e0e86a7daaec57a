"""Parquet values that are not text become plain text, as a filter names them; bytes are left out by name."""

import datetime
import decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.indexing.corpus.reading import read

MOMENT = datetime.datetime(2024, 1, 5, 12, 30, 15, 250_000)
UTC = datetime.UTC


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (MOMENT, pa.timestamp("us"), "2024-01-05T12:30:15.250000"),
        (MOMENT, pa.timestamp("ns"), "2024-01-05T12:30:15.250000"),
        (MOMENT.replace(microsecond=0), pa.timestamp("s"), "2024-01-05T12:30:15"),
        (MOMENT.replace(tzinfo=UTC), pa.timestamp("ns", "UTC"), "2024-01-05T12:30:15.250000+00:00"),
        (MOMENT.date(), pa.date32(), "2024-01-05"),
        (MOMENT.time(), pa.time64("ns"), "12:30:15.250000"),
        (datetime.timedelta(days=1, seconds=5), pa.duration("ns"), "1 day, 0:00:05"),
        (decimal.Decimal("1.50"), pa.decimal128(10, 2), "1.50"),
        (decimal.Decimal("-12000000000000000000000.001"), pa.decimal256(40, 3), "-12000000000000000000000.001"),
        (1.5, pa.float64(), "1.5"),
        (True, pa.bool_(), "true"),
        (7, pa.int16(), "7"),
        ("1.50", pa.string_view(), "1.50"),
        (b"plain bytes", pa.binary(), "plain bytes"),
        ({"at": MOMENT, "of": [decimal.Decimal("2.0")]}, pa.struct([("at", pa.timestamp("us")), ("of", pa.list_(pa.decimal128(4, 1)))]),
         '{"at": "2024-01-05T12:30:15.250000", "of": ["2.0"]}'),
        ({"raw": b"\xff\x00"}, pa.struct([("raw", pa.binary())]), '{"raw": "2 bytes"}'),
    ],
)  # fmt: skip
def test_a_value_is_stored_as_plain_text(tmp_path: Path, value: object, kind: pa.DataType, text: str) -> None:
    table = pa.table({"text": ["a", "b"], "id": pa.array([value, None], kind), "x": pa.array([value, None], kind)})
    pq.write_table(table, tmp_path / "d.parquet")
    documents, problems = read(tmp_path / "d.parquet", metadata_keys=("x",))
    assert [(each.id, each.metadata) for each in documents] == [(text, {"x": text}), ("d.parquet:2", {})]
    assert problems == []


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(4)])
@pytest.mark.parametrize("value", [b"\x89PNG", b"\x00\x01ab"])
def test_bytes_that_are_not_text_are_left_out_and_reported_by_column(
    tmp_path: Path, kind: pa.DataType, value: bytes
) -> None:
    table = pa.table({"text": ["a"], "id": pa.array([value], kind), "picture": pa.array([value], kind)})
    pq.write_table(table, tmp_path / "d.parquet")
    documents, problems = read(tmp_path / "d.parquet", metadata_keys=("picture",))
    assert [(each.id, each.metadata) for each in documents] == [("d.parquet:1", {})]
    assert [(each.kind, each.line) for each in problems] == [("binary value", 1)] * 2
    assert ["'id' holds 4 bytes" in problems[0].detail, "'picture' holds 4 bytes" in problems[1].detail] == [True, True]
    documents, problems = read(tmp_path / "d.parquet", text_key="picture", id_key="none", metadata_keys=())
    assert documents == []
    assert [(each.kind, each.line) for each in problems] == [("missing text", 1)]
    assert "'picture' leads to 4 bytes that are not text" in problems[0].detail
