"""Stopping a run without losing a step: SIGTERM from a scheduler, or one Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Stopped(KeyboardInterrupt):
    """A run was asked to stop, and has saved where it was.

    Attributes:
        exit_status: 128 + the signal's number, as shells and schedulers expect of a process that a signal ended: 143 for
            SIGTERM, 130 for SIGINT. Not 0, which would say that the run is complete.
    """

    def __init__(self, run: Path, step: int, number: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"{name}: {run} is saved at step {step}; the same command goes on from there")
        self.exit_status = 128 + number


@contextlib.contextmanager
def signals_as_requests() -> Iterator[Callable[[], int | None]]:
    """Inside, SIGTERM and SIGINT only ask: the yielded function returns the number of the first one, or None.

    A second SIGINT does what it always did, for an impatient person. A second SIGTERM changes nothing: launchers pass
    theirs on to processes that have had their own, and who is impatient has SIGKILL. Afterwards all is as it was before.
    Outside the main thread nothing changes at all, as Python handles signals in that one alone.
    """
    asked: list[int] = []
    before: dict[int, Any] = {}

    def ask(number: int, _: object) -> None:
        asked.append(number)
        if number == signal.SIGINT:
            signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, ask) or signal.SIG_DFL
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
