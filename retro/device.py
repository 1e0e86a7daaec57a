"""Where tensors live and in what precision they are multiplied."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from indexing.device import has_bfloat16, resolve
from indexing.store.errors import InputError

Precision = Literal["auto", "float32", "bfloat16"]
Tensors = dict[str, Any]
"""A batch: the model's arguments by name, and `labels`; tensors, or None for what it lacks."""


@dataclass(frozen=True)
class Placement:
    """A device and a precision, resolved.

    Attributes:
        device: of parameters and batches.
        bfloat16: whether matrix products run under autocast to bfloat16; parameters stay float32.
    """

    device: torch.device
    bfloat16: bool

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision of the forward pass."""
        if not self.bfloat16:
            yield
            return
        with torch.autocast(self.device.type, torch.bfloat16):
            yield

    def cast(self, model: nn.Module) -> None:
        """Keep the weights of matrix products as they are multiplied: autocast would cast them anew in every pass.

        For a model that trains no more, and is called under `autocast` alone: it computes what it did.
        """
        if self.bfloat16:
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.to(torch.bfloat16)

    def put(self, tensors: Tensors) -> Tensors:
        """A batch's tensors on the device; pinned ones are copied while the host goes on."""
        return {
            name: None if tensor is None else tensor.to(self.device, non_blocking=True)
            for name, tensor in tensors.items()
        }


def place(device: str, precision: Precision) -> Placement:
    """Resolve `auto`: CUDA where there is one; bfloat16 where it is multiplied in hardware, CPUs included (AMX or
    AVX512-BF16: a training step takes less than half the time, docs/benchmarks.md).

    Raises:
        InputError: a CUDA device is asked for and there is none.
    """
    chosen = resolve(device)
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device = {device!r}: this machine has no CUDA device; use 'auto' or 'cpu'.")
    fast = precision == "auto" and has_bfloat16(chosen)
    return Placement(torch.device(chosen), precision == "bfloat16" or fast)
