"""Choice of device and precision, of all that follows from them, and the random state of a device.

    device, precision ─► Placement ─► autocast, compilation, pinned memory, worker processes
                    └──► for the process: TensorFloat-32, kernels of attention

Faiss has its own choice, in `indexing/index/faiss_gpu.py`.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import torch
from torch import nn

from indexing.machine import Precision, keep_freed_memory, one_thread_each, resolve
from indexing.measured import fastest_products
from indexing.store.errors import InputError
from retro.batch.inputs import Inputs

log = logging.getLogger("retro")

T = TypeVar("T")
R = TypeVar("R")

_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

_WORTH_COMPILING = 1e15
"""FLOPs of a run on a CPU from which compilation pays. It takes one to four minutes and then saves 10% to 25% of each
step (docs/results/speed.md). So many FLOPs take two cores half an hour to two hours."""


@dataclass(frozen=True)
class Placement:
    """A device and a precision, resolved.

    Attributes:
        device: of parameters and batches.
        dtype: of matrix products, float32, bfloat16 or float16. Parameters stay float32; autocast reduces the products.
        half_weights: True if inference may round the weights of products to float16 (`inference/packed_weights.py`).
        is_measured: True if the precision is `auto`: inference takes the kernels that are the fastest on this CPU.
    """

    device: torch.device
    dtype: torch.dtype
    half_weights: bool = False
    is_measured: bool = False

    @property
    def pins_memory(self) -> bool:
        """True if batches are read into pinned memory, from which copies to the device are asynchronous."""
        return self.device.type == "cuda"

    def num_workers(self, wanted: int) -> int:
        """Number of processes that prepare batches: `wanted`, or for -1 two on CUDA and none on a CPU, where batches
        are cheap."""
        return wanted if wanted >= 0 else 2 if self.device.type == "cuda" else 0

    def compiles(self, choice: str, flops: float = 0.0) -> bool:
        """Decide `yes`, `no` or `auto`. `auto` compiles on CUDA, and on a CPU with a C++ compiler in long runs.

        Args:
            choice: `train.compile`.
            flops: of all steps of the run in this process.

        Raises:
            InputError: `yes` on a CPU without a C++ compiler.
        """
        if self.device.type == "cuda":
            return choice != "no"
        if choice == "yes" and not _has_cxx_compiler():
            raise InputError("train.compile = 'yes': no C++ compiler was found; install one (g++), or set 'no'.")
        return choice == "yes" or (choice == "auto" and flops >= _WORTH_COMPILING and _has_cxx_compiler())

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Run the forward pass inside this context in the chosen precision."""
        if self.dtype == torch.float32:
            yield
            return
        with torch.autocast(self.device.type, self.dtype):
            yield

    def cast(self, model: nn.Module) -> None:
        """Cast the weights of matrix products to `dtype` once, so that autocast does not cast them in every pass.

        Use it only for inference under `autocast`; results stay the same. Routers of experts multiply in float32
        (`Experts.route`) and are not cast.
        """
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] != "router":
                module.to(self.dtype)

    def put(self, inputs: Inputs) -> Inputs:
        """Copy inputs to the device; copies of pinned tensors are asynchronous."""
        return inputs.map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield what a function without gradients computes of each item, in order.

        On a CPU as many items at a time as torch has threads, each on one thread: kernels that share one product of
        some hundred tokens among threads use them less. So results do not depend on the number of threads. Elsewhere
        one after another.
        """
        if self.device.type != "cpu":
            yield from map(function, items)
            return
        waiting = iter(items)
        while group := list(islice(waiting, torch.get_num_threads())):
            with one_thread_each() as run:
                results = run(function, group)
            yield from results

    def wait(self) -> None:
        """Wait until the device has finished its work, to measure its time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def choose_placement(device: str, precision: Precision) -> Placement:
    """Resolve device and precision.

    Device `auto` is CUDA if available. Precision `auto` is bfloat16 on CUDA devices with it and on CPUs that were
    measured to be faster with it, and float32 elsewhere. On CUDA this also sets for the process whether float32 products
    use TensorFloat-32, and which kernels compute attention.

    Raises:
        InputError: the machine has no CUDA device, or the device has no TensorFloat-32, and the settings name one.
    """
    chosen = _existing(device)
    if precision == "tf32" and not _has_tf32(chosen):
        raise InputError(
            f"train.precision = 'tf32': the device {chosen!r} has no TensorFloat-32. It needs an NVIDIA GPU of the Ampere "
            "generation or later; use 'auto' or 'float32'."
        )
    if precision == "float16" and chosen == "cpu":
        log.warning("float16 on a CPU is more than 100 times slower than float32; use it only for tests")
    if chosen.startswith("cuda"):
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        choose_attention_kernels()
    if precision == "auto":
        precision = fastest_products("inference", chosen)
    return Placement(torch.device(chosen), _TYPES.get(precision, torch.float32))


def _existing(device: str) -> str:
    chosen = resolve(device)
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device = {device!r}: this machine has no CUDA device; use 'auto' or 'cpu'.")
    return chosen


def choose_attention_kernels() -> None:
    """Disable cuDNN's kernels of `scaled_dot_product_attention` in this process; flash, memory-efficient and math
    remain.

    On H100 and H200, PyTorch 2.11 and later prefer cuDNN. It builds a plan for every new shape, which takes 0.1 to 1 s,
    and never frees one; a server receives new lengths all the time. With a mask, its gradients can be NaN if the number
    of keys modulo 128 is 64, as for neighbors of chunks of 32 tokens (pytorch/pytorch#196678).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def training_device(device: str) -> torch.device:
    """Resolve the device of this process and set torch up for training on it.

    A process that torchrun started uses the GPU of its local rank. On a CPU, freed memory stays in the process.

    Raises:
        InputError: the machine has no CUDA device, and `device` names one.
    """
    if device in ("auto", "cuda") and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    chosen = torch.device(_existing(device))
    if chosen.type == "cpu":
        keep_freed_memory()
    elif chosen.index is not None:
        torch.cuda.set_device(chosen)
    return chosen


def choose_inference_placement(device: str, precision: Precision) -> Placement:
    """Resolve device and precision for a trained model: like `choose_placement`, except for two cases.

    Without TensorFloat-32, tf32 is float32. On a CPU, weights are float16 unless the precision is float32, and float16
    concerns nothing else.
    """
    on_cpu = resolve(device) == "cpu"
    if precision == "tf32" and not _has_tf32(resolve(device)):
        precision = "float32"
    placement = choose_placement(device, "float32" if on_cpu and precision == "float16" else precision)
    return replace(
        placement, half_weights=on_cpu and precision != "float32", is_measured=on_cpu and precision == "auto"
    )


def _has_tf32(device: str) -> bool:
    if not device.startswith("cuda") or not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(torch.device(device)) >= (8, 0)


def start_copy(values: torch.Tensor) -> Callable[[], list[float]]:
    """Begin to copy values [n] to the host. The returned function waits for the copy, not for later work of the
    device."""
    if values.device.type == "cpu":
        return values.tolist
    copied = torch.cuda.Event()
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return on_host.tolist()

    return read


# --- random state ----------------------------------------------------------------------------------------------------


def random_state(device: torch.device) -> list[torch.Tensor]:
    """States of the CPU's generator and, for CUDA, of the device's generator: a training step draws from these."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def restore_random_state(device: torch.device, states: list[torch.Tensor]) -> None:
    """Set the generators to states that `random_state` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _has_cxx_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True
