"""`retro index` of CSV, a saved dataset and WET: the datastore of the same documents as JSON Lines, also after an interruption."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from indexing.store.datastore import Datastore
from pipelines.cli.main import main
from pipelines.cli.settings.toml_file import to_toml
from tests.conftest import contents, tiny_config, write_corpus
from tests.indexing.corpus.test_arrow import save_to_disk
from tests.indexing.corpus.test_web_archives import record


def index(folder: Path, path: Path, *options: str) -> Datastore:
    """Build a datastore with the command line; a second call continues."""
    config = tiny_config(folder, path)
    config = replace(config, corpus=replace(config.corpus, shard_bytes=20_000))
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(to_toml(config))
    assert main(["index", str(folder / "config.toml"), *options]) == 0
    return Datastore.open(folder / "datastore")


def write_files(folder: Path, rows: list[dict[str, str]]) -> Path:
    """Write 60 documents as CSV, as a saved dataset without ids, and as WET, in order of their names."""
    folder.mkdir()
    with open(folder / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text", "title"])
        writer.writeheader()
        writer.writerows(rows[:20])
    save_to_disk(folder / "b", [row["text"] for row in rows[20:30]], [row["text"] for row in rows[30:40]])
    (folder / "c.wet").write_bytes(b"".join(record(row["text"].encode(), f"http://{row['id']}") for row in rows[40:]))
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    path = write_corpus(tmp_path_factory.mktemp("rows") / "all.jsonl", 60)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_other_formats_give_the_datastore_of_json_lines(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    expected = index(tmp_path / "lines", write_corpus(tmp_path / "all.jsonl", 60), "--stage", "chunk")
    datastore = index(tmp_path / "formats", write_files(tmp_path / "files", rows))
    for split in ("train", "valid"):
        tokens, same = datastore.split(split).tokens, expected.split(split).tokens
        assert np.array_equal(tokens.read(0, len(tokens)), same.read(0, len(same)))
    tables = [pq.read_table(path).to_pylist() for path in datastore.folder.glob("chunks/*/*/documents.parquet")]
    documents = {row["id"]: row for table in tables for row in table}
    assert [documents[f"doc-{number}"]["title"] for number in range(20)] == [row["title"] for row in rows[:20]]
    assert documents["b/data-00001-of-00002.arrow:10"]["file"] == "b/data-00001-of-00002.arrow"
    assert all(documents[f"http://doc-{number}"]["url"] == f"http://doc-{number}" for number in range(40, 60))
    assert len(documents) == 60


def test_a_build_that_lost_shards_continues_to_the_same_bytes(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    files = write_files(tmp_path / "files", rows)
    whole = contents(index(tmp_path, files, "--stage", "chunk").folder)
    shards = sorted((tmp_path / "datastore/chunks").glob("0*"))
    assert len(shards) > 2
    for shard in shards[1:]:
        shutil.rmtree(shard)
    assert contents(index(tmp_path, files, "--stage", "chunk").folder) == whole


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("d.csv", b"id,body\n1,x\n", r"missing text 1.*keys: id, body"),
        ("d.csv", b'id,text\n1,"never closed\n', r"broken record 1.*line 2 of the file"),
        ("d.tsv.gz", b"\x1f\x8b\x08", r"truncated file 1"),
        ("d.arrow", b"no Arrow", r"wrong suffix 1"),
        ("d.wet", b"no WARC", r"wrong suffix 1"),
        ("d.warc.gz", b"", r"no document with text in 1 files"),
    ],
)
def test_a_file_without_any_document_is_refused_by_name(
    tmp_path: Path, capsys, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    (tmp_path / "config.toml").write_text(to_toml(tiny_config(tmp_path, tmp_path / name)))
    assert main(["index", str(tmp_path / "config.toml")]) != 0
    shown = capsys.readouterr().err
    assert re.search(message, " ".join(shown.split()))
    assert name in shown
    assert "Traceback" not in shown
