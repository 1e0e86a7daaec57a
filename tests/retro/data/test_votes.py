"""Batches hold the stored votes of their tokens."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from indexing.store.datastore import Datastore, delete_documents
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from indexing.suffixes.votes import COLUMNS, as_columns, read_votes
from retro.data.batches import TrainingData, read_sequences, readers_first
from retro.data.neighbor_choice import NeighborUse
from retro.data.settings import DataSettings


def open_data(datastore: Datastore, *, k: int = 2, **changes: object) -> TrainingData:
    settings = DataSettings(sequence_length=64, k=k, **changes)  # type: ignore[arg-type]
    return TrainingData([datastore.folder], settings, retrieval=k > 0, votes=True)


@pytest.mark.parametrize("k", [0, 2])
def test_a_batch_has_the_stored_votes(voting_datastore: Datastore, k: int) -> None:
    data = open_data(voting_datastore, k=k)
    batch = data.batch(range(6))
    for sample in range(6):
        _, (first, stop) = data.locate(sample)
        stored = as_columns(read_votes(voting_datastore.train, np.arange(first, stop)))
        assert np.array_equal(batch.votes[sample, : 16 * (stop - first)], stored.reshape(-1, COLUMNS))
        assert not batch.votes[sample, 16 * (stop - first) :].any()
    assert batch.votes[..., 0].any()
    assert (batch.neighbors is None) == (k == 0)


def test_dropout_removes_the_votes_of_the_same_sequences(voting_datastore: Datastore) -> None:
    data = open_data(voting_datastore)
    whole, dropped = data.batch(range(16)), data.batch(range(16), 0.5)
    kept = dropped.neighbor_lengths.any(axis=(1, 2))
    assert 0 < kept.sum() < 16
    assert np.array_equal(dropped.votes[kept], whole.votes[kept])
    assert not dropped.votes[~kept].any()
    ordered = readers_first(dropped, int((~kept).sum()))
    assert np.array_equal(ordered.votes[: kept.sum()], whole.votes[kept])


def test_a_match_longer_than_the_limit_has_no_votes(voting_datastore: Datastore) -> None:
    whole = open_data(voting_datastore).batch(range(8)).votes
    limited = open_data(voting_datastore, max_overlap=0.25).batch(range(8)).votes
    longer = whole[..., 0] > 4
    assert 0 < longer.sum() < longer.size
    assert not limited[longer].any()
    assert np.array_equal(limited[~longer], whole[~longer])


def test_a_planted_copy_has_no_votes_after_the_limit(planted_datastore: Datastore) -> None:
    split = planted_datastore.valid
    ids = np.array([row["id"].startswith("planted") for row in split.metadata(range(split.num_documents))])
    ranges = split.chunk_ranges(np.arange(split.num_documents)).tolist()
    retrieval = RetrievalSet((planted_datastore.train,))

    def longest(use: NeighborUse) -> np.ndarray:
        votes = read_sequences(split, retrieval, ranges, max(stop - first for first, stop in ranges), use).votes
        return votes[..., 0].max(axis=1)

    assert (longest(NeighborUse(0, votes=True)) == 64).tolist() == ids.tolist()
    assert longest(NeighborUse(0, votes=True, max_overlap=0.75))[ids].tolist() == [12] * 6


def test_votes_made_before_a_deletion_are_refused(voting_datastore: Datastore, tmp_path: Path) -> None:
    folder = tmp_path / "datastore"
    shutil.copytree(voting_datastore.folder, folder)
    delete_documents(folder, [str(voting_datastore.train.metadata([0])[0]["id"])])
    with pytest.raises(InputError, match="--stage votes"):
        open_data(Datastore.open(folder))


def test_a_datastore_without_votes_is_refused(tiny_datastore: Datastore) -> None:
    with pytest.raises(InputError, match=r"--stage votes.*model\.copy_head\.datastore = false"):
        open_data(tiny_datastore)
