"""Mean loss, speed and utilization over the steps since the last line of metrics."""

import contextlib
import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from indexing.progress import Advance, Aside
from retro.device import Placement
from retro.estimates.flops import peak_flops
from retro.training.run_settings import RunSettings

peak_of_process = functools.cache(peak_flops)
"""As `peak_flops`, measured once in a process: a measurement takes a CPU up to a second."""


@dataclass
class Meter:
    """Mean loss and speed of the steps since the last line of metrics.

    Attributes:
        loss, steps: sum and number of the losses. A checkpoint keeps both, so that a resumed run logs the same to the
            bit.
        tokens, started: tokens trained on, and the time at which counting started.
    """

    loss: float = 0.0
    steps: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)

    def add(self, loss: float, tokens: int) -> None:
        """Count an optimizer step."""
        self.loss += loss
        self.steps += 1
        self.tokens += tokens

    def add_without_loss(self, tokens: int) -> None:
        """Count a step whose loss is not finite."""
        self.tokens += tokens

    def read(self) -> dict[str, float]:
        """Return `loss` and `tokens_per_second`, and reset. The loss of no steps is NaN."""
        figures = {
            "loss": self.loss / self.steps if self.steps else math.nan,
            "tokens_per_second": self.tokens / (time.perf_counter() - self.started),
        }
        self.loss, self.steps, self.tokens, self.started = 0.0, 0, 0, time.perf_counter()
        return figures

    @contextlib.contextmanager
    def paused(self, advance: Advance = lambda _: None) -> Iterator[None]:
        """Exclude the time of an evaluation, here and in the rate of `advance`.

        Waiting for data and checkpoints counts as training.
        """
        paused = time.perf_counter()
        yield
        seconds = time.perf_counter() - paused
        self.started += seconds
        advance(Aside(seconds))


@dataclass(frozen=True)
class Utilization:
    """Model-FLOPs utilization (MFU): the operations that training needs over those that the devices can do.

    Attributes:
        flops_per_token: operations for a token of training; see `retro.estimates.flops`.
        peak_flops: operations per second of all devices.
    """

    flops_per_token: float
    peak_flops: float

    @classmethod
    def of(cls, settings: RunSettings, placement: Placement, num_devices: int) -> "Utilization":
        """Take the maker's figure for the peak, or measure it."""
        flops = settings.flops_per_step / (settings.samples_per_step * settings.data.sequence_length)
        return cls(flops, peak_of_process(placement) * num_devices)

    def at(self, tokens_per_second: float) -> float:
        """The utilization at a rate of training."""
        return tokens_per_second * self.flops_per_token / self.peak_flops
