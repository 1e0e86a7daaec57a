"""A run killed twenty times, at random moments and while writing, ends with the bytes of an uninterrupted run."""

import random
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from indexing.store.datastore import Datastore
from pipelines.config import Config
from retro.checkpoints import checkpoint as checkpoints
from retro.training.run_folder import read_metrics
from retro.training.trainer import train
from tests.conftest import at_operation, forkserver, kill_itself, tiny_config

KILLS = 20
LATEST = 20  # last operation that kills a process: in one of its first two checkpoints


@pytest.mark.slow
def test_twenty_kills_change_neither_weights_nor_metrics(
    tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore
) -> None:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder, run=tmp_path / "killed")
    steps = 4 * KILLS * LATEST // 10 + 20  # 10 operations per checkpoint, every 4 steps: the last kill hits too
    settings = replace(config.train, steps=steps, log_every=3, eval_every=6, eval_tokens=100, checkpoint_every=4)
    config = replace(config, model=replace(config.model, dropout=0.1), train=settings)
    context = forkserver()
    draw, in_the_middle = random.Random(1), 0
    for kill in range(KILLS):
        later = 0.02 * draw.random() if kill % 2 else 0.0  # every other process lives for a moment longer
        process = context.Process(target=run_until_killed, args=(config, draw.randint(1, LATEST), later))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        in_the_middle += has_unfinished_checkpoint(config.run)
    assert in_the_middle >= 3
    straight = replace(config, run=tmp_path / "straight")
    for one in (config, straight):
        process = context.Process(target=run, args=(one,))
        process.start()
        process.join()
        assert process.exitcode == 0
    assert files(config.run) == files(straight.run)
    assert lines(config.run) == lines(straight.run)


def run(config: Config) -> None:
    torch.set_num_threads(1)
    train(config.run, config.run_settings)


def run_until_killed(config: Config, operation: int, later: float) -> None:
    at_operation(operation, config.run, threading.Timer(later, kill_itself).start if later else kill_itself)
    run(config)


def has_unfinished_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob(".*.tmp"))


def files(run: Path) -> dict[str, bytes]:
    """The last checkpoint and best.json."""
    last = checkpoints.open_checkpoint(run).path
    return {path.name: path.read_bytes() for path in [*last.iterdir(), run / "checkpoints" / "best.json"]}


def lines(run: Path) -> list[dict]:
    return [{**line, "tokens_per_second": 0, "mfu": 0} for line in read_metrics(run)]
