"""The executor that runs stages on a Ray cluster."""

import logging
import os
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from indexing.progress import Advance
from indexing.store.errors import InputError
from pipelines.executors.ray_cluster import connect
from pipelines.executors.settings import ExecutorSettings, Resources, StageName
from pipelines.executors.tasks import Task, log_failure, use_threads

log = logging.getLogger("retro")

_POLL_SECONDS = 1.0
_WAITING_SECONDS = 30
_ATTEMPTS = 4  # times that a task starts before the death of its worker counts as the task's fault
_STRAGGLER = 3.0  # times the median time of the finished tasks of a stage


class RayExecutor:
    """Runs each stage by a pool of actors. A worker keeps what it has loaded for all of its shards.

    A worker receives a shard only after its process is up, so no shard waits for a lost machine. When a worker dies, its
    task returns to the queue and a new worker starts as soon as there is room.
    """

    def __init__(self, settings: ExecutorSettings) -> None:
        self.settings = settings
        connect(settings.ray_address)

    def map(
        self, stage: StageName, function: Callable[..., Any], tasks: Sequence[Task], advance: Advance
    ) -> Iterator[Any]:
        """See `Executor.map`. Progress is polled once a second."""
        if tasks:
            pool = _Pool(stage, self.settings.resources_of(stage), self.settings.num_threads, tasks, advance)
            try:
                results = pool.run(function)
            finally:
                pool.close()
            yield from results


def _room(ray: Any, resources: Resources) -> int:
    """Workers that fit into the cluster, at least 1. An autoscaling cluster grows when the next ones are requested."""
    total = ray.cluster_resources()
    wanted = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": resources.memory_bytes}
    return max(1, min(int(total.get(key, 0) / amount) for key, amount in wanted.items() if amount))


class _Pool:
    """The workers of one stage and the tasks they share.

    Attributes:
        waiting: indexes of tasks without a worker, the next one last.
        starting: reference → a worker whose process is not up yet.
        running: reference → index of a task and the worker that runs it.
        losses: index of a task → how many times its worker has died.
    """

    def __init__(
        self, stage: StageName, resources: Resources, num_threads: int, tasks: Sequence[Task], advance: Advance
    ) -> None:
        import ray

        self.ray, self.stage, self.resources, self.tasks = ray, stage, resources, tasks
        reserved = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "memory": resources.memory_bytes or None}
        self.worker = ray.remote(**reserved, max_restarts=0)(_Worker)
        self.num_threads = num_threads or max(1, int(resources.cpus))
        # The dashboard labels actors by name, which must be unique, and their tasks by `Task.name`.
        self.label = uuid.uuid4().hex[:8]
        tally = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Tally)
        self.tally = tally.options(name=f"{stage} progress of {self.label}").remote()
        self.progress = _Progress(ray, self.tally, tasks, advance)
        self.waiting = list(range(len(tasks)))[::-1]
        self.starting: dict[Any, Any] = {}
        self.running: dict[Any, tuple[int, Any]] = {}
        self.losses: Counter[int] = Counter()
        self.workers_started = self.failed_starts = 0
        self.idle_since = time.monotonic()
        # Ray raises these when a worker's process or machine is lost, and when a result is lost with it.
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
                index, worker = self.running.pop(reference)
                try:
                    results[index] = self._result(reference, index)
                except self.lost as error:
                    self._lost(index, worker, error)
                else:
                    self.progress.finished(index)
                    self._give(worker, function)
            self.progress.poll()
            self._log_waiting()
        return results

    def close(self) -> None:
        """End every worker."""
        workers = [*self.starting.values(), *(worker for _, worker in self.running.values())]
        for actor in (*workers, self.tally):
            self.ray.kill(actor)

    def _new_worker(self) -> None:
        self.workers_started += 1
        name = f"{self.stage} {self.workers_started} of {self.label}"
        worker = self.worker.options(name=name).remote(self.num_threads, self.tally, os.getcwd())
        self.starting[worker.ready.remote()] = worker

    def _started(self, reference: Any, function: Callable[..., Any]) -> None:
        worker = self.starting.pop(reference)
        try:
            self.ray.get(reference)
        except self.lost as error:
            self.failed_starts += 1
            if self.failed_starts > _ATTEMPTS * len(self.tasks):
                raise InputError(f"{self.stage}: workers die before they start a task: {error}") from error
            self._new_worker()
        else:
            self._give(worker, function)

    def _give(self, worker: Any, function: Callable[..., Any]) -> None:
        if not self.waiting:
            self.ray.kill(worker)  # frees its resources
            return
        index = self.waiting.pop()
        task = self.tasks[index]
        reference = worker.run.options(name=task.name).remote(index, function, task.arguments)
        self.running[reference] = (index, worker)
        self.progress.started(index)

    def _result(self, reference: Any, index: int) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            log_failure(self.tasks[index].name, error.cause)
            # A user's mistake and a full disk keep type and message. Other errors keep the remote traceback.
            if isinstance(error.cause, (InputError, OSError)):
                raise error.cause from None
            raise error from None

    def _lost(self, index: int, worker: Any, error: Exception) -> None:
        """Put the task of a lost worker back into the queue, and start another worker."""
        name, reason = self.tasks[index].name, " ".join(str(error).split())
        self.losses[index] += 1
        if self.losses[index] >= _ATTEMPTS:
            raise InputError(
                f"{name}: its worker died {_ATTEMPTS} times ({reason}). The usual cause is too little memory: "
                f"lower executor.resources.{self.stage}.workers or raise executor.resources.{self.stage}.memory. Finished work is kept."
            ) from error
        log.warning("%s: its worker died; the task is started again (%s)", name, reason)
        self.ray.kill(worker)  # it may be alive but unreachable
        self.progress.lost(index)
        self.waiting.append(index)
        self._new_worker()

    def _log_waiting(self) -> None:
        now = time.monotonic()
        if self.running:
            self.idle_since = now
        elif now - self.idle_since > _WAITING_SECONDS:
            self.idle_since = now
            log.warning(
                "%s: no worker has started for %d s: each needs %s; free in the cluster: %s",
                self.stage,
                _WAITING_SECONDS,
                self.resources,
                {key: self.ray.available_resources().get(key, 0) for key in ("CPU", "GPU", "memory")},
            )


class _Progress:
    """Forwards the workers' counts to the progress bar, and logs tasks that take much longer than the others."""

    def __init__(self, ray: Any, tally: Any, tasks: Sequence[Task], advance: Advance) -> None:
        self.ray, self.tally, self.tasks, self.advance = ray, tally, tasks, advance
        self.shown = 0
        self.done: set[int] = set()
        self.since: dict[int, float] = {}
        self.times: list[float] = []
        self.named: set[int] = set()

    def started(self, index: int) -> None:
        self.since[index] = time.monotonic()

    def lost(self, index: int) -> None:
        self.since.pop(index)

    def finished(self, index: int) -> None:
        self.done.add(index)
        self.times.append(time.monotonic() - self.since.pop(index))

    def poll(self) -> None:
        counted: dict[int, int] = self.ray.get(self.tally.counts.remote())
        sizes = [
            task.size if index in self.done else min(counted.get(index, 0), task.size)
            for index, task in enumerate(self.tasks)
        ]
        if sum(sizes) > self.shown:  # a restarted task counts only beyond its first attempt
            self.advance(sum(sizes) - self.shown)
            self.shown = sum(sizes)
        if len(self.times) < 3:
            return
        usual, now = statistics.median(self.times), time.monotonic()
        for index, since in self.since.items():
            if now - since > max(_STRAGGLER * usual, 10 * _POLL_SECONDS) and index not in self.named:
                self.named.add(index)
                log.warning(
                    "%s: running for %.0f s; the others took %.0f s", self.tasks[index].name, now - since, usual
                )


class _Tally:
    """Actor that counts the finished units of each task of a stage."""

    def __init__(self) -> None:
        self.units: dict[int, int] = {}

    def add(self, index: int, units: int) -> None:
        self.units[index] = self.units.get(index, 0) + units

    def begin(self, index: int) -> None:
        self.units[index] = 0

    def counts(self) -> dict[int, int]:
        return self.units


class _Worker:
    """Actor that runs one task after another. Functions keep a loaded model or index between calls."""

    def __init__(self, num_threads: int, tally: Any, folder: str) -> None:
        self.num_threads, self.tally = num_threads, tally
        if os.path.isdir(folder):  # relative paths are those of the driver
            os.chdir(folder)

    def ready(self) -> None:
        """Return as soon as the process is up."""

    def run(self, index: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        use_threads(self.num_threads)
        self.tally.begin.remote(index)
        return function(*arguments, advance=lambda units: self.tally.add.remote(index, units))
