"""What a line of training metrics says of the steps since the line before it."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Meter:
    """The mean loss, and the rate, of the steps since the last line.

    Attributes:
        loss, steps: sum of the losses and their number. A checkpoint keeps both, so that a resumed run logs, to the bit,
            what an undisturbed one does.
        tokens, started: what this process has trained on, and since when.
    """

    loss: float = 0.0
    steps: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)

    def add(self, loss: float, tokens: int) -> None:
        """One optimizer step."""
        self.loss += loss
        self.steps += 1
        self.tokens += tokens

    def add_without_loss(self, tokens: int) -> None:
        """A step whose loss is not a number."""
        self.tokens += tokens

    def read(self) -> dict[str, float]:
        """The figures of a line; then everything starts anew. The loss of no step at all is not a number."""
        figures = {
            "loss": self.loss / self.steps if self.steps else math.nan,
            "tokens_per_second": self.tokens / (time.perf_counter() - self.started),
        }
        self.loss, self.steps, self.tokens, self.started = 0.0, 0, 0, time.perf_counter()
        return figures

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is not training's: an evaluation. Waiting for data and for checkpoints is."""
        paused = time.perf_counter()
        yield
        self.started += time.perf_counter() - paused
