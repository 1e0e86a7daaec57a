"""Training by workers of a Ray cluster (Ray Train). After a failure it restarts from the last checkpoint.

    driver ── TorchTrainer ── workers: a process group of torch, each `retro.training.trainer.train` ── checkpoints in RUN, on a file system
      ▲            ▲                                   │                                      that all nodes share
      │            └────── restart of all workers ─────┤ one dies
      └─────────── relay: lines, tokens, a mistake ────┘

Workers read and write the same files as the processes of torchrun, so a run may continue with either. The driver logs
the lines of rank 0.
"""

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from indexing.progress import STATUS, Advance, Aside, FinishedBefore
from indexing.store.errors import InputError
from pipelines.config import Config
from pipelines.executors.ray_cluster import connect
from pipelines.executors.settings import Resources
from pipelines.executors.tasks import use_threads
from pipelines.launch.in_process import Learning, train_quietly, training_progress

log = logging.getLogger("retro")

_POLL_SECONDS = 1.0
_AGREEMENT_SECONDS = 10.0  # for all workers to report the same user's mistake


def train_on_ray(config: Config, name: str = "train", learning: Learning = train_quietly) -> None:
    """Train with the workers of `config.executor.resources["train"]`, and return when the run is complete.

    Args:
        config: all settings.
        name: of the progress bar.
        learning: training or fine-tuning in a worker.

    Raises:
        InputError: no cluster answers, workers failed too often, or a worker raised InputError or FloatingPointError.
    """
    connect(config.executor.ray_address)
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    resources = resolve_workers(config.executor.resources_of("train"), ray.cluster_resources(), config.train.device)
    executor = replace(config.executor, resources={**config.executor.resources, "train": resources})
    config = replace(config, executor=executor)
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
            f"times. Run the same command again to continue from the last checkpoint. {failure}"
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
"""Folder in RUN. Ray uses it to check that all nodes share the file system; it is removed at the end."""


class _Relay:
    """Actor that keeps the workers' messages until the driver fetches them."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.tokens = 0
        self.tokens_before: int | None = None
        self.aside = 0.0
        self.problems: list[str] = []

    def say(self, level: int, line: str) -> None:
        """Keep a line of the log."""
        self.lines.append((level, line))

    def trained(self, tokens: int, tokens_before: int) -> None:
        """Keep the number of trained tokens, and how many a checkpoint had when the first workers started.

        Workers that Ray restarted count from their checkpoint.
        """
        if self.tokens_before is None:
            self.tokens_before = tokens_before
        self.tokens = max(self.tokens, tokens)

    def set_aside(self, seconds: float) -> None:
        """Add the time of an evaluation."""
        self.aside += seconds

    def refuse(self, problem: str) -> None:
        """Keep the message of a user's mistake from one worker."""
        self.problems.append(problem)

    def num_refusals(self) -> int:
        """Number of workers that have reported a mistake."""
        return len(self.problems)

    def mistake(self) -> str:
        """The first reported mistake, or ""."""
        return next(iter(self.problems), "")

    def news(self) -> tuple[list[tuple[int, str]], int, int, float]:
        """Lines since the last call, the number of trained tokens, how many of them were trained before, and the
        seconds of evaluations since the last call."""
        lines, self.lines = self.lines, []
        aside, self.aside = self.aside, 0.0
        return lines, self.tokens, self.tokens_before or 0, aside


@contextlib.contextmanager
def _passed_on(ray: Any, relay: Any, advance: Advance) -> Iterator[None]:
    """Forward the relay's lines and tokens to the log and the progress bar of this process."""
    ended, shown = threading.Event(), 0

    def pass_on() -> None:
        nonlocal shown
        lines, tokens, before, aside = ray.get(relay.news.remote())
        for level, line in lines:
            log.log(level, "%s", line)
        if before > shown:
            advance(FinishedBefore(before))
            shown = before
        advance(tokens - shown)
        advance(Aside(aside))
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
    """Sends log messages to the relay."""

    def __init__(self, relay: Any) -> None:
        super().__init__()
        self.relay = relay

    def emit(self, record: logging.LogRecord) -> None:
        """Send one message."""
        self.relay.say.remote(record.levelno, self.format(record))


def _work(arguments: dict[str, Any]) -> None:
    """Train in a worker.

    After a user's mistake nothing is retried. If all workers report it, they return. If only some do, the others wait
    for them, and only Ray can end them: it restarts all workers, which then return at once.
    """
    import ray

    from retro.parallel.coordination import joined

    config: Config = arguments["config"]
    learning: Learning = arguments["learning"]
    relay = arguments["relay"]
    if ray.get(relay.mistake.remote()):
        return
    if os.path.isdir(arguments["folder"]):  # relative paths are those of the driver
        os.chdir(arguments["folder"])
    use_threads(config.executor.num_threads or max(1, int(config.executor.resources_of("train").cpus)))
    log.handlers[:] = [_Lines(relay)]
    log.setLevel(STATUS)
    log.propagate = False
    trained = before = 0

    def advance(tokens: int) -> None:
        nonlocal trained, before
        if isinstance(tokens, Aside):
            relay.set_aside.remote(tokens.seconds)
            return
        before += tokens if isinstance(tokens, FinishedBefore) else 0
        trained += tokens
        relay.trained.remote(trained, before)

    try:
        with joined() as rank:
            learning(config, advance) if rank == 0 else learning(config)
    except (InputError, FloatingPointError) as error:
        deadline = time.monotonic() + _AGREEMENT_SECONDS
        ray.get(relay.refuse.remote(str(error)))
        while ray.get(relay.num_refusals.remote()) < config.executor.resources_of("train").workers:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    finally:
        ray.get(relay.trained.remote(trained, before))  # calls are answered in order, so the relay has all of them now
