"""The executor that runs stages on several processes of this machine.

    first task ── in this process ──► the rest would take long ──► a worker for each core ── the next task ─► result

A corpus of a few megabytes is indexed before workers have started. So they start when the tasks of a stage would take long,
or earlier if the corpus is large (`expect`), and then stay for all later stages. A worker that dies is replaced and its task starts again. Workers end with this process.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from indexing.machine import usable_cores, usable_memory
from indexing.progress import Advance
from indexing.store.errors import InputError
from pipelines.executors.settings import ExecutorSettings, StageName
from pipelines.executors.tasks import LocalExecutor, Task, log_failure

log = logging.getLogger("retro")

_WORTH_SECONDS = 3.0  # Workers start if the other tasks of a stage would take longer here. They import for 2 s.
_WORTH_BYTES = 8 * 2**20  # With more text than this, at least one stage takes longer than that.
_TASK_SECONDS = 0.01  # Shorter tasks, such as scans of small files, stay here: sending them would take longer.
_ATTEMPTS = 3  # starts of a task whose workers die
_PATIENCE = 5.0  # seconds after which a worker that was asked to end is killed
_GB = 2**30
_PEAK = 2 * _GB
"""Memory of a worker, at most. With 115 million tokens a worker took 0.3 GB in `chunk`, 0.5 in `sparse`, 0.7 in
`suffixes` and 1.5 in `votes`."""
_ON_GPU: tuple[StageName, ...] = ("embed", "train_index", "add", "neighbors")
_GPU = Path("/dev/nvidiactl")


class PoolExecutor:
    """Runs tasks on all cores. A single task, and those that share a GPU, run in this process with all threads."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self.here = LocalExecutor(settings)
        self.most = fitting(settings.workers)
        self.pool = _Pool(settings.num_threads or max(1, usable_cores() // self.most))

    def map(
        self, stage: StageName, function: Callable[..., Any], tasks: Sequence[Task], advance: Advance
    ) -> Iterator[Any]:
        """See `Executor.map`."""
        if min(self.most, len(tasks)) < 2 or (stage in _ON_GPU and _GPU.exists()):
            yield from self.here.map(stage, function, tasks, advance)
            return
        done = yield from self._begin(stage, function, tasks, advance)
        if tasks[done:]:
            yield from _StageRun(stage, self.pool, tasks[done:], self.most, advance).run(function)

    def expect(self, text_bytes: int) -> None:
        """See `Executor.expect`: workers import already, if some stage will need them."""
        if self.most > 1 and text_bytes > _WORTH_BYTES:
            self.pool.start(self.most)

    def _begin(
        self, stage: StageName, function: Callable[..., Any], tasks: Sequence[Task], advance: Advance
    ) -> Generator[Any, None, int]:
        """Run tasks here until the others would take long, as time and sizes say, and yield their results; returns their
        number. Where workers have started already, they do everything."""
        results, started = self.here.map(stage, function, tasks, advance), time.monotonic()
        total, finished, done = sum(task.size for task in tasks), 0, 0
        while done < len(tasks) and not self.pool.workers:
            yield next(results)
            finished, done = finished + tasks[done].size, done + 1
            spent = time.monotonic() - started
            if spent * (total - finished) > _WORTH_SECONDS * max(1, finished) and spent > _TASK_SECONDS * done:
                break
        results.close()
        return done


def fitting(wanted: int) -> int:
    """Workers that fit into the machine's memory: `wanted`, 0 = one for each core, but at least one."""
    room = max(1, usable_memory() // _PEAK)
    if wanted > room:
        log.warning("executor.workers = %d: %d fit into the memory, with %d GB each", wanted, room, _PEAK // _GB)
    return min(wanted or usable_cores(), room)


class _Pool:
    """The workers of a build.

    Attributes:
        workers: those that live.
        idle: those of them without a task.
        num_threads: of each.
        num_stages: stages so far.
    """

    def __init__(self, num_threads: int) -> None:
        self.workers: list[_Worker] = []
        self.idle: list[_Worker] = []
        self.num_threads, self.num_stages = num_threads, 0

    def start(self, count: int) -> None:
        """Start workers until there are `count`; they are idle."""
        while len(self.workers) < count:
            self.workers.append(_Worker(self.num_threads))
            self.idle.append(self.workers[-1])

    def take(self) -> "_Worker":
        """An idle worker, or a new one."""
        if self.idle:
            return self.idle.pop()
        self.workers.append(_Worker(self.num_threads))
        return self.workers[-1]

    def end(self, workers: Sequence["_Worker"]) -> None:
        """End workers with their tasks, and wait for them."""
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.join()
            self.workers.remove(worker)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.end([*self.workers])


class _Worker:
    """A process that runs one task after another (`worker.py`), and the connection to it."""

    def __init__(self, num_threads: int) -> None:
        ours, theirs = socket.socketpair()
        threads = {f"{name}_NUM_THREADS": str(num_threads) for name in ("OMP", "MKL", "OPENBLAS", "RAYON")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipelines.executors.worker", str(theirs.fileno())],
            env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__,
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends the workers
        )
        theirs.close()
        self.connection = Connection(ours.detach())

    def join(self) -> None:
        """Wait until the process has ended; after some time, kill it."""
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.connection.close()  # not before: without a parent it would end at once and leave files half written


class _StageRun:
    """The tasks of one stage and the workers that share them.

    Attributes:
        count: workers at a time.
        waiting: indexes of tasks without a worker, the next one last.
        running: connection → index of the task and its worker.
        deaths: index of a task → how many of its workers have died.
        units: index of a task → finished units, of its present attempt.
        finished: their sum.
        shown: units that `advance` has received.
        results: index of a task → its result.
        told: what workers have logged; each of them compiles the same loops, for example.
        traceback: of the task that failed, as text.
    """

    def __init__(self, stage: StageName, pool: _Pool, tasks: Sequence[Task], count: int, advance: Advance) -> None:
        pool.num_stages += 1
        self.stage, self.pool, self.tasks, self.count, self.advance = stage, pool, tasks, count, advance
        self.waiting = list(range(len(tasks)))[::-1]
        self.running: dict[Connection, tuple[int, _Worker]] = {}
        self.deaths: Counter[int] = Counter()
        self.units = Counter[int]()
        self.finished = self.shown = 0
        self.results: dict[int, Any] = {}
        self.told = set[str]()
        self.traceback = ""

    def run(self, function: Callable[..., Any]) -> Iterator[Any]:
        """Yield the results in order."""
        try:
            for index in range(len(self.tasks)):
                while index not in self.results:
                    while self.waiting and len(self.running) < self.count:
                        self._give(self.pool.take(), function)
                    for connection in wait([*self.running]):
                        assert isinstance(connection, Connection)
                        self._receive(connection)
                yield self.results.pop(index)
        finally:
            self.pool.end([worker for _, worker in self.running.values()])

    def _give(self, worker: _Worker, function: Callable[..., Any]) -> None:
        index = self.waiting.pop()
        self.running[worker.connection] = (index, worker)
        self.finished -= self.units.pop(index, 0)
        with contextlib.suppress(OSError):  # it has died while it was idle, which `_receive` sees
            worker.connection.send((self.pool.num_stages, function, self.tasks[index].arguments))

    def _receive(self, connection: Connection) -> None:
        """Take a message of a worker: a log record, finished units, a result or an error; or its death."""
        index, worker = self.running[connection]
        try:
            kind, value = connection.recv()
        except (EOFError, OSError):
            self._died(index, worker)
            return
        except Exception:  # an error whose class takes other arguments than it keeps
            kind, value = "error", RuntimeError(self.traceback)
        if kind == "log" and (message := value.getMessage()) not in self.told:
            self.told.add(message)
            logging.getLogger(value.name).handle(value)
        elif kind == "advance":
            self._count(index, value)
        elif kind == "traceback":
            self.traceback = value
        elif kind == "result":
            del self.running[connection]
            self._count(index, self.tasks[index].size - self.units[index])
            self.results[index] = value
            self.pool.idle.append(worker)
        elif kind == "error":
            log_failure(self.tasks[index].name, value)
            raise value

    def _count(self, index: int, units: int) -> None:
        """Show finished units. A task that starts again counts only beyond its first attempt."""
        more = min(units, self.tasks[index].size - self.units[index])
        self.units[index] += more
        self.finished += more
        if self.finished > self.shown:
            self.advance(self.finished - self.shown)
            self.shown = self.finished

    def _died(self, index: int, worker: _Worker) -> None:
        """Put the task of a worker that died back into the queue."""
        del self.running[worker.connection]
        self.pool.workers.remove(worker)
        worker.join()
        name, reason = self.tasks[index].name, _reason(worker.process.returncode)
        self.deaths[index] += 1
        if self.deaths[index] >= _ATTEMPTS:
            raise InputError(
                f"{name}: its worker {reason} {_ATTEMPTS} times. The usual cause is too little memory: start fewer workers "
                f"(executor.workers, now {self.count}), or stop other programs. Finished work of the stage {self.stage} is kept."
            )
        log.warning("%s: its worker %s; the task is started again", name, reason)
        self.waiting.append(index)


def _reason(status: int) -> str:
    """How a process ended: `was killed by SIGKILL`, `ended with status 1`."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
