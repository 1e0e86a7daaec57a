"""A bar for long work.

    with progress("embed", total=12345, unit="chunks") as advance:
        advance(512)

On a terminal: a bar with rate and time left. Elsewhere: a line with both after ten seconds without any line. Both leave
out the time before the first units, and log one line at the end. A message of the level `STATUS` within is shown behind
the bar, or in the next line. Inside a stage of a `stages.StagesView` it is a step of the stage.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Protocol

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from rich.theme import Theme

from pipelines.terminal.output import BLUE
from pipelines.terminal.silence import Work, live, silence
from pipelines.terminal.units import human_count, human_seconds

log = logging.getLogger("retro.progress")


class View(Protocol):
    """Shows work as steps of its current stage: `stages.StagesView`."""

    current: str | None

    def step(self, name: str, total: int | None, unit: str) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """Run a step."""


views: list[View] = []
"""The view that is open."""


@contextlib.contextmanager
def progress(name: str, *, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """Show a bar for long work; yields the function to call with the number of units just finished.

    Args:
        name: of the work.
        total: number of units; None if unknown.
        unit: plural name of the units; `bytes` are shown with prefixes.
    """
    if views and views[-1].current is not None:
        with views[-1].step(name, total, unit) as advance:
            yield advance
        return
    with display() as shown:
        task = shown.add_task(name, total=total, unit=unit, note=None, detail="") if shown else None
        row = partial(shown.update, task) if shown is not None and task is not None else None
        try:
            with _work(name, total, unit, row) as work:
                yield work.advance
        finally:
            if shown is not None and task is not None:
                shown.remove_task(task)
    if work.done:  # a resumed run may have nothing left but an evaluation
        log.info("%s: %s", name, finished(work.done, unit, silence.clock() - work.started, work.aside))


def finished(units: int, unit: str, seconds: float, aside: float = 0.0) -> str:
    """`12,345 chunks in 3.2 s (3,858/s)`; if `aside` of the seconds were other work, with `, evaluations in 9.0 s`."""
    seconds -= aside
    rate = human_count(units / max(seconds, 1e-9), unit)
    others = f", evaluations in {human_seconds(aside)}" if aside else ""
    return f"{human_count(units, unit, named=True)} in {human_seconds(seconds)} ({rate}/s){others}"


def running(name: str) -> contextlib.AbstractContextManager[object]:
    """Log what a verb does after ten seconds of silence, also where no `progress` runs."""
    return _work(name, None, "")


def _work(
    name: str, total: int | None, unit: str, row: Callable[..., None] | None = None
) -> contextlib.AbstractContextManager[Work]:
    """Context in which work is running; yields it."""
    return silence.during(Work(name, total, unit, silence.clock(), row))


_BAR_STYLES = (
    "bar.complete",
    "bar.finished",
    "bar.pulse",
    *(f"progress.{x}" for x in ("percentage", "elapsed", "remaining")),
)


@contextlib.contextmanager
def display() -> Iterator[Progress | None]:
    """The live display: a new one, the one already on screen, or None without a terminal."""
    if live:
        yield live[-1]
        return
    console = Console(file=sys.stderr, theme=Theme(dict.fromkeys(_BAR_STYLES, f"color({BLUE})")))
    if not console.is_terminal:
        yield None
        return
    columns = [
        TextColumn("{task.description}"),
        _Running(BarColumn()),
        _Running(TaskProgressColumn()),  # empty where the total is not known
        _Rate(),
        _Running(_Elapsed()),
        _Running(TextColumn("left"), done=False),
        _Running(TimeRemainingColumn(), done=False),
        TextColumn("{task.fields[detail]}", markup=False),
    ]
    with Progress(*columns, console=console, transient=True) as shown:
        live.append(shown)
        try:
            yield shown
        finally:
            live.pop()


class _Running(ProgressColumn):
    """A column that is empty in the rows of waiting and finished stages, and with `done=False` in those whose units are
    all done."""

    def __init__(self, column: ProgressColumn, *, done: bool = True) -> None:
        self.column, self.done = column, done
        super().__init__()

    def render(self, task: Task) -> RenderableType:
        is_empty = task.fields["note"] is not None or (task.finished and not self.done)
        return Text() if is_empty else self.column.render(task)


class _Elapsed(ProgressColumn):
    def render(self, task: Task) -> Text:
        """The time so far. Work can continue after its last unit; rich's column stops there."""
        return Text(str(timedelta(seconds=int(task.elapsed or 0))), style="progress.elapsed")


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Units, total and rate; for a stage that does not run, its state."""
        if task.fields["note"] is not None:
            return Text(task.fields["note"])
        unit = task.fields["unit"]
        total = f"/{human_count(task.total, unit)}" if task.total is not None else ""
        rate = human_count(task.speed or 0, unit)
        return Text(f"{human_count(task.completed, unit)}{total} {unit if unit != 'bytes' else ''} {rate}/s")
