"""Running work, and a line about it after ten seconds of silence, where no bar shows it."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.progress import Progress

from indexing.progress import Aside, FinishedBefore
from pipelines.terminal.units import human_count, human_seconds

log = logging.getLogger("retro.progress")

_LONGEST_SILENCE = 10.0  # seconds without a line, after which running work logs one

live: list[Progress] = []
"""The display that is on screen, shared by nested bars."""


@dataclass(eq=False)
class Work:
    """Running work.

    Attributes:
        name, total, unit: as in `progress`; the unit is empty if nothing is counted.
        started: time of the clock.
        row: updates its row of the display; None without a terminal.
        done, before: units finished by this process, and by an earlier one.
        aside: seconds of other work between units.
        first: time and number of the first units, and seconds of other work before them. Until then work can compile,
            start processes and fill caches, so a rate for the time left begins there; None = nothing is done yet.
        note: newest message of the level `STATUS`.
        noted: seconds after `started` at which the note was set.
    """

    name: str
    total: int | None
    unit: str
    started: float
    row: Callable[..., None] | None = None
    done: int = 0
    before: int = 0
    aside: float = 0.0
    first: tuple[float, int, float] | None = None
    note: str = ""
    noted: float = 0.0

    def advance(self, units: int) -> None:
        """Count finished units."""
        if isinstance(units, Aside):
            self.aside += units.seconds
        elif isinstance(units, FinishedBefore):
            self.before += units
        else:
            self.done += units
            if self.first is None and units:
                self.first = silence.clock() - self.started, units, self.aside
        if self.row is not None:
            self.row(advance=units)

    def set_note(self, note: str) -> None:
        """Show a message with the progress."""
        self.note, self.noted = note, silence.clock() - self.started
        if self.row is not None:
            self.row(detail=note)

    def line(self, seconds: float) -> str:
        """`embed: 45%, 4,500 of 10,000 chunks, 120/s, 46 s left` after some seconds, without the parts that are
        unknown.

        The time left is not known until something follows the first units. Work that continues after the last ones says
        how long.
        """
        return f"{self.name}: " + (f"{self.note}; " if self.note else "") + self._so_far(seconds)

    def _so_far(self, seconds: float) -> str:
        if not self.done:
            waiting = f"{human_count(self.total, self.unit, named=True)}, " if self.total else ""
            return f"{waiting}running for {human_seconds(seconds - (self.noted if self.note else 0))}"
        finished, rate = self.before + self.done, self._rate(seconds)
        own = human_count(self._rate(seconds, leave_out=True), self.unit)  # the time left includes other work
        speed = f", {own}/s" if rate else f", running for {human_seconds(seconds)}"
        if not self.total or finished > self.total:  # unknown, or an estimate
            return f"{human_count(finished, self.unit, named=True)} so far{speed}"
        if finished == self.total:
            return f"all {human_count(finished, self.unit, named=True)}, running for {human_seconds(seconds)}"
        counted = f"{human_count(finished, self.unit)} of {human_count(self.total, self.unit, named=True)}"
        left = f", {human_seconds((self.total - finished) / rate)} left" if rate else ""
        return f"{100 * finished // self.total}%, {counted}{speed}{left}"

    def _rate(self, seconds: float, *, leave_out: bool = False) -> float:
        """Units in a second after the first ones, with or without the time of other work; 0 = not known yet."""
        since, units, before = self.first or (0.0, 0, 0.0)
        other = self.aside - before if leave_out else 0.0
        return (self.done - units) / max(seconds - since - other, 1e-9)


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
    works: list[Work] = field(default_factory=list)
    last: float = 0.0

    @contextlib.contextmanager
    def during(self, work: Work) -> Iterator[Work]:
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
            for work in self.works[-1:] if not live else []:
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


silence = Silence()
"""The one of this process."""
