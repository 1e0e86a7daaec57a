"""Training and fine-tuning by settings, with a progress bar or without; every launcher calls these functions."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from indexing.progress import Advance
from pipelines.config import Config
from pipelines.terminal.progress import progress

if TYPE_CHECKING:
    from retro.training.trainer import Outcome


class Learning(Protocol):
    """Training or fine-tuning in one process. A function of a module, so that Ray can send it to workers."""

    def __call__(self, config: Config, advance: Advance = ...) -> "Outcome":
        """Train until the run is complete; call `advance` with the number of trained tokens."""


def run_training(config: Config, name: str, learning: Learning | None = None) -> "Outcome":
    """Train with a progress bar, by `learning` or `train_quietly`."""
    with training_progress(config, name) as advance:
        return (learning or train_quietly)(config, advance)


def training_progress(config: Config, name: str) -> contextlib.AbstractContextManager[Callable[[int], None]]:
    """The progress bar of a run. With epochs of examples the total is unknown until they are prepared."""
    per_step = config.run_settings.samples_per_step * config.data.sequence_length
    total = None if name == "finetune" and config.finetune.epochs else config.train.steps * per_step
    return progress(name, total=total, unit="tokens")


def train_quietly(config: Config, advance: Advance = lambda _: None) -> "Outcome":
    """Train; see `retro.training.trainer.train`."""
    from retro.training import trainer

    return trainer.train(config.run, config.run_settings, advance=advance)


def finetune_quietly(config: Config, advance: Advance = lambda _: None) -> "Outcome":
    """Fine-tune; see `retro.finetuning.trainer.finetune`."""
    from retro.finetuning import trainer as finetune

    return finetune.finetune(config.run, config.run_settings, config.finetune, advance=advance)
