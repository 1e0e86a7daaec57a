"""Which neighbors the chunks of a sequence are given, of those that are stored for them.

    stored neighbors (or random chunks) → deleted ones and own documents out → near copies out (if asked) → the first k that remain

Every step is a function of chunk ids, and of the epoch for random chunks: what a chunk is given depends on no other sequence
of its batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from indexing.overlap import overlap
from indexing.splitmix64 import mix
from indexing.store.datastore import Split
from indexing.store.retrieval_set import RetrievalSet

NeighborSource = Literal["nearest", "random"]


@dataclass(frozen=True)
class NeighborUse:
    """How neighbors are chosen.

    Attributes:
        k: neighbors of each chunk; 0 = retrieval OFF.
        source: `nearest`, as stored; or `random`, chunks drawn uniformly from the retrieval set: a control.
        max_overlap: neighbors are skipped that share a longer run of tokens with the chunk, or with the one after it,
            than this share of its length; 1 skips none.
        seed: of the random draws, which differ from epoch to epoch.
        materialized: whether their text is read from beside the chunk, where it stands there.
        found: [chunks, s] int64 ids, nearest first, of each chunk of the split: what was found by another search, in
            place of what is stored.
    """

    k: int
    source: NeighborSource = "nearest"
    max_overlap: float = 1.0
    seed: int = 0
    materialized: bool = False
    found: np.ndarray | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Queries:
    """Chunks of sequences that ask for neighbors, C of them; those of one sequence stand in order.

    Attributes:
        ids: [C] int64 in their split.
        excluded: [C, 2] int64, first and stop of the chunk ids of all documents that the sequence touches, if they are in
            the retrieval set. Copies of them in other datastores are not known by id: that is what `max_overlap` is for.
        tokens: [C, m] int64.
        lengths: [C] int64, real tokens.
        followed: [C] bool, whether the next row is the next chunk of the same document.
        epochs: [C] int64, how often the data was read before, or one number for all. Random neighbors are drawn again in
            each epoch: the same ones would identify their chunk, and could be memorized.
    """

    ids: np.ndarray
    excluded: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    followed: np.ndarray
    epochs: np.ndarray | int = 0


def read_neighbors(
    split: Split, retrieval: RetrievalSet, queries: Queries, use: NeighborUse
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [C, K, R] and lengths [C, K] int64 of the neighbors of some chunks; see `choose_neighbors`."""
    read = text_reader(split, retrieval, queries, use)
    chosen = choose_neighbors(split, retrieval, queries, use, read)
    tokens, lengths = read(np.repeat(np.arange(len(chosen)), use.k), chosen.ravel())
    return tokens.reshape(*chosen.shape, -1), lengths.reshape(chosen.shape)


ReadText = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Rows [n] of the queries, and for each the id [n] of a neighbor → its tokens [n, R] and length [n], int64."""


def text_reader(split: Split, retrieval: RetrievalSet, queries: Queries, use: NeighborUse) -> ReadText:
    """What reads the text of neighbors: from where they lie, or from beside the chunk that they are neighbors of.

    Both give the same. Beside a chunk stand the first of its stored neighbors; others are read from where they lie.
    """
    if not use.materialized:
        return lambda rows, ids: retrieval.with_continuation(ids)
    held = split.materialized_lengths.row_shape[0]
    stored = split.neighbor_ids.gather(queries.ids)[:, :held]

    def read(rows: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        same = (stored[rows] == ids[:, None]) & (ids[:, None] >= 0)  # [n, held]
        beside = same.any(axis=1)
        tokens = np.empty((len(ids), 2 * split.chunk_length), dtype=np.int64)
        lengths = np.empty(len(ids), dtype=np.int64)
        asking, of_asking = np.unique(rows[beside], return_inverse=True)
        places = (of_asking.ravel(), same[beside].argmax(axis=1))
        tokens[beside] = split.materialized_tokens.gather(queries.ids[asking])[places]
        lengths[beside] = split.materialized_lengths.gather(queries.ids[asking])[places]
        tokens[~beside], lengths[~beside] = retrieval.with_continuation(ids[~beside])
        return tokens, lengths

    return read


def choose_neighbors(
    split: Split, retrieval: RetrievalSet, queries: Queries, use: NeighborUse, read: ReadText | None = None
) -> np.ndarray:
    """The neighbors of some chunks.

    Args:
        split: where the chunks lie.
        retrieval: where their neighbors lie.
        queries: the chunks.
        use: how many, and which.
        read: what reads their text, if not `text_reader`.

    Returns:
        [C, k] int64 ids in the retrieval set, -1 where too few remain.
    """
    if use.source == "random":
        # A chunk whose nearest neighbors are missing gets random ones all the same: the control is given as many tokens
        # as there is room for, so that it never has less to read than what it is compared with.
        drawn = random_numbers(queries.ids, retrieval.num_chunks, 2 * use.k + 16, use.seed, queries.epochs)
        candidates = retrieval.ids_at(drawn)
    else:
        candidates = split.neighbor_ids.gather(queries.ids) if use.found is None else use.found[queries.ids]
    candidates = outside(retrieval.without_deleted(candidates), queries.excluded)
    if use.max_overlap < 1:
        read = read or text_reader(split, retrieval, queries, use)
        candidates = without_copies(candidates, read, queries, use.k, use.max_overlap)
    return first_present(candidates, use.k)


def random_numbers(ids: np.ndarray, below: int, num_draws: int, seed: int, epochs: np.ndarray | int = 0) -> np.ndarray:
    """Uniform draws from `range(below)`, each a function of seed, epoch, chunk id and place: [C] → [C, num_draws] int64."""
    of_epoch = mix(np.uint64(mix(seed)) + np.atleast_1d(epochs).astype(np.uint64))
    of_chunk = mix(of_epoch ^ ids.astype(np.uint64))
    places = np.arange(num_draws, dtype=np.uint64)
    return (mix(of_chunk[:, None] + places) % np.uint64(below)).astype(np.int64)


def outside(candidates: np.ndarray, excluded: np.ndarray) -> np.ndarray:
    """Candidates [C, s] with -1 for those in the row's range [first, stop), `excluded` [C, 2]: its own documents."""
    return np.where((candidates >= excluded[:, :1]) & (candidates < excluded[:, 1:]), -1, candidates)


def without_copies(candidates: np.ndarray, read: ReadText, queries: Queries, k: int, max_overlap: float) -> np.ndarray:
    """Candidates [C, s] with -1 for near copies among those that would be used; no others are read.

    The paper measures leakage between a chunk and its own neighbors (section 2.7). But a chunk's neighbors are read while
    the *next* chunk is predicted, so one that holds the next chunk gives the answer away although it may share little with
    the chunk that found it. The larger of both overlaps decides.
    """
    following = np.minimum(np.arange(1, len(queries.ids) + 1), len(queries.ids) - 1)
    following_lengths = np.where(queries.followed, queries.lengths[following], 0)
    candidates, tested, depth = candidates.copy(), candidates < 0, k
    while True:
        present = candidates >= 0
        lacking = np.cumsum(present & tested, axis=1)[:, -1:] < k
        rows, columns = np.nonzero(present & ~tested & lacking & (np.cumsum(present, axis=1) <= depth))
        if not len(rows):
            return candidates
        tested[rows, columns] = True
        text = read(rows, candidates[rows, columns])
        shared = np.maximum(
            overlap(queries.tokens[rows], queries.lengths[rows], *text),
            overlap(queries.tokens[following[rows]], following_lengths[rows], *text),
        )
        candidates[rows, columns] = np.where(shared > max_overlap, -1, candidates[rows, columns])
        depth *= 2  # most rows are content with their first; the few that are not must not cost a round for each


def first_present(candidates: np.ndarray, k: int) -> np.ndarray:
    """The first k candidates of each row that are not -1: [C, s] → [C, k], -1 where too few remain."""
    order = np.argsort(candidates < 0, axis=1, kind="stable")[:, :k]
    chosen = np.take_along_axis(candidates, order, 1)
    return np.pad(chosen, ((0, 0), (0, k - chosen.shape[1])), constant_values=-1)
