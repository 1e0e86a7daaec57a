"""Sort the prefixes of documents: a suffix array of their tokens in reverse.

    document  a b a c        prefixes, read backwards   in order
                             a, b a, a b a, c a b a     a, a b a, b a, c a b a

All prefixes that end in the same tokens are neighbors in this order, so one binary search finds every place where a text occurs,
and what follows there (infini-gram: Liu et al. 2024, arXiv 2401.17377; it sorts suffixes and asks for what follows them).

A search takes as many binary searches as there are sorted arrays. So consecutive shards are sorted together, as a group.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from indexing.progress import Advance
from indexing.store.artifact import read_manifest
from indexing.store.datastore import Split, shard_name
from indexing.store.errors import InputError
from indexing.store.files import NpyWriter, save_array

FOLDER = "suffixes"
GROUP_POSITIONS = 1 << 27
"""Positions of a group, unless one shard has more."""
SORTING_BYTES = {2: 20, 4: 30}
"""Memory that sorting takes for each token, by bytes of a token id."""
ROWS_OF_HEAD = 256
"""Sorted prefixes from one head to the next. Heads are small and stay in the cache. They replace the first steps of a binary search:
each of those would read a page of the prefixes and a page of the tokens."""
_BLOCK = 1 << 20


def planned_groups(split: Split, shards: range) -> Iterator[range]:
    """Divide the shards of a generation into groups."""
    first, positions = shards.start, 0
    for shard in shards:
        own = split.chunk_rows[shard] * split.chunk_length
        if shard > first and positions + own > GROUP_POSITIONS:
            yield range(first, shard)
            first, positions = shard, 0
        positions += own
    yield range(first, shards.stop)


def stored_groups(split: Split) -> Iterator[range]:
    """The groups of all shards, each in the folder that is named after its first shard.

    Raises:
        InputError: one is missing or damaged, or an older version wrote it.
    """
    shard = 0
    while shard < len(split.chunk_rows):
        folder = split.folder / FOLDER / shard_name(shard)
        if not (count := read_manifest(folder)["recipe"]["settings"].get("shards")):
            raise InputError(f"An older version wrote {folder}. Run `retro index CONFIG --stage suffixes --rebuild`.")
        yield range(shard, shard + count)
        shard += count


def first_positions(split: Split, shards: range) -> np.ndarray:
    """The first position of every shard of a group, then the number of positions: [shards + 1] int64.

    The position of a token is (row of its chunk in the group) · m + (its place in the chunk).
    """
    starts = np.asarray(split.tokens.starts[shards.start : shards.stop + 1])
    return (starts - starts[0]) * split.chunk_length


def document_starts(split: Split, shard: int) -> np.ndarray:
    """Positions in a shard of the first token of every document, then the number of positions: [documents + 1] int64.

    Only the last chunk of a document is padded, so the tokens of a document have consecutive positions.
    """
    return np.asarray(split.document_offsets.shard(shard)) * split.chunk_length


def write_sorted_prefixes(work: Path, split: Split, shards: range, advance: Advance) -> int:
    """Write the sorted prefixes of a group.

    - `positions.npy` [tokens] uint32: the last position of every prefix, in the order of the prefixes read backwards.
    - `heads.npy` [tokens / 256, rounded up] uint64: of every 256th prefix the last tokens (`head`).

    Takes about `SORTING_BYTES` of memory a token.

    Returns:
        the number of tokens.

    Raises:
        InputError: a single shard has more than 2^32 positions.
    """
    first_of_shard = first_positions(split, shards)
    if first_of_shard[-1] >= 2**32:
        raise InputError(
            f"{split.tokens.paths[shards.start]} has {first_of_shard[-1]:,} positions; `suffixes` has 32 bits for one. Build the "
            "datastore with a smaller `corpus.shard_bytes`."
        )
    documents = sum(split.document_rows[shards.start : shards.stop])
    tokens = sum(int(np.asarray(split.lengths.shard(shard)).sum(dtype=np.int64)) for shard in shards)
    largest = max(int(np.max(split.tokens.shard(shard), initial=0)) for shard in shards)
    # Backwards: token + 1, and a separator that is smaller than all tokens before each document. So no prefix reaches into another one.
    text = np.empty(tokens + documents, ">u2" if largest + 1 < 2**16 else ">u4")
    positions, stop = np.empty(len(text), np.uint32), len(text)
    for shard, first in zip(shards, first_of_shard.tolist(), strict=False):
        own_text, own_positions = _separated(split, shard)
        own = slice(stop - len(own_text), stop)
        text[own], positions[own] = own_text[::-1], own_positions[::-1] + first
        stop = own.start
    order = _suffix_array(text)[documents:]  # separators come first
    save_array(work / "heads.npy", _heads(text, order[::ROWS_OF_HEAD], 8 // split.tokens.shard(shards.start).itemsize))
    with NpyWriter(work / "positions.npy", np.uint32) as file:
        for block in _blocks(order):
            file.append(positions[block])
    advance(sum(split.chunk_rows[shards.start : shards.stop]))
    return tokens


def _separated(split: Split, shard: int) -> tuple[np.ndarray, np.ndarray]:
    """The text of a shard, token + 1 and 0 before each document, and its positions in the shard: both [tokens + documents] uint32."""
    lengths = np.asarray(split.lengths.shard(shard))
    is_text = np.arange(split.chunk_length) < lengths[:, None]  # [chunks, m]
    positions = np.flatnonzero(is_text).astype(np.uint32)  # [tokens]
    starts = np.searchsorted(positions, document_starts(split, shard)[:-1])
    text = np.asarray(split.tokens.shard(shard))[is_text].astype(np.uint32) + 1
    return np.insert(text, starts, 0), np.insert(positions, starts, 0)


def head(backwards: list[int], width: int) -> int:
    """The first `width` tokens of a text that is read backwards, as one number: four of 16 bits or two of 32, 0 where it is shorter.

    In the order of the prefixes, heads never fall.
    """
    number = 0
    for token in [*backwards[:width], *[0] * (width - len(backwards))]:
        number = number << 64 // width | token
    return number


def _heads(text: np.ndarray, ends: np.ndarray, width: int) -> np.ndarray:
    """Heads [n] of the prefixes that end at `ends` [n] of a text that is backwards: each token + 1, and 0 before each document."""
    heads, inside = np.zeros(len(ends), np.uint64), np.ones(len(ends), bool)
    for back in range(width):
        token = text[ends + back * inside]
        inside &= token > 0
        heads = heads << np.uint64(64 // width) | np.where(inside, token.astype(np.uint64) - 1, 0).astype(np.uint64)
    return heads


def _suffix_array(text: np.ndarray) -> np.ndarray:
    """The starts of all suffixes of a text [n] of big-endian numbers in their order, [n] int.

    divsufsort sorts bytes. Of their suffixes, those that begin with a number are moved to the front of its array, because a second one
    would take a third more memory.
    """
    from pydivsufsort import divsufsort  # training needs no package that only builds

    if not text.size:
        return np.empty(0, np.int32)
    array, count = divsufsort(text.view(np.uint8)), 0
    for block in _blocks(array):
        starts = block[block % text.itemsize == 0] // text.itemsize
        array[count : count + len(starts)] = starts
        count += len(starts)
    whole: np.ndarray = array[:count]
    return whole


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    return (array[start : start + _BLOCK] for start in range(0, len(array), _BLOCK))
