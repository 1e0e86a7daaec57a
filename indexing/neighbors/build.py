"""Find the neighbors of every chunk once, and store them.

New generations are merged with the stored neighbors, with the same result as one search of everything. The order by tokens and
n-grams depend on all candidates or chunks, so with them the stored neighbors stay as they are.
"""

from pathlib import Path

import numpy as np

from indexing.index.floats import to_float32
from indexing.neighbors.index_search import QueryChunks
from indexing.neighbors.search import NeighborSearch
from indexing.progress import Advance, status
from indexing.store.datastore import Split
from indexing.store.files import NpyWriter
from indexing.store.sharded_array import open_array

_BLOCK_ROWS = 65_536  # chunks per block, so that reading the index once per block costs little


def neighbor_shard(
    work: Path,
    split: Split,
    rows: tuple[int, int],
    search: NeighborSearch,
    *,
    before: Path | None = None,
    advance: Advance,
) -> dict[str, int]:
    """Write `work/ids.npy` [n, stored] int64 and `work/distances.npy` [n, stored] float32 for the chunks `rows` of a split.

    Args:
        work: folder to write to.
        split: the split of the chunks, in datastore 0. Own documents are excluded in this datastore only.
        rows: first and stop of the chunk ids.
        search: indexes and rules.
        before: folder with the same two files from a search of other indexes, to merge with this search; None with order or
            n-grams.
        advance: called with the number of finished chunks.

    Returns:
        counts: queries, neighbors found, chunks with too few neighbors, chunks with none, queries searched again.
    """
    work.mkdir(parents=True, exist_ok=True)
    stored, step = search.settings.stored, _block_rows(search)
    counts = {"queries": 0, "neighbors": 0, "short": 0, "empty": 0, "deeper": 0}
    earlier = [open_array(before / f"{name}.npy") for name in ("ids", "distances")] if before else None
    with (
        NpyWriter(work / "ids.npy", np.int64, (stored,)) as id_file,
        NpyWriter(work / "distances.npy", np.float32, (stored,)) as distance_file,
    ):
        for start in range(*rows, step):
            stop = min(start + step, rows[1])
            status("searching for chunks %s to %s", f"{start:,}", f"{stop:,}")
            block = slice(start - rows[0], stop - rows[0])
            ids, distances, deeper = search.find(
                _query_chunks(split, start, stop),
                earlier=(earlier[0][block], earlier[1][block]) if earlier else None,
            )
            id_file.append(ids)
            distance_file.append(distances)
            present = (ids >= 0).sum(axis=1)
            counts["queries"] += len(ids)
            counts["neighbors"] += int(present.sum())
            counts["short"] += int((present < stored).sum())
            counts["empty"] += int((present == 0).sum())
            counts["deeper"] += deeper
            advance(len(ids))
    return counts


def _query_chunks(split: Split, start: int, stop: int) -> QueryChunks:
    """The chunks [start, stop) of a split in datastore 0."""
    return QueryChunks(
        to_float32(split.embeddings.read(start, stop)),
        (split.tokens.read(start, stop), split.lengths.read(start, stop)),
        own=split.documents_of(np.arange(start, stop, dtype=np.int64))[1:] if split.name == "train" else None,
    )


def ngram_block_rows(dimension: int) -> int:
    """Chunks per block of a search by n-grams: up to 512 MB of float32 embeddings.

    Every block reads the embeddings of its neighbors, which are anywhere in the datastore, and may read the index.
    """
    return max(_BLOCK_ROWS, min(8 * _BLOCK_ROWS, 2**27 // dimension))


def _block_rows(search: NeighborSearch) -> int:
    """Chunks per block."""
    if search.by_ngrams is not None:
        return ngram_block_rows(search.by_ngrams.retrieval.own.embeddings.row_shape[0])
    return _BLOCK_ROWS
