"""Functions of tasks that run in other processes."""

import logging
import os
import signal
import time
from pathlib import Path

from indexing.progress import Advance
from indexing.store.errors import InputError


class NeedsTwo(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def square(number: int, *, advance: Advance) -> tuple[int, int]:
    """The square, and the process."""
    advance(1)
    time.sleep(0.02)
    return number * number, os.getpid()


def die_once(marks: Path, number: int, deaths: int, *, advance: Advance) -> int:
    """Kill this process in the first attempts of a task, after some progress."""
    advance(5)
    time.sleep(0.3)  # the progress is sent
    advance(5)
    mark = marks / f"{number}-{len([*marks.glob(f'{number}-*')])}"
    if number == 1 and not mark.name.endswith(f"-{deaths}"):
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail_as(kind: int, number: int, *, advance: Advance) -> None:
    """Raise an error in the first task; the others would take long."""
    if number:
        time.sleep(3600)
    errors = (
        KeyError("train\n valid"),
        InputError("c.jsonl:3: broken"),
        OSError(28, "No space", "c.jsonl"),
        NeedsTwo("a", "b"),
    )
    raise errors[kind]


def speak(number: int, *, advance: Advance) -> None:
    """Log a message of this task, and one that all log."""
    logging.getLogger("retro").info("compiling")
    logging.getLogger("retro").warning("task %d of %s", number, Path("a"))
    advance(1)


def write_slowly(folder: Path, number: int, *, advance: Advance) -> None:
    """Name this process, and work for a long time on a file that is removed at the end."""
    half = folder / f"half-{number}"
    half.touch()
    try:
        (folder / f"pid-{os.getpid()}").touch()
        time.sleep(3600)
    finally:
        half.unlink()
