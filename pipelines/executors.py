"""Two ways to map a stage over shards: in this process, or on a Ray cluster. The only importer of ray.

A task is an idempotent function call that writes its own artefact and returns counts, never arrays. Which executor ran it
makes no difference to the bytes on disk.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from indexing.store.errors import InputError

Advance = Callable[[int], None]


@dataclass(frozen=True)
class ExecutorSettings:
    """Where the stages run."""

    kind: Literal["local", "ray"] = "local"
    """`local`: this process, one shard after another, each on all threads; `ray`: a task for each shard."""
    threads: int = 0
    """Threads of one task; 0 = all cores (local) or the task's CPUs (Ray)."""
    ray_address: str = ""
    """Cluster to join (`auto`, `ray://…`); empty: the one that runs this job, or a new one on this machine."""
    cpus_per_task: float = 1
    """CPUs that Ray reserves for a task."""
    gpus_per_task: float = 0
    """GPUs that Ray reserves for a task."""

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise InputError(f"executor.threads = {self.threads}: must be 0 (all) or more.")
        if self.cpus_per_task <= 0 or self.gpus_per_task < 0:
            raise InputError("executor.cpus_per_task must be above 0 and executor.gpus_per_task at least 0.")


@dataclass(frozen=True)
class Task:
    """One call: `function(*arguments, advance=…)`; `size` is how much it adds to the progress bar."""

    arguments: tuple[Any, ...]
    size: int


class Executor(Protocol):
    """Runs the tasks of a stage."""

    def map(self, function: Callable[..., Any], tasks: Sequence[Task], advance: Advance) -> Iterator[Any]:
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

    def map(self, function: Callable[..., Any], tasks: Sequence[Task], advance: Advance) -> Iterator[Any]:
        """See `Executor.map`."""
        if self.threads:
            use_threads(self.threads)
        for task in tasks:
            yield function(*task.arguments, advance=advance)


class RayExecutor:
    """A Ray task for each shard, a bounded number in flight; a task whose worker died is run again."""

    def __init__(self, settings: ExecutorSettings) -> None:
        import ray

        self.settings = settings
        if not ray.is_initialized():
            ray.init(address=settings.ray_address or None, log_to_driver=False, include_dashboard=False)

    def map(self, function: Callable[..., Any], tasks: Sequence[Task], advance: Advance) -> Iterator[Any]:
        """See `Executor.map`. Progress advances by whole tasks."""
        import ray

        threads = self.settings.threads or max(1, int(self.settings.cpus_per_task))
        remote = ray.remote(num_cpus=self.settings.cpus_per_task, num_gpus=self.settings.gpus_per_task, max_retries=3)(
            _run_in_worker
        ).options(name=function.__name__)
        in_flight = 4 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        waiting: dict[Any, int] = {}
        results: dict[int, Any] = {}
        for number, task in enumerate(tasks):
            if len(waiting) >= in_flight:
                _collect(ray, waiting, results, tasks, advance)
            waiting[remote.remote(function, task.arguments, threads)] = number
        while waiting:
            _collect(ray, waiting, results, tasks, advance)
        yield from (results[number] for number in range(len(tasks)))


def _collect(
    ray: Any, waiting: dict[Any, int], results: dict[int, Any], tasks: Sequence[Task], advance: Advance
) -> None:
    (done,), _ = ray.wait(list(waiting), num_returns=1)
    number = waiting.pop(done)
    try:
        results[number] = ray.get(done)
    except ray.exceptions.RayTaskError as error:
        # The user's mistake keeps its own type and message; everything else keeps the remote traceback.
        raise (error.cause if isinstance(error.cause, InputError) else error) from None
    advance(tasks[number].size)


def _run_in_worker(function: Callable[..., Any], arguments: tuple[Any, ...], threads: int) -> Any:
    use_threads(threads)
    return function(*arguments, advance=lambda _: None)


def make_executor(settings: ExecutorSettings) -> Executor:
    """The executor that the settings ask for."""
    return RayExecutor(settings) if settings.kind == "ray" else LocalExecutor(settings)
