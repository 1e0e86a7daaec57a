"""Find the neighbors of every chunk once, and store them (paper, sections 2.2 and 2.4).

    embeddings of a shard → candidates → drop the own document → drop near copies (optional) → exact distances → store the nearest
                                                       │                                   or shared tokens (optional) → store the best
    rare n-grams of its tokens (optional) ─────────────┘

Each generation of the datastore and each datastore of `neighbors.extra_datastores` has an index. Every index is searched, and
the nearest or best neighbors of all are stored. New generations are merged with the stored neighbors, with the same result as one
search of everything. The order by tokens and n-grams depend on all candidates or chunks, so with them the stored neighbors stay as
they are.

Chunks are excluded by id, never by their position in a result: column 0 of a search need not be the query itself. Chunks
left with fewer neighbors than `neighbors.stored` are searched again with more candidates. Missing neighbors are stored as -1.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
from pydantic import Field, NonNegativeInt

from indexing.index.exact_search import distances_to, order_by_distance, rerank
from indexing.index.floats import to_float32
from indexing.index.product_search import ProductIndex
from indexing.index.sharded import ShardedIndex
from indexing.neighbors.list_search import ListIndex
from indexing.ngrams.search import NgramIndex
from indexing.progress import Advance, status
from indexing.similarity.overlap import overlap
from indexing.similarity.shared_tokens import SharedTokens
from indexing.sparse.candidates import Kept
from indexing.store.artifact import read_manifest
from indexing.store.datastore import Datastore, Split, shard_name
from indexing.store.errors import InputError
from indexing.store.files import NpyWriter
from indexing.store.retrieval_set import RetrievalSet, neighbor_ids
from indexing.store.settings import Fraction, settings
from indexing.store.sharded_array import open_array

Method = Literal["index", "exact", "lists", "ngrams"]

_BLOCK_ROWS = 65_536  # chunks per block, so that reading the index once per block costs little
_OVERLAP_ROWS = 4096
_FEW_LISTS = 8  # that chunks with too few candidates by n-grams visit
COMPLETING_BYTES = 1_000_000_000
"""Codes and ids of the index, in bytes, that these chunks search: of the first 14 million chunks with the default index."""
# Far above any use (the paper reads at most 40 neighbors). Without a limit, a mistyped number could fill a disk.
_MOST_NEIGHBORS, _MOST_CANDIDATES = 4096, 65_536


@settings
class NeighborSettings:
    """Which neighbors are stored, and how they are found."""

    stored: Annotated[int, Field(ge=1, le=_MOST_NEIGHBORS)] = 16
    """Neighbors stored for each chunk. Store more than training reads (`data.k`): a batch skips neighbors from its own documents."""
    candidates: Annotated[int, Field(le=_MOST_CANDIDATES)] = 64
    """Candidates that the index returns for each chunk, before filtering and re-ranking."""
    rerank: Literal["auto", "embeddings", "tokens", "none"] = "auto"
    """Order of the candidates. `embeddings`: the nearest first, by the stored embeddings. `tokens`: by the tokens that they share
    with the chunk, each adding to the ones before; for models that copy, with the lexical embedder
    (docs/explanation/neighbor-search.md). `none`: by the index's codes; the same as `embeddings` if `search` uses no codes. `auto`:
    `tokens` with the lexical embedder, `embeddings` (as in the paper) with a transformer; stored neighbors keep their order."""
    search: Literal["auto", "index", "exact", "lists", "ngrams"] = "auto"
    """How candidates are found. `index`: by the index's codes. `exact`: by matrix products with all embeddings. `lists`: by matrix
    products with the embeddings of the nearest inverted lists. `ngrams`: by the rare n-grams of tokens that chunks share, and by the
    index's codes for chunks that share too few. `auto`: `ngrams` with the lexical embedder, else the fastest of the others
    (docs/explanation/neighbor-search.md); stored neighbors keep their method."""
    max_overlap: Fraction = 1.0
    """Store no neighbor whose longest run of tokens in common with the chunk is more than this fraction of it. 1 = keep all.
    Only the chunk itself is compared; `data.max_overlap` also compares the next chunk, which training predicts. The datastore has no
    votes after a match that is longer than this fraction of a chunk."""
    extra_datastores: tuple[Path, ...] = ()
    """More datastores to retrieve from, with the same tokenizer, chunk length and embedder. Their training chunks can be neighbors."""
    materialized: NonNegativeInt = 0
    """Neighbors of each chunk whose tokens the stage `materialize` writes next to the chunk, for `data.materialized`. Use a few
    more than `data.k`, because training skips some neighbors. 0 = none."""

    @property
    def precise_candidates(self) -> int:
        """Candidates of a search by the embeddings: 1.5 times the kept ones, at least 16 more, because bfloat16 products are not exact."""
        return self.kept + max(16, self.kept // 2)

    @property
    def by_distance(self) -> bool:
        """Whether the nearest chunks are stored. Only these can be merged: the order by tokens needs all candidates, and n-grams need
        all chunks, but only the chosen neighbors are stored."""
        return self.rerank != "tokens" and self.search != "ngrams"

    @property
    def kept(self) -> int:
        """Candidates kept per index: `stored`, or all if the order by tokens follows."""
        return self.candidates if self.rerank == "tokens" else self.stored

    def __post_init__(self) -> None:
        if self.materialized > self.stored:
            raise InputError(
                f"neighbors.materialized = {self.materialized}: should be at most neighbors.stored = {self.stored}."
            )
        if self.candidates < self.stored:
            raise InputError(
                f"neighbors.candidates = {self.candidates}: should be at least neighbors.stored = {self.stored}; 4 times k is good."
            )


class Index(Protocol):
    """Finds candidates for many queries, such as `ShardedIndex`, `ProductIndex` and `ListIndex`.

    Attributes:
        num_vectors: chunks in the index.
        nprobe, max_nprobe: inverted lists that a search visits, and how many there are.
        by_codes: whether it compares codes, in whose order `rerank` = "none" leaves the candidates, instead of embeddings.
    """

    num_vectors: int
    nprobe: int
    max_nprobe: int
    by_codes: bool

    def search(
        self,
        queries: np.ndarray,
        k: int,
        excluded: tuple[np.ndarray, np.ndarray] | None = None,
        nprobe: int | None = None,
    ) -> np.ndarray:
        """See `ListIndex.search`."""


def open_index(train: Split, shards: range, method: Method, device: str = "auto", *, keep: bool = False) -> Index:
    """Open the index over some shards of a training split.

    Args:
        train: the split.
        shards: shard numbers.
        method: how candidates are found. An index without lists is small, so `lists` compares all its embeddings. `ngrams` opens
            the index for chunks with too few candidates by n-grams: the first shards only, up to `COMPLETING_BYTES`, because these
            chunks are few and find little.
        device: of a search by embeddings.
        keep: keep the embeddings in memory, for searches of few queries.
    """
    if method == "ngrams":
        return ShardedIndex.open(train.folder / "index", shards, COMPLETING_BYTES, only_fitting=True)
    if method == "index":
        return ShardedIndex.open(train.folder / "index", shards)
    opened = None
    if method == "lists":
        opened = ListIndex.open(train.folder / "index", train.embeddings, shards, device)
    rows = (int(train.tokens.starts[shards.start]), int(train.tokens.starts[shards.stop]))
    return opened or ProductIndex(train.embeddings, device, rows, keep=keep)


def stored_settings(datastore: Datastore) -> tuple[NeighborSettings, Method] | None:
    """The settings of the stored neighbors without `extra_datastores`, and the method that found them; None without neighbors."""
    if not datastore.has("neighbors"):
        return None
    manifest = read_manifest(datastore.folder / "neighbors" / shard_name(0))
    stored = {key.removeprefix("neighbors."): value for key, value in manifest["recipe"]["settings"].items()}
    if "retrieval" in stored:
        raise InputError(
            f"the neighbors of {datastore.folder} were found with neighbors.retrieval = {stored['retrieval']!r}, by terms. This program "
            "finds neighbors by embeddings or n-grams only: remove that setting and run "
            "`retro index CONFIG --stage neighbors --rebuild`."
        )
    known = {field.name: stored[field.name] for field in fields(NeighborSettings) if field.name in stored}
    return NeighborSettings(**known), manifest["counts"]["search"]


@dataclass(frozen=True)
class OpenIndex:
    """One open index to retrieve from, over a datastore or over one of its generations.

    Attributes:
        index: over chunks of `train`.
        train: the split whose ids the index returns.
        number: number of the datastore in the retrieval set; 0 = the datastore whose neighbors are searched.
    """

    index: Index
    train: Split
    number: int = 0


def merge_nearest(nearest: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Merge the results of several indexes.

    Args:
        nearest: for each index, ids of the retrieval set [n, c] int64 (-1 = none) and exact distances [n, c] (+inf), with c >= k.
        k: neighbors to keep.

    Returns:
        ids [n, k] int64 and distances [n, k] float32 of the k nearest.
    """
    if len(nearest) == 1:
        return nearest[0][0][:, :k], nearest[0][1][:, :k]
    ids = np.concatenate([each for each, _ in nearest], axis=1)
    distances, ids = order_by_distance(np.concatenate([near for _, near in nearest], axis=1), ids)
    return ids[:, :k], distances[:, :k]


@dataclass(frozen=True)
class _QueryChunks:
    """Chunks whose neighbors are searched.

    Attributes:
        vectors: [n, d] float32 embeddings.
        own: first and stop [n] of the ids of each chunk's own document; None for held-out chunks.
        tokens: tokens [n, m] and lengths [n], needed for `max_overlap`; None without it.
        live: see `find_neighbors`.
    """

    vectors: np.ndarray
    own: tuple[np.ndarray, np.ndarray] | None
    tokens: tuple[np.ndarray, np.ndarray] | None
    live: bool

    def take(self, rows: np.ndarray) -> "_QueryChunks":
        own = (self.own[0][rows], self.own[1][rows]) if self.own is not None else None
        tokens = (self.tokens[0][rows], self.tokens[1][rows]) if self.tokens is not None else None
        return _QueryChunks(self.vectors[rows], own, tokens, self.live)

    def own_sizes(self) -> np.ndarray:
        """Chunks [n] int64 of each chunk's own document, 0 for held-out chunks."""
        return self.own[1] - self.own[0] if self.own is not None else np.zeros(len(self.vectors), dtype=np.int64)


def find_neighbors(
    vectors: np.ndarray,
    tokens: tuple[np.ndarray, np.ndarray],
    searched: Sequence[OpenIndex],
    settings: NeighborSettings,
    *,
    own: tuple[np.ndarray, np.ndarray] | None = None,
    order: SharedTokens | None = None,
    by_ngrams: NgramIndex | None = None,
    known: tuple[np.ndarray, np.ndarray] | None = None,
    live: bool = False,
    first: int = 0,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Find the neighbors of some chunks. Stored neighbors and those of a live search are the results of this function.

    Args:
        vectors: [n, d] float32, embeddings rounded to float16 as the stored ones.
        tokens: tokens [n, m] and lengths [n] of the chunks.
        searched: the indexes.
        settings: the rules.
        own: first and stop [n] of the ids of each chunk's own document, in datastore 0; None for chunks outside of it.
        order: for `rerank` = "tokens".
        by_ngrams: for `search` = "ngrams". `searched` are then searched only for chunks with too few candidates.
        known: ids and distances [n, stored] from a search of other indexes, to merge with this search; None with order or
            n-grams.
        live: skip chunks of deleted documents. Stored neighbors keep them, and whoever reads these skips them.
        first: neighbors to return, the first of the stored ones; 0 = all.

    Returns:
        ids [n, first] int64 of the retrieval set (-1 = none), distances [n, first] float32 (+inf), and the number of queries
        searched again.
    """
    first = first or settings.stored
    if by_ngrams is not None:
        return _by_ngrams(vectors, tokens, searched, settings, own, order, by_ngrams, live, first)
    nearest, deeper = [], 0
    for each in searched:
        excluded = own if each.number == 0 else None
        ids, distances, more = neighbors_of(
            vectors, each.index, each.train, settings, excluded=excluded, tokens=tokens, live=live
        )
        nearest.append((neighbor_ids(each.number, ids), distances))
        deeper += more
    if known is not None:
        nearest.append(known)
    ids, distances = merge_nearest(nearest, first if order is None else settings.candidates)
    if order is not None:
        ids, distances = order.best(tokens[0], ids, distances, first)
    return ids, distances, deeper


def neighbors_of(
    queries: np.ndarray,
    index: Index,
    train: Split,
    settings: NeighborSettings,
    *,
    excluded: tuple[np.ndarray, np.ndarray] | None = None,
    tokens: tuple[np.ndarray, np.ndarray] | None = None,
    nprobe: int | None = None,
    live: bool = False,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Find the candidates of some chunks in one index, nearest first or in the order of its codes.

    Args:
        queries: [n, d] float32 embeddings.
        index: over the chunks of `train`.
        train: the split in the index.
        settings: stored, candidates, re-ranking, overlap.
        excluded: first and stop [n] of the ids of each query's own document; None for held-out chunks.
        tokens: tokens [n, m] and lengths [n] of the queries, needed for `max_overlap`.
        nprobe: inverted lists that the first search visits; None = the index's `nprobe`.
        live: see `find_neighbors`.

    Returns:
        ids [n, kept] int64 (-1 = none), distances [n, kept] float32 (+inf), and the number of queries searched again.
    """
    chunks = _QueryChunks(queries, excluded, tokens, live)
    nprobe = index.nprobe if nprobe is None else nprobe
    first = settings.candidates if index.by_codes else settings.precise_candidates
    ids, distances = _search_once(chunks, index, train, settings, first, nprobe)
    if first >= index.num_vectors and nprobe >= index.max_nprobe:
        return ids, distances, 0  # the search has compared everything
    wanted = ids[:, : settings.stored]
    starved = np.flatnonzero(wanted[:, -1] < 0)
    for rows, depth, wider in _deeper_searches(starved, wanted, chunks.own_sizes(), index, settings.candidates, nprobe):
        ids[rows], distances[rows] = _search_once(chunks.take(rows), index, train, settings, depth, wider)
    return ids, distances, len(starved)


def _deeper_searches(
    starved: np.ndarray, ids: np.ndarray, own_sizes: np.ndarray, index: Index, candidates: int, nprobe: int
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield searches until no query of `starved` lacks a neighbor in `ids`, which the caller updates.

    Usually a query lacks neighbors because its own document filled the candidates. So the first round asks for as many more
    as the document has chunks, in the same lists. Only the last round goes past the whole of a long document.

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
    chunks: _QueryChunks, index: Index, train: Split, settings: NeighborSettings, depth: int, nprobe: int
) -> tuple[np.ndarray, np.ndarray]:
    ids = index.search(chunks.vectors, depth, chunks.own, nprobe)  # [n, depth]
    if chunks.live:
        ids = train.without_deleted(ids)
    if chunks.tokens is not None and settings.max_overlap < 1:
        ids = np.where(_too_similar(ids, train, chunks.tokens, settings.max_overlap), -1, ids)
    if settings.rerank != "none" or not index.by_codes:
        distances, ids = rerank(chunks.vectors, ids, train.embeddings)
    else:
        # Keep the index's order, but store exact distances.
        ids = np.take_along_axis(ids, np.argsort(ids < 0, axis=1, kind="stable"), 1)
        distances = _exact_distances(chunks.vectors, ids, train)
    if depth < settings.kept:
        ids = np.pad(ids, ((0, 0), (0, settings.kept - depth)), constant_values=-1)
        distances = np.pad(distances, ((0, 0), (0, settings.kept - depth)), constant_values=np.inf)
    return ids[:, : settings.kept], distances[:, : settings.kept]


def _exact_distances(queries: np.ndarray, ids: np.ndarray, train: Split) -> np.ndarray:
    columns = [rerank(queries, ids[:, [column]], train.embeddings)[0] for column in range(ids.shape[1])]
    return np.concatenate(columns, axis=1)


def _too_similar(
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


def neighbor_shard(
    work: Path,
    split: Split,
    rows: tuple[int, int],
    searched: Sequence[OpenIndex],
    settings: NeighborSettings,
    *,
    order: SharedTokens | None = None,
    by_ngrams: NgramIndex | None = None,
    before: Path | None = None,
    advance: Advance,
) -> dict[str, int]:
    """Write `work/ids.npy` [n, stored] int64 and `work/distances.npy` [n, stored] float32 for the chunks `rows` of a split.

    Args:
        work: folder to write to.
        split: the split of the chunks, in datastore 0. Own documents are excluded in this datastore only.
        rows: first and stop of the chunk ids.
        searched: the indexes.
        settings: stored, candidates, re-ranking, overlap.
        order: for `rerank` = "tokens".
        by_ngrams: for `search` = "ngrams".
        before: folder with the same two files from a search of other indexes, to merge with this search; None with order or
            n-grams.
        advance: called with the number of finished chunks.

    Returns:
        counts: queries, neighbors found, chunks with too few neighbors, chunks with none, queries searched again.
    """
    work.mkdir(parents=True, exist_ok=True)
    counts = {"queries": 0, "neighbors": 0, "short": 0, "empty": 0, "deeper": 0}
    known = [open_array(before / f"{name}.npy") for name in ("ids", "distances")] if before else None
    with (
        NpyWriter(work / "ids.npy", np.int64, (settings.stored,)) as id_file,
        NpyWriter(work / "distances.npy", np.float32, (settings.stored,)) as distance_file,
    ):
        step = _block_rows(searched, by_ngrams)
        for start in range(*rows, step):
            stop = min(start + step, rows[1])
            status("searching for chunks %s to %s", f"{start:,}", f"{stop:,}")
            rows_of = slice(start - rows[0], stop - rows[0])
            ids, distances, deeper = find_neighbors(
                to_float32(split.embeddings.read(start, stop)),
                (split.tokens.read(start, stop), split.lengths.read(start, stop)),
                searched,
                settings,
                own=split.documents_of(np.arange(start, stop, dtype=np.int64))[1:] if split.name == "train" else None,
                order=order,
                by_ngrams=by_ngrams,
                known=(known[0][rows_of], known[1][rows_of]) if known else None,
            )
            id_file.append(ids)
            distance_file.append(distances)
            present = (ids >= 0).sum(axis=1)
            counts["queries"] += len(ids)
            counts["neighbors"] += int(present.sum())
            counts["short"] += int((present < settings.stored).sum())
            counts["empty"] += int((present == 0).sum())
            counts["deeper"] += deeper
            advance(len(ids))
    return counts


def ngram_block_rows(dimension: int) -> int:
    """Chunks per block of a search by n-grams: up to 512 MB of float32 embeddings.

    Every block reads the embeddings of its neighbors, which are anywhere in the datastore, and may read the index.
    """
    return max(_BLOCK_ROWS, min(8 * _BLOCK_ROWS, 2**27 // dimension))


def _block_rows(searched: Sequence[OpenIndex], by_ngrams: NgramIndex | None) -> int:
    """Chunks per block. A search by lists gets large blocks, up to 256 MB of float32."""
    if by_ngrams is not None:
        return ngram_block_rows(by_ngrams.retrieval.own.embeddings.row_shape[0])
    by_lists = [each.index for each in searched if isinstance(each.index, ListIndex)]
    fitting = min((2**26 // index.embeddings.row_shape[0] for index in by_lists), default=0)
    return max(_BLOCK_ROWS, min(4 * _BLOCK_ROWS, fitting))


def _by_ngrams(
    vectors: np.ndarray,
    tokens: tuple[np.ndarray, np.ndarray],
    searched: Sequence[OpenIndex],
    settings: NeighborSettings,
    own: tuple[np.ndarray, np.ndarray] | None,
    order: SharedTokens | None,
    by_ngrams: NgramIndex,
    live: bool,
    first: int,
) -> tuple[np.ndarray, np.ndarray, int]:
    """`find_neighbors` for candidates by n-grams. Chunks with fewer than `stored` of them get the nearest in a few lists after them."""
    kept = _condition(tokens, own, by_ngrams.retrieval, settings, live)
    ids, sums = by_ngrams.search(*tokens, settings.candidates, settings.stored, kept, own=own is not None)
    # The candidate with the greatest sum is first, and those by embeddings are last.
    ranks = np.where(ids >= 0, -sums, np.float32(np.inf))
    starved = np.flatnonzero(ids[:, settings.stored - 1] < 0)
    if len(starved) and searched:
        queries = _QueryChunks(vectors, own, tokens, live).take(starved)
        nearest = []
        for each in searched:
            neighbors = neighbors_of(
                queries.vectors,
                each.index,
                each.train,
                settings,
                excluded=queries.own if each.number == 0 else None,
                tokens=queries.tokens,
                nprobe=min(_FEW_LISTS, each.index.nprobe),
                live=live,
            )
            nearest.append((neighbor_ids(each.number, neighbors[0]), neighbors[1]))
        near, distances = merge_nearest(nearest, settings.stored)
        near = np.where((near[:, :, None] == ids[starved, None, :]).any(axis=2), -1, near)
        joined = order_by_distance(
            np.concatenate([ranks[starved], distances], axis=1), np.concatenate([ids[starved], near], axis=1)
        )
        ranks[starved], ids[starved] = (each[:, : settings.candidates] for each in joined)
    if order is not None:
        ids, _ = order.best(tokens[0], ids, ranks, first)
        return ids, distances_to(vectors, ids, by_ngrams.retrieval), len(starved)
    distances, ids = order_by_distance(distances_to(vectors, ids, by_ngrams.retrieval), ids)
    return ids[:, :first], distances[:, :first], len(starved)


def _condition(
    tokens: tuple[np.ndarray, np.ndarray],
    own: tuple[np.ndarray, np.ndarray] | None,
    retrieval: RetrievalSet,
    settings: NeighborSettings,
    live: bool,
) -> Kept:
    """The condition for candidates of a retrieval set: none of the own document, none deleted, no near copies."""

    def kept(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        if own is not None:
            ids = np.where((ids >= own[0][rows, None]) & (ids < own[1][rows, None]), -1, ids)
        if live:
            ids = retrieval.without_deleted(ids)
        if settings.max_overlap < 1:
            queries = (tokens[0][rows], tokens[1][rows])
            ids = np.where(_too_similar(ids, retrieval, queries, settings.max_overlap), -1, ids)
        return ids

    return kept
