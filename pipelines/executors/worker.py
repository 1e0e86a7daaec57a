"""A process of `process_pool.py`: receives tasks, and sends log records, finished units, results and errors."""

import logging
import logging.handlers
import os
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

_ADVANCE_SECONDS = 0.2  # between messages about finished units


_Task = tuple[int, Any, tuple[object, ...]]
"""Number of the stage, function and arguments."""


class _Parent:
    """The connection to the process that gives tasks. Several threads may send."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.lock = connection, threading.Lock()
        self.tasks = queue.SimpleQueue[_Task | Exception]()

    def send(self, kind: str, value: object) -> None:
        """Send a message. If the parent is gone, so is the need for this process."""
        try:
            with self.lock:
                self.connection.send((kind, value))
        except OSError:
            os._exit(1)

    def receive(self) -> None:
        """Queue tasks until the connection closes: the parent has ended, perhaps during a task of this process."""
        while True:
            try:
                self.tasks.put(self.connection.recv())
            except (EOFError, OSError):
                os._exit(1)
            except Exception as error:  # a function that this process cannot import
                self.tasks.put(error)


class _Handler(logging.handlers.QueueHandler):
    """Sends log records, as text."""

    def __init__(self, parent: _Parent) -> None:
        super().__init__(parent)  # type: ignore[arg-type]

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record that `prepare` made."""
        self.queue.send("log", record)  # type: ignore[attr-defined]


class _Units:
    """Sums finished units and sends them a few times a second."""

    def __init__(self, parent: _Parent) -> None:
        self.parent, self.units, self.sent = parent, 0, time.monotonic()

    def __call__(self, units: int) -> None:
        self.units += units
        if time.monotonic() - self.sent > _ADVANCE_SECONDS:
            self.parent.send("advance", self.units)
            self.units, self.sent = 0, time.monotonic()


def _tell(parent: _Parent, error: Exception) -> None:
    """Send the traceback as text, in case that the error cannot be read, and then the error with it."""
    told = "".join(traceback.format_exception(error))
    parent.send("traceback", told)
    error.add_note(told)
    try:
        parent.send("error", error)
    except Exception:
        parent.send("error", RuntimeError(told))


def _leave(number: int, frame: FrameType | None) -> None:
    """End the task by an exception, so that it removes what it has half written."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(1)


def main(descriptor: int) -> None:
    """Run tasks until the parent ends."""
    parent = _Parent(Connection(descriptor))
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=parent.receive, daemon=True).start()
    from indexing.progress import STATUS

    project = logging.getLogger("retro")
    project.handlers[:] = [_Handler(parent)]
    project.setLevel(STATUS + 1)  # the state of one of many tasks would hide the others'
    project.propagate = False
    from pipelines.executors.tasks import forget_stage

    present = 0
    while True:
        task = parent.tasks.get()
        try:
            if isinstance(task, Exception):
                raise task
            stage, function, arguments = task
            if stage != present:
                forget_stage()
                present = stage
            parent.send("result", function(*arguments, advance=_Units(parent)))
        except Exception as error:
            _tell(parent, error)


if __name__ == "__main__":
    main(int(sys.argv[1]))
