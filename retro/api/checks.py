"""Checks of row numbers and token ids that a caller passes."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from indexing.store.datastore import Split
from indexing.store.errors import InputError, OutOfRange
from indexing.store.remote import datastore_name

Ids: TypeAlias = Sequence[int] | NDArray[np.integer]
"""Numbers of rows, or token ids."""


def checked_numbers(numbers: Ids, count: int, kind: str, split: Split) -> NDArray[np.int64]:
    """The numbers [n] int64 of rows of a split.

    Raises:
        InputError: they are not a list of integers.
        OutOfRange: one is not in [0, count).
    """
    checked = _integers(numbers, f"{kind} numbers")
    if len(outside := checked[(checked < 0) | (checked >= count)]):
        rows = f"has {kind}s 0 to {count - 1}" if count else f"has no {kind}s"
        raise OutOfRange(f"{kind} {outside[0]}: the split '{split.name}' of {datastore_name(split.folder)} {rows}.")
    return checked


def checked_tokens(tokens: Ids, vocab_size: int) -> NDArray[np.int64]:
    """Token ids [t] int64.

    Raises:
        InputError: they are not a list of integers, or one is outside of the vocabulary.
    """
    if isinstance(tokens, str):
        raise InputError(f"{tokens!r:.80} is a text, but token ids are needed: `tokenizer.encode(text)` gives them.")
    checked = _integers(tokens, "token ids")
    if len(outside := checked[(checked < 0) | (checked >= vocab_size)]):
        raise InputError(f"token id {outside[0]}: the datastore's are 0 to {vocab_size - 1}.")
    return checked


def _integers(values: Ids, name: str) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise InputError(f"{name} must be a list of integers, not {values!s:.80}.")
    return array.astype(np.int64)
