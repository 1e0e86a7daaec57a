"""What the training of an index costs and brings: iterations of k-means, and training vectors for each list.

    python -m benchmarks.quality.index_training DATASTORE [--iterations 25 10 5] [--points 64 32] [--minutes 10]

Every index has the key that the datastore's size gives, and all its chunks. A row says how long the training took, and
the recall@10 of held-out chunks for some numbers of visited lists, after 64 candidates have been ordered by the stored
embeddings. `imbalance` is the time of a search relative to lists of equal size, n Σ sizes² / (Σ sizes)².
"""

import argparse
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import Budget, add_minutes, budget, markdown, say, write
from indexing.index import build
from indexing.index.exact_search import exact_search, recall, rerank
from indexing.index.faiss_files import ivf_of, read_index
from indexing.index.floats import to_float32
from indexing.index.key import choose_key
from indexing.index.sharded import ShardedIndex
from indexing.store.datastore import Datastore, Split
from pipelines.cli.results import Table
from pipelines.stages.index import sample_queries

_CANDIDATES, _K = 64, 10


def trained(train: Split, key: str, iterations: int, points: int, folder: Path) -> tuple[float, float]:
    """Train an index into a folder; CPU seconds and wall seconds."""
    sample = build.training_sample(train, build.sample_size(train.num_chunks, key, points), 0)
    started, cpu = time.perf_counter(), time.process_time()
    with mock.patch.object(build, "ITERATIONS", iterations):
        build.train(folder, key, sample, 0, points)
    return time.process_time() - cpu, time.perf_counter() - started


def compared(datastore: Datastore, iterations: list[int], points: list[int], limit: Budget) -> list[dict[str, Any]]:
    """A row for each number of iterations and of training vectors."""
    train = datastore.train
    key = choose_key(train.num_chunks, train.embeddings.row_shape[0], build.IndexSettings())
    queries = sample_queries(datastore, 1000, 0)[1]
    exact = exact_search(queries, train.embeddings, _K)[0]
    rows = []
    for times, per_list in limit.each(list(product(iterations, points)), "case", lambda case: case[0] * case[1]):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for each in ("trained", "00000"):
                (folder / each).mkdir()
            cpu, wall = trained(train, key, times, per_list, folder / "trained")
            vectors = to_float32(train.embeddings.read(0, train.num_chunks))
            build.add_shard(folder / "00000", folder / "trained", vectors, 0, advance=lambda units: None)
            index = ShardedIndex.open(folder, range(1))
            filled = read_index(folder / "00000" / "vectors.faiss")
            row = {"key": key, "iterations": times, "vectors a list": per_list, "CPU s": cpu, "s": wall}
            for nprobe in (8, 32, 128, 512):
                found = rerank(queries, index.search(queries, _CANDIDATES, nprobe=nprobe), train.embeddings)[0][:, :_K]
                row[f"recall, {nprobe} lists"] = recall(found, exact)
            ivf = ivf_of(filled)
            rows.append(row | {"imbalance": 1.0 if ivf is None else ivf.invlists.imbalance_factor()})
        say(str(rows[-1]))
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path)
    parser.add_argument("--iterations", nargs="+", type=int, default=[25, 10, 5])
    parser.add_argument("--points", nargs="+", type=int, default=[64, 32])
    parser.add_argument("--output", type=Path, default=Path("benchmark-index-training.json"))
    add_minutes(parser)
    arguments = parser.parse_args()
    rows = compared(Datastore.open(arguments.datastore), arguments.iterations, arguments.points, budget(arguments))
    write(arguments.output, {"rows": rows})
    print(
        markdown(
            Table(
                [*rows[0]],
                [
                    [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
                    for row in rows
                ],
            )
        )
    )


if __name__ == "__main__":
    main()
