"""Short runs, and the parts of them that tests compare."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipelines.config import Config
from retro.training.trainer import Outcome, train


def with_train(config: Config, **changes: Any) -> Config:
    return replace(config, train=replace(config.train, **changes))


def run(config: Config, advance: Callable[[int], None] = lambda _: None, **changes: Any) -> Outcome:
    """Train with other settings of `[train]`."""
    return train(config.run, with_train(config, **changes).run_settings, advance=advance)


def weights(outcome: Outcome) -> list[bytes]:
    """Weights and moments of the last checkpoint."""
    return [(outcome.checkpoint / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


def losses(outcome: Outcome) -> list[tuple[int, float]]:
    """Steps and their losses."""
    return [(line["step"], line["loss"]) for line in outcome.metrics if "loss" in line]


def interrupt_after(tokens: int) -> Callable[[int], None]:
    """An `advance` that raises KeyboardInterrupt after more than this number of tokens."""
    seen = [0]

    def advance(more: int) -> None:
        seen[0] += more
        if seen[0] > tokens:
            raise KeyboardInterrupt

    return advance
