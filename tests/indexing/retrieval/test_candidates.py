"""Candidates are the nearest chunks under any filter, as many as requested if there are enough."""

import numpy as np
import pytest

from indexing.index.exact_search import exact_search
from indexing.index.floats import to_float32
from indexing.index.sharded import ShardedIndex
from indexing.retrieval import candidates
from indexing.retrieval.candidates import PartsMissing, find_candidates
from indexing.store.datastore import Datastore, Split


@pytest.fixture
def no_exhaustive_search_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search the few hundred chunks of the tiny datastore like a large one."""
    monkeypatch.setattr(candidates, "_FEW_CHUNKS", 0)


class Listed:
    """An index that searches only part of the chunks, like inverted lists, and counts its searches."""

    def __init__(self, split: Split, share: int) -> None:
        self.split, self.share, self.num_vectors = split, share, split.num_chunks
        self.asked: list[int] = []

    def search(self, queries: np.ndarray, k: int) -> np.ndarray:
        self.asked.append(k)
        ids = exact_search(queries, self.split.embeddings, self.num_vectors)[1]
        ids[ids % self.share != 0] = -1
        return np.take_along_axis(ids, np.argsort(ids < 0, axis=1, kind="stable"), 1)[:, :k]


def vectors_of(split: Split, count: int = 9) -> np.ndarray:
    return to_float32(split.embeddings.read(0, count))


def ranges_of(split: Split, documents: list[int]) -> np.ndarray:
    return split.chunk_ranges(np.array(documents))


@pytest.mark.parametrize("share", [1, 5])
@pytest.mark.parametrize("documents", [[3], [5, 60, 61, 120], list(range(0, 150, 2))])
def test_filtered_search_returns_the_k_nearest_matching_chunks(
    tiny_datastore: Datastore, no_exhaustive_search_at_first: None, documents: list[int], share: int
) -> None:
    split = tiny_datastore.train
    among = ranges_of(split, documents)
    wanted = min(12, int(np.diff(among).sum()))
    found = find_candidates(vectors_of(split), Listed(split, share), split, 16, 12, among)
    exact = exact_search(vectors_of(split), split.embeddings, 12, among=among)[0][:, :wanted]
    assert ((found.ids >= 0).sum(axis=1) >= wanted).all()
    inside = (found.ids[..., None] >= among[:, 0]) & (found.ids[..., None] < among[:, 1])
    assert inside.any(axis=2)[found.ids >= 0].all()
    assert (np.diff(found.distances[:, :wanted], axis=1) >= 0).all()
    if share == 1:  # an index that searches all chunks misses none
        np.testing.assert_allclose(found.distances[:, :wanted], exact, atol=1e-5)


def test_filter_that_matches_few_chunks_searches_without_the_index(tiny_datastore: Datastore) -> None:
    split = tiny_datastore.train
    index = Listed(split, 1)
    among = ranges_of(split, [10, 20])
    found = find_candidates(vectors_of(split), index, split, 64, 5, among)
    assert not index.asked
    assert set(found.ids.ravel().tolist()) - {-1} == {chunk for start, stop in among for chunk in range(start, stop)}


def test_filter_without_matches_returns_no_candidates(tiny_datastore: Datastore) -> None:
    split = tiny_datastore.train
    found = find_candidates(vectors_of(split), Listed(split, 1), split, 64, 5, np.empty((0, 2), dtype=np.int64))
    assert (found.ids < 0).all()
    assert np.isinf(found.distances).all()


def test_number_of_requested_candidates_grows_with_the_fraction_filtered_out(
    tiny_datastore: Datastore, no_exhaustive_search_at_first: None
) -> None:
    split = tiny_datastore.train
    index = Listed(split, 1)
    find_candidates(vectors_of(split), index, split, 20, 5, np.array([[0, split.num_chunks // 4]]))
    assert 80 <= index.asked[0] <= 84


def test_exhaustive_search_among_ranges_equals_filtering_all_results(tiny_datastore: Datastore) -> None:
    split = tiny_datastore.train
    among = ranges_of(split, list(range(1, split.num_documents, 3)))
    distances, ids = exact_search(vectors_of(split), split.embeddings, split.num_chunks)
    inside = ((ids[..., None] >= among[:, 0]) & (ids[..., None] < among[:, 1])).any(axis=2)
    expected = [row[mask][:7].tolist() for row, mask in zip(distances, inside, strict=True)]
    found, chosen = exact_search(vectors_of(split), split.embeddings, 7, among=among)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert ((chosen[..., None] >= among[:, 0]) & (chosen[..., None] < among[:, 1])).any(axis=2).all()


def test_missing_index_parts_are_named_and_the_others_are_used(tiny_datastore: Datastore) -> None:
    split = tiny_datastore.train
    whole = ShardedIndex.open(split.folder / "index", range(len(split.chunk_rows)))

    class Partly:
        num_vectors = whole.num_vectors

        def search(self, queries: np.ndarray, k: int) -> np.ndarray:
            ids = whole.search(queries, k)
            raise PartsMissing(["shard 1 at node-b"], np.where(ids % 2, -1, ids))

    found = find_candidates(vectors_of(split), Partly(), split, 16, 5)
    assert found.missing == ("shard 1 at node-b",)
    assert not (found.ids[found.ids >= 0] % 2).any()
    assert (found.ids >= 0).any(axis=1).all()
