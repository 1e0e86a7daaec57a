"""Search the chunks of one index for neighbors: without the own document, near copies and deleted chunks.

    embeddings → candidates of the index → drop excluded chunks → exact distances → too few left? search deeper

Chunks are excluded by id, never by their position in a result: column 0 of a search need not be the query itself.
Chunks left with fewer neighbors than `neighbors.stored` are searched again with more candidates.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from indexing.index.exact_search import IdRanges, rerank
from indexing.index.floats import to_float32
from indexing.index.product_search import ProductIndex
from indexing.index.sharded import ShardedIndex
from indexing.neighbors.settings import Method, NeighborSettings
from indexing.similarity.candidates import present_first
from indexing.similarity.overlap import overlap
from indexing.store.datastore import Split
from indexing.store.retrieval_set import RetrievalSet

COMPLETING_BYTES = 1_000_000_000
"""Codes and ids of the index, in bytes, that chunks with too few n-grams search: of the first 14 million chunks by
default."""

_OVERLAP_ROWS = 4096


class Index(Protocol):
    """Finds candidates for many queries, such as `ShardedIndex` and `ProductIndex`.

    Attributes:
        num_vectors: chunks in the index.
        nprobe, max_nprobe: inverted lists that a search visits, and how many there are.
        by_codes: whether it compares codes, in whose order `rerank` = "none" leaves the candidates, instead of
            embeddings.
    """

    num_vectors: int
    nprobe: int
    max_nprobe: int
    by_codes: bool

    def search(
        self, queries: np.ndarray, k: int, excluded: IdRanges | None = None, nprobe: int | None = None
    ) -> np.ndarray:
        """See `ShardedIndex.search`."""


def open_index(train: Split, shards: range, method: Method, device: str = "auto", *, keep: bool = False) -> Index:
    """Open the index over some shards of a training split.

    Args:
        train: the split.
        shards: shard numbers.
        method: how candidates are found. `ngrams` opens the index for chunks with too few candidates by n-grams: the
            first shards only, up to `COMPLETING_BYTES`, because these chunks are few and find little.
        device: of `exact`.
        keep: keep the embeddings of `exact` in memory, for searches of few queries.
    """
    if method == "ngrams":
        return ShardedIndex.open(train.folder / "index", shards, COMPLETING_BYTES, only_fitting=True)
    if method == "index":
        return ShardedIndex.open(train.folder / "index", shards)
    rows = (int(train.tokens.starts[shards.start]), int(train.tokens.starts[shards.stop]))
    return ProductIndex(train.embeddings, device, rows, keep=keep)


@dataclass(frozen=True)
class QueryChunks:
    """Chunks whose neighbors are searched.

    Attributes:
        vectors: [n, d], embeddings rounded to float16 as the stored ones: float16, or float32.
        tokens: tokens [n, m] and lengths [n]; only a search by embeddings that accepts near copies does without.
        own: ids of each chunk's own document, in the datastore itself; None for chunks outside of it.
        live: skip chunks of deleted documents. Stored neighbors keep them: batches skip them when they are read.
    """

    vectors: np.ndarray
    tokens: tuple[np.ndarray, np.ndarray] | None = None
    own: IdRanges | None = None
    live: bool = False

    def take(self, rows: np.ndarray) -> "QueryChunks":
        """Some of the chunks."""
        tokens = (self.tokens[0][rows], self.tokens[1][rows]) if self.tokens is not None else None
        own = (self.own[0][rows], self.own[1][rows]) if self.own is not None else None
        return QueryChunks(self.vectors[rows], tokens, own, self.live)

    def own_sizes(self) -> np.ndarray:
        """Chunks [n] int64 of each chunk's own document, 0 for chunks outside of the datastore."""
        return self.own[1] - self.own[0] if self.own is not None else np.zeros(len(self.vectors), dtype=np.int64)


def neighbors_of(
    chunks: QueryChunks, index: Index, train: Split, settings: NeighborSettings, nprobe: int | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Find the candidates of some chunks in one index, nearest first or in the order of its codes.

    Args:
        chunks: the queries.
        index: over the chunks of `train`.
        train: the split in the index.
        settings: stored, candidates, re-ranking, overlap.
        nprobe: inverted lists that the first search visits; None = the index's `nprobe`.

    Returns:
        ids [n, settings.per_index] int64 (-1 = none), distances of the same shape, float32 (+inf), and the number of
        queries searched again.
    """
    chunks = replace(chunks, vectors=to_float32(chunks.vectors))
    nprobe = index.nprobe if nprobe is None else nprobe
    depth = settings.candidates if index.by_codes else settings.precise_candidates
    ids, distances = _search_once(chunks, index, train, settings, depth, nprobe)
    if depth >= index.num_vectors and nprobe >= index.max_nprobe:
        return ids, distances, 0  # the search has compared everything
    stored = ids[:, : settings.stored]
    starved = np.flatnonzero(stored[:, -1] < 0)
    for rows, more, wider in _deeper_searches(starved, stored, chunks.own_sizes(), index, settings.candidates, nprobe):
        ids[rows], distances[rows] = _search_once(chunks.take(rows), index, train, settings, more, wider)
    return ids, distances, len(starved)


def _deeper_searches(
    starved: np.ndarray, ids: np.ndarray, own_sizes: np.ndarray, index: Index, candidates: int, nprobe: int
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield searches until no query of `starved` lacks a neighbor in `ids`, which the caller updates.

    Usually a query lacks neighbors because its own document filled the candidates. So the first round asks for as many
    more as the document has chunks, in the same lists. Only the last round goes past the whole of a long document.

    Yields:
        queries to search again, candidates to ask for, lists to visit.
    """
    rounds: list[tuple[int, int, Callable[[int], int]]] = [  # nprobe, queries at a time, document size → candidates
        (nprobe, 1024, lambda longest: min(longest + 2 * candidates, 8 * candidates)),
        (8 * nprobe, 1024, lambda longest: 8 * candidates),
        (64 * nprobe, 1024, lambda longest: 64 * candidates),
        (index.max_nprobe, 16, lambda longest: longest + 4 * candidates),
    ]
    for lists, at_a_time, depth in rounds:
        if not len(starved):
            return
        starved = starved[np.argsort(own_sizes[starved], kind="stable")]
        for rows in np.array_split(starved, -(-len(starved) // at_a_time)):
            yield rows, min(index.num_vectors, depth(int(own_sizes[rows].max()))), lists
        starved = starved[ids[starved, -1] < 0]


def _search_once(
    chunks: QueryChunks, index: Index, train: Split, settings: NeighborSettings, depth: int, nprobe: int
) -> tuple[np.ndarray, np.ndarray]:
    ids = index.search(chunks.vectors, depth, chunks.own, nprobe)  # [n, depth]
    if chunks.live:
        ids = train.without_deleted(ids)
    if chunks.tokens is not None and settings.max_overlap < 1:
        ids = np.where(too_similar(ids, train, chunks.tokens, settings.max_overlap), -1, ids)
    if settings.rerank != "none" or not index.by_codes:
        distances, ids = rerank(chunks.vectors, ids, train.embeddings)
    else:
        # Keep the order of the index, with exact distances for a merge.
        ids = np.take_along_axis(ids, present_first(ids, depth), 1)
        distances = _exact_distances(chunks.vectors, ids, train)
    width = settings.per_index
    if depth < width:
        ids = np.pad(ids, ((0, 0), (0, width - depth)), constant_values=-1)
        distances = np.pad(distances, ((0, 0), (0, width - depth)), constant_values=np.inf)
    return ids[:, :width], distances[:, :width]


def _exact_distances(queries: np.ndarray, ids: np.ndarray, train: Split) -> np.ndarray:
    columns = [rerank(queries, ids[:, [column]], train.embeddings)[0] for column in range(ids.shape[1])]
    return np.concatenate(columns, axis=1)


def too_similar(
    ids: np.ndarray, chunks: Split | RetrievalSet, tokens: tuple[np.ndarray, np.ndarray], max_overlap: float
) -> np.ndarray:
    """Which candidates [n, c] hold too much of their query, continuation included; in blocks, to bound memory."""
    out = np.zeros(ids.shape, dtype=bool)
    rows, columns = np.nonzero(ids >= 0)
    for start in range(0, len(rows), _OVERLAP_ROWS):
        row, column = rows[start : start + _OVERLAP_ROWS], columns[start : start + _OVERLAP_ROWS]
        neighbors, lengths = chunks.with_continuation(ids[row, column])
        out[row, column] = overlap(tokens[0][row], tokens[1][row], neighbors, lengths) > max_overlap
    return out
