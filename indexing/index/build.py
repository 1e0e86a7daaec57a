"""Build a sharded Faiss index from embeddings: train, add, tune. `key.py` chooses which.

    sample of all shards → trained.faiss → one filled copy per shard → nprobe tuned to a recall target
    queries → every shard → merged candidates → distances from the stored embeddings → the nearest k

The default is cheap codes plus exact re-ranking: if 64 candidates are re-ranked, four-bit codes lose almost no recall.
Faiss is imported inside functions, so that a machine without it can read the settings.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from indexing.index.coarse_quantizer import TWO_LEVELS, train_centroids
from indexing.index.exact_search import recall, rerank
from indexing.index.faiss_files import ivf_of, read_index, write_index, write_shard
from indexing.index.faiss_gpu import on_cpu, on_gpus
from indexing.index.floats import to_float32
from indexing.index.product_search import ProductIndex
from indexing.index.sharded import ShardedIndex
from indexing.progress import Advance
from indexing.store.datastore import Split
from indexing.store.errors import InputError
from indexing.store.files import write_json
from indexing.store.settings import PositiveFraction, Size, settings
from indexing.store.sharded_array import ShardedArray

_BLOCK_ROWS = 65_536


POINTS_PER_LIST = 64
"""Training vectors for each inverted list, sampled over all shards."""
ITERATIONS = 5
"""Iterations of k-means. Ten, the default of Faiss, take twice the time for the same recall
(`benchmarks/quality/index_training.py`)."""
TUNE_QUERIES = 1000
"""Held-out chunks that are queries when `nprobe` is tuned."""


@settings
class IndexSettings:
    """Type of the index, and its recall target."""

    factory: str = ""
    """Faiss factory string. Empty: chosen by the rules of autofaiss from the number of chunks and the settings
    below."""
    memory: Size = "4GB"
    """Memory budget for the whole index (`500MB`, `16GB`)."""
    flat_below: int = 20_000
    """Datastores with fewer chunks get an exact index (`Flat`)."""
    codes: Literal["fast-scan", "pq"] = "fast-scan"
    """`fast-scan`: 4-bit PQ (d/4 bytes per chunk), the fastest, to be re-ranked. `pq`: autofaiss's proposal (OPQ +
    8-bit PQ)."""
    recall_target: PositiveFraction = 0.8
    """Recall@10 after re-ranking that held-out queries must reach. `nprobe` is the smallest power of two that reaches
    it."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the training sample and of k-means."""

    def __post_init__(self) -> None:
        if re.search(r"\bIDMap2?\b", self.factory):
            raise InputError(
                f"index.factory = {self.factory!r}: remove IDMap. Every index stores the ids of its chunks."
            )


def sample_size(num_vectors: int, key: str, points_per_list: int = POINTS_PER_LIST) -> int:
    """Number of training vectors for an index of this key: `points_per_list` per list, at least 65,536, at most all."""
    lists = re.search(r"IVF(\d+)", key)
    return min(num_vectors, max(int(lists.group(1)) * points_per_list if lists else 0, 65_536))


def training_sample(split: Split, size: int, seed: int) -> np.ndarray:
    """Sample this many vectors uniformly over all shards: [n, d] float32. The first rows alone would come from one
    source."""
    total = split.num_chunks
    if total <= size:
        ids = np.arange(total, dtype=np.int64)
    else:
        ids = np.sort(np.random.default_rng(seed).choice(total, size, replace=False)).astype(np.int64)
    return to_float32(split.embeddings.gather(ids))


def train(work: Path, key: str, sample: np.ndarray, seed: int, points_per_list: int = POINTS_PER_LIST) -> None:
    """Write `work/trained.faiss`: an empty index trained on the sample [n, d] float32.

    Raises:
        InputError: Faiss does not understand the key, an index of this kind takes no ids, or the sample is too small.
    """
    import faiss

    try:
        index = faiss.index_factory(sample.shape[1], key, faiss.METRIC_L2)
        ivf = ivf_of(index)
        if ivf is None:
            index = faiss.IndexIDMap2(index)  # stores our ids in an index that has none
        else:
            ivf.cp.seed, ivf.cp.niter = seed, ITERATIONS
            ivf.cp.max_points_per_centroid = points_per_list
            ivf.cp.min_points_per_centroid = 1  # no warning about few points: a small corpus has few
            if isinstance(ivf, faiss.IndexIVFPQ):
                # Polysemous training orders codes for Hamming comparisons. We make none, and it takes most of the time.
                ivf.do_polysemous_training = False  # type: ignore[attr-defined]
                if ivf.pq.nbits == 4:
                    ivf.by_residual = False  # needed by fast-scan: one distance table serves all lists
            ivf.clustering_index = on_gpus(faiss.IndexFlatL2(ivf.d), "k-means")
            is_graph = isinstance(faiss.downcast_index(ivf.quantizer), faiss.IndexHNSW)
            if is_graph or ivf.nlist >= TWO_LEVELS:
                _train_quantizer(index, ivf, sample)
        index.train(sample)
        write_index(work / "trained.faiss", index)
        index.add_with_ids(sample[:1], np.zeros(1, np.int64))  # rejects an index that takes no ids; not stored
    except RuntimeError as error:
        raise InputError(f"index.factory = {key!r} with {len(sample):,} training vectors: {error}") from error
    write_json(work / "index.json", {"key": key, "dimension": int(sample.shape[1]), "trained_on": len(sample)})


def _train_quantizer(index: Any, ivf: Any, sample: np.ndarray) -> None:
    """Give the quantizer its centroids. A graph is built on one thread: several would build a different one each
    time."""
    import faiss

    transformed = sample
    if isinstance(index, faiss.IndexPreTransform):
        chain: Any = index.chain
        for step in range(chain.size()):
            transform = faiss.downcast_VectorTransform(chain.at(step))
            if not transform.is_trained:
                transform.train(transformed)
            transformed = transform.apply(transformed)
    centroids = train_centroids(transformed, ivf.nlist, ivf.cp)
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    ivf.quantizer.add(centroids)
    faiss.omp_set_num_threads(threads)


def add_shard(work: Path, trained: Path, embeddings: np.ndarray, first_id: int, *, advance: Advance) -> None:
    """Write `work/vectors.faiss`: a copy of the trained index with the embeddings [n, d] of one shard, ids from
    `first_id`; see `write_shard`."""
    index = on_gpus(read_index(trained / "trained.faiss"), "adding")
    for start in range(0, len(embeddings), _BLOCK_ROWS):
        rows = to_float32(embeddings[start : start + _BLOCK_ROWS])
        index.add_with_ids(rows, np.arange(first_id + start, first_id + start + len(rows), dtype=np.int64))
        advance(len(rows))
    write_shard(work / "vectors.faiss", on_cpu(index))


def tune(
    work: Path,
    index: ShardedIndex,
    queries: np.ndarray,
    embeddings: ShardedArray,
    candidates: int,
    settings: IndexSettings,
) -> dict[str, Any]:
    """Choose `nprobe` for the recall target on held-out queries and write `work/tuned.json`.

    Args:
        work: folder to write into.
        index: the filled index.
        queries: [n, d] float32.
        embeddings: embeddings of the chunks in the index.
        candidates: candidates re-ranked for each query.
        settings: the recall target.

    Returns:
        {nprobe, recall_at_10, queries, curve: [[nprobe, recall_at_10], …]}.
    """
    k = min(10, max(1, index.num_vectors))
    # 4·k candidates: bfloat16 products are not exact, and this many contain the true k.
    exact = rerank(queries, ProductIndex(embeddings).search(queries, max(candidates, 4 * k)), embeddings)[0][:, :k]
    curve: list[tuple[int, float]] = []
    nprobe = 1
    while True:
        visited = min(nprobe, index.max_nprobe)
        distances, _ = rerank(queries, index.search(queries, max(candidates, k), nprobe=visited), embeddings)
        curve.append((visited, recall(distances[:, :k], exact)))
        if curve[-1][1] >= settings.recall_target or nprobe >= index.max_nprobe:
            break
        nprobe *= 2
    # If coarse codes keep every nprobe below the target, more lists than the best curve point needs would only cost
    # time.
    reached = max(recall for _, recall in curve)
    fewest = next(probe for probe, recall in curve if recall >= min(settings.recall_target, reached - 0.002))
    tuned = {"nprobe": fewest, "recall_at_10": dict(curve)[fewest], "queries": len(queries), "curve": curve}
    write_json(work / "tuned.json", tuned)
    return tuned
