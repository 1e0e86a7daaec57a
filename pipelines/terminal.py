"""Output on the terminal: a progress bar, a view of all stages, the logger, `echo`, and readable numbers.

    with progress("embed", total=12345, unit="chunks") as advance:
        advance(512)

On a terminal: a bar with rate and time left. Elsewhere: a line with both after ten seconds without any line. Both log one line
at the end. A message of the level `STATUS` within is shown behind the bar, or in the next line.

    view = StagesView()
    with view.shown(["chunk", "embed"]):
        with view.stage("chunk"):
            with progress(...)

On a terminal: a row for each stage, which waits, runs with a bar, or is finished. Elsewhere: a line when a stage starts and when a
step ends. Both log a summary of all steps with their rates at the end: `view.steps`.
"""

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from rich.theme import Theme

from indexing.progress import STATUS, FinishedBefore

log = logging.getLogger("retro.progress")

_LONGEST_SILENCE = 10.0  # seconds without a line, after which running work logs one

_live: list[Progress] = []  # the display that is on screen, shared by nested bars
_views: list["StagesView"] = []  # the view that is open


@dataclass(eq=False)
class _Work:
    """Running work.

    Attributes:
        name, total, unit: as in `progress`; the unit is empty if nothing is counted.
        started: time of the clock.
        row: updates its row of the display; None without a terminal.
        done, before: units finished by this process, and by an earlier one.
        note: newest message of the level `STATUS`.
    """

    name: str
    total: int | None
    unit: str
    started: float
    row: Callable[..., None] | None = None
    done: int = 0
    before: int = 0
    note: str = ""

    def advance(self, units: int) -> None:
        """Count finished units."""
        if isinstance(units, FinishedBefore):
            self.before += units
        else:
            self.done += units
        if self.row is not None:
            self.row(advance=units)

    def set_note(self, note: str) -> None:
        """Show a message with the progress."""
        self.note = note
        if self.row is not None:
            self.row(detail=note)

    def line(self, seconds: float) -> str:
        """`embed: 45%, 4,500 of 10,000 chunks, 120/s, 46 s left` after some seconds, without the parts that are unknown."""
        return f"{self.name}: " + (f"{self.note}; " if self.note else "") + self._so_far(seconds)

    def _so_far(self, seconds: float) -> str:
        if not self.done:
            waiting = f"{human_count(self.total, self.unit, named=True)}, " if self.total else ""
            return f"{waiting}running for {human_seconds(seconds)}"
        rate, finished = self.done / max(seconds, 1e-9), self.before + self.done
        if not self.total or finished > self.total:  # unknown, or an estimate
            return f"{human_count(finished, self.unit, named=True)} so far, {human_count(rate, self.unit)}/s"
        counted = f"{human_count(finished, self.unit)} of {human_count(self.total, self.unit, named=True)}"
        left = human_seconds((self.total - finished) / rate)
        return f"{100 * finished // self.total}%, {counted}, {human_count(rate, self.unit)}/s, {left} left"


@dataclass
class Silence:
    """Logs a line about the innermost running work after ten seconds without any line, unless a bar shows it.

    Another thread watches the clock, because k-means can run for hours without a call.

    Attributes:
        clock: time in seconds.
        works: running work, the innermost last.
        last: time of the last line.
    """

    clock: Callable[[], float] = time.monotonic
    works: list[_Work] = field(default_factory=list)
    last: float = 0.0

    @contextlib.contextmanager
    def during(self, work: _Work) -> Iterator[_Work]:
        """Log the lines of this work while the block runs."""
        self.works.append(work)
        try:
            with self._watched() if len(self.works) == 1 else contextlib.nullcontext():
                yield work
        finally:
            self.works.remove(work)
            self.set_note("")

    def set_note(self, note: str) -> None:
        """Show a message with the progress of the innermost work."""
        if self.works:
            self.works[-1].set_note(note)

    def restart(self) -> None:
        """Start counting again: a line was printed."""
        self.last = self.clock()

    def check(self) -> float:
        """Log a line if it is due; returns the seconds until the next one can be."""
        if self.clock() - self.last >= _LONGEST_SILENCE:
            for work in self.works[-1:] if not _live else []:
                log.info("%s", work.line(self.clock() - work.started))
            self.restart()
        return _LONGEST_SILENCE - (self.clock() - self.last)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(self.check()):
                pass

        self.restart()
        thread = threading.Thread(target=watch, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


_silence = Silence()


def _work(
    name: str, total: int | None, unit: str, row: Callable[..., None] | None = None
) -> contextlib.AbstractContextManager[_Work]:
    """Context in which work is running; yields it."""
    return _silence.during(_Work(name, total, unit, _silence.clock(), row))


def running(name: str) -> contextlib.AbstractContextManager[Any]:
    """Log what a verb does after ten seconds of silence, also where no `progress` runs."""
    return _work(name, None, "")


@contextlib.contextmanager
def progress(name: str, *, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """Show a bar for long work; yields the function to call with the number of units just finished.

    Args:
        name: of the work.
        total: number of units; None if unknown.
        unit: plural name of the units; `bytes` are shown with prefixes.
    """
    if _views and _views[-1].current is not None:
        with _views[-1].step(name, total, unit) as advance:
            yield advance
        return
    with _display() as display:
        task = display.add_task(name, total=total, unit=unit, note=None, detail="") if display else None
        row = partial(display.update, task) if display is not None and task is not None else None
        try:
            with _work(name, total, unit, row) as work:
                yield work.advance
        finally:
            if display is not None and task is not None:
                display.remove_task(task)
    if work.done:  # a resumed run may have nothing left but an evaluation
        log.info("%s: %s", name, _finished(work.done, unit, _silence.clock() - work.started))


def _finished(units: int, unit: str, seconds: float) -> str:
    rate = human_count(units / max(seconds, 1e-9), unit)
    return f"{human_count(units, unit, named=True)} in {human_seconds(seconds)} ({rate}/s)"


@dataclass(frozen=True)
class Step:
    """A finished step of a stage.

    Attributes:
        stage: as on the command line.
        name: of the step.
        units: number of finished units.
        unit: plural name of the units; empty for a stage that was finished before.
        seconds: duration.
    """

    stage: str
    name: str
    units: int = 0
    unit: str = ""
    seconds: float = 0.0


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
        with contextlib.nullcontext() if self.quiet else _display() as self._display:
            if self._display is not None:
                self._rows = {
                    name: self._display.add_task(name, total=None, start=False, unit="", note="waiting", detail="")
                    for name in names
                }
            _views.append(self)
            try:
                yield
            finally:
                _views.remove(self)
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
        work = _Work(name, total, unit, _silence.clock(), row)
        if self.quiet:
            _silence.set_note(name)
        with contextlib.nullcontext() if self.quiet else _silence.during(work):
            yield work.advance
        self.steps.append(Step(stage, name, work.done, unit, _silence.clock() - work.started))
        self._say("%s: %s", name, _finished(work.done, unit, self.steps[-1].seconds))

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


def _time_of(step: Step) -> str:
    return human_seconds(step.seconds) if step.unit else "finished before"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text as lines with aligned columns; a row may have fewer cells than others."""
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


def print_rows(rows: list[list[str]]) -> None:
    """Rows of text as aligned columns on standard output."""
    echo("\n".join(aligned(rows)))


def grouped(groups: Mapping[str, list[list[str]]]) -> str:
    """Rows of text under headings, with a blank line between two groups."""
    return "\n\n".join("\n".join([heading, *(f"  {row}" for row in aligned(rows))]) for heading, rows in groups.items())


def echo(text: object = "", file: TextIO | None = None) -> None:
    """Print text, `printable`, on standard output or to a file. The project prints through this function and `echo_shaded`."""
    file = file or sys.stdout
    with exit_if_closed(file):
        print(printable(str(text)), file=file)


_BLUE, _ORANGE = 33, 166  # of the 256 colors: readable on dark and on light backgrounds, also by the color-blind
_SHADES = {2: f"1;38;5;{_BLUE}", 1: f"38;5;{_BLUE}", -1: f"38;5;{_ORANGE}", -2: f"1;38;5;{_ORANGE}"}
_MARKS = {True: ("{+", "+}"), False: ("[-", "-]")}


def is_colored(file: TextIO) -> bool:
    """Whether text for a file is colored: it is a terminal, and NO_COLOR is not set."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def echo_shaded(pieces: Iterable[tuple[str, int]], file: TextIO | None = None, end: str = "\n") -> None:
    """Print pieces of text, `printable`, each with a shade from 2 (strong blue) to -2 (strong orange); 0 = no color.

    Without colors, blue text is printed as `{+text+}` and orange text as `[-text-]`, like `git diff --word-diff`.
    """
    file = file or sys.stdout
    colored = is_colored(file)
    out = ""
    for shade, group in groupby(pieces, key=lambda piece: piece[1] if colored else (piece[1] > 0) - (piece[1] < 0)):
        text = printable("".join(piece for piece, _ in group))
        core = text.strip()
        begin, after = (f"\x1b[{_SHADES.get(shade)}m", "\x1b[0m") if colored else _MARKS[shade > 0]
        out += text.replace(core, f"{begin}{core}{after}", 1) if shade and core else text
    with exit_if_closed(file):
        print(out, file=file, end=end)


@contextlib.contextmanager
def exit_if_closed(file: TextIO) -> Iterator[None]:
    """Flush a file after the block. If its reader has closed the pipe (`| head`), exit with the status of SIGPIPE, silently."""
    _silence.restart()
    try:
        try:
            yield
        finally:
            file.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # the rest is discarded
        raise SystemExit(128 + signal.SIGPIPE) from None


# Control characters except line breaks and tabs, marks that reverse the direction of text, halves of surrogate pairs.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Text without control sequences, which could set the terminal's title, clipboard or colors.

    Control characters become `\u001b` and the like, so JSON keeps its meaning; line breaks and tabs stay.
    """
    return _CONTROL.sub(lambda control: f"\\u{ord(control[0]):04x}", text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    r"""Printable text with line breaks and tabs escaped too (`\u000a`, `\u0009`), for a name within one line."""
    return printable(text).replace("\n", "\\u000a").replace("\t", "\\u0009")


def counted(count: int, noun: str) -> str:
    """`1 token`, `12,345 tokens`."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def times(occurrences: int) -> str:
    """`once`, or `2 times`."""
    return "once" if occurrences == 1 else f"{occurrences:,} times"


_BAR_STYLES = (
    "bar.complete",
    "bar.finished",
    "bar.pulse",
    *(f"progress.{x}" for x in ("percentage", "elapsed", "remaining")),
)


@contextlib.contextmanager
def _display() -> Iterator[Progress | None]:
    """The live display: a new one, the one already on screen, or None without a terminal."""
    if _live:
        yield _live[-1]
        return
    console = Console(file=sys.stderr, theme=Theme(dict.fromkeys(_BAR_STYLES, f"color({_BLUE})")))
    if not console.is_terminal:
        yield None
        return
    columns = [
        TextColumn("{task.description}"),
        _Running(BarColumn()),
        _Running(TaskProgressColumn()),  # empty where the total is not known
        _Rate(),
        _Running(TimeElapsedColumn()),
        _Running(TextColumn("left")),
        _Running(TimeRemainingColumn()),
        TextColumn("{task.fields[detail]}", markup=False),
    ]
    with Progress(*columns, console=console, transient=True) as display:
        _live.append(display)
        try:
            yield display
        finally:
            _live.pop()


class _Running(ProgressColumn):
    """A column that is empty in the rows of waiting and finished stages."""

    def __init__(self, column: ProgressColumn) -> None:
        self.column = column
        super().__init__()

    def render(self, task: Task) -> RenderableType:
        return self.column.render(task) if task.fields["note"] is None else Text()


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Units, total and rate; for a stage that does not run, its state."""
        if task.fields["note"] is not None:
            return Text(task.fields["note"])
        unit = task.fields["unit"]
        total = f"/{human_count(task.total, unit)}" if task.total is not None else ""
        rate = human_count(task.speed or 0, unit)
        return Text(f"{human_count(task.completed, unit)}{total} {unit if unit != 'bytes' else ''} {rate}/s")


class _Handler(logging.Handler):
    """Prints log messages on standard error, above the bar if there is one. A status is shown with the progress."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message, with its level if it is a warning or an error."""
        if record.levelno == STATUS:
            _silence.set_note(one_line(self.format(record)))
            return
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        message = printable(level + self.format(record))
        if _live:
            _live[-1].console.print(Text(message), soft_wrap=True)
        else:
            echo(message, sys.stderr)


def setup_logging() -> None:
    """Print the project's log messages and the warnings of libraries on standard error; the command line calls this once."""
    project = logging.getLogger("retro")
    project.handlers[:] = [_Handler()]
    logging.lastResort = _Handler(logging.WARNING)  # for loggers without a handler
    project.setLevel(STATUS)
    project.propagate = False


def human_count(value: float, unit: str = "", *, named: bool = False) -> str:
    """`12,345` (with the unit's name if `named`), or `1.2 MB` where the unit is bytes."""
    if unit == "bytes":
        return human_bytes(value)
    count = f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
    return f"{count} {unit}" if named else count


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


def long_time(seconds: float) -> str:
    """`3.2 s`, `2 h 03 min`, `12.5 days`, `340 years`."""
    if seconds < 2 * 86_400:
        return human_seconds(seconds)
    days = seconds / 86_400
    return f"{days:,.1f} days" if days < 730 else f"{days / 365.25:,.1f} years"
