"""How many chunks a search of dense embeddings must compare, as the datastore grows.

    retro index CONFIG --stage chunk                          # tokenizer.path: that of the checkpoint
    python -m benchmarks.speed.dense_growth DATASTORE base.safetensors [--shares 0.0625 0.25 1]

An embedding is the mean of the checkpoint's token embeddings, weighted by a / (a + p), where p is the frequency of the token
(Arora et al. 2017, "A simple but tough-to-beat baseline for sentence embeddings"), in 256 principal components. So any size is embedded
within minutes. A share of the documents is drawn, and for 1,000 of their chunks the nearest two of other documents are found exactly. Then:

- **comparisons** for a recall@2 of 0.95, where each chunk is in the nearest of about n / LENGTH lists, or in the 2, 4 or 8 nearest, so
  that lists overlap, as the partitions of PiPNN do (arXiv 2602.21247);
- **comparisons of a graph**, HNSW of Faiss, counted by it;
- **microseconds** of a core for `neighbors.search = "lists"` with the `nprobe` that reaches this recall.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import add_minutes, budget, markdown, say, write
from benchmarks.speed.index_stages import list_index
from indexing.index import build as building
from indexing.index.key import choose_key
from indexing.store.datastore import Datastore, Split, shard_name
from indexing.store.files import NpyWriter
from indexing.store.sharded_array import ShardedArray
from pipelines.results import Table
from retro.checkpoints.checkpoint import load_model, open_checkpoint

_WIDTH = 256  # principal components
_FREQUENT = 1e-3  # a in the weights of tokens
_BLOCK = 65_536  # chunks at a time
_QUERIES = 1000
_TIMED = 65_536  # queries of the timed search
_LENGTHS = (170, 680)  # of lists
_COPIES = (1, 2, 4, 8)  # lists that hold a chunk
_EFFORTS = (64, 128, 256, 512, 1024)  # candidates that a search of the graph keeps
_RECALL = 0.95


# --- embeddings -------------------------------------------------------------------------------------------------------


def embeddings(chunks: Split, table: np.ndarray) -> np.ndarray:
    """Embeddings [n, 256] float16 of unit length of all chunks; `table` [vocabulary, width] are the token embeddings."""
    counts = np.zeros(len(table))
    for first in range(0, chunks.num_chunks, _BLOCK):
        counts += np.bincount(real_tokens(chunks, first)[0], minlength=len(table))
    weights = _FREQUENT / (_FREQUENT + counts / counts.sum())
    weighted = torch.from_numpy((normalized(table) * weights[:, None]).astype(np.float32))

    def means(first: int) -> np.ndarray:
        tokens, offsets = real_tokens(chunks, first)
        bags = torch.nn.functional.embedding_bag(torch.from_numpy(tokens), weighted, torch.from_numpy(offsets))
        return normalized(bags.numpy())

    sample = np.concatenate([means(first)[::40] for first in range(0, chunks.num_chunks, _BLOCK)])
    center = sample.mean(axis=0)
    first_ones = slice(1, _WIDTH + 1)  # without the first, as in the paper
    components = np.linalg.svd(sample - center, full_matrices=False)[2][first_ones].T
    blocks = (normalized((means(first) - center) @ components) for first in range(0, chunks.num_chunks, _BLOCK))
    return np.concatenate([block.astype(np.float16) for block in blocks])


def real_tokens(chunks: Split, first: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a block of chunks one after another, without padding, and the first one of each chunk: both int64."""
    stop = min(first + _BLOCK, chunks.num_chunks)
    tokens, lengths = chunks.tokens.read(first, stop), chunks.lengths.read(first, stop).astype(np.int64)
    return tokens[np.arange(tokens.shape[1]) < lengths[:, None]].astype(np.int64), np.cumsum(lengths) - lengths


def normalized(rows: np.ndarray) -> np.ndarray:
    """Rows of unit length."""
    return rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 1e-9)


# --- measurements ----------------------------------------------------------------------------------------------------


class Sample:
    """Some documents: embeddings [n, d] float32, the document of each chunk, queries, and their nearest two of other documents."""

    def __init__(self, vectors: np.ndarray, documents: np.ndarray) -> None:
        self.vectors, self.documents = vectors.astype(np.float32), documents
        self.queries = np.random.default_rng(1).choice(len(vectors), _QUERIES, replace=False)
        self.nearest = np.empty((_QUERIES, 2), dtype=np.int64)
        for first in range(0, _QUERIES, 50):
            some = self.queries[first : first + 50]
            products = self.vectors[some] @ self.vectors.T
            products[documents[some][:, None] == documents] = -np.inf
            self.nearest[first : first + 50] = np.argpartition(-products, 2, axis=1)[:, :2]

    def __len__(self) -> int:
        return len(self.vectors)

    def recall(self, found: list[np.ndarray]) -> float:
        """Share of the nearest two among the two nearest hits of other documents; `found` are the ids of each query."""
        shares = []
        for query, ids, nearest in zip(self.queries, found, self.nearest, strict=True):
            others = ids[(ids >= 0) & (self.documents[ids] != self.documents[query])]
            best = others[np.argsort(-(self.vectors[others] @ self.vectors[query]))[:2]]
            shares.append(len(np.intersect1d(best, nearest)) / 2)
        return float(np.mean(shares))


def in_lists(sample: Sample, length: int) -> dict[int, float]:
    """Mean comparisons of a query for the required recall, by the number of lists that hold a chunk."""
    import faiss

    width, count = sample.vectors.shape[1], len(sample) // length
    means = faiss.Kmeans(width, count, niter=6, seed=0, max_points_per_centroid=48)
    means.train(sample.vectors)
    held = np.empty((len(sample), max(_COPIES)), dtype=np.int32)
    for first in range(0, len(sample), 8192):
        held[first : first + 8192] = means.index.search(sample.vectors[first : first + 8192], max(_COPIES))[1]
    order = means.index.search(sample.vectors[sample.queries], min(count, 2048))[1]  # lists, the nearest first
    ranks = np.full((_QUERIES, count), count, dtype=np.int32)
    np.put_along_axis(ranks, order, np.arange(order.shape[1], dtype=np.int32)[None], 1)
    comparisons = {}
    for copies in _COPIES:
        lists = held[sample.nearest, :copies].reshape(_QUERIES, -1)
        visited = np.take_along_axis(ranks, lists, 1).reshape(_QUERIES, 2, copies).min(axis=2) + 1
        nprobe = int(np.quantile(visited, _RECALL, method="higher"))
        sizes = np.bincount(held[:, :copies].ravel(), minlength=count)
        comparisons[copies] = float(sizes[order[:, :nprobe]].sum(axis=1).mean())
    return comparisons


def in_graph(sample: Sample) -> tuple[float, float]:
    """Comparisons of a query for the required recall, or the greatest measured one, and microseconds of a core to add a chunk."""
    import faiss

    graph = faiss.IndexHNSWFlat(sample.vectors.shape[1], 24, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction = 64
    counted: Any = faiss.cvar
    started = time.process_time()
    graph.add(sample.vectors)
    added = 1e6 * (time.process_time() - started) / len(sample)
    for effort in _EFFORTS:
        graph.hnsw.efSearch = effort
        counted.hnsw_stats.reset()
        recall = sample.recall(list(graph.search(sample.vectors[sample.queries], effort)[1]))
        if recall >= _RECALL:
            break
    say(f"graph: recall@2 of {recall:.3f} with {effort} candidates")
    return counted.hnsw_stats.ndis / _QUERIES, added


def by_lists(sample: Sample, folder: Path) -> tuple[float, float]:
    """The smallest measured `nprobe` for the required recall, and microseconds of a core per chunk."""
    path = folder / "embeddings" / shard_name(0) / "train.npy"
    path.parent.mkdir(parents=True)
    with NpyWriter(path, np.float16, sample.vectors.shape[1:]) as file:
        file.append(sample.vectors.astype(np.float16))
    stored = ShardedArray([path], [len(sample)])
    split, settings = Split(folder, "train", (len(sample),), (1,), 64, 0), building.IndexSettings(points_per_list=40)
    key = choose_key(len(sample), sample.vectors.shape[1], settings)
    trained, work = folder / "index" / "trained", folder / "index" / shard_name(0)
    trained.mkdir(parents=True)
    work.mkdir()
    building.train(trained, key, building.training_sample(split, key, settings), settings)
    building.add_shard(work, trained, stored.shard(0), 0, advance=lambda _: None)
    index = list_index("lists", folder / "index", split)["lists"]
    starts, stops = (np.searchsorted(sample.documents, sample.documents, side) for side in ("left", "right"))

    def search(rows: np.ndarray, nprobe: int) -> np.ndarray:
        return index.search(sample.vectors[rows], 16, (starts[rows], stops[rows]), nprobe)

    for nprobe in (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024):
        if sample.recall(list(search(sample.queries, nprobe))) >= _RECALL:
            break
    rows = np.random.default_rng(2).choice(len(sample), min(_TIMED, len(sample)), replace=False)
    started = time.process_time()
    search(np.sort(rows), nprobe)
    return nprobe, 1e6 * (time.process_time() - started) / len(rows)


def measure(vectors: np.ndarray, documents: np.ndarray) -> dict[str, float]:
    """All measurements for some documents."""
    sample = Sample(vectors, documents)
    row = {"chunks": float(len(sample))}
    for length in _LENGTHS:
        for copies, comparisons in in_lists(sample, length).items():
            row[f"lists of {length}, a chunk in {copies}: comparisons"] = comparisons
    with tempfile.TemporaryDirectory() as folder:
        row["search `lists`: nprobe"], row["search `lists`: µs"] = by_lists(sample, Path(folder))
    row["graph: comparisons"], row["graph: µs to add a chunk"] = in_graph(sample)
    return row


def main() -> None:
    """Measure all sizes and print a table with exponents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--shares", nargs="+", type=float, default=[0.0625, 0.25], help="of the documents")
    parser.add_argument("--output", type=Path, default=Path("dense_growth.json"))
    add_minutes(parser)
    options = parser.parse_args()
    limit = budget(options)
    datastore = Datastore.open(options.datastore)
    table = (
        load_model(open_checkpoint(options.checkpoint), torch.device("cpu")).embedding.weight.detach().float().numpy()
    )
    vectors = embeddings(datastore.train, table)
    documents = datastore.train.documents_of(np.arange(len(vectors)))[0]
    drawn = np.random.default_rng(0).random(documents.max() + 1)[documents]
    rows: list[dict[str, float]] = []
    for share in limit.each(options.shares, "size", lambda share: share**1.5):
        some = np.flatnonzero(drawn < share)
        rows.append(measure(vectors[some], documents[some]))
        say(rows[-1])
    sizes = np.log([row["chunks"] for row in rows])
    lines = []
    for name in rows[0]:
        values = [row[name] for row in rows]
        slope = f"{np.polyfit(sizes, np.log(values), 1)[0]:.2f}" if len(rows) > 1 and name != "chunks" else ""
        lines.append([name, *(f"{value:,.0f}" for value in values), slope])
    say(markdown(Table(["", *("" for _ in rows), "exponent"], lines)))
    write(options.output, {"rows": rows})


if __name__ == "__main__":
    main()
