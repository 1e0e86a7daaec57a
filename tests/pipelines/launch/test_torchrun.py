"""Training by several `python -m pipelines.train` processes that a launcher starts: messages, exit statuses, kills.

One test starts them with torchrun. The others start them as torchrun does, but fork a process that has already
imported PyTorch, which is faster.
"""

import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from indexing.store.datastore import Datastore
from pipelines.cli.main import main
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from retro.batch.inputs import Inputs
from retro.checkpoints import checkpoint as checkpoints
from retro.parallel.forward_backward import WholeModel
from retro.training.run_folder import read_metrics
from retro.training.trainer import train
from tests.conftest import PATIENCE, at_operation, tiny_config, wait_until

WORLD = 2
KILLS = 3
LATEST = 20  # kill no later than this operation: checkpoints take 10 operations each, every 4 steps
STEPS = 4 * KILLS * LATEST // 10 + 8  # the last kill hits too


@pytest.fixture
def config(tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore) -> Config:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder)
    changes: dict[str, Any] = {"batch_size": 4, "precision": "float32", "lr_schedule": "constant"}
    settings = replace(config.train, steps=STEPS, eval_every=16, eval_tokens=100, **changes)
    return replace(config, model=replace(config.model, dropout=0.1), train=settings)


def worker(rank: int, port: int, said: Path, config: Path, run: Path, pause_at: int, signal_at: int) -> None:
    """Run one process with torchrun's environment variables. The first one pauses before operation `pause_at`; only the last one
    receives SIGTERM, in batch `signal_at` of its evaluations."""
    if rank == 0 and pause_at:
        at_operation(pause_at, run, partial(pause, run.with_suffix(".paused")))
    if rank == WORLD - 1 and signal_at:
        signal_in_evaluation(signal_at)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    torch.set_num_threads(1)  # as OMP_NUM_THREADS of torchrun
    with open(said, "a", buffering=1) as file:
        sys.stdout = sys.stderr = file
        os._exit(main(["train", str(config)]))


def pause(mark: Path) -> None:
    """Create a file, and wait until it is removed."""
    mark.touch()
    wait_until(lambda: not mark.exists())


def signal_in_evaluation(number: int) -> None:
    """Send this process SIGTERM in the n-th batch of its evaluations."""
    batches, losses = itertools.count(1), WholeModel.token_losses

    def token_losses(model: WholeModel, inputs: Inputs) -> Tensor:
        if next(batches) == number:
            signal.raise_signal(signal.SIGTERM)
        return losses(model, inputs)

    WholeModel.token_losses = token_losses  # type: ignore[method-assign]


class Processes:
    """`WORLD` processes that train together. The first creates the file `paused` and waits before operation `pause_at`."""

    def __init__(self, config: Config, pause_at: int = 0, signal_at: int = 0) -> None:
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )  # outlives the processes, as torchrun's store does
        file, self.said, self.run = write(config), config.run.with_suffix(".log"), config.run
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch._dynamo"])
        self.paused = self.run.with_suffix(".paused")
        rest = (self.store.port, self.said, file, self.run, pause_at, signal_at)
        self.all = [context.Process(target=worker, args=(rank, *rest)) for rank in range(WORLD)]
        for one in self.all:
            one.start()

    def end(self) -> list[int | None]:
        """Wait for all processes, with a time limit, and return their exit statuses."""
        deadline = time.monotonic() + PATIENCE
        for one in self.all:
            one.join(max(0.0, deadline - time.monotonic()))
        hanging = [one.kill() for one in self.all if one.is_alive()]
        assert not hanging, self.said.read_text()
        return [one.exitcode for one in self.all]

    def until(self, seen: Callable[[], bool]) -> None:
        """Wait until `seen` is true."""
        deadline = time.monotonic() + PATIENCE
        while not seen():
            assert all(one.is_alive() for one in self.all), self.said.read_text()
            assert time.monotonic() < deadline, self.said.read_text()
            time.sleep(0.0005)


def write(config: Config) -> Path:
    file = config.run.with_suffix(".toml")
    file.write_text(to_toml(config))
    return file


def being_written(run: Path) -> bool:
    return any((run / "checkpoints").glob(".*.tmp"))


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.exists() else 0


def last_checkpoint(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoints.open_checkpoint(run).path.iterdir()}


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run) if "loss" in line]


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one_and_only_one_logs(config: Config, tmp_path: Path) -> None:
    config = replace(config, model=replace(config.model, dropout=0.0), train=replace(config.train, steps=8))
    processes = Processes(config)
    assert processes.end() == [0, 0], processes.said.read_text()
    said = processes.said.read_text().splitlines()
    for beginning in ("data: ", "step 8  tokens 2,048  loss ", "train: 2,048 tokens in ", "checkpoint: ", "curves: "):
        assert sum(line.startswith(beginning) for line in said) == 1, (beginning, said)
    train(tmp_path / "one", config.run_settings)
    assert losses(config.run) == pytest.approx(losses(tmp_path / "one"), rel=2e-5)


@pytest.mark.slow
def test_user_mistake_is_printed_once_and_every_process_exits_with_status_2(config: Config) -> None:
    processes = Processes(replace(config, train=replace(config.train, batch_size=3)))
    assert processes.end() == [2, 2]
    assert re.findall("^error: .*", processes.said.read_text(), re.MULTILINE) == [
        "error: train.batch_size = 3: must be a multiple of the 2 data-parallel processes."
    ]
    # Only the first process notices that the folder of the run is a file. The other processes receive its error.
    config = replace(config, run=config.run.with_name("file"))
    config.run.write_text("")
    processes = Processes(config)
    assert processes.end() == [2, 2]
    (error,) = re.findall("^(?:error|Traceback).*", processes.said.read_text(), re.MULTILINE)
    assert str(config.run) in error


@pytest.mark.slow
def test_after_kills_the_other_processes_end_and_restarts_give_bit_identical_results(config: Config) -> None:
    killed, calm = (replace(config, run=config.run.with_name(name)) for name in ("killed", "calm"))
    draw, in_the_middle = random.Random(1), 0
    for _ in range(KILLS):
        processes = Processes(killed, pause_at=draw.randint(1, LATEST))
        processes.until(processes.paused.exists)
        time.sleep(0.03 * draw.random())
        victim = draw.randrange(WORLD)
        processes.all[victim].kill()
        processes.paused.unlink()
        statuses = processes.end()
        in_the_middle += being_written(killed.run)
        assert statuses[victim] == -signal.SIGKILL
        assert statuses[1 - victim] not in (0, None)
    assert in_the_middle
    for one in (killed, calm):
        processes = Processes(one)
        assert processes.end() == [0, 0], processes.said.read_text()
    assert last_checkpoint(killed.run) == last_checkpoint(calm.run)
    assert losses(killed.run) == losses(calm.run)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_an_evaluation_in_all_at_the_same_batch(config: Config) -> None:
    settings = replace(config.train, steps=8, eval_every=4, eval_tokens=1000, checkpoint_every=8)
    stopped, calm = (
        replace(
            config, run=config.run.with_name(name), train=settings, evaluation=replace(config.evaluation, batch_size=2)
        )
        for name in ("stopped", "calm")
    )
    processes = Processes(stopped, signal_at=2)
    assert processes.end() == [143, 143], processes.said.read_text()
    assert checkpoints.open_checkpoint(stopped.run).step == 4  # saved because of the signal
    assert not [line for line in read_metrics(stopped.run) if "valid_bits_per_byte_on" in line]
    for one in (stopped, calm):
        processes = Processes(one)
        assert processes.end() == [0, 0], processes.said.read_text()
    assert last_checkpoint(stopped.run) == last_checkpoint(calm.run)
    lines = [[{**line, "tokens_per_second": 0, "mfu": 0} for line in read_metrics(one.run)] for one in (stopped, calm)]
    assert lines[0] == lines[1]


def torchrun_workers(launcher: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


@pytest.mark.slow
def test_torchrun_restarts_after_a_kill_and_stops_all_processes_at_the_same_step(config: Config) -> None:
    endless = replace(config, train=replace(config.train, steps=1_000_000, eval_every=0))
    command = [Path(sysconfig.get_path("scripts")) / "torchrun", "--standalone", "--nproc-per-node", str(WORLD)]
    command += ["--max-restarts", "1", "-m", "--", "pipelines.train", write(endless), "--run", str(config.run)]
    log = config.run.with_suffix(".log")
    with open(log, "w") as file:
        launcher = subprocess.Popen(command, stdout=file, stderr=file)

    def wait_for(seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not seen():
            assert launcher.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)

    try:
        wait_for(lambda: steps_done(config.run) > 8)
        os.kill(torchrun_workers(launcher.pid)[-1], signal.SIGKILL)
        wait_for(lambda: log.read_text().count("resuming from step") == 1)
        begun = steps_done(config.run)
        wait_for(lambda: steps_done(config.run) > begun + 2)
        launcher.terminate()
        assert launcher.wait(PATIENCE) != 0
    finally:
        launcher.kill()
    (step,) = re.findall(r"SIGTERM: .* is saved at step (\d+); the same command resumes it", log.read_text())
    found = checkpoints.open_checkpoint(config.run)
    assert found.step == int(step)
    assert found.mesh_dims == {"pipeline": 1, "data": WORLD, "tensor": 1}
    # A different number of processes can resume from its checkpoint.
    ended = replace(config, train=replace(endless.train, steps=found.step + 2))
    assert main(["train", str(write(ended))]) == 0
    assert json.loads((config.run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == found.step + 2
