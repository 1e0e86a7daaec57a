"""Neighbors by n-grams against neighbors by embeddings: speed, and how much of the next chunk they hold.

    retro index CONFIG && retro index CONFIG --stage ngrams
    python -m benchmarks.speed.neighbor_candidates DATASTORE [--methods lists ngrams] [--rerank tokens] [--rounds 3]

The methods alternate within one run. Each finds the stored neighbors of the same training chunks, everything included: candidates,
own documents, the order by tokens (with the lexical embedder) and distances. Opening an index is not timed.

Coverage is the mean share of the next chunk's distinct bigrams and 4-grams that the first k neighbors with their continuations hold,
for held-out chunks. `one` is the median time of a search for the first k neighbors of one held-out chunk, as in generation.

--most-entries 256 1024 8192 measures `ngrams` once for each bound on the entries of lists that a chunk reads. --shares 0.5 0.99 1
measures `ngrams` once in each first part of the chunks, without the index: the neighbors of chunks from before the others were appended.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.common import Budget, add_minutes, budget, markdown, say, seconds, write
from indexing.embedding.lexical import token_weights
from indexing.index.floats import to_float32
from indexing.machine import keep_freed_memory
from indexing.neighbors.search import Method, NeighborSettings, OpenIndex, find_neighbors, open_index
from indexing.similarity.shared_tokens import SharedTokens
from indexing.sparse import ngram_search
from indexing.sparse.ngram_index import NgramLists
from indexing.sparse.ngram_search import NgramIndex
from indexing.store.artifact import stored_json
from indexing.store.datastore import Datastore, Split
from indexing.store.retrieval_set import RetrievalSet
from pipelines.results import Table

_COVERED = 3000  # held-out chunks whose coverage is measured
_ALONE = 300  # searches of one chunk

Search = Callable[[Split, np.ndarray, int], np.ndarray]
"""A split, ids [n] of its chunks and a number → ids [n, number] of their first neighbors; 0 = all stored ones."""


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path)
    parser.add_argument("--methods", nargs="*", choices=get_args(Method), default=["lists", "ngrams"])
    parser.add_argument(
        "--rerank", choices=("tokens", "embeddings"), default="tokens", help="order; a transformer has `embeddings`"
    )
    parser.add_argument(
        "--most-entries", nargs="*", type=int, default=[], help="bounds of `ngrams`, instead of its own"
    )
    parser.add_argument("--shares", nargs="*", type=float, default=[], help="first parts of the chunks for `ngrams`")
    parser.add_argument("--queries", type=int, default=65_536, help="training chunks per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--k", type=int, default=4, help="neighbors for the coverage")
    parser.add_argument("--output", type=Path, default=Path("neighbor_candidates.json"))
    add_minutes(parser)
    options = parser.parse_args()
    if not options.methods and not options.shares:
        parser.error("name --methods or --shares")
    keep_freed_memory()  # as the stage does
    write(options.output, measure(options, budget(options)))


def measure(options: argparse.Namespace, limit: Budget) -> dict[str, Any]:
    """Measure all methods, print the table and return its rows."""
    datastore = Datastore.open(options.datastore)
    train, valid = datastore.train, datastore.valid
    searches: dict[str, Search] = {}
    for method in options.methods:
        search = search_by(datastore, method, options.rerank)
        bounds = options.most_entries if method == "ngrams" else []
        searches |= {f"ngrams, {most:,} entries": bounded(search, most) for most in bounds} or {method: search}
    searches |= {
        f"ngrams, {share:.0%} of the chunks": search_part(datastore, share, options.rerank) for share in options.shares
    }
    queries = np.arange(min(options.queries, train.num_chunks))
    following = np.arange(max(0, valid.num_chunks - 1))
    following = following[following + 1 < valid.documents_of(following)[2]]
    following = following[:: -(-len(following) // _COVERED) or 1]
    wall: dict[str, list[float]] = {method: [] for method in searches}
    cpu: dict[str, list[float]] = {method: [] for method in searches}
    for _ in limit.rounds(options.rounds):
        for method, search in searches.items():
            started = time.process_time()
            wall[method].append(seconds(partial(search, train, queries, 0)))
            cpu[method].append(time.process_time() - started)
    alone: dict[str, list[float]] = {method: [] for method in searches}
    for row in following[:_ALONE]:
        for method, search in searches.items():
            alone[method].append(seconds(partial(search, valid, row[None], options.k)))
    rows: list[dict[str, Any]] = []
    for method, search in searches.items():
        ids = search(valid, following, options.k)
        bigrams, fourgrams = (coverage(valid, train, following, ids, order) for order in (2, 4))
        rows.append(
            {
                "method": method,
                "chunks_per_second": len(queries) / statistics.median(wall[method]),
                "cpu_seconds": statistics.median(cpu[method]),
                "one_milliseconds": 1000 * statistics.median(alone[method]) if alone[method] else None,
                "bigrams": bigrams,
                "fourgrams": fourgrams,
            }
        )
    first = rows[0]
    header = ["", "chunks/s", "ratio", "CPU ratio", "one, ms", "bigrams", "4-grams"]
    table = [
        [
            row["method"],
            f"{row['chunks_per_second']:,.0f}",
            f"{row['chunks_per_second'] / first['chunks_per_second']:.2f}",
            f"{first['cpu_seconds'] / row['cpu_seconds']:.2f}",
            f"{row['one_milliseconds'] or 0:.2f}",
            f"{row['bigrams']:.3f}",
            f"{row['fourgrams']:.3f}",
        ]
        for row in rows
    ]
    say(f"{train.num_chunks:,} chunks, {torch.get_num_threads()} threads")
    say(markdown(Table(header, table)))
    return {"chunks": train.num_chunks, "queries": len(queries), "k": options.k, "rows": rows}


def search_by(datastore: Datastore, method: Method, rerank: str) -> Search:
    """Open what a method searches, and return its search."""
    train = datastore.train
    opened = [OpenIndex(open_index(train, range(len(train.chunk_rows)), method, keep=True), train)]
    by_ngrams = NgramIndex.open(RetrievalSet((train,))) if method == "ngrams" else None
    return searching(datastore, method, rerank, opened, by_ngrams)


def search_part(datastore: Datastore, share: float, rerank: str) -> Search:
    """The search by n-grams of the first chunks, as if there were no others. The n-grams are written to a temporary folder."""
    retrieval, stop = RetrievalSet((datastore.train,)), int(share * datastore.train.num_chunks)
    with tempfile.TemporaryDirectory() as folder:
        by_ngrams = NgramIndex(retrieval, NgramLists.of_part(retrieval, [lambda ids: ids < stop], Path(folder)), stop)
    return searching(datastore, "ngrams", rerank, [], by_ngrams)


def searching(
    datastore: Datastore, method: Method, rerank: str, opened: list[OpenIndex], by_ngrams: NgramIndex | None
) -> Search:
    """The search of open indexes with the default rules."""
    lexical = stored_json(datastore.folder / "embedder" / "embedder.json")["kind"] == "lexical"
    by_tokens = lexical and rerank == "tokens"
    settings = NeighborSettings(search=method, rerank="tokens" if by_tokens else "embeddings")
    retrieval = RetrievalSet((datastore.train,))
    order = SharedTokens(token_weights(datastore.folder / "embedder"), retrieval) if by_tokens else None

    def search(split: Split, chunks: np.ndarray, first: int) -> np.ndarray:
        own = split.documents_of(chunks)[1:] if split.name == "train" else None
        vectors = to_float32(split.embeddings.gather(chunks))
        tokens = (split.tokens.gather(chunks), split.lengths.gather(chunks))
        found = find_neighbors(
            vectors, tokens, opened, settings, own=own, order=order, by_ngrams=by_ngrams, first=first
        )
        return found[0]

    return search


def bounded(search: Search, most: int) -> Search:
    """The search by n-grams with another bound on the entries that a chunk reads."""

    def search_bounded(split: Split, chunks: np.ndarray, first: int) -> np.ndarray:
        with patch.object(ngram_search, "_MOST_ENTRIES", most):
            return search(split, chunks, first)

    return search_bounded


def coverage(split: Split, train: Split, chunks: np.ndarray, ids: np.ndarray, order: int) -> float:
    """Mean share of the distinct n-grams of the chunk after each of `chunks` that its neighbors, ids [n, k], hold."""
    shares = []
    tokens, lengths = split.tokens.gather(chunks + 1), split.lengths.gather(chunks + 1)
    for text, length, neighbors in zip(tokens, lengths, ids, strict=True):
        wanted = ngrams_of(text[:length], order)
        held = set[tuple[int, ...]]()
        for neighbor, size in zip(*train.with_continuation(neighbors), strict=True):
            held |= ngrams_of(neighbor[:size], order)
        if wanted:
            shares.append(len(wanted & held) / len(wanted))
    return float(np.mean(shares)) if shares else 0.0


def ngrams_of(tokens: np.ndarray, order: int) -> set[tuple[int, ...]]:
    """The distinct n-grams of a text."""
    text = tokens.tolist()
    return set(zip(*(text[start:] for start in range(order)), strict=False))


if __name__ == "__main__":
    main()
