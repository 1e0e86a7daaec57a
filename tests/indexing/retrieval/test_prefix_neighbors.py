"""Neighbors of chunks that are searched in the sorted prefixes: of a datastore that has nothing else."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from indexing.retrieval.prefix_neighbors import PrefixNeighbors
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore, Split, delete_documents
from indexing.store.errors import InputError
from indexing.suffixes.search import SuffixIndex
from tests.conftest import build_local, tiny_config, write_corpus


@pytest.fixture(scope="module")
def datastore(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    """A datastore with chunks and sorted prefixes."""
    folder = tmp_path_factory.mktemp("prefixes")
    config = tiny_config(folder, write_corpus(folder / "corpus.jsonl", 60))
    for stage in ("chunk", "suffixes"):
        built = build_local(config, only=stage)
    return built


def search(datastore: Datastore) -> PrefixNeighbors:
    return PrefixNeighbors(SuffixIndex.open(datastore.folder))


def full_chunks(split: Split) -> np.ndarray:
    """Ids of chunks that another one of their document follows."""
    ids = np.arange(split.num_chunks)
    return ids[ids + 1 < split.documents_of(ids)[2]]


def test_a_text_that_the_datastore_has_once_is_its_own_first_neighbor_and_comes_with_its_continuation(
    datastore: Datastore,
) -> None:
    split, m, index = datastore.train, datastore.chunk_length, SuffixIndex.open(datastore.folder)
    ids = full_chunks(split)[::7]
    once = [(match := index.match(chunk)) is not None and match.count == 1 for chunk in split.tokens.gather(ids)]
    wanted = ids[once]
    chunks = split.tokens.gather(wanted).astype(np.int64)
    tokens, lengths, found, distances = search(datastore).find(chunks, 2)
    assert len(wanted) > 10
    assert np.array_equal(found[:, 0], wanted)
    assert np.array_equal(tokens[:, 0, :m], chunks)
    expected, expected_lengths = split.with_continuation(found.ravel())
    assert np.array_equal(tokens.reshape(expected.shape), expected)
    assert np.array_equal(lengths.ravel(), expected_lengths)
    assert np.array_equal(np.isnan(distances), found >= 0)


def test_neighbors_share_rare_tokens_and_none_is_of_the_own_document(datastore: Datastore) -> None:
    split = datastore.train
    wanted = full_chunks(split)[::5]
    chunks = split.tokens.gather(wanted).astype(np.int64)
    own = np.stack(split.documents_of(wanted)[1:], axis=1)
    ids = search(datastore).rank(chunks, 4, own).ids
    assert (ids >= 0).any(axis=1).mean() > 0.9
    assert not ((ids >= own[:, :1]) & (ids < own[:, 1:])).any()
    counts = np.bincount(split.tokens.read(0, split.num_chunks).ravel(), minlength=400)
    weights = np.log(counts.sum() / np.maximum(1, counts))
    drawn = np.random.default_rng(0).integers(0, split.num_chunks, ids.shape)
    near, random = (
        [
            weights[np.intersect1d(chunk, split.tokens.gather(row[row >= 0]))].sum()
            for chunk, row in zip(chunks, rows, strict=True)
        ]
        for rows in (ids, drawn)
    )
    assert np.mean(near) > 1.2 * np.mean(random)


def test_frequencies_of_tokens_are_those_of_the_text(datastore: Datastore) -> None:
    split = datastore.train
    lengths = split.lengths.read(0, split.num_chunks)
    text = split.tokens.read(0, split.num_chunks)[np.arange(split.chunk_length) < lengths[:, None]]
    exact = np.bincount(text, minlength=split.vocab_size)
    found = SuffixIndex.open(datastore.folder).token_counts()
    assert len(found) == split.vocab_size
    assert abs(found.sum() - exact.sum()) < 256 * len(split.chunk_rows)
    assert np.abs(found - exact).max() <= 2 * 256


def test_deleted_documents_are_no_neighbors(datastore: Datastore, tmp_path: Path) -> None:
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder)
    split = datastore.train
    chunks = split.tokens.gather(full_chunks(split)[:1]).astype(np.int64)
    first = int(search(datastore).rank(chunks, 1).ids[0, 0])
    document = int(split.documents_of(np.array([first]))[0][0])
    delete_documents(folder, [split.metadata([document])[0]["id"]])
    begin, stop = split.chunk_range(document)
    found = search(Datastore.open(folder)).rank(chunks, 4).ids
    assert not ((found >= begin) & (found < stop)).any()


def test_text_that_the_datastore_does_not_have_has_no_neighbors(datastore: Datastore) -> None:
    unknown = np.full((1, datastore.chunk_length), datastore.manifest["vocab_size"] - 1, np.int64)
    ranked = search(datastore).rank(unknown, 3)
    assert ranked.ids.tolist() == [[-1, -1, -1]]
    assert np.isneginf(ranked.scores).all()


def test_a_retriever_searches_them_where_there_are_no_embeddings(datastore: Datastore, tmp_path: Path) -> None:
    retriever = Retriever.open(datastore.folder)
    retriever.require_neighbors()
    assert isinstance(retriever.neighbors, PrefixNeighbors)
    chunks = build_local(tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 20)), only="chunk")
    with pytest.raises(InputError, match="add"):
        Retriever.open(chunks.folder).require_neighbors()
