"""SplitMix64: 64-bit hashes of numbers that are the same on every machine and in every release."""

from typing import TypeVar

import numpy as np

_MASK64 = (1 << 64) - 1
_Bits = TypeVar("_Bits", int, np.ndarray)


def mix(value: _Bits) -> _Bits:
    """One step of SplitMix64: an integer or a uint64 array → a value in which every bit depends on all bits of the
    input."""
    return finalize((value + 0x9E3779B97F4A7C15) & _MASK64)


def finalize(value: _Bits) -> _Bits:
    """The second half of `mix`: a bijection of 64 bits that keeps 0."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
