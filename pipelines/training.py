"""Training as every launcher calls it: by settings, with a progress bar or without."""

import contextlib
from collections.abc import Callable
from typing import Any

from pipelines.config import Config
from pipelines.progress import progress


def run_training(config: Config, name: str) -> Any:
    """Train with a progress bar; see `retro.trainer.train`."""
    with training_progress(config, name) as advance:
        return train_quietly(config, advance)


def training_progress(config: Config, name: str) -> contextlib.AbstractContextManager[Callable[[int], None]]:
    """The progress bar of a run."""
    per_step = config.train.batch_size * config.train.accumulation * config.data.sequence_length
    return progress(name, total=config.train.steps * per_step, unit="tokens")


def train_quietly(config: Config, advance: Callable[[int], None] = lambda _: None) -> Any:
    """Train; see `retro.trainer.train`."""
    from retro import trainer

    return trainer.train(
        config.run,
        list(config.data.datastores) or [config.datastore],
        config.model,
        config.data,
        config.train,
        config.evaluation,
        config.parallel,
        advance=advance,
    )
