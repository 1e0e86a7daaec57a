"""Device guards of PyTorch's C++ code, for fake tensors on a device that this machine lacks. Benchmarks and tests use
them."""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch

CUDA, XLA, _META = 1, 9, 14
"""Numbers of devices in c10/core/DeviceType.h."""


@contextlib.contextmanager
def guard_of_meta(device: int) -> Iterator[None]:
    """Let C++ switch to a device and back without any effect, as for `meta`."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[device] = guards[device], guards[_META]
    try:
        yield
    finally:
        guards[device] = before
