"""Prepare batches ahead of time: worker processes read them, and pinned memory carries them to the device.

The n-th batch of a run is a pure function of n. So the order does not depend on the number of workers, and resuming at
a batch needs no state.
"""

import signal
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from retro.batch.inputs import Inputs
from retro.data.batches import readers_first
from retro.device import Placement


class BatchSource(Protocol):
    """The source of batches: datastores (`batches.TrainingData`) or
    examples (`finetuning.example_batches.ExampleData`).

    A batch is a function of sample numbers. Workers get a pickled source, and open its files themselves.
    """

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprints of everything that batches depend on, except settings."""

    def batch(self, samples: range, retrieval_dropout: float) -> Inputs[np.ndarray]:
        """The batch of these sample numbers; `retrieval_dropout` is the fraction of sequences without neighbors."""

    def origin(self, sample: int) -> dict[str, Any]:
        """A readable description of a sample: datastore, chunks and documents, or files and lines."""


class _Batches(Dataset):
    """The batches of a run by number."""

    def __init__(self, data: BatchSource, size: int, rows: range, retrieval_dropout: float) -> None:
        self.data, self.size, self.rows, self.retrieval_dropout = data, size, rows, retrieval_dropout
        # If at least this number of sequences have no neighbors, the encoder leaves this number out: two shapes of
        # batches.
        self.num_absent = min(max(1, int(len(rows) * retrieval_dropout)), len(rows) - 1) if retrieval_dropout else 0

    def __getitem__(self, index: int) -> Inputs:
        first = index * self.size
        batch = self.data.batch(range(first + self.rows.start, first + self.rows.stop), self.retrieval_dropout)
        return as_tensors(readers_first(batch, self.num_absent))


def as_tensors(batch: Inputs[np.ndarray]) -> Inputs:
    """A batch as tensors that share the arrays' memory."""
    return batch.map(torch.from_numpy)


def load(
    data: BatchSource,
    *,
    batches: range,
    batch_size: int,
    rows: range,
    retrieval_dropout: float,
    workers: int,
    placement: Placement,
) -> Iterator[Inputs]:
    """Yield the batches of a run, on its device, in order.

    Args:
        data: source of the batches.
        batches: numbers of the batches.
        batch_size: sequences of a batch; batch n starts at sample n · batch_size.
        rows: rows of each batch to read; data-parallel processes take different ones.
        retrieval_dropout: share of the sequences that get no neighbors.
        workers: processes that prepare batches; 0 = this process, on demand.
        placement: device of the tensors.
    """
    loader: DataLoader = DataLoader(
        _Batches(data, batch_size, rows, retrieval_dropout),
        batch_size=None,
        sampler=batches,
        generator=torch.Generator(),  # DataLoader draws a seed from it, and must not draw from the model's generator
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=placement.pins_memory,
        # Fork would copy torch's threads and CUDA's state.
        multiprocessing_context="forkserver" if workers else None,
        worker_init_fn=_leave_signals_to_the_trainer,
    )
    yield from map(placement.put, loader)


def _leave_signals_to_the_trainer(_: int) -> None:
    """Ignore signals in a worker: schedulers and terminals signal all processes, and the last step still needs
    batches."""
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, signal.SIG_IGN)
    torch.set_num_threads(1)
