"""Which device multiplies, whether it does so in bfloat16, and the memory of a CPU. torch is imported where it is used."""

import contextlib
import ctypes
from typing import Literal

Precision = Literal["auto", "float32", "tf32", "bfloat16", "float16"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def resolve(device: str) -> str:
    """`auto` is CUDA where there is one, else the CPU; anything else stays as it is."""
    import torch

    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def has_bfloat16(device: str) -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware: CUDA since Ampere, CPUs with AMX or AVX512-BF16."""
    import torch

    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def keep_freed_memory() -> None:
    """Let this process keep the memory that tensors on a CPU leave behind, and use it again.

    glibc gives every large block back to the kernel at once, and takes a new one, page fault by page fault, for the next
    tensor: a fifth of a training step (docs/explanation/training-step.md), a tenth of a search. Where the C library is another one nothing is
    changed.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
