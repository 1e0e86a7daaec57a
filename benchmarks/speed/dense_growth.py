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
from benchmarks.speed.index_stages import add_shards, list_index, train_index
from indexing.index import build as building
from indexing.index.exact_search import exact_search, recall, rerank
from indexing.store.datastore import Datastore, Split, shard_name
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
    """Some documents in the form of a datastore, and the nearest two chunks of other documents for 1,000 queries.

    Attributes:
        vectors: [n, d] float32 embeddings.
        train: the same in `folder`, as stored.
        own: first and stop [n] of the chunks of each chunk's document.
        queries: [q] chunks.
        nearest: ids [q, 2], and `distances` [q, 2] of them.
    """

    def __init__(self, folder: Path, vectors: np.ndarray, documents: np.ndarray) -> None:
        self.vectors, self.train = vectors.astype(np.float32), Split(folder, "train", (len(vectors),), (1,), 64, 0)
        path = folder / "embeddings" / shard_name(0) / "train.npy"
        path.parent.mkdir(parents=True)
        np.save(path, vectors)
        self.own = np.searchsorted(documents, documents), np.searchsorted(documents, documents, "right")
        self.queries = np.random.default_rng(1).choice(len(vectors), _QUERIES, replace=False)
        self.distances, self.nearest = exact_search(
            self.vectors[self.queries], self.train.embeddings, 2, self.own_of(self.queries)
        )

    def __len__(self) -> int:
        return len(self.vectors)

    def own_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and stop of the chunks of the documents of some chunks."""
        return self.own[0][rows], self.own[1][rows]

    def recall(self, ids: np.ndarray) -> float:
        """recall@2 of the hits ids [q, k] of other documents, -1 = none."""
        first, stop = self.own_of(self.queries)
        others = np.where((ids >= first[:, None]) & (ids < stop[:, None]), -1, ids)
        return recall(rerank(self.vectors[self.queries], others, self.train.embeddings)[0][:, :2], self.distances)


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
        found = sample.recall(graph.search(sample.vectors[sample.queries], effort)[1])
        if found >= _RECALL:
            break
    say(f"graph: recall@2 of {found:.3f} with {effort} candidates")
    return counted.hnsw_stats.ndis / _QUERIES, added


def by_lists(sample: Sample) -> tuple[float, float]:
    """The smallest measured `nprobe` for the required recall, and microseconds of a core per chunk."""
    train_index(sample.train, building.IndexSettings())
    add_shards(sample.train)
    index = list_index("lists", sample.train.folder / "index", sample.train)["lists"]

    def search(rows: np.ndarray, nprobe: int) -> np.ndarray:
        return index.search(sample.vectors[rows], 16, sample.own_of(rows), nprobe)

    for nprobe in (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024):
        if sample.recall(search(sample.queries, nprobe)) >= _RECALL:
            break
    rows = np.random.default_rng(2).choice(len(sample), min(_TIMED, len(sample)), replace=False)
    started = time.process_time()
    search(np.sort(rows), nprobe)
    return nprobe, 1e6 * (time.process_time() - started) / len(rows)


def measure(vectors: np.ndarray, documents: np.ndarray) -> dict[str, float]:
    """All measurements for some documents."""
    with tempfile.TemporaryDirectory() as folder:
        sample = Sample(Path(folder), vectors, documents)
        row = {"chunks": float(len(sample))}
        for length in _LENGTHS:
            for copies, comparisons in in_lists(sample, length).items():
                row[f"lists of {length}, a chunk in {copies}: comparisons"] = comparisons
        row["search `lists`: nprobe"], row["search `lists`: µs"] = by_lists(sample)
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
