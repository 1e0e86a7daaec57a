"""Signals stop a run after the current step is saved; previous signal handlers are restored."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from indexing.store.datastore import Datastore
from pipelines.cli import main
from pipelines.config import Config
from pipelines.settings.toml_file import to_toml
from retro.checkpoints import checkpoint as checkpoints
from retro.parallel.coordination import open_group
from retro.training.signals import Stopped, signals_as_requests
from retro.training.trainer import Trainer
from tests.conftest import tiny_config
from tests.retro.training.runs import run


@pytest.fixture
def config(tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore) -> Config:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder)
    return replace(config, model=replace(config.model, dropout=0.1), train=replace(config.train, log_every=2))


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Shells start background processes with SIGINT ignored, so set the default handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def signal_in_step(step: int, *numbers: int):
    seen = [0]

    def advance(tokens: int) -> None:
        seen[0] += tokens
        if seen[0] == step * 2 * 64:
            for number in numbers:
                signal.raise_signal(number)  # two OS signals in a row could be merged

    return advance


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_step_and_the_resumed_run_equals_an_uninterrupted_one(
    config: Config, tmp_path: Path, number: int, status: int
) -> None:
    straight = run(replace(config, run=tmp_path / "straight"))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(Stopped, match=r"step 5") as stopped:
        run(config, advance=signal_in_step(5, number))
    assert stopped.value.exit_status == status
    assert checkpoints.open_checkpoint(config.run).step == 5
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    resumed = run(config)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        assert (resumed.checkpoint / name).read_bytes() == (straight.checkpoint / name).read_bytes(), name
    values = [
        [{**line, "tokens_per_second": 0, "mfu": 0} for line in outcome.metrics] for outcome in (straight, resumed)
    ]
    assert values[0] == values[1]


def test_a_second_sigterm_is_ignored_and_a_second_sigint_stops_at_once(config: Config) -> None:
    with pytest.raises(Stopped):
        run(config, advance=signal_in_step(3, signal.SIGTERM, signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(config, advance=signal_in_step(5, signal.SIGINT, signal.SIGINT))
    assert not isinstance(stopped.value, Stopped)
    assert checkpoints.open_checkpoint(config.run).step == 4


def test_a_signal_in_the_last_step_completes_the_run(config: Config) -> None:
    assert run(config, advance=signal_in_step(8, signal.SIGTERM)).metrics[-1]["step"] == 8


def test_other_threads_install_no_signal_handlers() -> None:
    handlers = []

    def elsewhere() -> None:
        with signals_as_requests() as asked:
            handlers.append((signal.getsignal(signal.SIGTERM), asked()))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert handlers == [(signal.getsignal(signal.SIGTERM), None)]


def test_a_stopped_command_names_the_next_step_and_exits_with_143(config: Config, tmp_path: Path, capsys) -> None:
    file, metrics = tmp_path / "config.toml", config.run / "metrics.jsonl"
    file.write_text(to_toml(replace(config, train=replace(config.train, steps=100_000, eval_every=0, log_every=1))))

    returned = threading.Event()

    def terminate() -> None:
        while not returned.is_set() and not (metrics.exists() and metrics.read_text()):
            returned.wait(0.002)
        if not returned.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    status = main(["train", str(file)])
    returned.set()
    thread.join()
    assert status == 143
    assert "SIGTERM" in (said := capsys.readouterr().err)
    assert "the same command resumes it" in said


def test_processes_agree_on_a_signal_without_waiting_for_a_gpu(tmp_path) -> None:
    """The run's device is not asked: it does not exist here."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        trainer: Any = SimpleNamespace(
            group=open_group(), processes=SimpleNamespace(device=torch.device("cuda"), count=1)
        )
        assert [Trainer._agreed(trainer, number) for number in (None, signal.SIGTERM)] == [0, signal.SIGTERM]
    finally:
        dist.destroy_process_group()
