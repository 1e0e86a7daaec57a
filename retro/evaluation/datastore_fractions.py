"""Neighbors of held-out chunks in fractions of the datastore, to measure the benefit of a smaller datastore.

    documents ─ hash in [0, 1) ─ below the fraction? ─ embeddings of their chunks ─ exhaustive search ─ merged with the
                                                                                  neighbors in smaller fractions

A document belongs to every fraction above its hash, so a larger fraction contains the smaller ones. For each fraction only the
documents that the previous one lacks are searched, and the results are merged: all fractions together cost one search of the
largest. Memory does not depend on the size of the datastore: a block of embeddings and the candidates of each held-out chunk.
With `neighbors.rerank = "tokens"`, the candidates in each fraction are then ordered by shared tokens, like the stored neighbors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from indexing.embedding.lexical import token_weights
from indexing.index.floats import to_float32
from indexing.index.product_search import ProductIndex
from indexing.neighbors.search import NeighborSettings, merge_nearest, neighbors_of, stored_settings
from indexing.progress import Advance
from indexing.similarity.shared_tokens import SharedTokens
from indexing.splitmix64 import mix
from indexing.store.datastore import Datastore, Split
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet, neighbor_ids
from retro.evaluation.sets import EvaluationSet

_BLOCK_CHUNKS = 2**20  # chunks of the datastore in a block
_BLOCK_QUERIES = 65_536


@dataclass(frozen=True)
class PartialDatastore:
    """Neighbors of an evaluation set's chunks in a fraction of the datastore.

    Attributes:
        fraction: fraction of the documents.
        documents, chunks: numbers of documents and chunks in the fraction.
        found: [n, k] int64 ids of the retrieval set, best first, -1 = missing; for `NeighborUse.found`.
    """

    fraction: float
    documents: int
    chunks: int
    found: np.ndarray


def search_fractions(
    evaluation_set: EvaluationSet,
    num_chunks: int,
    k: int,
    fractions: Sequence[float],
    *,
    seed: int = 0,
    device: str = "auto",
    advance: Advance = lambda _: None,
) -> Iterator[PartialDatastore]:
    """Find the neighbors in growing fractions of the datastores that an evaluation set retrieves from.

    Like the stored neighbors, the results exclude near copies (`neighbors.max_overlap`) and deleted documents, and they have the
    order `neighbors.rerank`. Held-out documents are not in the training split, so a chunk's own document needs no exclusion.

    Args:
        evaluation_set: its datastore's embeddings are searched, and those of `neighbors.extra_datastores`.
        num_chunks: n; the first n chunks of the set are the queries.
        k: number of neighbors of each chunk.
        fractions: fractions of the documents, above 0 and at most 1, in any order.
        seed: seed of the documents' hash.
        device: device of the search.
        advance: called with numbers of searched chunks of the datastores.

    Yields:
        one `PartialDatastore` for each fraction, smallest first.

    Raises:
        InputError: the datastore has no embeddings, a datastore that it retrieves from cannot be opened, or the stored neighbors
            were found by terms.
    """
    datastore, split = evaluation_set.datastore, evaluation_set.split
    datastore.require("embed")
    retrieval, settings = RetrievalSet.of(datastore), _search_settings(datastore, k)
    order = None
    if settings.rerank == "tokens":
        order = SharedTokens(token_weights(datastore.folder / "embedder"), retrieval)
    ids = np.full((num_chunks, settings.kept), -1, dtype=np.int64)
    distances = np.full((num_chunks, settings.kept), np.inf, dtype=np.float32)
    documents = chunks = 0
    edges = sorted(set(fractions))
    for low, high in zip([0.0, *edges], edges, strict=False):
        for datastore_index, train in enumerate(retrieval.splits):
            for part, begun in _parts(train, datastore_index, low, high, seed):
                _search_part(split, train, datastore_index, part, settings, device, ids, distances)
                documents, chunks = documents + begun, chunks + len(part)
                advance(len(part))
        best = ids if order is None else order.best(split.tokens.read(0, num_chunks), ids, distances, k)[0]
        yield PartialDatastore(high, documents, chunks, best[:, :k].copy())


def points_of(documents: np.ndarray, datastore_index: int, seed: int) -> np.ndarray:
    """Return the hashes in [0, 1), float64, of documents [n] int64 of one datastore of the retrieval set (`datastore_index`)."""
    bits = mix(mix(mix(seed) ^ datastore_index) ^ documents.astype(np.uint64))
    return (bits >> np.uint64(11)) / 2.0**53  # 53 bits are exact in float64, so no value is rounded up to 1


def _search_settings(datastore: Datastore, k: int) -> NeighborSettings:
    """Return the settings of the stored neighbors, so that the whole datastore gives exactly these."""
    stored = stored_settings(datastore)
    settings = stored[0] if stored else NeighborSettings(rerank="embeddings")
    if stored and stored[1] == "ngrams":
        raise InputError(
            f"evaluation.datastore_fractions: the neighbors of {datastore.folder} were found with neighbors.search = 'ngrams'. "
            "Fractions are searched by embeddings, so only 'exact', 'lists' and 'index' are accepted."
        )
    candidates = max(k, settings.candidates) if settings.rerank == "tokens" else 4 * k + 16
    return replace(settings, stored=k, candidates=candidates, materialized=0)


def _parts(train: Split, datastore_index: int, low: float, high: float, seed: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield ids of chunks whose documents' hashes are in [low, high), block by block, and the number of these documents."""
    for start in range(0, train.num_chunks, _BLOCK_CHUNKS):
        ids = np.arange(start, min(start + _BLOCK_CHUNKS, train.num_chunks), dtype=np.int64)
        documents, first, _ = train.documents_of(ids)
        points = points_of(documents, datastore_index, seed)
        chosen = (points >= low) & (points < high) & (train.without_deleted(ids) >= 0)
        if chosen.any():
            yield ids[chosen], int((first == ids)[chosen].sum())


def _search_part(
    split: Split,
    train: Split,
    datastore_index: int,
    part: np.ndarray,
    settings: NeighborSettings,
    device: str,
    ids: np.ndarray,
    distances: np.ndarray,
) -> None:
    """Merge the nearest chunks of a part into ids [n, kept] and distances [n, kept], in place."""
    index = ProductIndex(train.embeddings, device, ids=part)
    for start in range(0, len(ids), _BLOCK_QUERIES):
        block = slice(start, min(start + _BLOCK_QUERIES, len(ids)))
        bounds = (block.start, block.stop)
        tokens = (split.tokens.read(*bounds), split.lengths.read(*bounds)) if settings.max_overlap < 1 else None
        queries = to_float32(split.embeddings.read(*bounds))
        near, far, _ = neighbors_of(queries, index, train, settings, tokens=tokens)
        candidates = [(ids[block], distances[block]), (neighbor_ids(datastore_index, near), far)]
        ids[block], distances[block] = merge_nearest(candidates, settings.kept)
