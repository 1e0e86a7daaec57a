"""Live search returns the stored neighbors of held-out chunks: generation reads what training read."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from indexing.index.build import IndexSettings
from indexing.index.exact_search import stored_distances
from indexing.neighbors.settings import NeighborSettings
from indexing.retrieval.retriever import Retriever
from indexing.similarity.overlap import overlap
from indexing.store.datastore import Datastore, delete_documents
from indexing.store.retrieval_set import CHUNK_ID_BITS, RetrievalSet
from pipelines.config import Config
from tests.conftest import build_local, tiny_config, write_corpus

SETTINGS = NeighborSettings(stored=6, candidates=24, rerank="embeddings", search="exact")
RULES = list(itertools.product(("embeddings", "tokens", "none"), (1.0, 0.3)))


def small_config(folder: Path, num_documents: int, **changes) -> Config:
    """Settings for a datastore whose held-out documents, a third of all, share some paragraphs with the others."""
    corpus = write_corpus(folder / "corpus.jsonl", num_documents, seed=3, num_paragraphs=2 * num_documents)
    config = tiny_config(folder, corpus, neighbors=SETTINGS)
    return replace(config, corpus=replace(config.corpus, split=(667, 333, 0)), **changes)


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A datastore whose index has lists and codes."""
    index = IndexSettings(factory="IVF16,PQ8x4")
    config = small_config(tmp_path_factory.mktemp("listed"), 60, index=index)
    build_local(config)
    return config


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = small_config(tmp_path_factory.mktemp("small"), 15)
    build_local(config)
    return config


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, small: Config) -> Path:
    """A datastore of other documents with the tokenizer and the embedder of `small`."""
    folder = tmp_path_factory.mktemp("other")
    model = str(small.datastore / "tokenizer" / "sentencepiece.model")
    config = replace(
        tiny_config(folder, write_corpus(folder / "corpus.jsonl", 10, seed=5, num_paragraphs=20)),
        tokenizer=replace(small.tokenizer, kind="sentencepiece", path=model),
        embedder=replace(small.embedder, path=str(small.datastore)),
    )
    build_local(config)
    return build_local(config, only="ngrams").folder


def full_chunks(datastore: Datastore) -> tuple[np.ndarray, np.ndarray]:
    """The tokens [n, m] of the full held-out chunks, and the ids of their stored neighbors [n, stored]."""
    full = full_rows(datastore)
    return datastore.valid.tokens.gather(full).astype(np.int64), datastore.valid.neighbor_ids.gather(full)


def full_rows(datastore: Datastore) -> np.ndarray:
    """The full held-out chunks."""
    valid = datastore.valid
    return np.flatnonzero(valid.lengths.read(0, valid.num_chunks) == datastore.chunk_length)


def assert_equal_neighbors(train: RetrievalSet, live: np.ndarray, stored: np.ndarray) -> None:
    """Ids [n, k] are equal, except among chunks with equal tokens: a search may cut equal distances anywhere."""
    rows, columns = np.nonzero(live != stored)
    np.testing.assert_array_equal(live[rows, columns] < 0, stored[rows, columns] < 0)
    np.testing.assert_array_equal(train.tokens(live[rows, columns]), train.tokens(stored[rows, columns]))
    assert len(rows) < 0.05 * live.size


def assert_live_equals_stored(datastore: Datastore) -> None:
    tokens, stored = full_chunks(datastore)
    assert len(tokens) > 30
    assert (stored >= 0).mean() > 0.9
    retriever = Retriever.open(datastore.folder)
    with torch.inference_mode():  # as in generation
        alone = np.concatenate([retriever.neighbors.rank(row[None], 2).ids for row in tokens[:20]])
    assert_equal_neighbors(retriever.retrieval, alone, stored[:20, :2])
    assert_equal_neighbors(retriever.retrieval, retriever.neighbors.rank(tokens, stored.shape[1]).ids, stored)


def search_again(config: Config) -> Datastore:
    """The datastore with the neighbors of other settings."""
    if config.neighbors.search == "ngrams":
        build_local(config, only="ngrams")
    return build_local(config, only="neighbors", rebuild=True)


@pytest.mark.parametrize("search", ["exact", "index", "ngrams"])
@pytest.mark.parametrize(("rerank", "max_overlap"), RULES)
def test_live_search_follows_the_stored_rules(listed: Config, search, rerank, max_overlap: float) -> None:
    settings = replace(SETTINGS, search=search, rerank=rerank, max_overlap=max_overlap)
    assert_live_equals_stored(search_again(replace(listed, neighbors=settings)))


@pytest.mark.parametrize("search", ["exact", "ngrams"])
@pytest.mark.parametrize(("rerank", "max_overlap"), RULES)
def test_live_search_finds_the_stored_chunks_of_other_datastores(
    tmp_path: Path, small: Config, other: Path, search, rerank, max_overlap: float
) -> None:
    shutil.copytree(small.datastore, tmp_path / "datastore")
    settings = replace(SETTINGS, search=search, rerank=rerank, max_overlap=max_overlap, extra_datastores=(other,))
    datastore = search_again(replace(small, datastore=tmp_path / "datastore", neighbors=settings))
    assert_live_equals_stored(datastore)
    assert (full_chunks(datastore)[1] >> CHUNK_ID_BITS == 1).any()


def test_more_neighbors_than_stored_begin_with_the_stored_ones(listed: Config) -> None:
    settings = replace(SETTINGS, rerank="tokens")
    datastore = build_local(replace(listed, neighbors=settings), only="neighbors", rebuild=True)
    tokens, stored = full_chunks(datastore)
    found = Retriever.open(datastore.folder).neighbors.rank(tokens, 12).ids
    assert_equal_neighbors(RetrievalSet.of(datastore), found[:, :6], stored)
    assert (found >= 0).all()


@pytest.mark.parametrize("search", ["exact", "ngrams"])
def test_live_search_replaces_deleted_chunks_by_the_next_ones(tmp_path: Path, small: Config, search) -> None:
    shutil.copytree(small.datastore, tmp_path / "datastore")
    neighbors = replace(SETTINGS, search=search, max_overlap=0.5)
    datastore = search_again(replace(small, datastore=tmp_path / "datastore", neighbors=neighbors))
    tokens, stored = full_chunks(datastore)
    train = datastore.train
    numbers = np.unique(train.documents_of(stored[:, 0])[0])[::2]
    delete_documents(datastore.folder, {row["id"] for row in train.metadata(numbers.tolist())})
    left = train.without_deleted(stored)
    assert (left[:, 0] < 0).any()
    ranked = Retriever.open(datastore.folder).neighbors.rank(tokens, 6)
    found = ranked.ids
    assert (found >= 0).all()
    assert (train.without_deleted(found) == found).all()
    order = np.argsort(left < 0, axis=1, kind="stable")
    kept = np.take_along_axis(left, order, 1)
    if search == "ngrams":  # the next candidate by n-grams can be nearer than the kept ones
        distances = stored_distances(datastore.valid, full_rows(datastore), RetrievalSet.of(datastore), range(6))
        distances = np.take_along_axis(distances, order, 1)
        assert (ranked.distances <= np.where(kept < 0, np.inf, distances) + 1e-5).all()
    else:
        assert_equal_neighbors(RetrievalSet.of(datastore), np.where(kept < 0, -1, found), kept)
    rows, _ = np.nonzero(found >= 0)
    texts, lengths = train.with_continuation(found.ravel())
    assert overlap(tokens[rows], np.full(len(rows), tokens.shape[1]), texts, lengths).max() <= 0.5
