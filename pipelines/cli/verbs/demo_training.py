"""The models of `retro demo`, trained on the same tokens until a time.

    trial ─► steps for half of the time left, again while that is most of it ─► steps for the rest, the learning rate falls

The number of steps of each round follows from the speed of the round before. All models finish a round before the next one
begins, so a slower machine means fewer steps, the same for all models. The round is stored, so that a stopped demo resumes.
"""

import logging
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from indexing.progress import Advance
from indexing.store.files import read_json, write_bytes, write_json
from pipelines.cli.settings.load import load
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from pipelines.launch.in_process import run_training, train_quietly
from pipelines.terminal.output import echo
from retro.model.settings import updated

_TRIAL_STEPS = 3
_LEAST_STEPS = 2
_GROWTH = 5
"""A round has at most this many times the steps before it: the speed of a few steps says little about that of many."""
_FILLED = 0.8
"""Part of the time left that the last round takes. The rest is for evaluations, checkpoints and a machine that becomes slower."""


@dataclass(frozen=True)
class Round:
    """A part of the training.

    Attributes:
        steps: that each model has done at its end.
        falls_from: step from which the learning rate falls; 0 = it is constant, and another round follows.
    """

    steps: int = _TRIAL_STEPS
    falls_from: int = 0


@dataclass(frozen=True)
class Trained:
    """The trained models by name.

    Attributes:
        config: settings of the RETRO.
        outcomes: of `plain`, `baseline` and `retro`.
        tokens: that each of them was trained on.
    """

    config: Config
    outcomes: dict[str, Any]
    tokens: int


def runs_of(config: Config) -> dict[str, Config]:
    """A plain decoder, one that copies from its own context, and the RETRO: the same number of parameters."""
    from retro.model.presets import baseline_of

    baseline = baseline_of(config.model)
    models = {"plain": updated(baseline, {"copy_head.context": False}), "baseline": baseline, "retro": config.model}
    return {name: replace(config, run=config.run.with_name(name), model=model) for name, model in models.items()}


def train_models(config: Config, folder: Path, until: float) -> Trained:
    """Train all models, or resume.

    Args:
        config: settings of the RETRO.
        folder: of the demo; `demo.json` there stores the round, `demo.toml` the final settings.
        until: end of the training, in seconds of `time.monotonic`.
    """
    stored, begun = folder / "demo.json", time.monotonic()
    now = Round(**read_json(stored).get("round", {}))
    while True:
        write_json(stored, read_json(stored) | {"round": asdict(now)})
        planned = _with_steps(config, now)
        echo(f"   training to step {now.steps}" + (", the learning rate falls" if now.falls_from else ""))
        outcomes = {name: run_training(run, f"train {name}", train_silently) for name, run in runs_of(planned).items()}
        if now.falls_from:
            break
        left = max(0.0, until - time.monotonic())
        fitting = left / sum(map(_seconds_per_step, outcomes.values()))
        if left > max(0.0, until - begun) / 2:
            now = Round(now.steps + max(_LEAST_STEPS, int(min(fitting / 2, _GROWTH * now.steps))))
        else:
            now = Round(now.steps + max(_LEAST_STEPS, int(fitting * _FILLED)), falls_from=now.steps)
    write_bytes(folder / "demo.toml", to_toml(planned).encode())
    tokens = planned.train.steps * planned.train.batch_size * planned.data.sequence_length
    return Trained(load(Config, folder / "demo.toml", [], verb="train"), outcomes, tokens)


def train_silently(config: Config, advance: Advance = lambda _: None) -> Any:
    """Train without the messages of a run except warnings: every round resumes it."""
    log = logging.getLogger("retro")

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno != logging.INFO

    log.addFilter(is_wanted)
    try:
        return train_quietly(config, advance)
    finally:
        log.removeFilter(is_wanted)


def _with_steps(config: Config, now: Round) -> Config:
    """Settings to train to the end of a round."""
    train = replace(config.train, steps=now.steps, checkpoint_every=20, lr_schedule="constant")
    if now.falls_from:
        falling = (now.steps - now.falls_from) / (now.steps - train.warmup)
        train = replace(train, lr_schedule="wsd", decay_ratio=falling)
    return replace(config, train=train)


def _seconds_per_step(outcome: Any) -> float:
    """Time of a step, as logged last."""
    lines = [line for line in outcome.metrics if "tokens_per_second" in line][-3:]
    tokens = lines[-1]["tokens"] / lines[-1]["step"]
    return tokens / float(np.median([line["tokens_per_second"] for line in lines]))
