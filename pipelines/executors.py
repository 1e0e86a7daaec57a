"""Two ways to map a stage over shards: in this process, or on a Ray cluster. The only importer of ray.

A task is an idempotent function call that writes its own artefact and returns counts, never arrays. Which executor ran it
makes no difference to the bytes on disk.
"""

import logging
import re
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from indexing.store.errors import InputError

log = logging.getLogger("retro")

Advance = Callable[[int], None]
StageName = Literal["chunk", "embed", "train_index", "add", "neighbors"]

_POLL_SECONDS = 1.0
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

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise InputError(f"executor.threads = {self.threads}: must be 0 (all) or more.")


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
            yield function(*task.arguments, advance=advance)


class RayExecutor:
    """A pool of actors for each stage: what a worker has loaded serves all of its shards. A dead one is started again.

    A worker without further work is let go at once, so that one whose machine was lost finds room on those that remain.
    """

    def __init__(self, settings: ExecutorSettings) -> None:
        import ray

        self.settings = settings
        if not ray.is_initialized():
            ray.init(address=settings.ray_address or None, log_to_driver=False, include_dashboard=False)

    def map(
        self, stage: StageName, function: Callable[..., Any], tasks: Sequence[Task], advance: Advance
    ) -> Iterator[Any]:
        """See `Executor.map`. Progress is polled once a second."""
        import ray

        if not tasks:
            return
        resources: Resources = getattr(self.settings, stage)
        threads = self.settings.threads or max(1, int(resources.cpus))
        reserved = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "memory": resources.memory_bytes or None}
        # The dashboard labels actors by name, which must be unique, and their tasks by `Task.name`.
        label = uuid.uuid4().hex[:8]
        tally = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Tally)
        tally = tally.options(name=f"{stage} progress of {label}").remote()
        worker = ray.remote(**reserved, max_restarts=-1, max_task_retries=3)(_Worker)
        count = min(len(tasks), resources.workers or _room(ray, resources))
        pool = [worker.options(name=f"{stage} {n} of {label}").remote(threads, tally) for n in range(count)]
        try:
            results = _run(ray, pool, function, tasks, _Progress(ray, tally, tasks, advance))
        finally:
            for each in (*pool, tally):
                ray.kill(each)
        yield from results


def _room(ray: Any, resources: Resources) -> int:
    """Workers that the cluster has room for, one at least: with more to come, a cluster that grows by itself does so."""
    total = ray.cluster_resources()
    wanted = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": resources.memory_bytes}
    return max(1, min(int(total.get(key, 0) / amount) for key, amount in wanted.items() if amount))


def _run(
    ray: Any, pool: list[Any], function: Callable[..., Any], tasks: Sequence[Task], progress: "_Progress"
) -> list[Any]:
    results: list[Any] = [None] * len(tasks)
    running: dict[Any, tuple[int, Any]] = {}
    waiting = list(range(len(tasks)))[::-1]

    def start(worker: Any) -> None:
        if waiting:
            number = waiting.pop()
            task = tasks[number]
            running[worker.run.options(name=task.name).remote(number, function, task.arguments)] = (number, worker)
            progress.started(number)
        else:
            ray.kill(worker)

    for worker in pool:
        start(worker)
    while running:
        done, _ = ray.wait(list(running), num_returns=1, timeout=_POLL_SECONDS)
        for reference in done:
            number, worker = running.pop(reference)
            try:
                results[number] = ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                # The user's mistake keeps its own type and message; everything else keeps the remote traceback.
                if isinstance(error.cause, InputError):
                    raise error.cause from None
                log.error("%s failed", tasks[number].name)
                raise error from None
            except ray.exceptions.RayActorError as error:
                raise InputError(
                    f"{tasks[number].name}: its worker died again and again ({error}). Most often memory ran out: give the "
                    "stage fewer workers or more memory (executor.STAGE.workers, executor.STAGE.memory); what is "
                    "finished is kept."
                ) from error
            progress.finished(number)
            start(worker)
        progress.poll()
    return results


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

    def __init__(self, threads: int, tally: Any) -> None:
        self.threads, self.tally = threads, tally

    def run(self, number: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        use_threads(self.threads)
        self.tally.begin.remote(number)
        return function(*arguments, advance=lambda units: self.tally.add.remote(number, units))


def make_executor(settings: ExecutorSettings) -> Executor:
    """The executor that the settings ask for."""
    return RayExecutor(settings) if settings.kind == "ray" else LocalExecutor(settings)
