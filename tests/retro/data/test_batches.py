"""Batches contain no neighbor from their own documents, and the data order needs no state."""

import logging
import pickle
from pathlib import Path

import numpy as np
import pytest

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.data.batches import TrainingData
from retro.data.neighbor_choice import NeighborUse
from retro.data.settings import DataSettings
from retro.data.windows import document_windows, window_batches


@pytest.fixture(scope="module")
def data(tiny_datastore: Datastore) -> TrainingData:
    return TrainingData([tiny_datastore.folder], DataSettings(sequence_length=64, k=3), retrieval=True)


def test_no_neighbor_comes_from_a_document_of_its_sequence(data: TrainingData) -> None:
    """A batch contains exactly the first stored neighbors whose documents are not in the sequence."""
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
        assert np.array_equal(batch.neighbors[0].reshape(tokens.shape), tokens)
        assert np.array_equal(batch.neighbor_lengths[0].ravel(), lengths)
    assert crowded > 5  # includes sequences of several documents


def arrays_of_row(batch: Inputs, row: int) -> list[list]:
    """All arrays of one row of a batch."""
    arrays = (batch.tokens, batch.labels, batch.neighbors, batch.neighbor_lengths)
    return [array[row].tolist() for array in arrays if array is not None]


def test_rows_do_not_depend_on_the_batch(tiny_datastore: Datastore) -> None:
    """Any number of processes can read the data: batches of 8 equal those of 4 and of 1 for all neighbor settings."""
    for changes in (
        {},
        {"neighbor_source": "random"},
        {"max_overlap": 0.3},
        {"neighbor_source": "random", "max_overlap": 0.3},
    ):
        options = DataSettings(sequence_length=64, k=3, **changes)
        two = TrainingData([tiny_datastore.folder] * 2, options, retrieval=True)
        whole = two.batch(range(8))
        for size in (1, 4):
            parts = [two.batch(range(start, start + size)) for start in range(0, 8, size)]
            rows = [arrays_of_row(part, row) for part in parts for row in range(size)]
            assert [arrays_of_row(whole, row) for row in range(8)] == rows


def test_a_baseline_reads_no_neighbors(tiny_datastore: Datastore) -> None:
    options = DataSettings(sequence_length=64, k=1)
    assert TrainingData([tiny_datastore.folder], options, retrieval=False).batch(range(2)).neighbors is None


def test_labels_are_the_next_tokens_of_the_same_document(data: TrainingData) -> None:
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
        assert np.array_equal(batch.lengths[0], train.lengths.read(first, stop))


def test_an_epoch_reads_every_sequence_once_and_epochs_differ_in_order(data: TrainingData) -> None:
    total = data.datastores[0].train.num_chunks
    per_epoch = total // data.num_chunks
    epochs = [sorted(data.locate(epoch * per_epoch + i)[1] for i in range(per_epoch)) for epoch in range(2)]
    for epoch in epochs:
        assert all(epoch[i][1] == epoch[i + 1][0] for i in range(per_epoch - 1))
        assert all(stop - first == data.num_chunks for first, stop in epoch)
    assert [data.locate(i) for i in range(20)] != [data.locate(per_epoch + i) for i in range(20)]


def test_epochs_of_different_seeds_have_different_orders(tiny_datastore: Datastore) -> None:
    """Runs of several epochs with seeds 0, 1, 2 … are independent."""
    orders = set()
    for seed in range(4):
        one = TrainingData([tiny_datastore.folder], DataSettings(sequence_length=64, seed=seed), retrieval=False)
        per_epoch = one.datastores[0].train.num_chunks // one.num_chunks
        for epoch in range(4):
            located = [one.locate(epoch * per_epoch + i)[1][0] // one.num_chunks for i in range(per_epoch)]
            orders.add(tuple(located))
    assert len(orders) == 16


def test_random_neighbors_depend_on_the_epoch_and_not_on_the_batch(tiny_datastore: Datastore) -> None:
    options = DataSettings(sequence_length=16, k=3, neighbor_source="random")
    data = TrainingData([tiny_datastore.folder], options, retrieval=True)
    per_epoch = data.datastores[0].train.num_chunks
    first_chunks = {data.locate(sample)[1]: sample for sample in range(per_epoch)}
    again = range(per_epoch, per_epoch + 8)
    before = [data.batch(range(sample, sample + 1)) for sample in (first_chunks[data.locate(new)[1]] for new in again)]
    now = data.batch(again)
    for row, one in enumerate(before):
        assert np.array_equal(one.tokens[0], now.tokens[row])
        assert not np.array_equal(one.neighbors[0], now.neighbors[row])
    across = data.batch(range(per_epoch - 4, per_epoch + 4))  # the end of one epoch and the start of the next
    assert np.array_equal(across.neighbors[4:], now.neighbors[:4])


def test_pickled_data_contains_no_arrays_and_reopens_the_datastore(data: TrainingData) -> None:
    data.batch(range(4))
    packed = pickle.dumps(data)
    assert len(packed) < 2000
    assert np.array_equal(pickle.loads(packed).batch(range(4)).neighbors, data.batch(range(4)).neighbors)


def test_retrieval_dropout_drops_the_given_ratio_of_sequences(data: TrainingData) -> None:
    batch = data.batch(range(200), retrieval_dropout=0.3)
    without = (batch.neighbor_lengths == 0).all(axis=(1, 2))
    assert 0.15 < without.mean() < 0.45


def test_evaluation_windows_score_every_token_after_the_first_once(tiny_datastore: Datastore) -> None:
    valid = tiny_datastore.valid
    wanted = list(document_windows(valid, 4, 2))
    assert max(window.stop - window.start for window in wanted) == 4
    scored = 0
    for group, batch in window_batches(valid, RetrievalSet.of(tiny_datastore), wanted, 3, NeighborUse(0)):
        assert len(group) == len(batch.tokens)
        scored += (batch.labels != IGNORED_LABEL).sum()
    total = int(valid.lengths.read(0, valid.num_chunks).sum())
    assert scored == total - valid.num_documents  # nothing precedes BOS, the first token of a document


def test_invalid_data_settings_are_rejected_with_their_key(tiny_datastore: Datastore) -> None:
    with pytest.raises(InputError, match=r"data\.sequence_length = 50"):
        TrainingData([tiny_datastore.folder], DataSettings(sequence_length=50), retrieval=True)
    with pytest.raises(InputError, match=r"data\.k = 7"):
        TrainingData([tiny_datastore.folder], DataSettings(sequence_length=64, k=7), retrieval=True)
    with pytest.raises(InputError, match="k = -1"):
        DataSettings(k=-1)
    with pytest.raises(InputError, match=r"max_overlap = 1\.5"):
        DataSettings(max_overlap=1.5)
    with pytest.raises(InputError, match=r"data\.weights has 2 numbers for 0"):
        DataSettings(weights=(1.0, 2.0))
    with pytest.raises(InputError, match=r"weights\[1\] = 0"):
        DataSettings(datastores=(Path("a"), Path("b")), weights=(5, 0))


def test_weights_determine_the_tokens_of_each_datastore(
    tiny_datastore: Datastore, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_datastore.folder
    options = DataSettings(datastores=(folder, folder), sequence_length=64, weights=(64_000, 16_000))
    data = TrainingData([folder, folder], options, retrieval=False)
    chosen = [data.locate(sample)[0] for sample in range(1250)]
    assert abs(chosen.count(0) - 1000) <= 20
    with caplog.at_level(logging.INFO, logger="retro"):
        data.announce(1250)
    epochs = 16_000 / (16 * tiny_datastore.train.num_chunks)
    assert "80.0% of the sequences, 64,000 tokens" in caplog.messages[0]
    assert f"20.0% of the sequences, 16,000 tokens, {epochs:.2f} epochs" in caplog.messages[1]


def test_batches_of_several_datastores_keep_the_sample_order(tiny_datastore: Datastore) -> None:
    data = TrainingData([tiny_datastore.folder] * 3, DataSettings(sequence_length=64, k=2), retrieval=True)
    located = [data.locate(sample) for sample in range(24)]
    assert len({chosen for chosen, _ in located}) == 3
    batch = data.batch(range(24))
    for row, (_, (first, stop)) in enumerate(located):
        assert np.array_equal(batch.tokens[row], tiny_datastore.train.tokens.read(first, stop).ravel())


def test_a_corpus_shorter_than_a_sequence_is_padded(tiny_datastore: Datastore) -> None:
    data = TrainingData([tiny_datastore.folder], DataSettings(sequence_length=16 * 8000, k=1), retrieval=True)
    batch = data.batch(range(2))
    real = tiny_datastore.train.num_chunks * 16
    assert batch.tokens.shape == (2, 16 * 8000)
    assert (batch.labels[:, real:] == IGNORED_LABEL).all()
    assert (batch.lengths[:, real // 16 :] == 0).all()
    assert (batch.neighbor_lengths[:, tiny_datastore.train.num_chunks :] == 0).all()
