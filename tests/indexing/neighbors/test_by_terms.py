"""Stored neighbors of sparse and hybrid retrieval: the best by terms, under the same rules as those of dense retrieval."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.neighbors.search import NeighborSettings
from indexing.retrieval.retriever import Retriever
from indexing.similarity.overlap import overlap
from indexing.sparse.candidates import Retrieval
from indexing.sparse.index import SparseIndex
from indexing.sparse.terms import query_terms
from indexing.store.artifact import read_manifest
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from pipelines.cli import main
from pipelines.config import Config
from pipelines.reports.datastore import measure
from tests.conftest import build_local, contents, tiny_config, write_corpus

SETTINGS = NeighborSettings(stored=6, candidates=24, retrieval="sparse", rerank="embeddings", search="exact")


def config_of(folder: Path, *files: Path, **changes) -> Config:
    config = tiny_config(folder, files[0], neighbors=replace(SETTINGS, **changes))
    return replace(config, corpus=replace(config.corpus, paths=tuple(map(str, files))))


@pytest.fixture(scope="module", params=["sparse", "hybrid"])
def datastore(
    request, tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore
) -> Datastore:
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copytree(tiny_datastore.folder, folder / "datastore")
    config = config_of(folder, tiny_corpus, retrieval=request.param)
    return build_local(config, only="neighbors", rebuild=True)


def retrieval_of(datastore: Datastore) -> Retrieval:
    return read_manifest(datastore.folder / "neighbors" / "00000")["recipe"]["settings"]["neighbors.retrieval"]


def test_no_neighbor_is_of_the_own_document(datastore: Datastore) -> None:
    train = datastore.train
    ids = train.neighbor_ids.read(0, train.num_chunks)
    _, first, stop = train.documents_of(np.arange(train.num_chunks))
    assert not ((ids >= first[:, None]) & (ids < stop[:, None])).any()
    assert (ids >= 0).mean() > 0.9
    assert np.isfinite(train.neighbor_distances.read(0, train.num_chunks))[ids >= 0].all()
    assert main(["verify", str(datastore.folder)]) == 0


def test_neighbors_of_sparse_retrieval_have_the_highest_bm25(datastore: Datastore) -> None:
    if retrieval_of(datastore) != "sparse":
        pytest.skip("the hybrid orders by the sum with the cosine")
    retriever, valid = Retriever.open(datastore.folder), datastore.valid
    tokens, lengths = valid.tokens.read(0, 30), valid.lengths.read(0, 30)
    texts = retriever.tokenizer.decode_batch([row[:length] for row, length in zip(tokens, lengths, strict=True)])
    best, _ = SparseIndex.open([datastore.train]).search([query_terms(text) for text in texts], SETTINGS.stored)
    np.testing.assert_array_equal(valid.neighbor_ids.read(0, 30), best)


def test_report_names_the_terms_and_has_no_recall(datastore: Datastore) -> None:
    measured = measure(Retriever.open(datastore.folder))
    assert measured["recall"] == {}
    assert "terms (BM25)" in measured["search"]


def test_near_copies_are_dropped(tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore) -> None:
    shutil.copytree(tiny_datastore.folder, tmp_path / "datastore")
    config = config_of(tmp_path, tiny_corpus, max_overlap=0.5)
    train = build_local(config, only="neighbors", rebuild=True).train
    ids = train.neighbor_ids.read(0, 200)
    rows, columns = np.nonzero(ids >= 0)
    tokens, lengths = train.with_continuation(ids[rows, columns])
    assert overlap(train.tokens.read(0, 200)[rows], train.lengths.read(0, 200)[rows], tokens, lengths).max() <= 0.5


def test_tokens_order_the_candidates_of_sparse_retrieval(
    tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore
) -> None:
    shutil.copytree(tiny_datastore.folder, tmp_path / "datastore")
    train = build_local(config_of(tmp_path, tiny_corpus, rerank="tokens"), only="neighbors", rebuild=True).train
    chosen = train.neighbor_ids.read(0, 100)
    wide = config_of(tmp_path, tiny_corpus, stored=24)
    candidates = build_local(wide, only="neighbors", rebuild=True).train.neighbor_ids.read(0, 100)
    assert all(set(row.tolist()) <= set(among.tolist()) for row, among in zip(chosen, candidates, strict=True))
    assert not np.array_equal(chosen, candidates[:, :6])


def test_appended_datastore_equals_a_rebuild(tmp_path: Path) -> None:
    """BM25 depends on all chunks, so all neighbors are searched again."""
    files = [write_corpus(tmp_path / f"{seed}.jsonl", 40, seed) for seed in (1, 2)]
    build_local(config_of(tmp_path, files[0]))
    appended = build_local(config_of(tmp_path, *files), append=True)
    before = contents(appended.folder)
    build_local(config_of(tmp_path, *files), only="sparse", rebuild=True)
    build_local(config_of(tmp_path, *files))
    assert contents(appended.folder) == before
    assert main(["verify", str(appended.folder)]) == 0


def test_the_order_of_the_codes_is_refused() -> None:
    with pytest.raises(InputError, match=r"neighbors\.rerank = 'none' .* neighbors\.retrieval = 'sparse'"):
        replace(SETTINGS, rerank="none")
