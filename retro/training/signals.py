"""Stop a run without losing a step, on SIGTERM from a scheduler or on Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Stopped(KeyboardInterrupt):
    """A signal stopped the run after a checkpoint.

    Attributes:
        exit_status: 128 + the number of the signal, as shells and schedulers expect: 143 for SIGTERM, 130 for SIGINT. A
            status of 0 would mean that the run is complete.
    """

    def __init__(self, run: Path, step: int, number: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"{name}: {run} is saved at step {step}; the same command resumes it")
        self.exit_status = 128 + number


@contextlib.contextmanager
def signals_as_requests() -> Iterator[Callable[[], int | None]]:
    """Record SIGTERM and SIGINT instead of handling them. Yields a function that returns the first signal's number, or
    None.

    A second SIGINT interrupts as usual. A second SIGTERM is ignored: launchers forward theirs to processes that already
    received one, and SIGKILL is left for impatience. On exit the previous handlers are restored. Outside the main
    thread this does nothing, because Python handles signals only there.
    """
    received: list[int] = []
    before: dict[int, Any] = {}

    def receive(number: int, _: object) -> None:
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, receive) or signal.SIG_DFL
    try:
        yield lambda: received[0] if received else None
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
