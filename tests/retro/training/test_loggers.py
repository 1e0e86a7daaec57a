"""Metric loggers other than `metrics.jsonl`."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indexing.progress import STATUS
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.files import read_json
from retro.training.loggers import Console, WeightsAndBiases
from retro.training.trainer import train
from tests.conftest import tiny_config


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch) -> Iterator[Any]:
    """The package without a key, kept out of the user's home folder."""
    package = pytest.importorskip("wandb")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    yield package
    package.teardown()


def test_a_resumed_run_continues_its_wandb_run_offline(
    tmp_path: Path, tiny_datastore: Datastore, wandb, monkeypatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny_config(tmp_path, tmp_path)
    settings = replace(config.train, report_to=("wandb",))

    def run(stop_after: int = 99) -> None:
        steps: list[int] = []

        def advance(tokens: int) -> None:
            steps.append(tokens)
            if len(steps) > stop_after:
                raise KeyboardInterrupt

        train(
            config.run, replace(config, datastore=tiny_datastore.folder, train=settings).run_settings, advance=advance
        )

    def logged() -> list[Path]:
        return sorted((config.run / "wandb").glob("offline-run-*/run-*.wandb"))

    with pytest.raises(KeyboardInterrupt):
        run(stop_after=5)
    known = read_json(config.run / "wandb.json")["id"]
    run()
    wandb.teardown()  # its service writes asynchronously
    assert [path.name for path in logged()] == [f"run-{known}.wandb"] * 2
    first, second = (path.read_bytes() for path in logged())
    for name in (b"loss", b"valid_bits_per_byte_on"):
        assert name in first
        assert name in second
    assert b"d_model" in first  # the settings


def test_a_missing_key_is_rejected_before_training(tmp_path: Path, wandb, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr("sys.stdin", None)
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(InputError, match=r"train\.report_to: 'wandb'.*WANDB_MODE=offline"):
        WeightsAndBiases(tmp_path, 0)


def test_a_restarted_run_is_a_new_wandb_run(tmp_path: Path, wandb, monkeypatch) -> None:
    given: list[dict] = []
    monkeypatch.setattr(wandb, "init", lambda **options: given.append(options))
    (tmp_path / "settings.json").write_text("{}")
    for step in (0, 4, 0):
        WeightsAndBiases(tmp_path, step)
    first, resumed, again = (options["id"] for options in given)
    assert first == resumed != again
    assert [options["project"] for options in given] == ["retro"] * 3


def test_losses_are_a_status_and_only_evaluations_and_the_last_step_are_lines(caplog: pytest.LogCaptureFixture) -> None:
    console = Console(steps=1000)
    caplog.set_level(STATUS, "retro")
    for step in (100, 200):
        console.write({"step": step, "tokens": step, "loss": 5.25, "monitor/update_ratio/head": 0.1})
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (STATUS, "step 100 of 1,000, loss 5.25"),
        (STATUS, "step 200 of 1,000, loss 5.25"),
    ]
    caplog.clear()
    console.write({"step": 200, "tokens": 200, "valid_bits_per_byte_off": 2.5})
    console.write({"step": 200, "tokens": 200, "monitor/update_ratio/head": 0.1})
    console.write({"step": 1000, "tokens": 1000, "loss": 4.5})
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert [record.getMessage().split()[1] for record in caplog.records] == ["200", "1,000"]
