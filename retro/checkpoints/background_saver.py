"""Save checkpoints in the background: the training loop copies tensors to host memory, and a thread writes them.

loop      step step step copy step step step step step step copy step …
thread                       └ files ─ fsync ─ checksums ─ rename ┘   └ files …

Each process of a run has a saver. It copies the local shard of a DTensor.
"""

from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from indexing.machine import on_background_thread
from retro.checkpoints.checkpoint import TensorFiles
from retro.parallel.gradient_norms import local


class Saver:
    """Copies tensors and writes them in a thread, one save at a time.

    The copies are in host buffers that are allocated once, and pinned if the tensors are on a CUDA device. An error of
    the thread is raised by the next call of any method, at the latest by `close`.
    """

    def __init__(self) -> None:
        self._thread = on_background_thread("checkpoint")
        self._running: Future[object] | None = None
        self._buffers: TensorFiles = {}

    def prepare(self, tensors: TensorFiles) -> None:
        """Allocate the buffers in the background: touching new memory takes longer than the copy."""
        self.wait()
        self._running = self._thread.submit(self._allocate, tensors)

    @torch.no_grad()
    def save(self, tensors: TensorFiles, write: Callable[[TensorFiles], object]) -> None:
        """Copy the tensors and call `write` with the copies in the background, after the previous save has finished."""
        self.wait()
        self._allocate(tensors)
        for file, values in tensors.items():
            for name, value in values.items():
                local(self._buffers[file][name]).copy_(local(value), non_blocking=True)
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
        """Wait until the last save has finished."""
        if self._running is None:
            return
        try:
            self._running.result()
        finally:
            if self._running.done():  # not if a signal interrupted the wait
                self._running = None

    def close(self) -> None:
        """Wait for the last save and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _on_host(tensor: Tensor) -> Tensor:
    """A new tensor in host memory, pinned if its source is on a CUDA device; for a DTensor, one with the same local
    shard."""
    from torch.distributed.tensor import DTensor

    part = local(tensor)
    buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda).zero_()
    # `DTensor.from_local` would move it to the mesh's device.
    return DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer
