"""The batched search: queries of several requests with the same key ─► one call of the retriever ─► a result for each query."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from indexing.retrieval.queries import Retrieval
from indexing.retrieval.results import Hit, known_distances
from indexing.retrieval.retriever import Retriever
from indexing.store.remote import datastore_name
from indexing.store.retrieval_set import CHUNK_ID_BITS, RetrievalSet

Query = str | np.ndarray
"""A text, token ids [t] int64, or a vector [d] float32."""

_COST_WITH_TERMS = 16  # of a query that is searched by its terms too; a query searched by its vector alone costs 1

QueryKind = Literal["texts", "tokens", "vectors"]


class SearchKey(NamedTuple):
    """Everything except the queries that the results of a search depend on."""

    kind: QueryKind
    k: int
    filters: str
    retrieval: Retrieval
    text: bool = True
    datastore: str = ""
    neighbors: bool = False
    """Queries are whole chunks; find and order their neighbors as the stored ones."""


class BareHit(NamedTuple):
    """A hit without text. Unlike `Hit`, it is cheap to create; the search thread is blocked meanwhile."""

    chunk_id: int
    score: float
    distance: float | None


class SearchResult(NamedTuple):
    """Hits of one query (`BareHit` if `SearchKey.text` is False), and the parts of the index that did not answer."""

    hits: Sequence[Hit | BareHit]
    missing: tuple[str, ...]


def cost_of_search(search: SearchKey, query: Query) -> int:
    """Return the cost of one query."""
    return 1 if search.retrieval == "dense" else _COST_WITH_TERMS


def search_with(retriever: Retriever) -> Callable[[SearchKey, list[Query]], list[SearchResult]]:
    """Return the work of `Service.search`: a search for queries with the same key."""
    by_name = dict(_retrievers_of_datastores(retriever))

    def work(search: SearchKey, queries: list[Query]) -> list[SearchResult]:
        together: Any = np.stack(queries) if search.kind == "vectors" else queries
        filters = json.loads(search.filters)
        first_id, searched = by_name[search.datastore] if search.datastore else (0, retriever)
        if search.text:
            results = searched.search(together, search.k, filters=filters, retrieval=search.retrieval)
            return [SearchResult(_moved(hits, first_id), results.missing) for hits in results.hits]
        if search.neighbors:
            ranked = searched.neighbors.rank(np.stack(together), search.k)
        else:
            ranked = searched.chunks.rank(together, search.k, filters=filters, retrieval=search.retrieval)
        ids = np.where(ranked.ids < 0, -1, first_id + ranked.ids)
        rows = zip(ids.tolist(), ranked.scores.tolist(), map(known_distances, ranked.distances), strict=True)
        return [
            SearchResult([BareHit(*hit) for hit in zip(*row, strict=True) if hit[0] >= 0], ranked.missing)
            for row in rows
        ]

    return work


def _moved(hits: list[Hit], first_id: int) -> list[Hit]:
    """Add the id of a datastore's first chunk to the ids of hits."""
    return [replace(hit, chunk_id=first_id + hit.chunk_id) for hit in hits] if first_id else hits


def _retrievers_of_datastores(retriever: Retriever) -> Iterator[tuple[str, tuple[int, Retriever]]]:
    """Yield the name of each datastore with the id of its first chunk and a retriever that searches only this
    datastore."""
    for index, split in enumerate(retriever.retrieval.splits):
        dense = retriever.dense and replace(retriever.dense, indexes=retriever.dense.indexes[index : index + 1])
        alone = replace(retriever, dense=dense, retrieval=RetrievalSet((split,)))
        yield datastore_name(split.folder), (index << CHUNK_ID_BITS, alone)
