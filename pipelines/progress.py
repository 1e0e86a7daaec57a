"""The one progress bar, the one logger, and numbers as people read them.

    with progress("embed", total=12345, unit="chunks") as advance:
        advance(512)

In a terminal: a bar with rate and time left. Elsewhere: quiet. In both, one line through the logger at the end.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

log = logging.getLogger("retro")

_live: list[Progress] = []  # the display that is on screen, shared by nested bars


@contextlib.contextmanager
def progress(name: str, *, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """A bar for long work; yields the function that says how many more units are done.

    Args:
        name: what is being done.
        total: units in all; None where nobody knows.
        unit: plural name of what is counted; `bytes` are shown with prefixes.
    """
    started, done = time.perf_counter(), 0
    with _display() as display:
        task = display.add_task(name, total=total, unit=unit) if display else None

        def advance(units: int) -> None:
            nonlocal done
            done += units
            if display is not None and task is not None:
                display.update(task, advance=units)

        try:
            yield advance
        finally:
            if display is not None and task is not None:
                display.remove_task(task)
    seconds = time.perf_counter() - started
    rate = human_count(done / max(seconds, 1e-9), unit)
    log.info("%s: %s in %s (%s/s)", name, human_count(done, unit, named=True), human_seconds(seconds), rate)


@contextlib.contextmanager
def _display() -> Iterator[Progress | None]:
    """The live display: a new one, the one already on screen, or None where nobody watches."""
    if _live:
        yield _live[-1]
        return
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield None
        return
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),  # empty where the total is not known
        _Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console, transient=True) as display:
        _live.append(display)
        try:
            yield display
        finally:
            _live.pop()


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Done, total and rate."""
        unit = task.fields["unit"]
        total = f"/{human_count(task.total, unit)}" if task.total is not None else ""
        rate = human_count(task.speed or 0, unit)
        return Text(f"{human_count(task.completed, unit)}{total} {unit if unit != 'bytes' else ''} {rate}/s")


class _Handler(logging.Handler):
    """Messages on standard error, above the bar where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """One message, which says so if it is a warning."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        message = level + self.format(record)
        if _live:
            _live[-1].console.print(Text(message), soft_wrap=True)
        else:
            print(message, file=sys.stderr, flush=True)


def setup_logging() -> None:
    """Send the project's messages to standard error; called once, by the command line."""
    log.handlers[:] = [_Handler()]
    log.setLevel(logging.INFO)
    log.propagate = False


def human_count(value: float, unit: str = "", *, named: bool = False) -> str:
    """`12,345` (with the unit's name if `named`), or `1.2 MB` where the unit is bytes."""
    if unit == "bytes":
        return human_bytes(value)
    number = f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
    return f"{number} {unit}" if named else number


def human_bytes(value: float) -> str:
    """`512 B`, `1.2 MB`, `3.4 TB`: powers of 1000."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.0f} B" if not prefix else f"{value:.1f} {prefix}B"
        value /= 1000
    return f"{value:.1f} PB"


def human_seconds(seconds: float) -> str:
    """`3.2 s`, `4 min 05 s`, `2 h 03 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
