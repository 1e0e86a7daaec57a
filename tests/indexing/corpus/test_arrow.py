"""Arrow files, and the folders of Hugging Face `datasets`: the rows of the dataset and nothing else, damaged files by row."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indexing.corpus.documents import CorpusSettings
from indexing.corpus.readers import read_documents
from indexing.corpus.scan import list_files, read_slice, scan_file, strict_problem
from indexing.store.errors import InputError
from tests.indexing.corpus.reading import only_file, read

TEXTS = [f"text {number} 第\r\n" for number in range(1000)]


def write_arrow(path: Path, table: pa.Table, file_format: str = "stream", compression: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = pa.ipc.new_stream if file_format == "stream" else pa.ipc.new_file
    with new(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=300)
    return path


def save_to_disk(folder: Path, *shards: list[str], split: str | None = None) -> Path:
    """Write what `Dataset.save_to_disk` of `datasets` 5.2 writes."""
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, texts in zip(names, shards, strict=True):
        write_arrow(folder / name, pa.table({"text": texts}))
    state = {
        "_data_files": [{"filename": name} for name in names], "_fingerprint": "0123456789abcdef", "_format_columns": None,
        "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": split,
    }  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state, indent=2, sort_keys=True))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string", "_type": "Value"}}}))
    return folder


def texts_at(*paths: object) -> dict[str, list[str]]:
    """Texts by file name, in the order in which they are read."""
    settings = CorpusSettings(paths=tuple(map(str, paths)))
    return {
        file.name: [each.text for each in read_documents(file, settings, on_problem=strict_problem)]
        for file in list_files(settings)
    }


# --- files


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("file_format", ["stream", "file"])
def test_a_row_is_a_document_and_a_slice_has_the_same_rows(tmp_path: Path, file_format: str, compression: str) -> None:
    table = pa.table({"picture": [b"\x89PNG"] * 1000, "id": range(1000), "text": TEXTS, "meta": [{"url": "u"}] * 1000})
    file = only_file(write_arrow(tmp_path / "d.arrow", table, file_format, compression))
    settings = CorpusSettings(shard_bytes=3000, metadata_keys=("meta.url",))
    documents = list(read_documents(file, settings, on_problem=strict_problem))
    assert [each.text for each in documents] == TEXTS
    assert [each.id for each in documents] == [str(number) for number in range(1000)]
    assert documents[0].metadata == {"meta.url": "u"}
    for start, stop in [(0, 0), (0, 300), (299, 301), (255, 600), (999, None), (1000, None), (5000, 6000)]:
        part = read_documents(file, settings, start=start, stop=stop, on_problem=strict_problem)
        assert list(part) == documents[start:stop]
    scan = scan_file(file, settings)
    assert len(scan.slices) > 4
    assert [each for part in scan.slices for each in read_slice(part, settings, strict_problem)] == documents


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int8(), pa.string())]
)
def test_every_type_of_text_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    write_arrow(tmp_path / "d.arrow", pa.table({"text": pa.array(TEXTS[:3], pa.string()).cast(kind)}))
    assert [each.text for each in read(tmp_path / "d.arrow")[0]] == TEXTS[:3]


def not_utf_8() -> pa.Array:
    return pa.array([b"good", b"bad \xff", None, b" "], pa.binary()).view(pa.string())


def test_problems_are_reported_with_their_row(tmp_path: Path) -> None:
    write_arrow(tmp_path / "d.arrow", pa.table({"text": not_utf_8()}))
    documents, problems = read(tmp_path / "d.arrow")
    assert [each.text for each in documents] == ["good", "bad \ufffd"]
    reported = [("undecodable bytes", 2), ("missing text", 3), ("empty document", 4)]
    assert [(each.kind, each.line) for each in problems] == reported
    write_arrow(tmp_path / "e.arrow", pa.table({"body": ["x"], "n": [1]}))
    documents, problems = read(tmp_path / "e.arrow")
    assert documents == []
    assert [(each.kind, each.detail) for each in problems] == [
        ("missing text", "corpus.text_key = 'text' leads to nothing; keys: body, n")
    ]


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
def test_nested_text_that_is_not_utf_8_and_equal_names_do_not_stop_the_run(tmp_path: Path, suffix: str) -> None:
    nested = pa.StructArray.from_arrays(
        [not_utf_8(), pa.ListArray.from_arrays([0, 1, 2, 3, 4], not_utf_8())], ["a", "b"]
    )
    table = pa.Table.from_arrays([pa.array(TEXTS[:4]), nested, pa.array(["other"] * 4)], ["text", "meta", "text"])
    if suffix == ".arrow":
        write_arrow(tmp_path / "d.arrow", table)
    else:
        pq.write_table(table, tmp_path / "d.parquet")
    documents, problems = read(tmp_path / f"d{suffix}", metadata_keys=("meta",))
    assert [each.text for each in documents] == TEXTS[:4]
    assert documents[1].metadata == {"meta": '{"a": "bad \ufffd", "b": ["bad \ufffd"]}'}
    assert problems == []


@pytest.mark.parametrize("file_format", ["stream", "file"])
def test_a_file_that_ends_early_keeps_the_batches_before(tmp_path: Path, file_format: str) -> None:
    path = write_arrow(tmp_path / "d.arrow", pa.table({"text": TEXTS}), file_format)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    documents, problems = read(path)
    assert [each.text for each in documents] == TEXTS[:600]
    assert [(each.kind, each.line) for each in problems] == [("truncated file", 601)]
    with pytest.raises(InputError, match=r"d\.arrow:601: truncated file"):
        scan_file(only_file(path), CorpusSettings(strict=True))


@pytest.mark.parametrize(
    ("data", "kind"), [(b"", "truncated file"), (b"text", "wrong suffix"), (b"PAR1" * 9, "wrong suffix")]
)
def test_other_content_is_reported(tmp_path: Path, data: bytes, kind: str) -> None:
    (tmp_path / "d.arrow").write_bytes(data)
    documents, problems = read(tmp_path / "d.arrow")
    assert documents == []
    assert [(each.kind, each.line) for each in problems] == [(kind, 1)]


@pytest.mark.parametrize("file_format", ["stream", "file"])
def test_damage_is_reported_and_never_raised(tmp_path: Path, file_format: str) -> None:
    table = pa.table({"text": TEXTS[:40], "id": pa.array(TEXTS[:40]).dictionary_encode(), "title": [["a"]] * 40})
    path = write_arrow(tmp_path / "d.arrow", table, file_format)
    data, generator = path.read_bytes(), random.Random(0)
    for _ in range(200):
        damaged = bytearray(data)
        damaged[generator.randrange(len(data))] ^= generator.randrange(1, 256)
        path.write_bytes(damaged)
        documents, problems = read(path)
        assert len(documents) <= 40
        assert len(documents) + len(problems) > 0


# --- folders of datasets


def test_a_saved_dataset_is_read_in_order_without_what_was_cached_in_its_folder(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "saved", TEXTS[:400], TEXTS[400:])
    write_arrow(folder / "cache-0123456789abcdef.arrow", pa.table({"text": ["a copy"]}))
    write_arrow(folder / "data-00002-of-00003.arrow", pa.table({"text": ["of an earlier version"]}))
    expected = {"data-00000-of-00002.arrow": TEXTS[:400], "data-00001-of-00002.arrow": TEXTS[400:]}
    assert texts_at(folder) == texts_at(folder / "*.arrow") == texts_at(folder / "**") == expected
    assert texts_at(folder / "cache-0123456789abcdef.arrow") == {"cache-0123456789abcdef.arrow": ["a copy"]}


def test_all_splits_of_a_dataset_dict_are_read_unless_the_path_names_one(tmp_path: Path) -> None:
    for split, texts in (("train", TEXTS[:20]), ("test", TEXTS[20:30])):
        save_to_disk(tmp_path / "saved" / split, texts, split=split)
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    name = "data-00000-of-00001.arrow"
    assert texts_at(tmp_path / "saved") == {f"test/{name}": TEXTS[20:30], f"train/{name}": TEXTS[:20]}
    assert texts_at(tmp_path / "saved/train") == {name: TEXTS[:20]}


def test_a_folder_that_datasets_wrote_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    train = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(1000))})
    datasets.DatasetDict({"train": train}).save_to_disk(str(tmp_path / "saved"), num_shards={"train": 3})
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    loaded["train"].filter(lambda row: row["id"] % 2 == 0)
    assert list((tmp_path / "saved/train").glob("cache-*.arrow"))
    assert [text for texts in texts_at(tmp_path / "saved").values() for text in texts] == TEXTS


def test_a_saved_dataset_with_a_missing_file_is_refused(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "saved", TEXTS[:4], TEXTS[4:8])
    (folder / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(InputError, match=r"state\.json names data-00000-of-00002\.arrow, which is missing"):
        texts_at(folder)
    (folder / "data-00001-of-00002.arrow").unlink()
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match="which is missing"):
        texts_at(tmp_path)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", "cannot be read: JSONDecodeError.*Save the dataset again"),
        ('{"_data_files": ["a.arrow"]}', "cannot be read: TypeError"),
        ('{"_data_files": [], "_indices_files": [{"filename": "indices.arrow"}]}', "selects rows by an index"),
    ],
)
def test_a_state_that_cannot_be_followed_is_refused(tmp_path: Path, state: str, message: str) -> None:
    folder = save_to_disk(tmp_path / "saved", TEXTS[:4])
    (folder / "state.json").write_text(state)
    with pytest.raises(InputError, match=rf"state\.json {message}"):
        texts_at(folder)


def test_the_state_of_another_program_does_not_matter(tmp_path: Path) -> None:
    write_arrow(tmp_path / "in/d.arrow", pa.table({"text": TEXTS[:4]}))
    (tmp_path / "in/state.json").write_text('{"step": 3}')
    assert texts_at(tmp_path / "in") == {"d.arrow": TEXTS[:4]}
