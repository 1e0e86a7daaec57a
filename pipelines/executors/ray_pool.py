"""The executor that runs stages on a Ray cluster."""

import logging
import os
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from indexing.progress import Advance
from indexing.store.errors import InputError
from pipelines.executors.ray_cluster import connect
from pipelines.executors.settings import ExecutorSettings, Resources, StageName
from pipelines.executors.tasks import Task, forget_stage, log_failure

log = logging.getLogger("retro")

_POLL_SECONDS = 1.0
_WAITING_SECONDS = 30
_IDLE_SECONDS = 60  # after which a worker without a task frees what it reserves
_ATTEMPTS = 4  # times that a task starts before the death of its worker counts as the task's fault
_STRAGGLER = 3.0  # times the median time of the finished tasks of a stage


class RayExecutor:
    """Runs all stages of a build by one pool of actors, which ends with this object.

    A worker receives a shard only after its process is up, so no shard waits for a lost machine. When a worker dies,
    its task returns to the queue and a new worker starts as soon as there is room.
    """

    def __init__(self, settings: ExecutorSettings) -> None:
        self.settings = settings
        connect(settings.ray_address)
        self.pool = _Pool(settings.num_threads)
        # The first worker starts while this process imports the stages.
        self.pool.keep(self.pool.take(settings.resources_of("chunk"), 1))

    def map(
        self, stage: StageName, function: Callable[..., Any], tasks: Sequence[Task], advance: Advance
    ) -> Iterator[Any]:
        """See `Executor.map`."""
        if tasks:
            run = _StageRun(stage, self.settings.resources_of(stage), self.pool, tasks, advance)
            try:
                results = run.run(function)
            finally:
                run.close()
            yield from results

    def expect(self, text_bytes: int) -> None:
        """See `Executor.expect`: the first worker starts already, and the others when the cluster has room."""


class _Pool:
    """The workers of a build. They keep what they have imported: a process takes seconds to start.

    Stages that reserve the same share workers. A stage that reserves something else ends the workers of the others
    first, so that its own fit into the cluster.

    Attributes:
        idle: workers without a task, and since when. Their processes may still start, or may have died.
        num_stages: stages so far.
        tally: actor that counts the finished units of tasks.
    """

    def __init__(self, num_threads: int) -> None:
        import ray

        self.ray, self.num_threads = ray, num_threads
        # The dashboard labels actors by name, which must be unique, and their tasks by `Task.name`.
        self.label = uuid.uuid4().hex[:8]
        tally = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Tally)
        self.tally = tally.options(name=f"progress of {self.label}").remote()
        self.reserved = Resources()
        self.idle: list[tuple[Any, float]] = []
        self.num_stages = self.num_started = 0

    def take(self, resources: Resources, count: int) -> list[Any]:
        """Workers for a stage: idle ones, then new ones."""
        if (reserved := replace(resources, workers=0)) != self.reserved:
            self.end_idle(0)
            self.reserved = reserved
        kept = [self.idle.pop()[0] for _ in range(min(count, len(self.idle)))]
        return kept + [self.new_worker() for _ in range(count - len(kept))]

    def new_worker(self) -> Any:
        """Start a worker."""
        self.num_started += 1
        resources = self.reserved
        worker = self.ray.remote(
            num_cpus=resources.cpus, num_gpus=resources.gpus, memory=resources.memory_bytes or None, max_restarts=0
        )(_Worker)
        name = f"worker {self.num_started} of {self.label}"
        num_threads = self.num_threads or max(1, int(resources.cpus))
        return worker.options(name=name).remote(num_threads, self.tally, os.getcwd())

    def keep(self, workers: Sequence[Any]) -> None:
        """Take workers back."""
        self.idle += [(worker, time.monotonic()) for worker in workers]

    def end_idle(self, seconds: float) -> None:
        """End the workers that have been idle for some time, which frees what they reserve."""
        latest = time.monotonic() - seconds
        for worker, since in self.idle:
            if since <= latest:
                self.ray.kill(worker)
        self.idle = [(worker, since) for worker, since in self.idle if since > latest]


def _room(ray: Any, resources: Resources) -> int:
    """Workers that fit into the cluster, at least 1. An autoscaling cluster grows when the next ones are requested."""
    total = ray.cluster_resources()
    wanted = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": resources.memory_bytes}
    return max(1, min(int(total.get(key, 0) / amount) for key, amount in wanted.items() if amount))


class _StageRun:
    """The tasks of one stage and the workers that share them.

    Attributes:
        waiting: indexes of tasks without a worker, the next one last.
        starting: reference → a worker whose process is not known to be up.
        running: reference → index of a task and the worker that runs it.
        losses: index of a task → how many times its worker has died.
    """

    def __init__(
        self, stage: StageName, resources: Resources, pool: _Pool, tasks: Sequence[Task], advance: Advance
    ) -> None:
        pool.num_stages += 1
        self.ray, self.stage, self.resources, self.pool, self.tasks = pool.ray, stage, resources, pool, tasks
        self.number = pool.num_stages
        self.progress = _Progress(pool, tasks, advance)
        self.waiting = list(range(len(tasks)))[::-1]
        self.starting: dict[Any, Any] = {}
        self.running: dict[Any, tuple[int, Any]] = {}
        self.losses: Counter[int] = Counter()
        self.failed_starts = 0
        self.idle_since = time.monotonic()
        # Ray raises these when a worker's process or machine is lost, and when a result is lost with it.
        errors = self.ray.exceptions
        self.lost = (errors.RayActorError, errors.WorkerCrashedError, errors.OutOfMemoryError, errors.ObjectLostError)

    def run(self, function: Callable[..., Any]) -> list[Any]:
        """Run every task; returns their results in order."""
        results: list[Any] = [None] * len(self.tasks)
        count = min(len(self.tasks), self.resources.workers or _room(self.ray, self.resources))
        for worker in self.pool.take(self.resources, count):
            self._await(worker)
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
            self.pool.end_idle(_IDLE_SECONDS)
            self._log_waiting()
        return results

    def close(self) -> None:
        """Return the workers to the pool, and end those that still run a task."""
        for _, worker in self.running.values():
            self.ray.kill(worker)
        self.pool.keep([*self.starting.values()])

    def _await(self, worker: Any) -> None:
        self.starting[worker.ready.remote()] = worker

    def _started(self, reference: Any, function: Callable[..., Any]) -> None:
        worker = self.starting.pop(reference)
        try:
            self.ray.get(reference)
        except self.lost as error:
            self.failed_starts += 1
            if self.failed_starts > _ATTEMPTS * len(self.tasks):
                raise InputError(f"{self.stage}: workers die before they start a task: {error}") from error
            self._await(self.pool.new_worker())
        else:
            self._give(worker, function)

    def _give(self, worker: Any, function: Callable[..., Any]) -> None:
        if not self.waiting:
            self.pool.keep([worker])
            return
        index = self.waiting.pop()
        task = self.tasks[index]
        reference = worker.run.options(name=task.name).remote(self.number, index, function, task.arguments)
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
        self._await(self.pool.new_worker())

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

    def __init__(self, pool: _Pool, tasks: Sequence[Task], advance: Advance) -> None:
        self.ray, self.tally, self.stage = pool.ray, pool.tally, pool.num_stages
        self.tasks, self.advance, self.shown = tasks, advance, 0
        self.counted: dict[int, int] = {}
        self.answer, self.polled = self.tally.counts.remote(self.stage), 0.0
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
        """Once a second, and when no task runs: a poll costs time for every task of the stage."""
        now = time.monotonic()
        if self.since and now - self.polled < _POLL_SECONDS:
            return
        self.polled = now
        if self.ray.wait([self.answer], timeout=0)[0]:
            self.counted, self.answer = self.ray.get(self.answer), self.tally.counts.remote(self.stage)
        sizes = [
            task.size if index in self.done else min(self.counted.get(index, 0), task.size)
            for index, task in enumerate(self.tasks)
        ]
        if sum(sizes) > self.shown:  # a restarted task counts only beyond its first attempt
            self.advance(sum(sizes) - self.shown)
            self.shown = sum(sizes)
        if len(self.times) < 3:
            return
        usual = statistics.median(self.times)
        for index, since in self.since.items():
            if now - since > max(_STRAGGLER * usual, 10 * _POLL_SECONDS) and index not in self.named:
                self.named.add(index)
                log.warning(
                    "%s: running for %.0f s; the others took %.0f s", self.tasks[index].name, now - since, usual
                )


class _Tally:
    """Actor that counts the finished units of each task of the newest stage."""

    def __init__(self) -> None:
        self.stage = 0
        self.units: dict[int, int] = {}

    def add(self, stage: int, index: int, units: int) -> None:
        if stage > self.stage:
            self.stage, self.units = stage, {}
        if stage == self.stage:  # not from a worker that was lost in an earlier one
            self.units[index] = self.units.get(index, 0) + units

    def begin(self, stage: int, index: int) -> None:
        self.add(stage, index, 0)
        if stage == self.stage:
            self.units[index] = 0

    def counts(self, stage: int) -> dict[int, int]:
        return self.units if stage == self.stage else {}


class _Worker:
    """Actor that runs one task after another. Functions keep a loaded model or index for the shards of a stage."""

    def __init__(self, num_threads: int, tally: Any, folder: str) -> None:
        # Torch and Faiss read it when a task imports them, which takes seconds. Ray's own value is 1.
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        self.tally, self.stage = tally, 0
        if os.path.isdir(folder):  # relative paths are those of the driver
            os.chdir(folder)

    def ready(self) -> None:
        """Return as soon as the process is up."""

    def run(self, stage: int, index: int, function: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
        if stage != self.stage:
            forget_stage()
            self.stage = stage
        self.tally.begin.remote(stage, index)
        return function(*arguments, advance=lambda units: self.tally.add.remote(stage, index, units))
