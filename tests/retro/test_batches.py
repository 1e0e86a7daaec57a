"""Batches: the rule that decides whether a result is true, and an order that needs no state."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from retro.batches import (
    IGNORED_LABEL,
    DataSettings,
    TrainingData,
    usable_neighbors,
    window_batches,
    windows,
)
from retro.order import mixture, permuted


@given(size=st.integers(1, 300), seed=st.integers(0, 2**63))
def test_permuted_is_a_permutation(size: int, seed: int) -> None:
    assert sorted(permuted(position, size, seed) for position in range(size)) == list(range(size))


def test_permuted_depends_on_the_seed_and_handles_any_size() -> None:
    assert [permuted(i, 1000, 1) for i in range(20)] != [permuted(i, 1000, 2) for i in range(20)]
    assert 0 <= permuted(3 * 10**10, 10**12, 5) < 10**12


@given(weights=st.lists(st.floats(0.05, 1), min_size=1, max_size=4), seed=st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_mixture_follows_its_weights_and_numbers_each_source_without_gaps(weights: list[float], seed: int) -> None:
    drawn = [mixture(sample, weights, seed) for sample in range(1500)]
    counts = Counter(source for source, _ in drawn)
    for source, weight in enumerate(weights):
        assert [number for chosen, number in drawn if chosen == source] == list(range(counts[source]))
        in_first_block = sum(chosen == source for chosen, _ in drawn[:1024])
        assert abs(in_first_block - 1024 * weight / sum(weights)) <= 1


@given(
    stored=st.lists(st.lists(st.integers(-1, 30), min_size=5, max_size=5), min_size=1, max_size=4),
    k=st.integers(1, 7),
    own=st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted),
)
def test_usable_neighbors_are_the_first_k_outside_the_sequence(stored, k: int, own) -> None:
    used = usable_neighbors(np.array(stored), k, tuple(own))
    for row, kept in zip(stored, used, strict=True):
        allowed = [i for i in row if i >= 0 and not own[0] <= i < own[1]][:k]
        assert kept.tolist() == allowed + [-1] * (k - len(allowed))


@pytest.fixture(scope="module")
def data(tiny_datastore: Datastore) -> TrainingData:
    return TrainingData([tiny_datastore.folder], DataSettings(sequence_length=64, k=3), retrieval=True)


def test_no_neighbor_comes_from_any_document_of_its_sequence(data: TrainingData) -> None:
    """By id: what the batch holds is exactly the first stored neighbors whose documents are none of the sequence's."""
    train, crowded = data.datastores[0].train, 0
    for sample in range(80):
        _, (first, stop) = data.locate(sample)
        own = set(train.documents_of(np.arange(first, stop))[0].tolist())
        crowded += len(own) > 1
        expected = []
        for row in train.neighbor_ids.read(first, stop):
            allowed = [i for i in row.tolist() if i >= 0 and int(train.documents_of(np.array([i]))[0][0]) not in own]
            expected.append((allowed + [-1] * 3)[:3])
        tokens, lengths = train.with_continuation(np.array(expected).ravel())
        batch = data.batch(range(sample, sample + 1))
        assert batch.neighbors is not None
        assert batch.neighbor_lengths is not None
        assert np.array_equal(batch.neighbors[0].reshape(tokens.shape), tokens)
        assert np.array_equal(batch.neighbor_lengths[0].ravel(), lengths)
    assert crowded > 5  # sequences of several documents were among them


def test_labels_are_the_next_token_of_the_same_document(data: TrainingData) -> None:
    for sample in range(20):
        batch = data.batch(range(sample, sample + 1))
        tokens, labels = batch.tokens[0], batch.labels[0]
        _, (first, stop) = data.locate(sample)
        train = data.datastores[0].train
        documents = np.repeat(train.documents_of(np.arange(first, stop))[0], 16)
        real = (np.arange(16) < train.lengths.read(first, stop)[:, None]).ravel()
        for t in range(len(tokens)):
            follows = t + 1 < len(tokens) and real[t + 1] and documents[t + 1] == documents[t]
            assert labels[t] == (tokens[t + 1] if follows else IGNORED_LABEL)


def test_an_epoch_sees_every_sequence_once_and_the_next_one_cuts_elsewhere(data: TrainingData) -> None:
    total = data.datastores[0].train.num_chunks
    per_epoch = total // data.num_chunks
    epochs = [sorted(data.locate(epoch * per_epoch + i)[1] for i in range(per_epoch)) for epoch in range(2)]
    for epoch in epochs:
        assert all(epoch[i][1] == epoch[i + 1][0] for i in range(per_epoch - 1))
        assert all(stop - first == data.num_chunks for first, stop in epoch)
    assert [data.locate(i) for i in range(20)] != [data.locate(per_epoch + i) for i in range(20)]


def test_a_batch_depends_on_its_sample_numbers_alone(tiny_datastore: Datastore, data: TrainingData) -> None:
    again = TrainingData([tiny_datastore.folder], DataSettings(sequence_length=64, k=3), retrieval=True)
    for name in ("tokens", "labels", "neighbors", "neighbor_lengths"):
        assert np.array_equal(getattr(data.batch(range(10, 14)), name), getattr(again.batch(range(10, 14)), name))


def test_retrieval_is_dropped_for_about_the_share_asked_for(data: TrainingData) -> None:
    batch = data.batch(range(200), dropped=0.3)
    without = (batch.neighbor_lengths == 0).all(axis=(1, 2))
    assert 0.15 < without.mean() < 0.45


def test_every_token_after_the_first_is_scored_once_by_windows(tiny_datastore: Datastore) -> None:
    valid = tiny_datastore.valid
    wanted = list(windows(valid, 4, 2))
    assert max(window.stop - window.first for window in wanted) == 4
    scored = 0
    for group, batch in window_batches(valid, tiny_datastore.train, wanted, 3, None):
        assert len(group) == len(batch.tokens)
        scored += (batch.labels != IGNORED_LABEL).sum()
    total = int(valid.lengths.read(0, valid.num_chunks).sum())
    assert scored == total - valid.num_documents  # the first token of a document, bos, has nothing before it


def test_datastores_that_do_not_fit_are_refused(tiny_datastore: Datastore) -> None:
    with pytest.raises(InputError, match=r"data\.sequence_length = 50"):
        TrainingData([tiny_datastore.folder], DataSettings(sequence_length=50), retrieval=True)
    with pytest.raises(InputError, match=r"data\.k = 7"):
        TrainingData([tiny_datastore.folder], DataSettings(sequence_length=64, k=7), retrieval=True)
    with pytest.raises(InputError, match=r"data\.weights"):
        DataSettings(weights=(1.0, 2.0))


def test_a_corpus_shorter_than_a_sequence_is_padded(tiny_datastore: Datastore) -> None:
    data = TrainingData([tiny_datastore.folder], DataSettings(sequence_length=16 * 8000, k=1), retrieval=True)
    batch = data.batch(range(2))
    real = tiny_datastore.train.num_chunks * 16
    assert batch.tokens.shape == (2, 16 * 8000)
    assert (batch.labels[:, real:] == IGNORED_LABEL).all()
    assert (batch.neighbor_lengths[:, tiny_datastore.train.num_chunks :] == 0).all()
