"""Neighbors of held-out chunks in a part of the datastore: how much a smaller datastore would help.

    documents ─ point of the unit interval, by hash ─ below the share? ─ their chunks' embeddings ─ exhaustive search ─ merged
                                                                                             with those of smaller shares

A document belongs to every share above its point, so a larger share holds the smaller ones. Only what a share has more
than the one before it is searched, and merged with what was found: all shares together cost one search of the largest.
Memory holds a block of embeddings and the k ids of each held-out chunk, however large the datastore is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from indexing.neighbors.search import NeighborSettings, merge_nearest, neighbors_of
from indexing.splitmix64 import mix
from indexing.store.artifact import read_manifest
from indexing.store.datastore import Datastore, Split, shard_name
from indexing.store.retrieval_set import RetrievalSet, neighbor_ids
from indexing.vectors.floats import to_float32
from indexing.vectors.product_search import ProductIndex
from retro.evaluation.sets import EvaluationSet

_BLOCK_CHUNKS = 2**20  # of the datastore, looked at together
_BLOCK_QUERIES = 65_536


@dataclass(frozen=True)
class PartialDatastore:
    """What a share of the datastore has for the chunks of an evaluation set.

    Attributes:
        share: of the documents, as asked for.
        documents, chunks: that it holds.
        found: [n, k] int64 ids of the retrieval set, nearest first, -1 where there are fewer; for `NeighborUse.found`.
    """

    share: float
    documents: int
    chunks: int
    found: np.ndarray


def search_shares(
    evaluation_set: EvaluationSet,
    num_chunks: int,
    k: int,
    shares: Sequence[float],
    *,
    seed: int = 0,
    device: str = "auto",
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[PartialDatastore]:
    """The nearest chunks in growing shares of the datastores that an evaluation set retrieves from.

    Near copies that its stored neighbors leave out (`neighbors.max_overlap`) and deleted documents are left out here too.
    Held-out documents are in no training split, so a chunk has no own document to leave out.

    Args:
        evaluation_set: its datastore's embeddings are searched, and those of `neighbors.extra_datastores`.
        num_chunks: n; the first so many chunks of the set ask.
        k: neighbors of each.
        shares: of the documents, above 0 and at most 1, in any order.
        seed: of the hash of the documents.
        device: of the search.
        advance: told of chunks of the datastores that have been searched.

    Yields:
        one for each share, smallest first.

    Raises:
        InputError: the datastore has no embeddings, or one that it retrieves from cannot be opened.
    """
    evaluation_set.datastore.require("embed")
    retrieval, settings = RetrievalSet.of(evaluation_set.datastore), _search_settings(evaluation_set.datastore, k)
    ids = np.full((num_chunks, k), -1, dtype=np.int64)
    distances = np.full((num_chunks, k), np.inf, dtype=np.float32)
    documents = chunks = 0
    edges = sorted(set(shares))
    for low, high in zip([0.0, *edges], edges, strict=False):
        for number, train in enumerate(retrieval.splits):
            for part, begun in _parts(train, number, low, high, seed):
                _search_part(evaluation_set.split, train, number, part, settings, device, ids, distances)
                documents, chunks = documents + begun, chunks + len(part)
                advance(len(part))
        yield PartialDatastore(high, documents, chunks, ids.copy())


def points_of(documents: np.ndarray, number: int, seed: int) -> np.ndarray:
    """Document numbers [n] int64 of the datastore of this number in the retrieval set → points in [0, 1), float64."""
    bits = mix(mix(mix(seed) ^ number) ^ documents.astype(np.uint64))
    return (bits >> np.uint64(11)) / 2.0**53  # no more than float64 holds: none is rounded up to 1


def _search_settings(datastore: Datastore, k: int) -> NeighborSettings:
    """As the stored neighbors were chosen, so that the whole datastore gives what is stored."""
    max_overlap = 1.0
    if datastore.has("neighbors"):
        recipe = read_manifest(datastore.folder / "neighbors" / shard_name(0))["recipe"]
        max_overlap = recipe["settings"].get("neighbors.max_overlap", 1.0)
    return NeighborSettings(stored=k, candidates=4 * k + 16, max_overlap=max_overlap)


def _parts(train: Split, number: int, low: float, high: float, seed: int) -> Iterator[tuple[np.ndarray, int]]:
    """Ids of chunks whose documents' points lie in [low, high), block by block, and how many documents begin there."""
    for start in range(0, train.num_chunks, _BLOCK_CHUNKS):
        ids = np.arange(start, min(start + _BLOCK_CHUNKS, train.num_chunks), dtype=np.int64)
        documents, first, _ = train.documents_of(ids)
        points = points_of(documents, number, seed)
        chosen = (points >= low) & (points < high) & (train.without_deleted(ids) >= 0)
        if chosen.any():
            yield ids[chosen], int((first == ids)[chosen].sum())


def _search_part(
    split: Split,
    train: Split,
    number: int,
    part: np.ndarray,
    settings: NeighborSettings,
    device: str,
    ids: np.ndarray,
    distances: np.ndarray,
) -> None:
    """Merge the nearest chunks of a part into what has been found, ids [n, k] and distances [n, k], in place."""
    index = ProductIndex(train.embeddings, device, ids=part)
    for start in range(0, len(ids), _BLOCK_QUERIES):
        block = slice(start, min(start + _BLOCK_QUERIES, len(ids)))
        bounds = (block.start, block.stop)
        tokens = (split.tokens.read(*bounds), split.lengths.read(*bounds)) if settings.max_overlap < 1 else None
        queries = to_float32(split.embeddings.read(*bounds))
        near, far, _ = neighbors_of(queries, index, train, settings, tokens=tokens)
        found = [(ids[block], distances[block]), (neighbor_ids(number, near), far)]
        ids[block], distances[block] = merge_nearest(found, settings.stored)
