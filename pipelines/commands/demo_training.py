"""The models of `retro demo`, trained on the same tokens until a time.

    trial ─► steps for half of the time ─► steps for the rest, with a falling learning rate

The number of steps of each round follows from the speed of the round before. All models finish a round before the next one
begins, so a slower machine means fewer steps, the same for all models. The rounds are stored, so that a stopped demo resumes.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from indexing.store.files import read_json, write_bytes, write_json
from pipelines.config import Config
from pipelines.launch.in_process import run_training
from pipelines.settings.load import load
from pipelines.settings.toml_file import to_toml
from pipelines.terminal import echo
from retro.model.settings import updated

_TRIAL_STEPS = 3
_SHARES = (0.5, 0.8)
"""Part of the time left that the second and the third round take. The rest is for evaluations, checkpoints and a slower machine."""
_LEAST_STEPS = 2


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
        folder: of the demo; `demo.json` there stores the rounds, `demo.toml` the final settings.
        until: end of the training, in seconds of `time.monotonic`.
    """
    stored = folder / "demo.json"
    rounds: list[int] = read_json(stored).get("rounds") or [_TRIAL_STEPS]
    while True:
        write_json(stored, read_json(stored) | {"rounds": rounds})
        planned = _with_steps(config, rounds)
        names = ("trial", "constant learning rate", "falling learning rate")
        echo(f"   {names[len(rounds) - 1]}: to step {rounds[-1]}")
        outcomes = {name: run_training(run, name) for name, run in runs_of(planned).items()}
        if len(rounds) > len(_SHARES):
            break
        seconds = sum(map(_seconds_per_step, outcomes.values()))
        left = max(0.0, until - time.monotonic())
        rounds = [*rounds, rounds[-1] + max(_LEAST_STEPS, int(_SHARES[len(rounds) - 1] * left / seconds))]
    write_bytes(folder / "demo.toml", to_toml(planned).encode())
    tokens = planned.train.steps * planned.train.batch_size * planned.data.sequence_length
    return Trained(load(Config, folder / "demo.toml", [], verb="train"), outcomes, tokens)


def _with_steps(config: Config, rounds: list[int]) -> Config:
    """Settings to train to the end of the last of these rounds."""
    steps, before = rounds[-1], rounds[-2] if rounds[:-1] else 0
    train = replace(config.train, steps=steps, checkpoint_every=max(20, (steps - before) // 3), lr_schedule="constant")
    if len(rounds) > len(_SHARES):
        ratio = (steps - before) / (steps - train.warmup_steps)
        train = replace(train, lr_schedule="wsd", decay_ratio=ratio)
    return replace(config, train=train)


def _seconds_per_step(outcome: Any) -> float:
    """Time of a step, as logged last."""
    lines = [line for line in outcome.metrics if "tokens_per_second" in line][-3:]
    tokens = lines[-1]["tokens"] / lines[-1]["step"]
    return tokens / float(np.median([line["tokens_per_second"] for line in lines]))
