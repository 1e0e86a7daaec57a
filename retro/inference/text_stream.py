"""Text of a row of tokens while it grows: only what no later token can change or take back is shown.

    token → text of all tokens so far → without half a character at its end → without the beginning of a stop string → shown

A stop string is found wherever it lies, across the borders of tokens too; neither it nor what follows is ever shown.
"""

from collections.abc import Callable, Sequence

import numpy as np

Decode = Callable[[Sequence[int]], str]
"""Tokens to text; bytes that are no character become U+FFFD, as `Tokenizer.decode` has it."""

# A character has four bytes at most, so that at most three of them can wait for the rest.
_WAITING_BYTES = 3
# Tokens that are decoded again with a new one: what stands before a token can decide about a blank at its beginning.
_BEFORE = 4


class TextStream:
    """The text of one row. `add` a token, show what it returns; at the end show `rest` too."""

    def __init__(self, decode: Decode, prompt: Sequence[int] | np.ndarray, stop: tuple[str, ...] = ()) -> None:
        """Begin after a prompt, which is read but never shown."""
        self._decode, self._stop = decode, stop
        self._tokens = [int(token) for token in prompt]
        text = decode(self._tokens)
        complete = _without_half_characters(text)
        self._read = len(complete)  # characters of the text of `_tokens` that are shown or held
        self._borders = [len(self._tokens)] if complete == text else []  # where a token ends and no character is cut
        self._held = ""  # characters that may begin a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """What can be shown once a token has been added."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        complete = _without_half_characters(text)
        self._take(complete)
        if complete == text:
            self._forget()
        return self._show(0 if self.stopped else _beginning_of(self._stop, self._held))

    def rest(self) -> str:
        """What was held back: no token follows. Half a character becomes U+FFFD."""
        if not self.stopped:
            self._take(self._decode(self._tokens))
        return self._show(0)

    def _take(self, text: str) -> None:
        """Move the new characters of the text to what is held, and end it where a stop string begins."""
        self._held += text[self._read :]
        self._read = max(self._read, len(text))
        found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            self._held, self.stopped = self._held[: min(found)], True

    def _show(self, held_back: int) -> str:
        stop = len(self._held) - held_back
        shown, self._held = self._held[:stop], self._held[stop:]
        return shown

    def _forget(self) -> None:
        """Drop tokens whose text is complete but for the last few: a step costs the same however long the text is."""
        self._borders.append(len(self._tokens))
        start = max((border for border in self._borders if border <= len(self._tokens) - _BEFORE), default=0)
        if start:
            self._tokens = self._tokens[start:]
            self._borders = [border - start for border in self._borders if border > start]
            self._read = len(self._decode(self._tokens))


def _without_half_characters(text: str) -> str:
    """The text without the U+FFFD at its end that a later byte may turn into a character."""
    stop = len(text)
    while stop > max(0, len(text) - _WAITING_BYTES) and text[stop - 1] == "\ufffd":
        stop -= 1
    return text[:stop]


def _beginning_of(stops: tuple[str, ...], text: str) -> int:
    """Characters at the end of the text that may be the beginning of a stop string, at most: 0 where none can."""
    longest = max(map(len, stops), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
