"""Which characters a token stands for, and which a chunk shares with a neighbor.

    tokens ─► texts of their beginnings ─► [start, stop) in characters of each token ─► runs that two rows of tokens share

A token may be a part of a character (a byte of 中), or need the one before it to be written right. So the text of a token is
what the text gains once the token is there and all characters are whole; parts of a character gain it together, at the last.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

DecodeBatch = Callable[[Sequence[np.ndarray]], list[str]]

_BLOCK = 64  # tokens whose beginnings are decoded together
_BEFORE = 8  # tokens in front of them, as a token's text may depend on those before it
_AFTER = 4  # tokens after them: the parts of the last character


def token_ends(decode_batch: DecodeBatch, tokens: np.ndarray) -> tuple[str, list[int]]:
    """The text of tokens [t], and for each token the number of characters that are whole once it is there: [t] ascending.

    The last one is the length of the text. A token that ends within a character has the number of the one before.
    """
    text, ends, start = "", list[int](), 0
    while start < len(tokens):
        stop = min(len(tokens), start + _BLOCK)
        first = max(0, start - _BEFORE)
        rows = [tokens[first:end] for end in range(start, stop + 1)]
        before, *prefixes, whole = decode_batch([*rows, tokens[first : stop + _AFTER]])
        if stop == len(tokens):
            whole = prefixes[-1]
        known, block = len(before), list[int]()
        for prefix in prefixes:
            if len(prefix) >= known and whole.startswith(prefix):
                known = len(prefix)
            block.append(known)
        # The next block begins where characters are whole: after the last token that finished one.
        clean = [number for number, prefix in enumerate(prefixes) if whole.startswith(prefix)]
        taken = clean[-1] + 1 if clean else len(prefixes)
        ends += [len(text) + end - len(before) for end in block[:taken]]
        text += whole[len(before) : block[taken - 1]]
        start += taken
    return text, ends


def character_groups(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Tokens [start, stop) that belong together: each with the parts of a character that come before its last."""
    groups, start = [], 0
    for stop, (before, end) in enumerate(pairwise([0, *ends]), start=1):
        if end > before:
            groups.append((start, stop))
            start = stop
    if start < len(ends):  # what has no text at the end
        groups = [*groups[:-1], (groups[-1][0], len(ends))] if groups else [(0, len(ends))]
    return groups


def characters(ends: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """The characters [start, stop) of tokens [start, stop), with the whole of a character of which they have a part."""
    begin = ends[start - 1] if start else 0
    end = ends[stop - 1]
    if end == (ends[stop - 2] if stop > 1 else 0):  # it ends within a character
        end = next((later for later in ends[stop:] if later > end), ends[-1])
    return begin, end


def shared_runs(first: np.ndarray, second: np.ndarray, least: int = 3) -> list[tuple[int, int, int]]:
    """Runs of tokens that stand in both rows, [s] and [t]: (place in the first, place in the second, tokens), longest first.

    The longest run is taken, then the longest of what touches none that was taken, in either row, and so on.
    """
    equal = first[:, None] == second[None, :]  # [s, t]; runs are along its diagonals
    rows, columns = (max(0, size - least + 1) for size in equal.shape)
    begins = np.logical_and.reduce([equal[i : i + rows, i : i + columns] for i in range(least)])
    if begins.size:
        begins[1:, 1:] &= ~equal[: rows - 1, : columns - 1]
    found = sorted((-_run_length(equal, i, j), i, j) for i, j in np.argwhere(begins).tolist())
    taken: list[tuple[int, int, int]] = []
    for negative, i, j in found:
        length = -negative
        if all((i + length <= c or i >= c + n) and (j + length <= d or j >= d + n) for c, d, n in taken):
            taken.append((i, j, length))
    return taken


def _run_length(equal: np.ndarray, row: int, column: int) -> int:
    """How far a diagonal of [s, t] bool is true from here on."""
    diagonal = equal.diagonal(column - row)[min(row, column) :]
    return len(diagonal) if diagonal.all() else int(diagonal.argmin())
