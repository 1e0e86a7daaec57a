"""A run that is killed twenty times, at random moments and in the middle of writing, ends with the same bytes."""

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from pipelines.config import Config
from retro import checkpoint as checkpoints
from retro.run import read_metrics
from retro.trainer import train
from tests.conftest import forkserver, tiny_config

KILLS = 20
STEPS_BETWEEN = 8


@pytest.mark.slow
def test_twenty_kills_change_neither_weights_nor_metrics(
    tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore
) -> None:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder, run=tmp_path / "killed")
    steps = STEPS_BETWEEN * KILLS + 60  # spare ones, so that the run is still going at the last kill
    settings = replace(
        config.train, steps=steps, log_every=3, eval_every=20, eval_tokens=100, checkpoint_every=4, threads=1
    )
    config = replace(config, model=replace(config.model, dropout=0.1), train=settings)
    context = forkserver()
    draw, in_the_middle = random.Random(1), 0
    for kill in range(1, KILLS + 1):
        process = context.Process(target=run, args=(config,))
        process.start()
        while process.is_alive() and num_lines(config.run) < kill * STEPS_BETWEEN // settings.log_every:
            time.sleep(0.001)
        time.sleep(0.02 * draw.random())
        if kill % 2:  # every other one waits for a checkpoint that is being written, and hits it
            while process.is_alive() and not being_written(config.run):
                time.sleep(0.0002)
        assert process.is_alive(), process.exitcode
        process.kill()
        process.join()
        in_the_middle += being_written(config.run)
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
    train(config.run, [config.datastore], config.model, config.data, config.train, config.evaluation)


def being_written(run: Path) -> bool:
    return any((run / "checkpoints").glob(".*.tmp"))


def num_lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def files(run: Path) -> dict[str, bytes]:
    """The last checkpoint, and which one is the best."""
    last = checkpoints.open_checkpoint(run).path
    return {path.name: path.read_bytes() for path in [*last.iterdir(), run / "checkpoints" / "best.json"]}


def lines(run: Path) -> list[dict]:
    return [{**line, "tokens_per_second": 0, "mfu": 0} for line in read_metrics(run)]
