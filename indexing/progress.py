"""How long work reports its progress: a callback, and a level of log messages."""

from collections.abc import Callable

Advance = Callable[[int], None]
"""Receives the number of units (chunks, tokens, documents …) that were finished since the last call."""


class FinishedBefore(int):
    """Units that an earlier process had finished, for `Advance`. They count as done, but not in a rate."""


STATUS = 15
"""Level of a log message about the state of running work, between DEBUG and INFO. It is shown with the progress of the work
instead of on a line."""
