"""Rows of a datastore are those of its files, and search and neighbors those of the retriever and of the stored ids."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import retro
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore, delete_documents
from indexing.store.errors import InputError, NotFound, OutOfRange
from tests.indexing.suffixes.whole_search import documents_of


@pytest.fixture(scope="module")
def store(tiny_datastore: Datastore) -> retro.Datastore:
    return retro.Datastore(tiny_datastore.folder)


@pytest.fixture
def after_deletion(tiny_datastore: Datastore, tmp_path: Path) -> retro.Datastore:
    """A datastore in which documents 0, 3, 6 … are deleted."""
    shutil.copytree(tiny_datastore.folder, tmp_path / "datastore")
    names = [row["id"] for row in tiny_datastore.train.metadata(range(0, tiny_datastore.train.num_documents, 3))]
    delete_documents(tmp_path / "datastore", names)
    return retro.Datastore(tmp_path / "datastore")


@pytest.mark.parametrize(("split", "reading"), [("train", "mmap"), ("valid", "pread"), ("test", "mmap")])
def test_rows_hold_the_tokens_of_the_files(split: Any, reading: Any, tiny_datastore: Datastore) -> None:
    stored, store = tiny_datastore.split(split), retro.Datastore(str(tiny_datastore.folder), split, reading)
    expected = documents_of(stored)
    assert [row.tokens.tolist() for row in store.documents] == expected
    assert list(store.tokens) == [token for document in expected for token in document]
    assert (len(store.documents), len(store.chunks)) == (stored.num_documents, stored.num_chunks)
    for document in store.documents:
        chunks = store.chunks[document.chunks.start : document.chunks.stop]
        assert np.array_equal(np.concatenate([chunk.tokens for chunk in chunks]), document.tokens)
        assert {chunk.document for chunk in chunks} == {document.number}
        assert store.tokenizer.decode(document.tokens) == document.text
        assert document.metadata["tokens"] == len(document.tokens)


def test_documents_are_found_by_their_id(store: retro.Datastore) -> None:
    document = store.documents[20]
    assert store.documents.find(document.id) == [20]
    assert store.documents.find("other") == []


def test_indices_and_slices_are_those_of_a_list(store: retro.Datastore) -> None:
    tokens, ids = list(store.tokens), range(len(store.chunks))
    for index in (0, 7, -1, -len(ids)):
        assert store.chunks[index].id == ids[index]
        assert store.tokens[index] == tokens[index]
    for part in (slice(3, 9), slice(-5, None), slice(9, 3, -2), slice(4, 4), slice(0, 4000, 37), slice(None, None, -1)):
        assert [chunk.id for chunk in store.chunks[part]] == list(ids[part])
        assert store.tokens[part].tolist() == tokens[part]
    assert [chunk.id for chunk in store.chunks.take(np.array([5, 2, 5]))] == [5, 2, 5]
    assert [len(block) for block in store.tokens.batches(1000)][:2] == [1000, 1000]


@pytest.mark.parametrize("block", [1, 3])
def test_tokens_do_not_depend_on_the_block_that_is_counted(
    block: int, store: retro.Datastore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = store.tokens[:]
    monkeypatch.setattr("retro.api.rows.BATCH", block)
    tokens = retro.Datastore(store.location).tokens
    for first, stop in ((0, 1), (15, 33), (100, 131), (len(expected) - 3, len(expected))):
        assert np.array_equal(tokens[first:stop], expected[first:stop])


def test_tables_of_arrow_have_the_rows(store: retro.Datastore) -> None:
    chunks, documents = store.chunks.to_arrow(), store.documents.to_arrow()
    assert chunks["tokens"].to_pylist() == [chunk.tokens.tolist() for chunk in store.chunks]
    assert chunks["text"].to_pylist() == [chunk.text for chunk in store.chunks]
    assert documents["id"].to_pylist() == [document.id for document in store.documents]
    assert documents["first_chunk"].to_pylist() == [document.chunks.start for document in store.documents]
    assert store.tokens.to_arrow()["token"].to_pylist() == list(store.tokens)
    assert [batch.num_rows for batch in store.chunks.batches(100)][:2] == [100, 100]
    assert next(store.chunks.batches(7)).schema == chunks.schema


def test_deleted_documents_are_no_rows_and_keep_their_numbers(
    after_deletion: retro.Datastore, store: retro.Datastore
) -> None:
    left = [row.number for row in store.documents if row.number % 3]
    assert [row.number for row in after_deletion.documents] == left
    assert {chunk.document for chunk in after_deletion.chunks} == set(left)
    assert list(after_deletion.tokens) == [token for row in store.documents.take(left) for token in row.tokens.tolist()]
    assert after_deletion.chunks.to_arrow().num_rows < len(after_deletion.chunks) == len(store.chunks)
    with pytest.raises(NotFound, match=r"document 3 of .* has been deleted"):
        after_deletion.documents[3]
    assert not np.isin(after_deletion.neighbors(range(50), k=6).ids, store.documents[3].chunks).any()


def test_errors_name_the_row_and_the_rows_that_there_are(store: retro.Datastore) -> None:
    last = len(store.chunks) - 1
    for act in (
        lambda: store.chunks[last + 1],
        lambda: store.neighbors([last + 1]),
        lambda: store.chunks.take([last + 1]),
    ):
        with pytest.raises(OutOfRange, match=f"chunk {last + 1}: the split 'train' .* has chunks 0 to {last}"):
            act()
    with pytest.raises(IndexError, match="document -1000"):
        store.documents[-1000]
    with pytest.raises(InputError, match="chunk numbers must be a list of integers, not 3"):
        store.neighbors(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"split = 'dev': accepted are train, valid, test"):
        retro.Datastore(store.location, "dev")  # type: ignore[arg-type]


def test_search_finds_what_the_retriever_finds(store: retro.Datastore, retriever: Retriever) -> None:
    text = store.chunks[11].text
    (expected,) = retriever.search([text], 3).hits
    assert store.search(text, 3) == expected
    assert store.search([text, text], 3) == [expected, expected]
    assert store.search(store.embed([text]), 3) == [expected]
    assert store.search(store.embeddings([11]), 1)[0][0].distance < 1e-3
    filters = {"title": ["Title 3", "Title 4"]}
    assert {hit.title for hit in store.search(text, 9, filters=filters)} <= set(filters["title"])


def test_neighbors_are_the_stored_ones_and_those_of_a_new_text_follow_their_rules(
    store: retro.Datastore, tiny_datastore: Datastore
) -> None:
    chunks = [4, 90, 31]
    stored = store.neighbors(chunks, k=3)
    assert np.array_equal(stored.ids, tiny_datastore.train.neighbor_ids.gather(np.array(chunks))[:, :3])
    tokens, lengths = tiny_datastore.train.with_continuation(stored.ids.ravel())
    assert np.array_equal(stored.tokens.reshape(tokens.shape), tokens)
    assert np.array_equal(stored.lengths.ravel(), lengths)
    whole = next(row for row in store.documents if len(row.chunks) > 2)
    found = store.find_neighbors(whole.tokens, k=2)
    assert found.ids.shape == (len(whole.tokens) // store.chunk_length, 2)
    assert np.array_equal(found.ids[:, 0], whole.chunks[: len(found.ids)])  # the text itself is in the datastore
    assert np.array_equal(store.find_neighbors(whole.text, k=2).ids[:-1], found.ids[: len(found.ids) - 1])


def test_errors_of_search_and_neighbors_say_what_is_accepted(store: retro.Datastore) -> None:
    with pytest.raises(InputError, match=r"stores 6 neighbors .* --neighbors.stored 7 --stage neighbors"):
        store.neighbors([0], k=7)
    with pytest.raises(InputError, match="the text has 2 tokens, and a chunk 16"):
        store.find_neighbors([1, 2])
    with pytest.raises(InputError, match=f"token id {store.vocab_size}: the datastore's are 0 to"):
        store.find_neighbors([store.vocab_size] * 16)
    with pytest.raises(InputError, match="is empty"):
        store.search("")


def test_a_datastore_without_a_stage_names_stage_and_command(tiny_datastore: Datastore, tmp_path: Path) -> None:
    from tests.conftest import build_local, tiny_config, write_corpus

    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 30))
    build_local(config, only="chunk")
    store = retro.Datastore(config.datastore)
    assert store.stages == ("chunk",)
    assert len(list(store.chunks)) == len(store.chunks)
    for stage, act in (
        ("neighbors", lambda: store.neighbors([0])),
        ("embed", lambda: store.embeddings([0])),
        ("add", lambda: store.search("text")),
        ("suffixes", lambda: retro.NGrams(config.datastore)),
        ("neighbors", lambda: retro.Dataset(config.datastore, sequence_length=64)),
        ("votes", lambda: retro.Dataset(config.datastore, sequence_length=64, k=0, votes=True)),
    ):
        with pytest.raises(InputError, match=f"no finished '{stage}' stage(?s:.*)--stage"):
            act()


def test_another_process_gets_the_place_and_not_the_files(store: retro.Datastore) -> None:
    written = pickle.dumps(store)
    assert len(written) < 500
    assert pickle.loads(written).chunks[5].text == store.chunks[5].text


def test_rows_of_a_url_are_those_of_the_folder(store: retro.Datastore, another_machine) -> None:
    remote = retro.Datastore(f"file://{store.location}")
    assert remote.chunks[3].text == store.chunks[3].text
    assert np.array_equal(remote.neighbors([3]).ids, store.neighbors([3]).ids)
