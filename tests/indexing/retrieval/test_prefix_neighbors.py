"""Neighbors of chunks that are searched in the sorted prefixes: of a datastore that has nothing else."""

import shutil
from itertools import pairwise
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


def test_neighbors_share_tokens_in_order_have_different_texts_and_none_is_of_the_own_document(
    datastore: Datastore,
) -> None:
    split = datastore.train
    wanted = full_chunks(split)[::5]
    chunks = split.tokens.gather(wanted).astype(np.int64)
    own = np.stack(split.documents_of(wanted)[1:], axis=1)
    ranked = search(datastore).rank(chunks, 4, own)
    assert (ranked.ids >= 0).any(axis=1).mean() > 0.9
    assert not ((ranked.ids >= own[:, :1]) & (ranked.ids < own[:, 1:])).any()
    for chunk, ids, scores in zip(chunks, ranked.ids, ranked.scores, strict=True):
        texts, lengths = split.with_continuation(ids[ids >= 0])
        known = [text[:length].tolist() for text, length in zip(texts, lengths, strict=True)]
        assert len({*map(tuple, known)}) == len(known)
        of_chunk = {*chunk.tolist()} | {*zip(chunk[:-1].tolist(), chunk[1:].tolist(), strict=True)}
        shared = [len(of_chunk & ({*text} | {*pairwise(text)})) for text in known]
        assert shared == scores[ids >= 0].tolist() == sorted(shared, reverse=True)


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
