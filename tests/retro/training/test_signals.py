"""Signals stop a run after the current step is saved; previous signal handlers are restored."""

import contextlib
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
from torch import Tensor

from indexing.progress import Aside
from indexing.store.datastore import Datastore
from pipelines.cli.main import main
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from retro.batch.inputs import Inputs
from retro.checkpoints import checkpoint as checkpoints
from retro.parallel.coordination import open_group
from retro.parallel.forward_backward import WholeModel
from retro.training.run_folder import read_metrics
from retro.training.signals import Stopped, signals_as_requests
from retro.training.task import DocumentTask
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
    assert without_speed(resumed.metrics) == without_speed(straight.metrics)


def test_a_second_sigterm_is_ignored_and_a_second_sigint_stops_at_once(config: Config) -> None:
    with pytest.raises(Stopped):
        run(config, advance=signal_in_step(3, signal.SIGTERM, signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(config, advance=signal_in_step(5, signal.SIGINT, signal.SIGINT))
    assert not isinstance(stopped.value, Stopped)
    assert checkpoints.open_checkpoint(config.run).step == 4


@pytest.mark.parametrize("step", [3, 6], ids=["without a checkpoint of its own", "of the last step"])
def test_a_signal_stops_an_evaluation_at_its_next_batch_and_the_resumed_run_equals_an_uninterrupted_one(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    config = replace(config, train=replace(config.train, steps=6, eval_every=3))  # checkpoints: 4 and 6
    with evaluation_batches(monkeypatch) as counted:
        straight = run(replace(config, run=tmp_path / "straight"))
    signaled = 2 if step == 3 else len(counted) // 2 + 2  # the second batch of the evaluation
    assert signaled < len(counted) * step // 6
    with evaluation_batches(monkeypatch, signaled) as counted, pytest.raises(Stopped, match=f"step {step}") as stopped:
        run(config)
    assert len(counted) == signaled
    assert stopped.value.exit_status == 143
    assert checkpoints.open_checkpoint(config.run).step == step
    assert evaluated(read_metrics(config.run)) == [3][: step // 6]
    resumed = run(config)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        assert (resumed.checkpoint / name).read_bytes() == (straight.checkpoint / name).read_bytes(), name
    assert without_speed(resumed.metrics) == without_speed(straight.metrics)
    best = [folder / "checkpoints" / "best.json" for folder in (config.run, tmp_path / "straight")]
    assert best[0].read_bytes() == best[1].read_bytes()


def test_a_signal_in_the_last_step_leaves_only_the_evaluation_to_the_next_start(config: Config) -> None:
    with pytest.raises(Stopped, match="step 8"):
        run(config, advance=signal_in_step(8, signal.SIGTERM))
    trained: list[int] = []
    resumed = run(config, advance=trained.append)
    assert [count for count in trained if not isinstance(count, Aside)] == [8 * 2 * 64]  # reported as done before
    assert evaluated(resumed.metrics) == [4, 8]


def test_a_signal_in_the_last_step_completes_a_run_without_an_evaluation(config: Config, monkeypatch) -> None:
    monkeypatch.setattr(DocumentTask, "evaluate", lambda *_: {})
    assert run(config, advance=signal_in_step(8, signal.SIGTERM)).metrics[-1]["step"] == 8


@contextlib.contextmanager
def evaluation_batches(monkeypatch: pytest.MonkeyPatch, number: int = 0) -> Iterator[list[Inputs]]:
    """Collect the batches of evaluations. SIGTERM comes in the n-th of them."""
    batches: list[Inputs] = []

    def token_losses(model: WholeModel, inputs: Inputs) -> Tensor:
        batches.append(inputs)
        if len(batches) == number:
            signal.raise_signal(signal.SIGTERM)
        return original(model, inputs)

    original = WholeModel.token_losses
    with monkeypatch.context() as patch:
        patch.setattr(WholeModel, "token_losses", token_losses)
        yield batches


def evaluated(metrics: list[dict[str, Any]]) -> list[int]:
    """The steps that have an evaluation."""
    return [line["step"] for line in metrics if "valid_bits_per_byte_on" in line]


def without_speed(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**line, "tokens_per_second": 0, "mfu": 0} for line in metrics]


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
