"""The callback through which long work reports its progress."""

from collections.abc import Callable

Advance = Callable[[int], None]
"""Receives the number of units (chunks, tokens, documents …) that were finished since the last call."""


class FinishedBefore(int):
    """Units that an earlier process had finished, for `Advance`. They count as done, but not in a rate."""
