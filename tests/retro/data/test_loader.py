"""Worker processes yield the same batches in the same order as this process, from any first batch."""

from pathlib import Path

import pytest
import torch

from indexing.store.datastore import Datastore
from retro.batch.inputs import Inputs
from retro.data.batches import TrainingData
from retro.data.loader import as_tensors, load
from retro.data.settings import DataSettings
from retro.device import Placement

SETTINGS = DataSettings(sequence_length=32, k=2)
WHOLE = range(3)
HERE = Placement(torch.device("cpu"), torch.float32)


def batches(folder: Path, numbers: range, workers: int = 0, rows: range = WHOLE, dropout: float = 0.3) -> list[Inputs]:
    return list(
        load(
            TrainingData([folder], SETTINGS, retrieval=True),
            batches=numbers,
            batch_size=3,
            rows=rows,
            retrieval_dropout=dropout,
            workers=workers,
            placement=HERE,
        )
    )


def equal_batches(first: Inputs, second: Inputs) -> bool:
    return all(
        (one is None and other is None) or torch.equal(one, other) for one, other in zip(first, second, strict=True)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # intended
def test_batches_do_not_depend_on_the_number_of_workers(tiny_datastore: Datastore) -> None:
    here = batches(tiny_datastore.folder, range(7), workers=0)
    for workers in (1, 3):
        there = batches(tiny_datastore.folder, range(7), workers)
        assert all(equal_batches(*pair) for pair in zip(here, there, strict=True))


def test_loading_can_start_at_any_batch(tiny_datastore: Datastore) -> None:
    whole = batches(tiny_datastore.folder, range(6), workers=0)
    rest = batches(tiny_datastore.folder, range(4, 6), workers=0)
    assert [equal_batches(*pair) for pair in zip(whole[4:], rest, strict=True)] == [True, True]
    assert not equal_batches(whole[0], whole[1])


@pytest.mark.parametrize("rows", [WHOLE, range(1)])
def test_a_batch_without_any_neighbor_has_the_arrays_of_others(tiny_datastore: Datastore, rows: range) -> None:
    (none,) = batches(tiny_datastore.folder, range(1), rows=rows, dropout=1.0)
    (some,) = batches(tiny_datastore.folder, range(1), rows=rows, dropout=0.0)
    assert not none.neighbor_lengths.any()
    assert [value is None for value in none] == [value is None for value in some]


@pytest.mark.parametrize("rows", [WHOLE, range(2), range(1)])
def test_batches_of_two_sizes_have_no_neighbors_for_the_rows_that_lack_them(
    tiny_datastore: Datastore, rows: range
) -> None:
    """A row of a batch has the tokens, labels and neighbors that it has in the batch in the order of the samples."""
    data, seen = TrainingData([tiny_datastore.folder], SETTINGS, retrieval=True), set()
    for number, found in enumerate(batches(tiny_datastore.folder, range(12), rows=rows, dropout=0.4)):
        first = number * len(WHOLE)
        plain = as_tensors(data.batch(range(first + rows.start, first + rows.stop), 0.4))
        size = len(found.neighbors)
        seen.add(size)
        assert plain.neighbor_lengths.any((1, 2)).sum() <= size
        for row, tokens in enumerate(found.tokens):
            (at,) = (plain.tokens == tokens).all(1).nonzero()[0]
            for name in ("labels", "documents", "lengths"):
                if getattr(plain, name) is not None:
                    assert torch.equal(getattr(found, name)[row], getattr(plain, name)[at])
            if row < size:
                assert torch.equal(found.neighbors[row], plain.neighbors[at])
                assert torch.equal(found.neighbor_lengths[row], plain.neighbor_lengths[at])
            else:
                assert not plain.neighbor_lengths[at].any()
    assert seen == ({len(rows), len(rows) - 1} if len(rows) > 1 else {1})
