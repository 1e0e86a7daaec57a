"""Statistics of the overlap of evaluation chunks with their neighbors: distribution of r, and sources of the neighbors.

r(C) of every chunk (`leakage_of`) → buckets, mean, median        documents of chunks and neighbors → same source?
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from indexing.store.datastore import Datastore, Split
from indexing.store.retrieval_set import CHUNK_ID_BITS, RetrievalSet
from retro.evaluation.leakage import LEAKAGE_NEIGHBORS
from retro.evaluation.sets import EvaluationSet

_BUCKETS = 16
_BLOCK_CHUNKS = 65_536


@dataclass(frozen=True)
class OverlapStatistics:
    """Overlap statistics of one evaluation set.

    Attributes:
        set: name of the set.
        chunks: number of chunks.
        neighbors: largest number of neighbors of a chunk.
        mean, median: mean and median of r(C), the largest overlap of a chunk with a neighbor.
        edges: [b + 1] edges of the buckets of r; a bucket includes its lower edge, the last one both.
        share_of_chunks: [b] fraction of the chunks in each bucket.
        without_neighbors: fraction of the chunks without stored neighbors.
        nearest_distance: mean squared distance of the nearest neighbor; None if no chunk has one.
        source_column: column of `documents.parquet` with the source: `source`, or `file` if no document has a source.
        sources: number of sources of the chunks.
        nearest_of_same_source, any_of_same_source: fraction of the chunks whose nearest neighbor, or any neighbor, has the
            chunk's source.
    """

    set: str
    chunks: int
    neighbors: int
    mean: float
    median: float
    edges: list[float]
    share_of_chunks: list[float]
    without_neighbors: float
    nearest_distance: float | None
    source_column: str
    sources: int
    nearest_of_same_source: float
    any_of_same_source: float


def overlap_statistics(
    evaluation_set: EvaluationSet,
    ids: np.ndarray,
    leakage: np.ndarray,
    num_neighbors: int = LEAKAGE_NEIGHBORS,
    *,
    source: Datastore | None = None,
) -> OverlapStatistics:
    """Compute overlap statistics of a set's chunks and their stored neighbors.

    Args:
        evaluation_set: the set with the chunks.
        ids: [n] int64 chunk ids, at least one.
        leakage: [n] r of each chunk, from `leakage_of` with the same neighbors.
        num_neighbors: number of stored neighbors to use.
        source: datastore with the neighbors; None = the set's.
    """
    source = source or evaluation_set.datastore
    split, known, retrieval = evaluation_set.split, source.split(evaluation_set.split_name), RetrievalSet.of(source)
    counts, edges = np.histogram(leakage, bins=_BUCKETS, range=(0, 1))
    column = "source" if _has_sources(split, ids) else "file"
    empty, distance, nearest_same, any_same, names = 0, 0.0, 0, 0, set[str]()
    for start in range(0, len(ids), _BLOCK_CHUNKS):
        block = ids[start : start + _BLOCK_CHUNKS]
        near = retrieval.without_deleted(known.neighbor_ids.gather(block)[:, :num_neighbors])
        nearest = known.neighbor_distances.gather(block)[:, 0]
        own = _sources((split,), block, column)
        names |= set(own.tolist())
        theirs = _sources(retrieval.splits, near.ravel(), column).reshape(near.shape)
        same = (theirs == own[:, None]) & (near >= 0)
        empty += int((near < 0).all(axis=1).sum())
        distance += float(nearest[np.isfinite(nearest)].sum())
        nearest_same += int(same[:, 0].sum())
        any_same += int(same.any(axis=1).sum())
    return OverlapStatistics(
        set=evaluation_set.name,
        chunks=len(ids),
        neighbors=min(num_neighbors, known.neighbor_ids.row_shape[0]),
        mean=float(leakage.mean()),
        median=float(np.median(leakage)),
        edges=edges.tolist(),
        share_of_chunks=(counts / len(ids)).tolist(),
        without_neighbors=empty / len(ids),
        nearest_distance=distance / (len(ids) - empty) if empty < len(ids) else None,
        source_column=column,
        sources=len(names),
        nearest_of_same_source=nearest_same / len(ids),
        any_of_same_source=any_same / len(ids),
    )


def _has_sources(split: Split, ids: np.ndarray) -> bool:
    documents = np.unique(split.documents_of(ids)[0])
    return any(row.get("source") for row in split.metadata(documents.tolist()))


def _sources(splits: Sequence[Split], ids: np.ndarray, column: str) -> np.ndarray:
    """Return the source of each chunk's document: ids [n] of a retrieval set → [n] text, empty for -1."""
    out = np.full(len(ids), "", dtype=object)
    for number, split in enumerate(splits):
        rows = np.flatnonzero((ids >= 0) & (ids >> CHUNK_ID_BITS == number))
        documents, places = np.unique(
            split.documents_of(ids[rows] & ((1 << CHUNK_ID_BITS) - 1))[0], return_inverse=True
        )
        values = [str(row.get(column) or "") for row in split.metadata(documents.tolist())]
        out[rows] = np.array(values, dtype=object)[places.ravel()]
    return out
