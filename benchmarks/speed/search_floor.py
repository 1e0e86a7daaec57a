"""How near the searches for neighbors are to the rate at which the machine multiplies matrices.

    python -m benchmarks.speed.search_floor DATASTORE [--queries 4096] [--nprobe N]

Both searches multiply queries with chunks, and keep the best. The floors multiply the same numbers and keep nothing: in
tiles as small as those of the exact search, one thread for each, and in large matrices with all threads. Operations are
2 · d for each product of a query with a chunk, those of padding left out. All alternate within one run.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import add_minutes, budget, markdown, say, seconds, write
from indexing.index.faiss_files import read_index
from indexing.index.product_search import ProductIndex
from indexing.machine import keep_freed_memory, one_thread_each
from indexing.neighbors.list_search import ListIndex, read_lists
from indexing.store.datastore import Datastore
from pipelines.results import Table

_TILE = 256, 1024  # queries and chunks, as in `product_search.py`
_LARGE = 8192


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path)
    parser.add_argument("--queries", type=int, default=4096)
    parser.add_argument("--nprobe", type=int, help="lists to visit; default: a quarter of them")
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-search-floor.json"))
    options = parser.parse_args()
    limit = budget(options)
    keep_freed_memory()  # as the stage does
    train = Datastore.open(options.datastore).train
    first = (train.num_chunks - options.queries) // 2
    queries = train.embeddings.read(first, first + options.queries).astype(np.float32)
    exact = ProductIndex(train.embeddings, device="cpu")
    trained = read_index(train.folder / "index" / "trained" / "trained.faiss")
    lists = read_lists(train.folder / "index", train.embeddings, range(len(train.chunk_rows)))
    listed = ListIndex(trained, 1, train.embeddings, lists, device="cpu")
    nprobe = options.nprobe or listed.max_nprobe // 4
    dimension = queries.shape[1]
    products = len(queries) * train.num_chunks
    # Chunks of the visited lists. The search has loaded them, so only products and choice are measured.
    sizes = torch.from_numpy(np.bincount(lists, minlength=listed.max_nprobe))
    visited = int(sizes.take(listed._probe(torch.from_numpy(queries).to(listed.dtype), nprobe)).sum())
    say(f"{train.num_chunks:,} chunks, {dimension} dimensions, {nprobe} of {listed.max_nprobe} lists, {exact.dtype}")
    work: dict[str, tuple[Callable[[], object], int]] = {
        "exact": (partial(exact.search, queries, options.candidates), products),
        "lists": (partial(listed.search, queries, options.candidates, nprobe=nprobe), visited),
        "floor: tiles": (partial(tiles, queries, exact.dtype, products), products),
        "floor: large matrices": (partial(large, dimension, exact.dtype), 4 * _LARGE**2),
    }
    took: dict[str, list[float]] = {name: [] for name in work}
    for number in limit.rounds(options.rounds + 1):
        for name, (call, _) in work.items():
            spent = seconds(call)
            if number:  # the first round loads the lists
                took[name].append(spent)
    rates = {name: [2 * dimension * work[name][1] / each for each in values] for name, values in took.items()}
    rows: list[dict[str, Any]] = []
    for name, values in rates.items():
        shares = {
            floor: statistics.median(a / b for a, b in zip(values, rates[floor], strict=True))
            for floor in rates
            if floor.startswith("floor")
        }
        per_second = len(queries) / statistics.median(took[name])
        rows.append({"case": name, "operations_per_second": statistics.median(values), "shares": shares})
        rows[-1] |= {"queries_per_second": None if name.startswith("floor") else per_second, "seconds": took[name]}
    header = ["", "chunks/s", "10⁹ operations/s", "of tiles", "of large matrices"]
    say(markdown(Table(header, [formatted(row) for row in rows])))
    write(options.output, {"chunks": train.num_chunks, "nprobe": nprobe, "visited": visited, "rows": rows})


def formatted(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    rate = row["queries_per_second"]
    shares = [f"{share:.2f}" for share in row["shares"].values()]
    return [row["case"], f"{rate:,.1f}" if rate else "", f"{row['operations_per_second'] / 1e9:,.0f}", *shares]


def tiles(queries: np.ndarray, dtype: torch.dtype, products: int) -> None:
    """Multiply as many pairs as the exact search, in tiles, one thread for each."""
    points = torch.from_numpy(queries).to(dtype)
    chunks = torch.randn(_TILE[1], points.shape[1]).to(dtype)

    def work(first: int) -> None:
        block = points[first : first + _TILE[0]]
        out = torch.empty((len(block), _TILE[1]), dtype=dtype)
        for _ in range(products // len(points) // _TILE[1]):
            torch.mm(block, chunks.T, out=out)

    with one_thread_each(None) as run:
        run(work, range(0, len(points), _TILE[0]))


def large(dimension: int, dtype: torch.dtype) -> None:
    """Multiply two large matrices, four times."""
    points = torch.ones(_LARGE, dimension, dtype=dtype)
    for _ in range(4):
        points @ points.T


if __name__ == "__main__":
    main()
