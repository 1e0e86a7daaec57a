"""Candidates by terms under a condition, and the fusion with dense candidates."""

import numpy as np
import pytest

from indexing.sparse.candidates import find_by_terms, fuse
from indexing.sparse.index import SparseIndex
from indexing.sparse.terms import terms
from indexing.store.datastore import Datastore

INF = np.inf


@pytest.fixture(scope="module")
def index(tiny_datastore: Datastore) -> SparseIndex:
    return SparseIndex.open([tiny_datastore.train])


def test_excluded_chunks_are_replaced_by_the_next_best(index: SparseIndex) -> None:
    queries = [terms("the memory of a document"), terms("检索"), terms("title 42")]
    ids, scores = index.search(queries, index.num_chunks)
    found, best = find_by_terms(queries, index, 10, lambda rows, each: np.where(each % (rows[:, None] + 2), each, -1))
    for row in range(len(queries)):
        kept = np.flatnonzero((ids[row] >= 0) & (ids[row] % (row + 2) != 0))[:10]
        np.testing.assert_array_equal(found[row, : len(kept)], ids[row, kept])
        np.testing.assert_allclose(best[row, : len(kept)], scores[row, kept], rtol=1e-6)
        assert (found[row, len(kept) :] == -1).all()


def test_a_condition_that_excludes_everything_finds_nothing(index: SparseIndex) -> None:
    found, scores = find_by_terms([terms("the memory")], index, 4, lambda rows, each: np.full_like(each, -1))
    assert (found == -1).all()
    assert not scores.any()


def fused(sparse_cosines: list[float], dense_cosines: list[float], usual: float) -> tuple[list[int], list[float]]:
    """Chunks 1 and 2 found by terms, with BM25 8 and 7 of at most 10; chunks 2 and 3 found by embeddings."""
    sparse = (np.array([[1, 2, -1]]), np.array([[8.0, 7.0, -INF]]), 2 - 2 * np.array([[*sparse_cosines, -INF]]))
    dense = (np.array([[2, 3]]), 2 - 2 * np.array([dense_cosines]))
    ids, scores, distances = fuse(sparse, dense, np.array([10.0]), np.array([usual]))
    assert (np.isinf(distances) == (ids < 0)).all()
    assert (ids[0, 3:] == -1).all()
    return ids[0, :3].tolist(), scores[0, :3].tolist()


def test_bm25_and_cosines_are_added_if_both_searches_agree() -> None:
    """The chunks found by terms are as near as the nearest ones."""
    ids, scores = fused([0.3, 0.9], [0.9, 0.3], usual=0.0)
    assert ids == [2, 1, 3]
    assert scores == pytest.approx([0.7 + 0.9, 0.8 + 0.3, 0.3])


def test_bm25_alone_orders_if_the_embedder_finds_chunks_of_another_subject() -> None:
    """The chunks found by terms are as far as any chunk."""
    ids, scores = fused([0.0, 0.2], [0.9, 0.8], usual=0.1)
    assert ids == [1, 2, 3]
    assert scores == pytest.approx([0.8, 0.7, 0.0])


def test_a_query_without_known_terms_is_ordered_by_cosines() -> None:
    none = (np.full((1, 2), -1), np.full((1, 2), -INF), np.full((1, 2), INF))
    ids, scores, _ = fuse(none, (np.array([[7, 4]]), np.array([[0.5, 1.0]])), np.zeros(1), np.zeros(1))
    assert ids.tolist() == [[7, 4, -1, -1]]
    np.testing.assert_allclose(scores[0, :2], [0.75, 0.5])
