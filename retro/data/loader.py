"""Batches ahead of time: worker processes read and assemble them, pinned memory carries them to the device.

Batches are numbered through the whole run, whatever the number of workers, and the n-th is a pure function of n: the order
is the same with any number of workers, and going on at a batch needs no state.
"""

import signal
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from retro.data.batches import Batch
from retro.data.neighbor_choice import NeighborUse
from retro.device import Placement, TensorBatch


class BatchSource(Protocol):
    """What batches are made of: datastores (`batches.TrainingData`), or examples (`finetuning.rows.ExampleData`).

    What it gives is a function of sample numbers. Another process gets it by pickling, and opens the files itself.
    """

    @property
    def fingerprints(self) -> list[str]:
        """Of all that the batches depend on beside the settings."""

    def neighbor_use(self, first: int) -> NeighborUse:
        """How neighbors are chosen in the batch whose first sample number this is."""

    def batch(self, samples: range, retrieval_dropout: float, use: NeighborUse) -> Batch:
        """The batch of some sample numbers, of which a share is left without neighbors."""

    def origin(self, sample: int) -> dict[str, Any]:
        """What a sample number is made of, as people name it."""


class _Batches(Dataset):
    """The batches of a run by number. In a worker process the data opens its files itself."""

    def __init__(self, data: BatchSource, size: int, rows: range, retrieval_dropout: float) -> None:
        self.data, self.size, self.rows, self.retrieval_dropout = data, size, rows, retrieval_dropout

    def __getitem__(self, number: int) -> TensorBatch:
        first = number * self.size
        samples = range(first + self.rows.start, first + self.rows.stop)
        return as_tensors(self.data.batch(samples, self.retrieval_dropout, self.data.neighbor_use(first)))


def as_tensors(batch: Batch) -> TensorBatch:
    """A batch as tensors that share its memory."""
    arrays = vars(batch)
    return {name: None if array is None else torch.from_numpy(array) for name, array in arrays.items()}


def load(
    data: BatchSource,
    *,
    batches: range,
    batch_size: int,
    rows: range,
    retrieval_dropout: float,
    workers: int,
    placement: Placement,
) -> Iterator[TensorBatch]:
    """The batches of a run on its device, in order.

    Args:
        data: what they are made of.
        batches: their numbers.
        batch_size: sequences of a batch; batch n holds the samples from n · batch_size on.
        rows: of each batch that are wanted; processes that share batches take different ones.
        retrieval_dropout: share of the sequences that get no neighbors.
        workers: processes that make batches; 0 makes them here, when they are asked for.
        placement: of the tensors.
    """
    loader: DataLoader = DataLoader(
        _Batches(data, batch_size, rows, retrieval_dropout),
        batch_size=None,
        sampler=batches,
        generator=torch.Generator(),  # it draws a seed for its workers, which must not come from the model's
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=placement.device.type == "cuda",
        # A fork would inherit torch's threads and CUDA's state.
        multiprocessing_context="forkserver" if workers else None,
        worker_init_fn=_leave_signals_to_the_trainer,
    )
    yield from map(placement.put, loader)


def _leave_signals_to_the_trainer(_: int) -> None:
    """Schedulers and terminals signal a whole group of processes; the batches of the last step are needed still."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
