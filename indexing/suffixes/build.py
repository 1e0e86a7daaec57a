"""Sort the prefixes of the documents of a shard: a suffix array of their tokens in reverse.

    document  a b a c        prefixes, read backwards   in order
                             a, b a, a b a, c a b a     a, a b a, b a, c a b a

All prefixes that end in the same tokens are neighbors in this order, so one binary search finds every place where a text occurs,
and what follows there (infini-gram: Liu et al. 2024, arXiv 2401.17377; it sorts suffixes and asks for what follows them).
"""

from pathlib import Path

import numpy as np
from pydivsufsort import divsufsort

from indexing.progress import Advance
from indexing.store.datastore import Split
from indexing.store.errors import InputError
from indexing.store.files import save_array

FOLDER = "suffixes"
ROWS_OF_HEAD = 256
"""Sorted prefixes from one head to the next. Heads are small and stay in the cache: they replace the first steps of a binary search,
each of which would read another page of the prefixes and of the tokens."""


def document_starts(split: Split, shard: int) -> np.ndarray:
    """Positions of the first token of every document of a shard, then the number of positions: [documents + 1] int64.

    The position of a token is (row of its chunk in the shard) · m + (its place in the chunk). Only the last chunk of a document is
    padded, so the tokens of a document have consecutive positions.
    """
    return np.asarray(split.document_offsets.shard(shard)) * split.chunk_length


def write_sorted_prefixes(work: Path, split: Split, shard: int, advance: Advance) -> int:
    """Write the sorted prefixes of a shard.

    - `positions.npy` [tokens] uint32: the last position of every prefix, in the order of the prefixes read backwards.
    - `heads.npy` [tokens / 256, rounded up] uint64: of every 256th prefix the last tokens (`head`).

    Sorting takes about 24 bytes of memory a token.

    Returns:
        the number of tokens.

    Raises:
        InputError: the shard has more than 2^32 positions.
    """
    tokens, lengths = split.tokens.shard(shard), np.asarray(split.lengths.shard(shard))
    if tokens.size >= 2**32:
        raise InputError(
            f"{split.tokens.paths[shard]} has {tokens.size:,} positions; `suffixes` has 32 bits for one. Build the datastore "
            "with a smaller `corpus.shard_bytes`."
        )
    is_text = np.arange(split.chunk_length) < lengths[:, None]  # [chunks, m]
    positions = np.flatnonzero(is_text).astype(np.uint32)  # [tokens]
    starts = np.searchsorted(positions, document_starts(split, shard)[:-1])
    # A separator that is smaller than all tokens stands before each document. So no prefix reaches into the document before.
    text = np.insert(np.asarray(tokens)[is_text].astype(np.uint32) + 1, starts, 0)
    places = np.insert(positions, starts, 0)
    order = len(text) - 1 - _suffix_array(text[::-1])
    order = order[text[order] > 0]
    save_array(work / "positions.npy", places[order])
    save_array(work / "heads.npy", _heads(text, order[::ROWS_OF_HEAD], 8 // tokens.dtype.itemsize))
    advance(len(tokens))
    return len(positions)


def head(backwards: list[int], width: int) -> int:
    """The first `width` tokens of a text that is read backwards, as one number: four of 16 bits or two of 32, 0 where it is shorter.

    In the order of the prefixes, heads never fall.
    """
    number = 0
    for token in [*backwards[:width], *[0] * (width - len(backwards))]:
        number = number << 64 // width | token
    return number


def _heads(text: np.ndarray, ends: np.ndarray, width: int) -> np.ndarray:
    """Heads [n] of the prefixes that end at `ends` [n]. The text has each token + 1, and 0 before each document."""
    heads, inside = np.zeros(len(ends), np.uint64), np.ones(len(ends), bool)
    for back in range(width):
        token = text[ends - back * inside]
        inside &= token > 0
        heads = heads << np.uint64(64 // width) | np.where(inside, token - 1, 0).astype(np.uint64)
    return heads


def _suffix_array(text: np.ndarray) -> np.ndarray:
    """The starts of all suffixes of a text [n] in their order, [n] int."""
    small = text.astype(np.uint16 if text.size and text.max() < 2**16 else np.uint32)
    array: np.ndarray = divsufsort(small) if text.size else np.empty(0, np.int32)
    return array
