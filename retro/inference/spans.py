"""Character ranges of tokens, in a text and in stored chunks, and of token runs that a chunk shares with a neighbor.

    tokens ─► texts of their prefixes ─► character range [start, stop) of each token ─► runs that two rows of tokens share

A token may be a part of a character (one byte of 中), and its text may depend on the token before it. So the text of a
token is what the decoded prefix gains with it, counted in whole characters. The last part of a character has the
character.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # `retro trace` needs no retriever
    from indexing.retrieval.retriever import Retriever

DecodeBatch = Callable[[Sequence[np.ndarray]], list[str]]

_BLOCK = 64  # tokens whose prefixes are decoded together
_BEFORE = 8  # tokens before a block: the text of a token may depend on them
_AFTER = 4  # tokens after a block: remaining parts of its last character


def token_ends(decode_batch: DecodeBatch, tokens: np.ndarray) -> tuple[str, list[int]]:
    """Return the text of tokens [t] and, for each token, the number of whole characters up to its end: [t] ascending.

    The last number is the length of the text. A token that ends inside a character has the number of the token before
    it.
    """
    text, ends, start = "", list[int](), 0
    while start < len(tokens):
        stop = min(len(tokens), start + _BLOCK)
        first = max(0, start - _BEFORE)
        rows = [tokens[first:end] for end in range(start, stop + 1)]
        before, *prefixes, whole = decode_batch([*rows, tokens[first : stop + _AFTER]])
        if stop == len(tokens):
            whole = prefixes[-1]
        reached, block = len(before), list[int]()
        for prefix in prefixes:
            if len(prefix) >= reached and whole.startswith(prefix):
                reached = len(prefix)
            block.append(reached)
        # The next block begins at a character: after the last token that completed one.
        clean = [index for index, prefix in enumerate(prefixes) if whole.startswith(prefix)]
        taken = clean[-1] + 1 if clean else len(prefixes)
        ends += [len(text) + end - len(before) for end in block[:taken]]
        text += whole[len(before) : block[taken - 1]]
        start += taken
    return text, ends


def character_groups(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Group tokens into ranges [start, stop): the tokens that are parts of one character form one group."""
    groups, start = [], 0
    for stop, (before, end) in enumerate(pairwise([0, *ends]), start=1):
        if end > before:
            groups.append((start, stop))
            start = stop
    if start < len(ends):  # tokens without text at the end join the last group
        groups = [*groups[:-1], (groups[-1][0], len(ends))] if groups else [(0, len(ends))]
    return groups


def characters(ends: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """Return the characters [start, stop) of tokens [start, stop). A character is included if one of them is a part of
    it."""
    begin = ends[start - 1] if start else 0
    end = ends[stop - 1]
    if end == (ends[stop - 2] if stop > 1 else 0):  # the last token ends inside a character
        end = next((later for later in ends[stop:] if later > end), ends[-1])
    return begin, end


class ChunkTexts:
    """Character positions of the tokens of chunks for one request: decodes each chunk once, even if it is used several
    times."""

    def __init__(self, retriever: "Retriever") -> None:
        self._decode, self._m = retriever.tokenizer.decode_batch, retriever.datastore.chunk_length
        self._chunks: dict[int, tuple[str, list[int]]] = {}

    def ends(self, chunk_id: int, tokens: np.ndarray) -> list[int]:
        """Return `token_ends` of a chunk, or of a chunk and its continuation, decoded separately like the two texts of
        a hit.

        Args:
            chunk_id: id of the chunk; that of its continuation is the next one.
            tokens: [≤ 2m] of both, without padding.
        """
        text, ends = self._of_chunk(chunk_id, tokens[: self._m])
        if len(tokens) <= self._m:
            return ends
        _, later = self._of_chunk(chunk_id + 1, tokens[self._m :])
        return ends + [len(text) + end for end in later]

    def text(self, tokens: np.ndarray) -> str:
        """Return the text of tokens [t]."""
        return self._decode([tokens])[0]

    def _of_chunk(self, chunk_id: int, tokens: np.ndarray) -> tuple[str, list[int]]:
        if chunk_id not in self._chunks:
            self._chunks[chunk_id] = token_ends(self._decode, tokens)
        return self._chunks[chunk_id]


def shared_runs(first: np.ndarray, second: np.ndarray, least: int = 3) -> list[tuple[int, int, int]]:
    """Find token runs common to two rows [s] and [t]: (position in the first, position in the second, length), longest
    first.

    Greedy: take the longest run, then the longest one that overlaps no taken run in either row, and so on.
    """
    equal = first[:, None] == second[None, :]  # [s, t]; runs are along its diagonals
    rows, columns = (max(0, size - least + 1) for size in equal.shape)
    begins = np.logical_and.reduce([equal[i : i + rows, i : i + columns] for i in range(least)])
    if begins.size:
        begins[1:, 1:] &= ~equal[: rows - 1, : columns - 1]
    runs = [(i, j, _run_length(equal, i, j)) for i, j in np.argwhere(begins).tolist()]
    taken: list[tuple[int, int, int]] = []
    for i, j, length in sorted(runs, key=lambda run: (-run[2], run)):
        if all((i + length <= c or i >= c + n) and (j + length <= d or j >= d + n) for c, d, n in taken):
            taken.append((i, j, length))
    return taken


def _run_length(equal: np.ndarray, row: int, column: int) -> int:
    """Return how many entries of a diagonal of [s, t] bool are true from this one on."""
    diagonal = equal.diagonal(column - row)[min(row, column) :]
    return len(diagonal) if diagonal.all() else int(diagonal.argmin())
