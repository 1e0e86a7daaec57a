"""Choose a device, check its bfloat16 support, and keep freed CPU memory. torch is imported inside functions."""

import contextlib
import ctypes
from typing import Literal

Precision = Literal["auto", "float32", "tf32", "bfloat16", "float16"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)


def resolve(device: str) -> str:
    """Resolve `auto` to CUDA if available, else to the CPU. Other values stay."""
    import torch

    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def has_bfloat16(device: str) -> bool:
    """True if the device multiplies bfloat16 matrices in hardware: CUDA since Ampere, CPUs with AMX or AVX512-BF16."""
    import torch

    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def keep_freed_memory() -> None:
    """Let this process keep and reuse the memory of freed CPU tensors.

    glibc returns every large block to the kernel at once, and requests a new one, page fault by page fault, for the next tensor.
    That takes a fifth of a training step (docs/explanation/training-step.md) and a tenth of a search. With another C library this
    function has no effect.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
