"""A view of all stages of a build.

    view = StagesView()
    with view.shown(["chunk", "embed"]):
        with view.stage("chunk"):
            with progress(...)

On a terminal: a row for each stage, which waits, runs with a bar, or is finished. Elsewhere: a line when a stage starts
and when a step ends. Both log a summary of all steps with their rates at the end: `view.steps`.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.progress import Progress, TaskID

from pipelines.terminal.output import aligned
from pipelines.terminal.progress import display, finished, views
from pipelines.terminal.silence import Work, silence
from pipelines.terminal.units import human_count, human_seconds

log = logging.getLogger("retro.progress")


@dataclass(frozen=True)
class Step:
    """A finished step of a stage.

    Attributes:
        stage: as on the command line.
        name: of the step.
        units: number of finished units.
        unit: plural name of the units; empty for a stage that was finished before.
        seconds: duration.
        cpu_seconds: time that this process and its finished children spent on processors, all threads together.
    """

    stage: str
    name: str
    units: int = 0
    unit: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0


class StagesView:
    """Shows all stages of a build; see the top of this file.

    Args:
        quiet: only record the steps.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.steps: list[Step] = []
        self.current: str | None = None
        self._names: list[str] = []
        self._display: Progress | None = None
        self._rows: dict[str, TaskID] = {}

    @contextlib.contextmanager
    def shown(self, names: Sequence[str]) -> Iterator[None]:
        """Show these stages as waiting; at the end, unless an error occurs, log the summary."""
        self._names = list(names)
        with contextlib.nullcontext() if self.quiet else display() as self._display:
            if self._display is not None:
                self._rows = {
                    name: self._display.add_task(name, total=None, start=False, unit="", note="waiting", detail="")
                    for name in names
                }
            views.append(self)
            try:
                yield
            finally:
                views.remove(self)
                for row in self._rows.values():
                    if self._display is not None:
                        self._display.remove_task(row)
        if not self.quiet:
            for line in aligned(summary_rows(self.steps)):
                log.info("%s", line)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run a stage. Calls of `progress` inside are its steps."""
        self.current, before = name, len(self.steps)
        title = f"stage {self._names.index(name) + 1} of {len(self._names)}, {name}"
        try:
            self._say("%s", title)
            yield
        finally:
            self.current = None
        if len(self.steps) == before:
            self.steps.append(Step(name, name))
            self._say("%s: finished before", title)
        seconds = sum(step.seconds for step in self.steps[before:])
        note = human_seconds(seconds) if seconds else _time_of(self.steps[-1])
        self._update(name, description=name, note=note, detail="")

    @contextlib.contextmanager
    def step(self, name: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        """Run a step; `progress` calls this inside a stage."""
        assert self.current is not None
        stage, row = self.current, None
        if self._display is not None:
            row = partial(self._display.update, self._rows[stage])
            description = stage if name == stage else f"{stage}: {name.removeprefix(stage).strip()}"
            self._display.reset(
                self._rows[stage], total=total, description=description, unit=unit, note=None, detail=""
            )
        work, cpu = Work(name, total, unit, silence.clock(), row), _cpu_seconds()
        if self.quiet:
            silence.set_note(name)
        with contextlib.nullcontext() if self.quiet else silence.during(work):
            yield work.advance
        took = silence.clock() - work.started
        self.steps.append(Step(stage, name, work.done, unit, took, _cpu_seconds() - cpu))
        self._say("%s: %s", name, finished(work.done, unit, self.steps[-1].seconds))

    def _say(self, message: str, *arguments: object) -> None:
        """Log a line where there is no terminal."""
        if self._display is None and not self.quiet:
            log.info(message, *arguments)

    def _update(self, stage: str, **fields: Any) -> None:
        if self._display is not None:
            self._display.update(self._rows[stage], **fields)


def summary_rows(steps: Iterable[Step]) -> list[list[str]]:
    """Rows of all steps: stage, step, units, time, rate. The first row is the header, the last one the total."""
    steps = list(steps)
    rows = [["stage", "step", "units", "time", "rate"]]
    for index, step in enumerate(steps):
        first = not index or steps[index - 1].stage != step.stage
        row = [step.stage if first else "", step.name if step.unit else "", "", _time_of(step), ""]
        if step.unit:
            row[2] = human_count(step.units, step.unit, named=True)
            row[4] = human_count(step.units / max(step.seconds, 1e-9), step.unit) + "/s"
        rows.append(row)
    return [*rows, ["all", "", "", human_seconds(sum(step.seconds for step in steps)), ""]]


def _cpu_seconds() -> float:
    """Seconds that this process and its finished children have spent on processors."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def _time_of(step: Step) -> str:
    return human_seconds(step.seconds) if step.unit else "finished before"
