"""Candidates by terms under a condition, and the fusion with dense candidates."""

import numpy as np
import pytest

from indexing.sparse.candidates import agreement, find_by_terms, fuse
from indexing.sparse.index import SparseIndex
from indexing.sparse.terms import terms
from indexing.store.datastore import Datastore

INF = np.inf


@pytest.fixture(scope="module")
def index(tiny_datastore: Datastore) -> SparseIndex:
    return SparseIndex.open([tiny_datastore.train])


def test_excluded_chunks_are_replaced_by_the_next_best(index: SparseIndex) -> None:
    queries = [terms("the memory of a document"), terms("检索"), terms("title 42")]
    ids, scores = index.search(queries, 64)  # as many passages as a search for 10 looks at
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


def fused(weight: float) -> tuple[list[int], list[float]]:
    """Chunks 1 and 2 found by terms, with BM25 8 and 7 of at most 10; chunks 2 and 3 found by embeddings."""
    sparse = (np.array([[1, 2, -1]]), np.array([[8.0, 7.0, -INF]]), 2 - 2 * np.array([[0.3, 0.9, -INF]]))
    dense = (np.array([[2, 3]]), 2 - 2 * np.array([[0.9, 0.8]]))
    ids, scores, distances = fuse(sparse, dense, np.array([10.0]), np.array([weight]))
    assert (np.isinf(distances) == (ids < 0)).all()
    assert (ids[0, 3:] == -1).all()
    return ids[0, :3].tolist(), scores[0, :3].tolist()


@pytest.mark.parametrize(
    ("weight", "expected", "scores"),
    [
        (0.0, [1, 2, 3], [0.8, 0.7, 0.0]),
        (1.0, [2, 1, 3], [0.7 + 0.9, 0.8 + 0.3, 0.8]),
        (5.0, [2, 3, 1], [0.7 + 4.5, 4.0, 0.8 + 1.5]),
    ],
)
def test_bm25_and_weighted_cosines_are_added(weight: float, expected: list[int], scores: list[float]) -> None:
    ids, found = fused(weight)
    assert ids == expected
    assert found == pytest.approx(scores)


def test_a_query_without_known_terms_is_ordered_by_cosines() -> None:
    none = (np.full((1, 2), -1), np.full((1, 2), -INF), np.full((1, 2), INF))
    ids, scores, _ = fuse(none, (np.array([[7, 4]]), np.array([[0.5, 1.0]])), np.zeros(1), np.ones(1))
    assert ids.tolist() == [[7, 4, -1, -1]]
    np.testing.assert_allclose(scores[0, :2], [0.75, 0.5])


@pytest.mark.parametrize(
    ("by_terms", "expected"), [([0.9, 0.7], 1.0), ([0.5, 0.3], 0.5), ([0.1, -0.1], 0.0), ([-0.5, -0.9], 0.0)]
)
def test_agreement_is_the_nearness_of_chunks_found_by_terms(by_terms: list[float], expected: float) -> None:
    ids, nearest = np.array([[5, 6]]), 2 - 2 * np.array([[0.9, 0.7]])
    found = agreement((ids, 2 - 2 * np.array([by_terms])), (ids, nearest), np.zeros(1))
    np.testing.assert_allclose(found, [expected], atol=1e-6)


def test_agreement_is_full_without_chunks_found_by_terms() -> None:
    none, nearest = (np.full((1, 2), -1), np.full((1, 2), INF)), (np.array([[5, 6]]), np.ones((1, 2)))
    np.testing.assert_array_equal(agreement(none, nearest, np.zeros(1)), [1.0])
