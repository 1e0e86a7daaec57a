"""How long work reports its progress: a callback, and a level of log messages."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

log = logging.getLogger("retro")

Advance = Callable[[int], None]
"""Receives the number of units (chunks, tokens, documents …) that were finished since the last call."""


class FinishedBefore(int):
    """Units that an earlier process had finished, for `Advance`. They count as done, but not in a rate."""


class Aside(int):
    """No units, for `Advance`, after `seconds` of other work, such as an evaluation. They do not count in a rate."""

    seconds: float

    def __new__(cls, seconds: float) -> "Aside":
        """Zero with the time of the other work."""
        aside = super().__new__(cls, 0)
        aside.seconds = seconds
        return aside


STATUS = 15
"""Level of the messages of `status`, between DEBUG and INFO."""


def status(message: str, *arguments: object) -> None:
    """Log the state of running work, until the next one. The command line shows it with the progress of the work
    instead of on its own line."""
    log.log(STATUS, message, *arguments)


@contextlib.contextmanager
def during(message: str, *arguments: object) -> Iterator[None]:
    """Log what the block does, as `status`, and nothing about it afterwards."""
    status(message, *arguments)
    try:
        yield
    finally:
        status("")


class Progress(Protocol):
    """Shows long work while a block runs. The block receives the function to call with the number of units just
    finished."""

    def __call__(self, name: str, *, total: int | None, unit: str) -> contextlib.AbstractContextManager[Advance]:
        """Begin to show work: its name, its number of units (None = unknown), and their plural name."""


@contextlib.contextmanager
def percentage(name: str, *, total: int | None, unit: str) -> Iterator[Advance]:
    """Progress as the `status` of other work, whose bar is shown: `NAME: 37%`."""
    done = 0

    def advance(units: int) -> None:
        nonlocal done
        done += units
        status("%s: %d%%", name, min(100, 100 * done // max(1, total or 0)))

    yield advance
