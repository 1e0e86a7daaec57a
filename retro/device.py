"""Where tensors live and in what precision they are multiplied."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from indexing.device import Precision, has_bfloat16, resolve
from indexing.store.errors import InputError

log = logging.getLogger("retro")

_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Tensors = dict[str, Any]
"""A batch: the model's arguments by name, and `labels`; tensors, or None for what it lacks."""


@dataclass(frozen=True)
class Placement:
    """A device and a precision, resolved.

    Attributes:
        device: of parameters and batches.
        dtype: of matrix products, float32, bfloat16 or float16; reduced ones by autocast, as parameters stay float32.
    """

    device: torch.device
    dtype: torch.dtype

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision of the forward pass."""
        if self.dtype == torch.float32:
            yield
            return
        with torch.autocast(self.device.type, self.dtype):
            yield

    def cast(self, model: nn.Module) -> None:
        """Keep the weights of matrix products in the type they are multiplied in: autocast would cast them in every pass.

        For a model that is no longer trained, and is only called under `autocast`: its results stay the same. Routers of
        experts multiply in float32 (`Experts.route`), so they stay as they are.
        """
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] != "router":
                module.to(self.dtype)

    def put(self, tensors: Tensors) -> Tensors:
        """A batch's tensors on the device; pinned ones are copied while the host goes on."""
        return {
            name: None if tensor is None else tensor.to(self.device, non_blocking=True)
            for name, tensor in tensors.items()
        }


def place(device: str, precision: Precision) -> Placement:
    """Resolve `auto`: CUDA where there is one; bfloat16 where it is multiplied in hardware, CPUs included (AMX or
    AVX512-BF16: a training step takes less than half the time, docs/results/training-speed.md).

    On CUDA this also decides for the process whether products of float32 are taken in TensorFloat-32, and which kernels compute
    attention.

    Raises:
        InputError: a CUDA device is asked for and there is none, or tf32 of a device that has none.
    """
    chosen = resolve(device)
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device = {device!r}: this machine has no CUDA device; use 'auto' or 'cpu'.")
    if precision == "tf32" and not _has_tf32(chosen):
        raise InputError(
            f"train.precision = 'tf32': the device {chosen!r} has no TensorFloat-32, NVIDIA GPUs since Ampere have; use "
            "'auto' or 'float32'."
        )
    if precision == "float16" and chosen == "cpu":
        log.warning("float16 is slow on a CPU, by a factor of a hundred or more: it is there for tests")
    if chosen.startswith("cuda"):
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        choose_attention_kernels()
    if precision == "auto":
        precision = "bfloat16" if has_bfloat16(chosen) else "float32"
    return Placement(torch.device(chosen), _TYPES.get(precision, torch.float32))


def choose_attention_kernels() -> None:
    """Let `scaled_dot_product_attention` of this process choose among flash, memory-efficient and math kernels, without cuDNN's.

    On H100 and H200, PyTorch 2.11 and later prefer cuDNN. It prepares a plan for every new shape, 0.1 to 1 s each, in a cache
    without limit: a server meets new lengths all the time. With a mask its gradients can be NaN where the number of keys modulo
    128 is 64, as for neighbors of chunks of 32 tokens (pytorch/pytorch#196678). Nothing is set on devices that are not CUDA.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def place_trained(device: str, precision: Precision) -> Placement:
    """As `place`, for a model that has been trained in a precision. Where there is no tf32, float32 is finer still."""
    if precision == "tf32" and not _has_tf32(resolve(device)):
        precision = "float32"
    return place(device, precision)


def _has_tf32(device: str) -> bool:
    if not device.startswith("cuda") or not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(torch.device(device)) >= (8, 0)


# --- random state ----------------------------------------------------------------------------------------------------


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Of the generators that a training step on this device draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def restore_random_state(device: torch.device, states: list[torch.Tensor]) -> None:
    """Back to what `random_state` has returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
