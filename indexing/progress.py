"""The callback through which long work reports its progress."""

from collections.abc import Callable

Advance = Callable[[int], None]
"""Receives the number of units (chunks, tokens, documents …) that were finished since the last call."""
