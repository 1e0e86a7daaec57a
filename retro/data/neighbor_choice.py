"""Choose the neighbors that the chunks of a sequence read, from those stored for them.

    stored neighbors (or random chunks) → without deleted ones and own documents → without near copies (optional) → the first k

Every step is a function of chunk ids, and of the epoch for random chunks. So the neighbors of a chunk do not depend on
other sequences of the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import numpy as np

from indexing.retrieval.prefix_neighbors import PrefixNeighbors, searches_prefixes
from indexing.similarity.overlap import overlap
from indexing.splitmix64 import mix
from indexing.store.datastore import Datastore, Split
from indexing.store.retrieval_set import RetrievalSet
from indexing.suffixes.search import SuffixIndex
from indexing.suffixes.votes import stores_votes

NeighborSource = Literal["nearest", "random"]


@dataclass(frozen=True)
class NeighborUse:
    """How neighbors are chosen.

    Attributes:
        k: neighbors of each chunk; 0 = none, and without `votes` retrieval OFF.
        source: `nearest`, as stored; or `random`, a control: chunks drawn uniformly from the retrieval set.
        max_overlap: skip neighbors whose longest run of tokens in common with the chunk, or with the next one, is more
            than this fraction of its length; 1 = skip none.
        seed: of the random draws, which differ between epochs.
        materialized: read the text from the copy next to the chunk, if there is one.
        votes: also read the votes of the datastore for each token (`Inputs.votes`). A match that is longer
            than `max_overlap` of a chunk has none (`indexing.suffixes.votes.within_limit`).
        found: [chunks, s] int64 ids of neighbors for each chunk of the split, best first, to use instead of the stored
            ones.
        found_votes: [chunks, m, 32] int64 votes for each token of the split, to use instead of the stored ones.
        live_votes: searches votes that are not stored; None = they are.
        live_neighbors: searches neighbors that are not stored; None = they are.
    """

    k: int
    source: NeighborSource = "nearest"
    max_overlap: float = 1.0
    seed: int = 0
    materialized: bool = False
    votes: bool = False
    found: np.ndarray | None = field(default=None, repr=False, compare=False)
    found_votes: np.ndarray | None = field(default=None, repr=False, compare=False)
    live_votes: SuffixIndex | None = field(default=None, repr=False, compare=False)
    live_neighbors: PrefixNeighbors | None = field(default=None, repr=False, compare=False)

    @property
    def rule(self) -> str:
        """Which neighbors are read, in words."""
        limit = f"at most {self.max_overlap:g}" if self.max_overlap < 1 else "not limited"
        return f"{self.source}, overlap with the chunk or the next one {limit}"


def searching(datastore: Datastore, uses: Sequence[NeighborUse]) -> list[NeighborUse]:
    """The uses, with a search of the votes and neighbors that are needed and not stored. One index serves all.

    Raises:
        InputError: votes are needed that are neither stored nor can be searched.
    """
    index, found = cache(lambda: SuffixIndex(datastore.train)), list[NeighborUse]()
    for use in uses:
        if use.votes and use.found_votes is None and not stores_votes(datastore):
            use = replace(use, live_votes=index())
        if use.k and use.source == "nearest" and use.found is None and searches_prefixes(datastore):
            use = replace(use, live_neighbors=PrefixNeighbors.of(index()))
        found.append(use)
    return found


@dataclass(frozen=True)
class Queries:
    """C chunks that need neighbors; chunks of one sequence are in order.

    Attributes:
        ids: [C] int64 in their split.
        excluded: [C, 2] int64, chunk ids [first, stop) of the sequence's documents, if they are in the retrieval set.
            Copies of them in other datastores have other ids: `max_overlap` skips those.
        tokens: [C, m] int64.
        lengths: [C] int64, tokens without padding.
        followed: [C] bool, True if the next row is the next chunk of the same document.
        epochs: [C] int64, or one number for all: earlier passes over the data. Random neighbors differ between epochs,
            because constant ones would identify their chunk and could be memorized.
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
    """Choose neighbors and read their tokens [C, K, R] and lengths [C, K], int64; see `choose_neighbors`."""
    read = text_reader(split, retrieval, queries, use)
    chosen = choose_neighbors(split, retrieval, queries, use, read)
    tokens, lengths = read(np.repeat(np.arange(len(chosen)), use.k), chosen.ravel())
    return tokens.reshape(*chosen.shape, -1), lengths.reshape(chosen.shape)


ReadText = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(rows of the queries [n], ids of neighbors [n]) → tokens [n, R] and lengths [n] of the neighbors, int64."""


def text_reader(split: Split, retrieval: RetrievalSet, queries: Queries, use: NeighborUse) -> ReadText:
    """Make a function that reads the text of neighbors, from their own place or from the copy next to the querying
    chunk.

    Both return the same. Only the first stored neighbors of a chunk are copied; others are read from their own place.
    """
    if not use.materialized:
        return lambda rows, ids: retrieval.with_continuation(ids)
    held = split.materialized_lengths.row_shape[0]
    stored = split.neighbor_ids.gather(queries.ids)[:, :held]

    def read(rows: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        same = (stored[rows] == ids[:, None]) & (ids[:, None] >= 0)  # [n, held]
        copied = same.any(axis=1)
        tokens = np.empty((len(ids), 2 * split.chunk_length), dtype=np.int64)
        lengths = np.empty(len(ids), dtype=np.int64)
        # A chunk's copies [held, R] are read at once, also if several of its neighbors are wanted. Pairs of chunk and
        # copy then pick the n rows.
        chunks, number = np.unique(rows[copied], return_inverse=True)
        positions = (number.ravel(), same[copied].argmax(axis=1))
        tokens[copied] = split.materialized_tokens.gather(queries.ids[chunks])[positions]
        lengths[copied] = split.materialized_lengths.gather(queries.ids[chunks])[positions]
        tokens[~copied], lengths[~copied] = retrieval.with_continuation(ids[~copied])
        return tokens, lengths

    return read


def choose_neighbors(
    split: Split, retrieval: RetrievalSet, queries: Queries, use: NeighborUse, read: ReadText | None = None
) -> np.ndarray:
    """Choose the neighbors of chunks.

    Args:
        split: the split of the chunks.
        retrieval: where their neighbors lie.
        queries: the chunks.
        use: how many, and which.
        read: reads the text of neighbors; None = `text_reader`.

    Returns:
        [C, k] int64 ids in the retrieval set; missing neighbors are -1.
    """
    if use.source == "random":
        # A chunk without nearest neighbors gets random ones too, so that the control never reads less than the model
        # that it is compared with.
        drawn = random_numbers(queries.ids, retrieval.num_chunks, 2 * use.k + 16, use.seed, queries.epochs)
        candidates = retrieval.ids_at(drawn)
    elif use.live_neighbors is not None:
        candidates = use.live_neighbors.rank(queries.tokens, 2 * use.k, queries.excluded).ids
    else:
        candidates = split.neighbor_ids.gather(queries.ids) if use.found is None else use.found[queries.ids]
    candidates = outside(retrieval.without_deleted(candidates), queries.excluded)
    if use.max_overlap < 1:
        read = read or text_reader(split, retrieval, queries, use)
        candidates = without_copies(candidates, read, queries, use.k, use.max_overlap)
    return first_present(candidates, use.k)


def random_numbers(ids: np.ndarray, below: int, num_draws: int, seed: int, epochs: np.ndarray | int = 0) -> np.ndarray:
    """Uniform draws from `range(below)`, functions of seed, epoch, chunk id and column: [C] → [C, num_draws] int64."""
    # Hashes in place of a generator: a draw does not depend on the draws before it, so neither on the batch.
    of_epoch = mix(np.uint64(mix(seed)) + np.atleast_1d(epochs).astype(np.uint64))
    of_chunk = mix(of_epoch ^ ids.astype(np.uint64))
    draws = np.arange(num_draws, dtype=np.uint64)
    return (mix(of_chunk[:, None] + draws) % np.uint64(below)).astype(np.int64)


def outside(candidates: np.ndarray, excluded: np.ndarray) -> np.ndarray:
    """Candidates [C, s] with -1 for those in the row's range [first, stop) of `excluded` [C, 2], its own documents."""
    return np.where((candidates >= excluded[:, :1]) & (candidates < excluded[:, 1:]), -1, candidates)


def without_copies(candidates: np.ndarray, read: ReadText, queries: Queries, k: int, max_overlap: float) -> np.ndarray:
    """Candidates [C, s] with -1 for near copies. Only candidates that would be used are read and compared.

    The paper measures leakage between a chunk and its own neighbors (section 2.7). But the model reads a chunk's
    neighbors while it predicts the *next* chunk, so a neighbor that contains the next chunk gives the answer away even
    if it has little in common with its own chunk. The larger overlap decides.
    """
    # [C], the row of the next chunk. Where it is of another document its length counts as 0, which overlaps with
    # nothing.
    following = np.minimum(np.arange(1, len(queries.ids) + 1), len(queries.ids) - 1)
    following_lengths = np.where(queries.followed, queries.lengths[following], 0)
    candidates, tested, depth = candidates.copy(), candidates < 0, k
    while True:
        # [C, s] each. A round tests the first `depth` candidates that are left, in rows with fewer than k that passed.
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
        depth *= 2  # few rows need more candidates, and should not cost a round for each of them


def first_present(candidates: np.ndarray, k: int) -> np.ndarray:
    """The first k candidates of each row that are not -1: [C, s] → [C, k], filled with -1."""
    # False sorts before True, and a stable sort leaves the others in their order, best first.
    order = np.argsort(candidates < 0, axis=1, kind="stable")[:, :k]
    chosen = np.take_along_axis(candidates, order, 1)
    return np.pad(chosen, ((0, 0), (0, k - chosen.shape[1])), constant_values=-1)
