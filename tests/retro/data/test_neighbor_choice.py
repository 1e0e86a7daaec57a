"""Choice of neighbors: none from a chunk's own documents, no copies above max_overlap, random ones as a control."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexing.similarity.overlap import overlap
from indexing.store.datastore import Datastore, Split
from indexing.store.retrieval_set import RetrievalSet
from retro.data.neighbor_choice import NeighborUse, Queries, choose_neighbors, first_present, outside, random_numbers


def queries_of(split: Split, first: int, stop: int, *, exclude: bool) -> Queries:
    """The chunks [first, stop) of a split as one sequence."""
    ids = np.arange(first, stop)
    documents, starts, stops = split.documents_of(ids)
    own = [int(starts.min()), int(stops.max())] if exclude else [0, 0]
    return Queries(
        ids=ids,
        excluded=np.array([own] * len(ids)),
        tokens=split.tokens.read(first, stop).astype(np.int64),
        lengths=split.lengths.read(first, stop).astype(np.int64),
        followed=np.append(documents[1:] == documents[:-1], False),
    )


@given(
    stored=st.lists(st.lists(st.integers(-1, 30), min_size=5, max_size=5), min_size=1, max_size=4),
    k=st.integers(1, 7),
    own=st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted),
)
def test_the_first_k_neighbors_outside_the_sequence_are_used(stored, k: int, own) -> None:
    used = first_present(outside(np.array(stored), np.array([own] * len(stored))), k)
    for row, kept in zip(stored, used, strict=True):
        allowed = [i for i in row if i >= 0 and not own[0] <= i < own[1]][:k]
        assert kept.tolist() == allowed + [-1] * (k - len(allowed))


@pytest.mark.parametrize("max_overlap", [0.0, 0.3, 0.7])
def test_near_copies_of_a_chunk_or_the_next_one_are_skipped(tiny_datastore: Datastore, max_overlap: float) -> None:
    train, skipped, only_by_the_next = tiny_datastore.train, 0, 0
    for first in range(0, 120, 8):
        queries = queries_of(train, first, first + 8, exclude=True)
        used = choose_neighbors(
            train, RetrievalSet.of(tiny_datastore), queries, NeighborUse(2, max_overlap=max_overlap)
        )
        for row, stored in enumerate(train.neighbor_ids.read(first, first + 8)):
            allowed = []
            for candidate in stored[stored >= 0]:
                if queries.excluded[0, 0] <= candidate < queries.excluded[0, 1]:
                    continue
                text = train.with_continuation(np.array([candidate]))
                own = overlap(queries.tokens[[row]], queries.lengths[[row]], *text)[0]
                following = 0.0
                if queries.followed[row]:
                    following = overlap(queries.tokens[[row + 1]], queries.lengths[[row + 1]], *text)[0]
                if max(own, following) <= max_overlap:
                    allowed.append(candidate)
                skipped += max(own, following) > max_overlap
                only_by_the_next += own <= max_overlap < following
            assert used[row].tolist() == [*allowed, -1, -1][:2]
    assert skipped > 20
    assert only_by_the_next > 0 or max_overlap == 0


def test_random_numbers_are_uniform_and_reproducible() -> None:
    ids = np.arange(2000)
    drawn = random_numbers(ids, 50, 10, seed=1)
    counts = np.bincount(drawn.ravel(), minlength=50)
    assert drawn.min() == 0
    assert abs(counts - 400).max() < 5 * np.sqrt(400)
    assert np.array_equal(random_numbers(ids[7:9], 50, 4, seed=1), drawn[7:9, :4])
    assert not np.array_equal(random_numbers(ids, 50, 10, seed=2), drawn)
    assert random_numbers(ids[:1], 10**12, 20, seed=0).max() > 2**32
    later = random_numbers(ids, 50, 10, seed=1, epochs=np.arange(2000) % 2)
    assert np.array_equal(later[::2], drawn[::2])  # epoch 0
    assert 0.01 < (later[1::2] == drawn[1::2]).mean() < 0.03


@pytest.mark.parametrize("split_name", ["train", "valid"])
def test_random_neighbors_are_outside_the_sequence_and_never_missing(
    tiny_datastore: Datastore, split_name: str
) -> None:
    train, split = tiny_datastore.train, tiny_datastore.split(split_name)
    for first in range(0, 40, 4):
        queries = queries_of(split, first, first + 4, exclude=split_name == "train")
        used = choose_neighbors(
            split, RetrievalSet.of(tiny_datastore), queries, NeighborUse(5, source="random", seed=3)
        )
        assert (used >= 0).all()
        assert (used < train.num_chunks).all()
        assert not ((used >= queries.excluded[:, :1]) & (used < queries.excluded[:, 1:])).any()
        # Without exclusions the draw is the same; excluded neighbors are skipped.
        alone = replace(queries, excluded=0 * queries.excluded)
        drawn = choose_neighbors(
            split, RetrievalSet.of(tiny_datastore), alone, NeighborUse(21, source="random", seed=3)
        )
        for row, kept in zip(drawn, used, strict=True):
            own = [i for i in row.tolist() if queries.excluded[0, 0] <= i < queries.excluded[0, 1]]
            assert kept.tolist() == [i for i in row.tolist() if i not in own][:5]
