"""Two ways to map a stage over shards: in this process, or on a Ray cluster. The only importer of ray.

A task is an idempotent function call that writes its own artifact and returns counts, never arrays. Which executor ran it
makes no difference to the bytes on disk.
"""

import logging
import os
import re
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from indexing.store.errors import InputError
from pipelines.ray_address import require_answer

log = logging.getLogger("retro")

Advance = Callable[[int], None]
StageName = Literal["chunk", "embed", "train_index", "add", "neighbors"]

_POLL_SECONDS = 1.0
_WAITING_SECONDS = 30
_ATTEMPTS = 4  # times that a task is begun before its worker's death counts as its own fault
_STRAGGLER = 3.0  # times the median time of the finished tasks of a stage
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Resources:
    """What Ray reserves for a worker of a stage, and how many there are."""

    cpus: float = 1
    """CPUs of a worker, which is also how many threads it uses."""
    gpus: float = 0
    """GPUs of a worker; a fraction where several share one."""
    memory: str = ""
    """Memory of a worker (`8GB`), so that no more of them start on a machine than fit; empty: not reserved."""
    workers: int = 0
    """Workers of the stage; 0 = as many as the cluster has room for."""

    def __post_init__(self) -> None:
        if self.cpus <= 0 or self.gpus < 0 or self.workers < 0:
            raise InputError("executor: cpus of a stage must be above 0, gpus and workers 0 or more.")
        if self.memory and not re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]?B", self.memory):
            raise InputError(f"executor: memory = {self.memory!r}: must be a size such as '500MB' or '16GB', or empty.")

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes, 0 where none is reserved."""
        number, unit = re.fullmatch(r"([\d.]*)\s*([KMGT]?)B?", self.memory).groups()  # type: ignore[union-attr]
        return int(float(number or 0) * _UNITS[unit])


@dataclass(frozen=True)
class ExecutorSettings:
    """Where the stages run, and on Ray with what."""

    kind: Literal["local", "ray"] = "local"
    """`local`: this process, one shard after another, each on all threads; `ray`: a pool of workers for each stage."""
    threads: int = 0
    """Threads of this process or of a worker; 0 = all cores (local) or the worker's CPUs (Ray)."""
    ray_address: str = ""
    """Cluster to join (`auto`, `ray://…`); empty: the one that runs this job, or a new one on this machine."""
    chunk: Resources = field(default_factory=Resources)
    embed: Resources = field(default_factory=Resources)
    train_index: Resources = field(default_factory=Resources)
    add: Resources = field(default_factory=Resources)
    neighbors: Resources = field(default_factory=Resources)
    train: Resources = field(default_factory=Resources)
    """Training: with `workers` above 0, `retro train` runs on as many workers of Ray, one device each; 0 = in this process."""
    train_failures: int = 8
    """How often training is started anew from its last checkpoint when a worker of Ray fails."""

    def __post_init__(self) -> None:
        if self.train_failures < 0:
            raise InputError(f"executor.train_failures = {self.train_failures}: must be 0 or more.")
        if not 0 <= self.threads < 2**15:
            raise InputError(f"executor.threads = {self.threads}: must be between 0 (all cores) and 32,767.")


@dataclass(frozen=True)
class Task:
    """One call: `function(*arguments, advance=…)`.

    Attributes:
        name: what it makes, as people are told of it: `embeddings/00003`.
        arguments: of the call.
        size: how much it adds to the progress bar.
    """

    name: str
    arguments: tuple[Any, ...]
    size: int


class Executor(Protocol):
    """Runs the tasks of a stage."""

    def map(
        self, stage: StageName, function: Callable[..., Any], tasks: Sequence[Task], advance: Advance
    ) -> Iterator[Any]:
        """Yield the result of each task in order; `advance` is told of progress."""


def _reason(error: BaseException | None) -> str:
    """An error in one line: its message, after its type where that is not a user's mistake."""
    text = " ".join(str(error).split())
    return text if isinstance(error, (InputError, OSError)) else f"{type(error).__name__}: {text}"


def use_threads(threads: int) -> None:
    """Set the threads of torch and Faiss in this process: Ray's OMP_NUM_THREADS=1 outlives the task it was meant for."""
    import faiss
    import torch

    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)


class LocalExecutor:
    """One task after another in this process."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self.threads = settings.threads

    def map(
        self, stage: StageName, function: Callable[..., Any], tasks: Sequence[Task], advance: Advance
    ) -> Iterator[Any]:
        """See `Executor.map`."""
        if self.threads:
            use_threads(self.threads)
        for task in tasks:
            try:
                result = function(*task.arguments, advance=advance)
            except Exception as error:
                log.error("%s failed: %s", task.name, _reason(error))
                raise
            yield result


class RayExecutor:
    """A pool of actors for each stage: what a worker has loaded serves all of its shards.

    A worker is told of a shard when its process is up, so no shard waits for a machine that is gone: what a dead worker
    had in hand goes back to the others, and a new worker takes its place as soon as there is room.
    """

    def __init__(self, settings: ExecutorSettings) -> None:
        self.settings = settings
        connect(settings.ray_address, "executor.ray_address")

    def map(
        self, stage: StageName, function: Callable[..., Any], tasks: Sequence[Task], advance: Advance
    ) -> Iterator[Any]:
        """See `Executor.map`. Progress is polled once a second."""
        if tasks:
            pool = _Pool(stage, getattr(self.settings, stage), self.settings.threads, tasks, advance)
            try:
                results = pool.run(function)
            finally:
                pool.close()
            yield from results


def connect(address: str, key: str) -> None:
    """Join a Ray cluster, or start one on this machine; nothing where this process is in one already.

    Args:
        address: `auto`, `ray://…`; empty: the one that runs this job, or a new one.
        key: the setting that the address comes from.

    Raises:
        InputError: there is no cluster, or it does not let this process in.
    """
    import ray

    if ray.is_initialized():
        return
    try:
        require_answer(address or os.environ.get("RAY_ADDRESS", ""))
        ray.init(address=address or None, log_to_driver=False, include_dashboard=False)
    except (ConnectionError, ValueError, ray.exceptions.AuthenticationError) as error:
        where = address or os.environ.get("RAY_ADDRESS", "")
        raise InputError(
            f"{key}: no Ray cluster at {where or 'this machine'}: {error}\nA cluster with token "
            "authentication wants RAY_AUTH_MODE=token and its token here too (docs/how-to/run-on-a-cluster.md)."
        ) from error


def _room(ray: Any, resources: Resources) -> int:
    """Workers that the cluster has room for, one at least: with more to come, a cluster that grows by itself does so."""
    total = ray.cluster_resources()
    wanted = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": resources.memory_bytes}
    return max(1, min(int(total.get(key, 0) / amount) for key, amount in wanted.items() if amount))


class _Pool:
    """The workers of one stage and the tasks they share.

    Attributes:
        waiting: tasks that nobody has in hand, the next one last.
        starting: reference to a worker whose process is not up yet.
        running: reference to a task's number and the worker that has it in hand.
        losses: how often a task's worker has died.
    """

    def __init__(
        self, stage: StageName, resources: Resources, threads: int, tasks: Sequence[Task], advance: Advance
    ) -> None:
        import ray

        self.ray, self.stage, self.resources, self.tasks = ray, stage, resources, tasks
        reserved = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "memory": resources.memory_bytes or None}
        self.worker = ray.remote(**reserved, max_restarts=0)(_Worker)
        self.threads = threads or max(1, int(resources.cpus))
        # The dashboard labels actors by name, which must be unique, and their tasks by `Task.name`.
        self.label = uuid.uuid4().hex[:8]
        tally = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Tally)
        self.tally = tally.options(name=f"{stage} progress of {self.label}").remote()
        self.progress = _Progress(ray, self.tally, tasks, advance)
        self.waiting = list(range(len(tasks)))[::-1]
        self.starting: dict[Any, Any] = {}
        self.running: dict[Any, tuple[int, Any]] = {}
        self.losses: Counter[int] = Counter()
        self.made = self.failed_starts = 0
        self.idle_since = time.monotonic()
        # What Ray raises when a worker's process or machine is gone; and when a result went with it.
        errors = ray.exceptions
        self.lost = (errors.RayActorError, errors.WorkerCrashedError, errors.OutOfMemoryError, errors.ObjectLostError)

    def run(self, function: Callable[..., Any]) -> list[Any]:
        """Run every task; returns their results in order."""
        results: list[Any] = [None] * len(self.tasks)
        for _ in range(min(len(self.tasks), self.resources.workers or _room(self.ray, self.resources))):
            self._new_worker()
        while self.waiting or self.running:
            known = [*self.running, *self.starting]
            for reference in self.ray.wait(known, num_returns=1, timeout=_POLL_SECONDS)[0]:
                if reference in self.starting:
                    self._started(reference, function)
                    continue
                number, worker = self.running.pop(reference)
                try:
                    results[number] = self._result(reference, number)
                except self.lost as error:
                    self._lost(number, worker, error)
                else:
                    self.progress.finished(number)
                    self._give(worker, function)
            self.progress.poll()
            self._tell_of_waiting()
        return results

    def close(self) -> None:
        """End every worker."""
        workers = [*self.starting.values(), *(worker for _, worker in self.running.values())]
        for actor in (*workers, self.tally):
            self.ray.kill(actor)

    def _new_worker(self) -> None:
        self.made += 1
        name = f"{self.stage} {self.made} of {self.label}"
        worker = self.worker.options(name=name).remote(self.threads, self.tally, os.getcwd())
        self.starting[worker.ready.remote()] = worker

    def _started(self, reference: Any, function: Callable[..., Any]) -> None:
        worker = self.starting.pop(reference)
        try:
            self.ray.get(reference)
        except self.lost as error:
            self.failed_starts += 1
            if self.failed_starts > _ATTEMPTS * len(self.tasks):
                raise InputError(f"{self.stage}: its workers die before they do anything: {error}") from error
            self._new_worker()
        else:
            self._give(worker, function)

    def _give(self, worker: Any, function: Callable[..., Any]) -> None:
        if not self.waiting:
            self.ray.kill(worker)  # makes room
            return
        number = self.waiting.pop()
        task = self.tasks[number]
        reference = worker.run.options(name=task.name).remote(number, function, task.arguments)
        self.running[reference] = (number, worker)
        self.progress.started(number)

    def _result(self, reference: Any, number: int) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            log.error("%s failed: %s", self.tasks[number].name, _reason(error.cause))
            # A user's mistake and a full disk keep their type and message; everything else its remote traceback.
            if isinstance(error.cause, (InputError, OSError)):
                raise error.cause from None
            raise error from None

    def _lost(self, number: int, worker: Any, error: Exception) -> None:
        """Take a task back from a worker that is gone, and start another worker."""
        name, reason = self.tasks[number].name, " ".join(str(error).split())
        self.losses[number] += 1
        if self.losses[number] >= _ATTEMPTS:
            log.error("%s failed: its worker died %d times: %s", name, _ATTEMPTS, reason)
            raise InputError(
                f"{name}: its worker died {_ATTEMPTS} times ({reason}). Most often memory ran out: give the stage fewer "
                f"workers or more memory (executor.{self.stage}.workers, executor.{self.stage}.memory); what is finished "
                "is kept."
            ) from error
        log.warning("%s: its worker died, begun again (%s)", name, reason)
        self.ray.kill(worker)  # it may only have been out of reach
        self.progress.lost(number)
        self.waiting.append(number)
        self._new_worker()

    def _tell_of_waiting(self) -> None:
        now = time.monotonic()
        if self.running:
            self.idle_since = now
        elif now - self.idle_since > _WAITING_SECONDS:
            self.idle_since = now
            log.warning(
                "%s: no worker has started for %d s: each wants %s, free in the cluster are %s",
                self.stage,
                _WAITING_SECONDS,
                self.resources,
                {key: self.ray.available_resources().get(key, 0) for key in ("CPU", "GPU", "memory")},
            )


class _Progress:
    """Hands on what the workers have counted, and names the tasks that take much longer than the others."""

    def __init__(self, ray: Any, tally: Any, tasks: Sequence[Task], advance: Advance) -> None:
        self.ray, self.tally, self.tasks, self.advance = ray, tally, tasks, advance
        self.shown = 0
        self.done: set[int] = set()
        self.since: dict[int, float] = {}
        self.times: list[float] = []
        self.named: set[int] = set()

    def started(self, number: int) -> None:
        self.since[number] = time.monotonic()

    def lost(self, number: int) -> None:
        self.since.pop(number)

    def finished(self, number: int) -> None:
        self.done.add(number)
        self.times.append(time.monotonic() - self.since.pop(number))

    def poll(self) -> None:
        counted: dict[int, int] = self.ray.get(self.tally.counts.remote())
        sizes = [
            task.size if number in self.done else min(counted.get(number, 0), task.size)
            for number, task in enumerate(self.tasks)
        ]
        if sum(sizes) > self.shown:  # a task that was begun again counts from where it stood
            self.advance(sum(sizes) - self.shown)
            self.shown = sum(sizes)
        if len(self.times) < 3:
            return
        usual, now = statistics.median(self.times), time.monotonic()
        for number, since in self.since.items():
            if now - since > max(_STRAGGLER * usual, 10 * _POLL_SECONDS) and number not in self.named:
                self.named.add(number)
                log.warning(
                    "%s: running for %.0f s; the others took %.0f s", self.tasks[number].name, now - since, usual
                )


class _Tally:
    """Actor: how far each task of a stage is."""

    def __init__(self) -> None:
        self.units: dict[int, int] = {}

    def add(self, number: int, units: int) -> None:
        self.units[number] = self.units.get(number, 0) + units

    def begin(self, number: int) -> None:
        self.units[number] = 0

    def counts(self) -> dict[int, int]:
        return self.units


class _Worker:
    """Actor: runs one task after another; what functions keep between calls (a model, an index) stays."""

    def __init__(self, threads: int, tally: Any, folder: str) -> None:
        self.threads, self.tally = threads, tally
        if os.path.isdir(folder):  # relative paths mean what they mean to the driver
            os.chdir(folder)

    def ready(self) -> None:
        """Answered as soon as the process is up."""

    def run(self, number: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        use_threads(self.threads)
        self.tally.begin.remote(number)
        return function(*arguments, advance=lambda units: self.tally.add.remote(number, units))


def make_executor(settings: ExecutorSettings) -> Executor:
    """The executor that the settings ask for."""
    return RayExecutor(settings) if settings.kind == "ray" else LocalExecutor(settings)
