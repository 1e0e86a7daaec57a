"""Batches ahead of time: worker processes read and assemble them, pinned memory carries them to the device.

Batches are numbered through the whole run, whatever the number of workers, and the n-th is a pure function of n: the order
is the same with any number of workers, and going on at a batch needs no state.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from retro.batches import Batch, DataSettings, TrainingData
from retro.device import Placement

Tensors = dict[str, Tensor | None]
"""A batch: the model's arguments by name, and `labels`."""


class _Batches(Dataset):
    """The batches of a run by number. A worker process opens the datastores itself: nothing open crosses over."""

    def __init__(self, folders: list[Path], settings: DataSettings, retrieval: bool, size: int, dropped: float) -> None:
        self.arguments = (folders, settings, retrieval)
        self.size, self.dropped = size, dropped
        self.data: TrainingData | None = None

    def __getitem__(self, number: int) -> Tensors:
        if self.data is None:
            folders, settings, retrieval = self.arguments
            self.data = TrainingData(folders, settings, retrieval=retrieval)
        samples = range(number * self.size, (number + 1) * self.size)
        return as_tensors(self.data.batch(samples, self.dropped))


def as_tensors(batch: Batch) -> Tensors:
    """A batch as tensors that share its memory."""
    arrays = {
        "tokens": batch.tokens,
        "labels": batch.labels,
        "documents": batch.documents,
        "neighbors": batch.neighbors,
        "neighbor_lengths": batch.neighbor_lengths,
    }
    return {name: None if array is None else torch.from_numpy(array) for name, array in arrays.items()}


def load(
    folders: list[Path],
    settings: DataSettings,
    *,
    retrieval: bool,
    batches: range,
    batch_size: int,
    dropped: float,
    workers: int,
    placement: Placement,
) -> Iterator[Tensors]:
    """The batches of a run on its device, in order.

    Args:
        folders: the datastores.
        settings: sequences and neighbors.
        retrieval: whether neighbors are read.
        batches: their numbers.
        batch_size: sequences of a batch; batch n holds the samples from n · batch_size on.
        dropped: share of the sequences without neighbors.
        workers: processes that make batches; 0 makes them here, when they are asked for.
        placement: of the tensors.
    """
    cuda = placement.device.type == "cuda"
    loader: DataLoader = DataLoader(
        _Batches(folders, settings, retrieval, batch_size, dropped),
        batch_size=None,
        sampler=batches,
        generator=torch.Generator(),  # it draws a seed for its workers, which must not come from the model's
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=cuda,
        # A fork would inherit torch's threads and CUDA's state.
        multiprocessing_context="forkserver" if workers else None,
        worker_init_fn=_leave_signals_to_the_trainer,
    )
    for batch in loader:
        yield {
            name: tensor if tensor is None else tensor.to(placement.device, non_blocking=cuda)
            for name, tensor in batch.items()
        }


def _leave_signals_to_the_trainer(_: int) -> None:
    """Schedulers and terminals signal a whole group of processes; the batches of the last step are needed still."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
