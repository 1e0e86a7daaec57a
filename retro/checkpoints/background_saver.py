"""Checkpoints that hardly stop the training loop: the loop copies to host memory, one thread writes.

loop      step step step copy step step step step step step copy step …
thread                       └ files ─ fsync ─ checksums ─ rename ┘   └ files …

Where processes train together each has a saver; of a DTensor it copies the shard that is here.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from retro.checkpoints.checkpoint import TensorFiles


class Saver:
    """Hands copies of tensors to a writing thread, one save at a time.

    The copies live in host buffers that are allocated once, pinned where the tensors are on a CUDA device. What the
    thread raises is raised by the next call of any method, at the latest by `close`.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._running: Future[object] | None = None
        self._buffers: TensorFiles = {}

    def prepare(self, tensors: TensorFiles) -> None:
        """Allocate the buffers in the background: the first touch of so much memory takes longer than a copy."""
        self.wait()
        self._running = self._thread.submit(self._allocate, tensors)

    @torch.no_grad()
    def save(self, tensors: TensorFiles, write: Callable[[TensorFiles], object]) -> None:
        """Copy the tensors, then call `write` with the copies in the background. Waits for the save before it."""
        self.wait()
        self._allocate(tensors)
        for file, values in tensors.items():
            for name, value in values.items():
                _local(self._buffers[file][name]).copy_(_local(value), non_blocking=True)
        for device in {value.device for values in tensors.values() for value in values.values() if value.is_cuda}:
            torch.cuda.synchronize(device)
        self._running = self._thread.submit(write, self._buffers)

    @torch.no_grad()
    def _allocate(self, tensors: TensorFiles) -> None:
        for file, values in tensors.items():
            buffers = self._buffers.setdefault(file, {})
            for name, value in values.items():
                if name not in buffers:
                    buffers[name] = _on_host(value)

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._running is None:
            return
        try:
            self._running.result()
        finally:
            if self._running.done():  # a signal may have ended the waiting instead
                self._running = None

    def close(self) -> None:
        """Wait for the last save and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _on_host(tensor: Tensor) -> Tensor:
    """A new tensor in the host's memory, pinned where that helps; of a DTensor one with the same shard here."""
    from torch.distributed.tensor import DTensor

    local = _local(tensor)
    buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda).zero_()
    # `DTensor.from_local` would move it to the mesh's device.
    return DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer


def _local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
