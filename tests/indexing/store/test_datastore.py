"""Continuations stay within their document, and other folders are refused."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexing.store.datastore import Datastore
from indexing.store.deletions import read_deletions
from indexing.store.errors import InputError
from indexing.store.files import write_checked
from indexing.suffixes.votes import read_votes


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_continuation_is_the_next_chunk_of_the_same_document_or_padding(tiny_datastore: Datastore, data) -> None:
    train, m = tiny_datastore.train, tiny_datastore.chunk_length
    chunk_id = data.draw(st.integers(0, train.num_chunks - 1))
    tokens, lengths = train.with_continuation(np.array([chunk_id, -1]))
    document, first, stop = (array[0] for array in train.documents_of(np.array([chunk_id])))
    assert train.chunk_range(int(document)) == (first, stop)
    assert np.array_equal(tokens[0, :m], train.tokens.read(chunk_id, chunk_id + 1)[0])
    if chunk_id + 1 < stop:
        assert np.array_equal(tokens[0, m:], train.tokens.read(chunk_id + 1, chunk_id + 2)[0])
        assert lengths[0] == m + train.lengths.read(chunk_id + 1, chunk_id + 2)[0]
    else:
        assert (tokens[0, m:] == train.pad_id).all()
        assert lengths[0] == train.lengths.read(chunk_id, chunk_id + 1)[0]
    assert lengths[1] == 0
    assert (tokens[1] == train.pad_id).all()


def test_last_chunk_of_a_document_has_no_continuation(tiny_datastore: Datastore) -> None:
    train, m = tiny_datastore.train, tiny_datastore.chunk_length
    last = np.array([train.chunk_range(number)[1] - 1 for number in range(train.num_documents)])
    assert (train.with_continuation(last)[1] <= m).all()


def test_other_folder_is_refused_with_the_command_that_builds_a_datastore(tmp_path) -> None:
    with pytest.raises(InputError, match="retro index"):
        Datastore.open(tmp_path)


@pytest.mark.parametrize(
    "ranges",
    [
        [[4, 8], [0, 2]],
        [[0, 4], [3, 8]],
        [[4, 4]],
        [[8, 4]],
        [[-2, 4]],
        [[0]],
        [[0, 10**30]],
        [[0.5, 4]],
        [["a", 4]],
        7,
    ],
)
def test_deleted_ranges_that_are_not_in_order_are_refused(tmp_path: Path, ranges: Any) -> None:
    write_checked(tmp_path / "deleted.json", {"documents": {"a": 1}, "chunks": {"train": ranges}})
    with pytest.raises(InputError, match=r"deleted\.json has changed since it was written"):
        read_deletions(tmp_path)


def test_deleted_chunks_that_a_split_does_not_have_are_left_out(tmp_path: Path, tiny_datastore: Datastore) -> None:
    folder = shutil.copytree(tiny_datastore.folder, tmp_path / "datastore")
    train = Datastore.open(folder).train
    first, rows = train.chunk_range(0), train.num_chunks
    chunks = {"train": [list(first), [rows, rows + 5], [10**15, 10**15 + 1]]}
    write_checked(folder / "deleted.json", {"documents": {"a": 1}, "chunks": chunks})
    assert train.deleted.tolist() == [list(first)]
    assert train.deleted_documents.tolist() == [0]


@pytest.mark.parametrize(
    "change",
    [
        {"splits": 7}, {"splits": {}}, {"splits": {"train": {"chunks": [1]}}}, {"chunk_length": "16"}, {"chunk_length": 0},
        {"pad_id": None}, {"fingerprints": []}, {"splits": {"train": {"chunks": [-1], "documents": [1]}}},
        {"splits": {"train": {"chunks": ["1"], "documents": [1]}}}, {"chunk_length": 10**12},
        {"splits": {"train": {"chunks": [10**15], "documents": [1]}}},
    ],
)  # fmt: skip
def test_manifest_with_values_of_other_types_is_refused(tmp_path: Path, tiny_datastore: Datastore, change: Any) -> None:
    write_checked(tmp_path / "manifest.json", {**tiny_datastore.manifest, **change})
    with pytest.raises(InputError, match=rf"manifest\.json: {next(iter(change))}"):
        Datastore.open(tmp_path)


@pytest.mark.parametrize(("key", "by"), [("vocab_size", 1), ("vocab_size", -1), ("pad_id", 1)])
def test_manifest_that_contradicts_the_tokenizer_is_refused(
    tmp_path: Path, tiny_datastore: Datastore, key: str, by: int
) -> None:
    shutil.copytree(tiny_datastore.folder / "tokenizer", tmp_path / "tokenizer")
    value = tiny_datastore.manifest[key]
    write_checked(tmp_path / "manifest.json", {**tiny_datastore.manifest, key: value + by})
    with pytest.raises(InputError, match=rf"manifest\.json: {key} = {value + by}, but .*meta\.json has {value}\. "):
        Datastore.open(tmp_path)


@pytest.mark.parametrize("reading", ["mmap", "pread"])
def test_a_datastore_that_was_read_is_sent_to_another_process_without_what_was_read(
    voting_datastore: Datastore, reading: Any
) -> None:
    datastore = Datastore.open(voting_datastore.folder, reading)

    def read(opened: Datastore) -> list[bytes]:
        train, ids = opened.train, np.arange(0, opened.train.num_chunks, 7)
        arrays = [train.tokens.gather(ids), train.lengths.read(0, 100), train.embeddings.gather(ids)]
        return [each.tobytes() for each in (*arrays, read_votes(train, ids))] + [str(train.metadata([0, 3])).encode()]

    before, found = len(pickle.dumps(datastore)), read(datastore)
    sent = pickle.dumps(datastore)
    assert len(sent) < before + 3000
    assert read(pickle.loads(sent)) == found
