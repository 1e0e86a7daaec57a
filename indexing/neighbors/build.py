"""Find the neighbors of every chunk once, and store them.

New generations are merged with the stored neighbors, with the same result as one search of everything. The order by
tokens and n-grams depend on all candidates or chunks, so with them the stored neighbors stay as they are.
"""

from pathlib import Path

import numpy as np

from indexing.index.exact_search import rerank
from indexing.index.floats import to_float32
from indexing.neighbors.index_search import QueryChunks
from indexing.neighbors.search import Nearest, NeighborSearch
from indexing.progress import Advance, status
from indexing.store.datastore import Split
from indexing.store.files import NpyWriter
from indexing.store.retrieval_set import CHUNK_ID_BITS, RetrievalSet, neighbor_ids
from indexing.store.sharded_array import open_array

BLOCK_ROWS = 65_536
"""Chunks per block, so that reading the index once per block costs little."""


def neighbor_shard(
    work: Path,
    split: Split,
    rows: tuple[int, int],
    search: NeighborSearch,
    *,
    before: tuple[Path, RetrievalSet] | None = None,
    advance: Advance,
) -> dict[str, int]:
    """Write `work/ids.npy` [n, stored] int64 for the chunks `rows` of a split.

    Args:
        work: folder to write to.
        split: the split of the chunks, in datastore 0. Own documents are excluded in this datastore only.
        rows: first and stop of the chunk ids.
        search: indexes and rules.
        before: folder with the same file from a search of other indexes, to merge with this search, and the chunks that
            it names; None with order or n-grams.
        advance: called with the number of finished chunks.

    Returns:
        counts: queries, neighbors found, chunks with too few neighbors, chunks with none, queries searched again.
    """
    work.mkdir(parents=True, exist_ok=True)
    stored = search.settings.stored
    counts = {"queries": 0, "neighbors": 0, "short": 0, "empty": 0, "deeper": 0}
    with NpyWriter(work / "ids.npy", np.int64, (stored,)) as file:
        for start in range(*rows, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, rows[1])
            status("searching for chunks %s to %s", f"{start:,}", f"{stop:,}")
            chunks = _query_chunks(split, start, stop)
            earlier = _earlier(chunks.vectors, *before, start - rows[0]) if before else ()
            ids, deeper = search.find(chunks, earlier=earlier)
            file.append(ids)
            present = (ids >= 0).sum(axis=1)
            counts["queries"] += len(ids)
            counts["neighbors"] += int(present.sum())
            counts["short"] += int((present < stored).sum())
            counts["empty"] += int((present == 0).sum())
            counts["deeper"] += deeper
            advance(len(ids))
    return counts


def _earlier(vectors: np.ndarray, folder: Path, retrieval: RetrievalSet, first: int) -> list[Nearest]:
    """The neighbors in each datastore that an earlier search found for the chunks from row `first` on, with embeddings
    [n, d]."""
    vectors, ids, results = to_float32(vectors), open_array(folder / "ids.npy")[first : first + len(vectors)], []
    for number, split in enumerate(retrieval.splits):
        of_split = np.where(ids >> CHUNK_ID_BITS == number, ids & ((1 << CHUNK_ID_BITS) - 1), -1)
        distances, ordered = rerank(vectors, of_split, split.embeddings)
        results.append((neighbor_ids(number, ordered), distances))
    return results


def _query_chunks(split: Split, start: int, stop: int) -> QueryChunks:
    """The chunks [start, stop) of a split in datastore 0."""
    return QueryChunks(
        split.embeddings.read(start, stop),
        (split.tokens.read(start, stop), split.lengths.read(start, stop)),
        own=split.documents_of(np.arange(start, stop, dtype=np.int64))[1:] if split.name == "train" else None,
    )
