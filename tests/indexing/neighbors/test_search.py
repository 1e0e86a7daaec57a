"""Stored neighbors never come from the own document or excluded positions, and none is missing if it exists."""

from dataclasses import replace

import numpy as np
import pytest

from indexing.index.exact_search import exact_search, recall, stored_distances
from indexing.index.sharded import ShardedIndex
from indexing.neighbors.index_search import QueryChunks, neighbors_of
from indexing.neighbors.settings import NeighborSettings
from indexing.similarity.overlap import overlap
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet


def test_neighbors_never_come_from_the_own_document(tiny_datastore: Datastore) -> None:
    train = tiny_datastore.train
    ids = train.neighbor_ids.read(0, train.num_chunks)
    own, _, _ = train.documents_of(np.arange(train.num_chunks))
    rows, columns = np.nonzero(ids >= 0)
    theirs, _, _ = train.documents_of(ids[rows, columns])
    assert (own[rows] != theirs).all()


@pytest.mark.parametrize("split_name", ["train", "valid"])
def test_neighbors_are_sorted_distinct_and_exact(tiny_datastore: Datastore, split_name: str) -> None:
    split, train = tiny_datastore.split(split_name), tiny_datastore.train
    ids = split.neighbor_ids.read(0, split.num_chunks)
    chunks, retrieval = np.arange(split.num_chunks), RetrievalSet.of(tiny_datastore)
    distances = stored_distances(split, chunks, retrieval, range(ids.shape[1]))
    assert (np.diff(distances, axis=1) >= 0).all()
    assert all(len(set(row)) == len(row) for row in ids)
    excluded = split.documents_of(np.arange(split.num_chunks))[1:] if split_name == "train" else None
    queries = split.embeddings.read(0, split.num_chunks).astype(np.float32)
    exact, _ = exact_search(queries, train.embeddings, ids.shape[1], excluded)
    assert recall(distances, exact) == 1


def test_queries_with_too_few_neighbors_are_searched_again_with_more_candidates(tiny_datastore: Datastore) -> None:
    """In a repetitive document almost all of six candidates are its own chunks. Further searches find enough others."""
    train = tiny_datastore.train
    index = ShardedIndex.open(tiny_datastore.folder / "index", range(len(train.chunk_rows)))
    settings = NeighborSettings(stored=6, candidates=6)
    longest = max(range(train.num_documents), key=lambda n: train.chunk_range(n)[1] - train.chunk_range(n)[0])
    first, stop = train.chunk_range(longest)
    queries = train.embeddings.read(first, stop).astype(np.float32)
    own = (np.full(stop - first, first), np.full(stop - first, stop))
    ids, _, deeper = neighbors_of(QueryChunks(queries, own=own), index, train, settings)
    assert deeper > 0
    assert (ids >= 0).all()


def test_max_overlap_excludes_near_copies(tiny_datastore: Datastore) -> None:
    train, valid = tiny_datastore.train, tiny_datastore.valid
    index = ShardedIndex.open(tiny_datastore.folder / "index", range(len(train.chunk_rows)))
    queries = valid.embeddings.read(0, 60).astype(np.float32)
    tokens = (valid.tokens.read(0, 60), valid.lengths.read(0, 60))

    def worst(max_overlap: float) -> float:
        settings = NeighborSettings(stored=6, candidates=24, max_overlap=max_overlap)
        ids, _, _ = neighbors_of(QueryChunks(queries, tokens), index, train, settings)
        rows, columns = np.nonzero(ids >= 0)
        found, lengths = train.with_continuation(ids[rows, columns])
        return float(overlap(tokens[0][rows], tokens[1][rows], found, lengths).max())

    assert worst(1.0) > 0.5
    assert worst(0.5) <= 0.5


def test_without_reranking_neighbors_keep_the_order_of_the_index(tiny_datastore: Datastore) -> None:
    train, valid = tiny_datastore.train, tiny_datastore.valid
    index = ShardedIndex.open(tiny_datastore.folder / "index", range(len(train.chunk_rows)))
    settings = replace(NeighborSettings(stored=6, candidates=24), rerank="none")
    queries = valid.embeddings.read(0, 20).astype(np.float32)
    ids, distances, _ = neighbors_of(QueryChunks(queries), index, train, settings)
    assert np.array_equal(ids, index.search(queries, 24)[:, :6])
    assert np.isfinite(distances).all()


def test_fewer_candidates_than_neighbors_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"neighbors\.candidates = 3"):
        NeighborSettings(stored=4, candidates=3)
