"""Streaming of generated text: return only text that no later token can change.

    token → text of all tokens so far → without a partial character at its end → without the start of a stop string → returned

Stop strings may span tokens. The stop string and the text after it are never returned.
"""

from collections.abc import Callable, Sequence

import numpy as np

Decode = Callable[[Sequence[int]], str]
"""Tokens → text; invalid bytes become U+FFFD, as in `Tokenizer.decode`."""

# A character has at most four bytes, so at most three bytes wait for the rest.
_WAITING_BYTES = 3
# Tokens that are decoded again with a new one: a space at the start of a token can depend on the token before it.
_BEFORE = 4


class TextStream:
    """The text of one row: `add` returns the new text of each token, and `rest` the remaining text at the end."""

    def __init__(self, decode: Decode, prompt: Sequence[int] | np.ndarray, stop: tuple[str, ...] = ()) -> None:
        """Start after a prompt; the prompt itself is never returned."""
        self._decode, self._stop = decode, stop
        self._tokens = [int(token) for token in prompt]
        text = decode(self._tokens)
        complete = _without_partial_character(text)
        self._read = len(complete)  # characters of the text of `_tokens` that were returned or are held back
        self._borders = [len(self._tokens)] if complete == text else []  # positions where the text has whole characters
        self._held = ""  # held back: characters that may begin a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """Append a token and return the new text."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        complete = _without_partial_character(text)
        self._take(complete)
        if complete == text:
            self._forget()
        return self._show(0 if self.stopped else _beginning_of(self._stop, self._held))

    def rest(self) -> str:
        """Return the text that was held back, after the last token. A partial character becomes U+FFFD."""
        if not self.stopped:
            self._take(self._decode(self._tokens))
        return self._show(0)

    def _take(self, text: str) -> None:
        """Append the new characters of the text to the held text, and cut it at a stop string."""
        self._held += text[self._read :]
        self._read = max(self._read, len(text))
        if starts := [start for stop in self._stop if (start := self._held.find(stop)) >= 0]:
            self._held, self.stopped = self._held[: min(starts)], True

    def _show(self, held_back: int) -> str:
        stop = len(self._held) - held_back
        shown, self._held = self._held[:stop], self._held[stop:]
        return shown

    def _forget(self) -> None:
        """Drop all but the last few tokens with complete text, so that the cost of a step does not grow with the
        text."""
        self._borders.append(len(self._tokens))
        start = max((border for border in self._borders if border <= len(self._tokens) - _BEFORE), default=0)
        if start:
            self._tokens = self._tokens[start:]
            self._borders = [border - start for border in self._borders if border > start]
            self._read = len(self._decode(self._tokens))


def _without_partial_character(text: str) -> str:
    """Remove U+FFFD from the end of the text if a later byte may complete the character."""
    stop = len(text)
    while stop > max(0, len(text) - _WAITING_BYTES) and text[stop - 1] == "\ufffd":
        stop -= 1
    return text[:stop]


def _beginning_of(stops: tuple[str, ...], text: str) -> int:
    """Return the largest number of characters at the end of the text that may begin a stop string."""
    longest = max(map(len, stops), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
