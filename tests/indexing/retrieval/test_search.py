"""Chunks are ranked by embeddings, by terms or by both, among the chunks that a filter and deletions leave."""

import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from indexing.index.exact_search import exact_search
from indexing.retrieval.queries import Retrieval
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore, delete_documents, read_datastore_manifest, write_datastore_manifest
from indexing.store.errors import InputError, NotFound

RETRIEVALS = get_args(Retrieval)


def test_scores_of_embeddings_are_cosines_and_the_nearest_is_first(retriever: Retriever) -> None:
    vectors = retriever.queries.vectors(["memory of a chunk in the store", "训练数据"])
    found = retriever.search(vectors, 6)
    exact = exact_search(vectors, retriever.retrieval.own.embeddings, 6)[0]
    np.testing.assert_allclose([[hit.distance for hit in hits] for hits in found.hits], exact, atol=1e-5)
    np.testing.assert_allclose([[hit.score for hit in hits] for hits in found.hits], 1 - exact / 2, atol=1e-5)


def test_sparse_retrieval_finds_chunks_by_the_words_of_their_title(retriever: Retriever) -> None:
    """Only the first chunk contains the title, and the vectors of the others do not reflect it."""
    hits = retriever.search(["title 42"], 3, retrieval="sparse").hits[0]
    chunks = retriever.lookup.document("doc-42").num_chunks
    assert [hit.document_id for hit in hits[:chunks]] == ["doc-42"] * min(3, chunks)
    assert retriever.search(["zzz unheard"], 3, retrieval="sparse").hits == [[]]


def test_hybrid_retrieval_joins_the_candidates_of_both(retriever: Retriever) -> None:
    query = ["42"]  # of few chunks
    ids = {way: retriever.chunks.rank(query, 64, retrieval=way).ids[0] for way in RETRIEVALS}
    found = {way: set(each[each >= 0].tolist()) for way, each in ids.items()}
    assert found["hybrid"] <= found["dense"] | found["sparse"]
    assert found["sparse"] <= found["hybrid"]
    assert len(found["sparse"]) < 64 == len(found["hybrid"])


def test_words_without_vectors_and_vectors_without_words_are_found_by_hybrid_retrieval(retriever: Retriever) -> None:
    """A query without any known term is ordered by embeddings alone."""
    query = ["…?! zzz"]
    near = retriever.chunks.rank(query, 5).ids
    np.testing.assert_array_equal(retriever.chunks.rank(query, 5, retrieval="hybrid").ids, near)


@pytest.mark.parametrize("way", ["sparse", "hybrid"])
def test_deleted_documents_are_found_by_no_term(tiny_datastore: Datastore, tmp_path: Path, way: Retrieval) -> None:
    folder = shutil.copytree(tiny_datastore.folder, tmp_path / "copy")
    opened = Retriever.open(folder)
    victims = [hit.document_id for hit in opened.search(["title 42"], 3, retrieval=way).hits[0]]
    delete_documents(folder, victims)
    hits = opened.search(["title 42"], 40, retrieval=way).hits[0]
    assert len(hits) == 40
    assert not {hit.document_id for hit in hits} & set(victims)


def test_a_filter_that_matches_many_chunks_holds_for_sparse_retrieval(
    retriever: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    filters = {"title": [f"Title {number}" for number in range(0, 150, 3)]}
    few = retriever.chunks.rank(["memory of a chunk"], 30, filters=filters, retrieval="sparse")
    monkeypatch.setattr("indexing.retrieval.candidates._FEW_CHUNKS", 0)
    many = retriever.chunks.rank(["memory of a chunk"], 30, filters=filters, retrieval="sparse")
    np.testing.assert_array_equal(few.ids, many.ids)
    np.testing.assert_allclose(few.scores, many.scores, rtol=1e-6)


def test_a_datastore_without_a_sparse_index_is_refused_by_name(tiny_datastore: Datastore, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_datastore.folder, tmp_path / "copy")
    manifest = read_datastore_manifest(folder)
    del manifest["fingerprints"]["sparse"]
    write_datastore_manifest(folder, {key: value for key, value in manifest.items() if key != "format_version"})
    opened = Retriever.open(folder)
    assert opened.chunks.ways == ("dense",)
    assert opened.search(["memory"], 2).hits[0]
    with pytest.raises(InputError, match="no finished 'sparse' stage"):
        opened.search(["memory"], 2, retrieval="hybrid")


@pytest.mark.parametrize("way", RETRIEVALS)
def test_filtered_search_finds_k_chunks_of_the_matching_documents(retriever: Retriever, way: Retrieval) -> None:
    split = retriever.retrieval.own
    row = max(split.metadata(range(split.num_documents)), key=lambda row: row["chunks"])
    hits = retriever.search(["数据 gradient"], 3, filters={"id": row["id"]}, retrieval=way).hits[0]
    assert [hit.document_id for hit in hits] == [row["id"]] * 3
    query = ["数据 gradient " + row["title"]]  # all chunks of the document have a term of its title
    all_of_it = retriever.search(query, 1000, filters={"id": row["id"]}, retrieval=way).hits[0]
    assert len({hit.chunk_id for hit in all_of_it}) == row["chunks"]
    assert retriever.search(["x"], 3, filters={"id": "nobody"}, retrieval=way).hits == [[]]


def test_filters_omit_deleted_documents(tiny_datastore: Datastore, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_datastore.folder, tmp_path / "copy")
    opened = Retriever.open(folder)
    filters = {"title": ["Title 8", "Title 9"]}
    before = opened.search(["memory"], 500, filters=filters).hits[0]
    victim = before[0].document_id
    delete_documents(folder, [victim])
    after = opened.search(["memory"], 500, filters=filters).hits[0]
    assert {hit.document_id for hit in before} - {hit.document_id for hit in after} == {victim}
    with pytest.raises(NotFound, match="deleted"):
        opened.lookup.chunk(before[0].chunk_id)
    with pytest.raises(NotFound, match="no document"):
        opened.lookup.document(victim)
