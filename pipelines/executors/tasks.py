"""Tasks of a stage, and the executor that runs them in this process.

A task is an idempotent function call that writes its own artifact, or returns a small result, never arrays. The bytes
on disk do not depend on the executor.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ParamSpec, Protocol, TypeVar

from indexing.progress import Advance
from indexing.store.errors import InputError
from pipelines.executors.settings import ExecutorSettings, StageName

log = logging.getLogger("retro")

P = ParamSpec("P")
T = TypeVar("T")
_kept: list[Any] = []


@dataclass(frozen=True)
class Task:
    """One call: `function(*arguments, advance=…)`.

    Attributes:
        name: what the task makes, for messages: `embeddings/00003`.
        arguments: of the call.
        size: units that the task adds to the progress bar.
    """

    name: str
    arguments: tuple[object, ...]
    size: int


class Executor(Protocol):
    """Runs the tasks of a stage."""

    def map(
        self, stage: StageName, function: Callable[..., Any], tasks: Sequence[Task], advance: Advance
    ) -> Iterator[Any]:
        """Yield the result of each task in order; call `advance` with finished units."""

    def expect(self, text_bytes: int) -> None:
        """Prepare for stages of this much text, while this process does other work."""


class LocalExecutor:
    """Runs one task after another in this process."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self.num_threads = settings.num_threads

    def map(
        self, stage: StageName, function: Callable[..., Any], tasks: Sequence[Task], advance: Advance
    ) -> Generator[Any, None, None]:
        """See `Executor.map`."""
        if self.num_threads:
            use_threads(self.num_threads)
        try:
            for task in tasks:
                try:
                    result = function(*task.arguments, advance=advance)
                except Exception as error:
                    log_failure(task.name, error)
                    raise
                yield result
        finally:
            forget_stage()

    def expect(self, text_bytes: int) -> None:
        """See `Executor.expect`: there is nothing to prepare."""


def kept_for_stage(function: Callable[P, T]) -> Callable[P, T]:
    """Keep the last result of a function, such as a loaded model, until the worker runs another stage."""
    cached: Any = lru_cache(maxsize=1)(function)
    _kept.append(cached)
    kept: Callable[P, T] = cached
    return kept


def forget_stage() -> None:
    """Drop what functions keep for a stage: memory, and artifacts that a repair replaces under the same fingerprint."""
    for cached in _kept:
        cached.cache_clear()


def use_threads(num_threads: int) -> None:
    """Set the threads of torch and Faiss in this process. Ray sets OMP_NUM_THREADS=1 in its processes."""
    import faiss
    import torch

    torch.set_num_threads(num_threads)
    faiss.omp_set_num_threads(num_threads)


def log_failure(name: str, error: BaseException | None) -> None:
    """Log which task failed and why, in one line. Errors that name a file are left to the command line, which prints
    them."""
    if not isinstance(error, (InputError, OSError)):
        log.error("%s failed: %s: %s", name, type(error).__name__, " ".join(str(error).split()))
