"""The logger of the command line."""

import logging
import sys

from rich.text import Text

from indexing.progress import STATUS
from pipelines.terminal.output import echo, one_line, printable
from pipelines.terminal.silence import live, silence


class Handler(logging.Handler):
    """Prints log messages on standard error, above the bar if there is one. A status is shown with the progress."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message, with its level if it is a warning or an error."""
        if record.levelno == STATUS:
            silence.set_note(one_line(self.format(record)))
            return
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        message = printable(level + self.format(record))
        if live:
            live[-1].console.print(Text(message), soft_wrap=True)
        else:
            echo(message, sys.stderr)


def setup_logging() -> None:
    """Print the project's log messages and the warnings of libraries on standard error; the command line calls this
    once."""
    project = logging.getLogger("retro")
    project.handlers[:] = [Handler()]
    logging.lastResort = Handler(logging.WARNING)  # for loggers without a handler
    project.setLevel(STATUS)
    project.propagate = False
