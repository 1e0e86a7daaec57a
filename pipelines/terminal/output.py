"""Printing: `echo`, colors, aligned rows, and text without control characters."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TextIO

from pipelines.terminal.silence import silence


def echo(text: object = "", file: TextIO | None = None) -> None:
    """Print text, `printable`, on standard output or to a file. The project prints through this function and
    `echo_shaded`."""
    file = file or sys.stdout
    with exit_if_closed(file):
        print(printable(str(text)), file=file)


BLUE, _ORANGE = 33, 166  # of the 256 colors: readable on dark and on light backgrounds, also by the color-blind
_SHADES = {2: f"1;38;5;{BLUE}", 1: f"38;5;{BLUE}", -1: f"38;5;{_ORANGE}", -2: f"1;38;5;{_ORANGE}"}
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
    """Flush a file after the block. If its reader has closed the pipe (`| head`), exit with the status of SIGPIPE,
    silently."""
    silence.restart()
    try:
        try:
            yield
        finally:
            file.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # the rest is discarded
        raise SystemExit(128 + signal.SIGPIPE) from None


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
