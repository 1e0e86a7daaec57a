"""One rule for functions that take several texts: a string is a list of one."""

from typing import TypeVar

T = TypeVar("T")


def as_texts(texts: str | T) -> list[str] | T:
    """Return a string as a list of one text, and anything else as it is.

    A loop over a string would take each letter for a text.
    """
    return [texts] if isinstance(texts, str) else texts
