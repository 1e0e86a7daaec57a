"""A part of `retro check gpu`: what it runs on, and what it reports."""

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from indexing.device import Precision
from retro.device import Placement, choose_placement


class Skipped(Exception):
    """A part cannot run on this machine; the message says what is missing."""


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        name: what was checked or measured.
        value: the result, with its unit.
        passed: None for a measurement without a limit.
    """

    name: str
    value: str
    passed: bool | None = None


@dataclass(frozen=True)
class Job:
    """What a part runs on.

    Attributes:
        device: `cuda`, or `cpu` to test the part itself.
        tiny: run at a size for tests.
        precision: of matrix products; `auto` is that of training.
    """

    device: str = "cuda"
    tiny: bool = False
    precision: Precision = "auto"

    @property
    def placement(self) -> Placement:
        """The device with its precision."""
        return choose_placement(self.device, self.precision)

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any]) -> float:
        """Time one call, until the device has finished."""
        self.synchronize()
        started = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - started


Part = Callable[[Job], list[Finding]]


def require(module: str, install: str) -> None:
    """Raise Skipped if a package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise Skipped(f"{module} is not installed ({install})")


def distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference of two tensors, relative to the norm of the expected one; infinite if a value is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
