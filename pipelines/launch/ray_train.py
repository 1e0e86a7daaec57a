"""Training by workers of a Ray cluster (Ray Train): started, and started anew from the last checkpoint when some of them fail.

    driver ── TorchTrainer ── workers: a process group of torch, each `retro.training.trainer.train` ── checkpoints in RUN, on a file system
      ▲            ▲                                   │                                      that all nodes share
      │            └────── all anew, a few times ──────┤ one dies
      └─────────── relay: lines, tokens, a mistake ────┘

What a worker is told and what it leaves is the same as under torchrun, so a run may go on with either. The driver says what the
first worker would say if it were alone.
"""

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from indexing.store.errors import InputError
from pipelines.config import Config
from pipelines.executors.ray_cluster import connect
from pipelines.executors.settings import Resources
from pipelines.executors.tasks import use_threads
from pipelines.launch.in_process import Learning, train_quietly, training_progress

log = logging.getLogger("retro")

_POLL_SECONDS = 1.0
_AGREEMENT_SECONDS = 10.0  # for all workers to meet the mistake of one


def train_on_ray(config: Config, name: str = "train", learning: Learning = train_quietly) -> None:
    """Train as `config.executor.train` says, and return when the run is complete.

    Args:
        config: everything.
        name: of the progress bar.
        learning: what the workers do.

    Raises:
        InputError: there is no cluster, workers failed too often, or a worker's own InputError or FloatingPointError.
    """
    connect(config.executor.ray_address)
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    resources = resolve_workers(config.executor.train, ray.cluster_resources(), config.train.device)
    config = replace(config, executor=replace(config.executor, train=resources))
    reserved: dict[str, float] = {"CPU": resources.cpus}
    if resources.gpus:
        reserved["GPU"] = resources.gpus
    if resources.memory_bytes:
        reserved["memory"] = resources.memory_bytes
    relay = ray.remote(num_cpus=0)(_Relay).remote()
    trainer = TorchTrainer(
        _work,
        train_loop_config={"config": config, "learning": learning, "relay": relay, "folder": os.getcwd()},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if resources.gpus else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=resources.workers, use_gpu=resources.gpus > 0, resources_per_worker=reserved
        ),
        run_config=RunConfig(
            name=_RAYS_OWN,
            storage_path=str(config.run.absolute()),
            failure_config=FailureConfig(max_failures=config.executor.train_failures),
        ),
    )
    failure = None
    try:
        with training_progress(config, name) as advance, _passed_on(ray, relay, advance):
            trainer.fit()
    except TrainingFailedError as error:
        failure = error
    finally:
        shutil.rmtree(config.run / _RAYS_OWN, ignore_errors=True)
    if problem := ray.get(relay.mistake.remote()):
        raise InputError(problem)
    if failure is not None:
        raise InputError(
            f"{config.run}: training on Ray failed more than executor.train_failures = {config.executor.train_failures} "
            f"times; the same command goes on from the last checkpoint. {failure}"
        ) from failure


def resolve_workers(resources: Resources, cluster: Mapping[str, float], device: str) -> Resources:
    """Fill in `workers` where it is 0: one for each GPU of the cluster, or one without GPUs.

    Args:
        resources: what a worker reserves. `gpus` becomes 1 if it is 0 and workers shall have a GPU.
        cluster: all resources of the cluster, as Ray names them.
        device: `train.device`; with "cpu" workers reserve no GPU.
    """
    if resources.workers:
        return resources
    total = cluster.get("GPU", 0.0)
    gpus = resources.gpus or float(total > 0 and device != "cpu")
    return replace(resources, gpus=gpus, workers=max(1, int(total / gpus)) if gpus else 1)


_RAYS_OWN = ".ray"
"""Folder in RUN by which Ray sees that all nodes share the file system; nothing else is kept there."""


class _Relay:
    """Actor: what the workers have to say, until the driver fetches it."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.tokens = 0
        self.problems: list[str] = []

    def say(self, level: int, line: str) -> None:
        """A line of the log."""
        self.lines.append((level, line))

    def trained(self, tokens: int) -> None:
        """How far the run is. One that was started anew counts from its checkpoint."""
        self.tokens = max(self.tokens, tokens)

    def refuse(self, problem: str) -> None:
        """A user's mistake, as one of the workers has met it."""
        self.problems.append(problem)

    def num_refusals(self) -> int:
        """How many workers have met a mistake."""
        return len(self.problems)

    def mistake(self) -> str:
        """The first mistake that was met, or nothing."""
        return next(iter(self.problems), "")

    def news(self) -> tuple[list[tuple[int, str]], int]:
        """Lines since the last call, and tokens."""
        lines, self.lines = self.lines, []
        return lines, self.tokens


@contextlib.contextmanager
def _passed_on(ray: Any, relay: Any, advance: Callable[[int], None]) -> Iterator[None]:
    """Meanwhile, let this process's log and progress bar show what the relay hears."""
    ended, shown = threading.Event(), 0

    def pass_on() -> None:
        nonlocal shown
        lines, tokens = ray.get(relay.news.remote())
        for level, line in lines:
            log.log(level, "%s", line)
        advance(tokens - shown)
        shown = tokens

    def repeat() -> None:
        while not ended.wait(_POLL_SECONDS):
            pass_on()

    thread = threading.Thread(target=repeat, name="relay", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        pass_on()


class _Lines(logging.Handler):
    """Sends messages to the relay."""

    def __init__(self, relay: Any) -> None:
        super().__init__()
        self.relay = relay

    def emit(self, record: logging.LogRecord) -> None:
        """One message."""
        self.relay.say.remote(record.levelno, self.format(record))


def _work(arguments: dict[str, Any]) -> None:
    """What a worker does.

    A user's mistake is not tried again, as it would be the same mistake. Where all workers have met it, they just end. Else some
    wait for the one that has failed, and only Ray can end them: it starts all anew, and they find that there is nothing to do.
    """
    import ray

    from retro.parallel.coordination import joined

    config: Config = arguments["config"]
    learning: Learning = arguments["learning"]
    relay = arguments["relay"]
    if ray.get(relay.mistake.remote()):
        return
    if os.path.isdir(arguments["folder"]):  # relative paths mean what they mean to the driver
        os.chdir(arguments["folder"])
    use_threads(config.executor.num_threads or max(1, int(config.executor.train.cpus)))
    log.handlers[:] = [_Lines(relay)]
    log.setLevel(logging.INFO)
    log.propagate = False
    trained = 0

    def advance(tokens: int) -> None:
        nonlocal trained
        trained += tokens
        relay.trained.remote(trained)

    try:
        with joined() as rank:
            learning(config, advance) if rank == 0 else learning(config)
    except (InputError, FloatingPointError) as error:
        deadline = time.monotonic() + _AGREEMENT_SECONDS
        ray.get(relay.refuse.remote(str(error)))
        while ray.get(relay.num_refusals.remote()) < config.executor.train.workers:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    finally:
        ray.get(relay.trained.remote(trained))  # calls are answered in order: now the relay has heard all of them
