"""Embeddings → a sharded Faiss index: which key, train, add, tune; and searching it.

    sample of all shards → trained.faiss → one copy per shard, filled → nprobe tuned to a recall target
    queries → every shard → merged candidates → distances from the stored embeddings → the nearest k

Cheap codes plus exact re-ranking is the default: with the top 64 re-ranked, four-bit codes lose almost nothing. Faiss is
imported where it is used, so that a machine without it can read the settings.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from indexing.index.faiss_files import ivf_of, read_index, transformed, write_index
from indexing.index.faiss_gpu import on_cpu, on_gpus
from indexing.index.sharded import ShardedIndex
from indexing.store.datastore import ShardedArray, Split
from indexing.store.errors import InputError
from indexing.store.files import write_json
from indexing.vectors.exact_search import recall, rerank
from indexing.vectors.floats import to_float32
from indexing.vectors.product_search import ProductIndex

_BLOCK_ROWS = 65_536
# Below this many lists a flat coarse quantizer is faster to build than a graph, exact, and as fast to search.
_HNSW_LISTS = 16_384
_MOST_PROBES = 1024  # beyond these all lists are visited


@dataclass(frozen=True)
class IndexSettings:
    """Which index is built and how well it must do."""

    factory: str = ""
    """A Faiss factory string; empty: chosen for the size of the corpus by autofaiss and the settings below."""
    memory: str = "4GB"
    """Memory budget for the whole index, as autofaiss reads it (`500MB`, `16GB`)."""
    flat_below: int = 20_000
    """Corpora with fewer chunks get exact search (`Flat`)."""
    codes: Literal["fast-scan", "pq"] = "fast-scan"
    """`fast-scan`: 4-bit PQ (d/4 bytes a chunk), fastest, made to be re-ranked; `pq`: what autofaiss proposes (OPQ + 8-bit PQ)."""
    points_per_list: int = 64
    """Training vectors per inverted list, sampled over all shards."""
    recall_target: float = 0.8
    """`nprobe` is the smallest power of two whose recall@10 after re-ranking reaches this on held-out queries; that of
    `neighbors.search = "lists"` the smallest number."""
    tune_queries: int = 1000
    """Held-out chunks used as queries for tuning."""
    seed: int = 0
    """Of the training sample and the k-means."""

    def __post_init__(self) -> None:
        if not 0 < self.recall_target <= 1:
            raise InputError(f"index.recall_target = {self.recall_target}: must be above 0 and at most 1.")
        for key in ("points_per_list", "tune_queries"):
            if not 1 <= getattr(self, key) < 2**31:  # Faiss counts in 32 bits
                raise InputError(f"index.{key} = {getattr(self, key)}: must be between 1 and 2^31 - 1.")
        if not 0 <= self.seed < 2**31:
            raise InputError(f"index.seed = {self.seed}: must be between 0 and 2^31 - 1.")
        if re.search(r"\bIDMap2?\b", self.factory):
            raise InputError(
                f"index.factory = {self.factory!r}: remove IDMap. Every index stores the ids of its chunks."
            )
        if not re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]?B", self.memory):
            raise InputError(f"index.memory = {self.memory!r}: must be a size such as '500MB' or '16GB'.")


def choose_key(num_vectors: int, dimension: int, settings: IndexSettings) -> str:
    """The Faiss factory string for this many vectors.

    autofaiss proposes the number of inverted lists and the product quantizer for the memory budget.

    Raises:
        InputError: nothing fits into `index.memory` (autofaiss then returns an empty list).
    """
    if settings.factory:
        return settings.factory
    if num_vectors < settings.flat_below:
        return "Flat"
    from autofaiss.external.optimize import get_optimal_index_keys_v2

    threshold = max(settings.flat_below, 1)
    proposals = get_optimal_index_keys_v2(
        num_vectors,
        dimension,
        settings.memory,
        flat_threshold=threshold - 1,
        quantization_threshold=threshold - 1,
        ivf_flat_threshold=0,
        should_be_memory_mappable=True,
    )
    if not proposals:
        raise InputError(
            f"index.memory = {settings.memory}: no index of {num_vectors:,} × {dimension} fits. "
            "Raise it, or name a smaller index.factory yourself."
        )
    lists = re.search(r"IVF(\d+)", proposals[0])
    if lists is None:
        return proposals[0]
    # Up to 4·√N lists, as Faiss advises: with autofaiss's 65,536 for ten million the k-means alone takes hours on a CPU.
    nlist = min(int(lists.group(1)), 2 ** math.ceil(math.log2(4 * math.sqrt(num_vectors))))
    quantizer = f"IVF{nlist}_HNSW32" if nlist >= _HNSW_LISTS else f"IVF{nlist}"
    if settings.codes == "pq":
        return re.sub(r"IVF\d+(_HNSW\d+)?", quantizer, proposals[0])
    return f"{quantizer},PQ{largest_divisor(dimension, dimension // 2)}x4"


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is not above `at_most`."""
    return next(divisor for divisor in range(max(at_most, 1), 0, -1) if number % divisor == 0)


def sample_size(num_vectors: int, key: str, settings: IndexSettings) -> int:
    """How many vectors an index of this key is trained on: `points_per_list` for each list, 65,536 at least, or all."""
    lists = re.search(r"IVF(\d+)", key)
    return min(num_vectors, max(int(lists.group(1)) * settings.points_per_list if lists else 0, 65_536))


def training_sample(split: Split, key: str, settings: IndexSettings) -> np.ndarray:
    """A uniform sample over all shards, [n, d] float32: never the first rows, which are one source's."""
    total = split.num_chunks
    wanted = sample_size(total, key, settings)
    if total <= wanted:
        ids = np.arange(total, dtype=np.int64)
    else:
        ids = np.sort(np.random.default_rng(settings.seed).choice(total, wanted, replace=False)).astype(np.int64)
    return to_float32(split.embeddings.gather(ids))


def train(work: Path, key: str, sample: np.ndarray, settings: IndexSettings) -> None:
    """Write `work/trained.faiss`: an empty index trained on the sample [n, d] float32.

    Raises:
        InputError: Faiss does not understand the key, such an index takes no ids, or the sample is too small for it.
    """
    import faiss

    try:
        index = faiss.index_factory(sample.shape[1], key, faiss.METRIC_L2)
        ivf = ivf_of(index)
        if ivf is None:
            index = faiss.IndexIDMap2(index)  # ids are ours, also where the index has none
        else:
            ivf.cp.seed = settings.seed
            ivf.cp.max_points_per_centroid = settings.points_per_list
            ivf.cp.min_points_per_centroid = 1  # few points are our choice for a small corpus: no warning
            if isinstance(ivf, faiss.IndexIVFPQ):
                # Faiss's keys order the codes for a comparison by Hamming distance, which nobody makes: most of the time.
                ivf.do_polysemous_training = False  # type: ignore[attr-defined]
                if ivf.pq.nbits == 4:
                    ivf.by_residual = False  # as fast-scan wants them: one table of distances serves all lists
            ivf.clustering_index = clustering = on_gpus(faiss.IndexFlatL2(ivf.d), "k-means")
            if isinstance(faiss.downcast_index(ivf.quantizer), faiss.IndexHNSW):
                _train_graph_quantizer(index, ivf, clustering, sample)
        index.train(sample)
        write_index(work / "trained.faiss", index)
        index.add_with_ids(sample[:1], np.zeros(1, np.int64))  # not stored: an index that takes no ids is refused here
    except RuntimeError as error:
        raise InputError(f"index.factory = {key!r} with {len(sample):,} training vectors: {error}") from error
    write_json(work / "index.json", {"key": key, "dimension": int(sample.shape[1]), "trained_on": len(sample)})


def _train_graph_quantizer(index: Any, ivf: Any, clustering: Any, sample: np.ndarray) -> None:
    """k-means first, then the HNSW graph on one thread: built on several it comes out another one each time."""
    import faiss

    transformed = sample
    if isinstance(index, faiss.IndexPreTransform):
        chain: Any = index.chain
        for number in range(chain.size()):
            transform = faiss.downcast_VectorTransform(chain.at(number))
            if not transform.is_trained:
                transform.train(transformed)
            transformed = transform.apply(transformed)
    kmeans = faiss.Clustering(ivf.d, ivf.nlist, ivf.cp)
    kmeans.train(transformed, clustering)
    centroids = faiss.vector_to_array(kmeans.centroids).reshape(ivf.nlist, ivf.d)
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    ivf.quantizer.add(centroids)
    faiss.omp_set_num_threads(threads)


def add_shard(
    work: Path, trained: Path, embeddings: np.ndarray, first_id: int, *, advance: Callable[[int], None]
) -> None:
    """Write `work/vectors.faiss`: a copy of the trained index with the embeddings [n, d] of one shard, ids from `first_id`."""

    index = on_gpus(read_index(trained / "trained.faiss"), "adding")
    for start in range(0, len(embeddings), _BLOCK_ROWS):
        rows = to_float32(embeddings[start : start + _BLOCK_ROWS])
        index.add_with_ids(rows, np.arange(first_id + start, first_id + start + len(rows), dtype=np.int64))
        advance(len(rows))
    write_index(work / "vectors.faiss", on_cpu(index))


def tune(
    work: Path,
    index: ShardedIndex,
    trained: Path,
    queries: np.ndarray,
    embeddings: ShardedArray,
    candidates: int,
    settings: IndexSettings,
) -> dict[str, Any]:
    """Choose `nprobe` for the recall target on held-out queries and write `work/tuned.json`.

    A search of the lists by the embeddings themselves (`list_search.py`) needs fewer of them than one by codes: it has its own.

    Args:
        work: folder to write into.
        index: the filled index.
        trained: the folder of the trained one.
        queries: [n, d] float32.
        embeddings: of the chunks in the index.
        candidates: how many are re-ranked for each query.
        settings: the recall target.

    Returns:
        {nprobe, recall_at_10, queries, curve: [[nprobe, recall_at_10], …], lists: {nprobe, recall_at_10} of an IVF}.
    """
    k = min(10, max(1, index.num_vectors))
    # Four times k: what bfloat16 misplaces is still among them.
    exact, ids = rerank(queries, ProductIndex(embeddings).search(queries, max(candidates, 4 * k)), embeddings)
    exact, ids = exact[:, :k], ids[:, :k]
    curve: list[tuple[int, float]] = []
    nprobe = 1
    while True:
        visited = min(nprobe, index.max_nprobe)
        distances, _ = rerank(queries, index.search(queries, max(candidates, k), nprobe=visited), embeddings)
        curve.append((visited, recall(distances[:, :k], exact)))
        if curve[-1][1] >= settings.recall_target or nprobe >= index.max_nprobe:
            break
        nprobe *= 2
    # Where the target is out of reach at any nprobe (codes too coarse), more lists than the best needs cost time only.
    reached = max(recall for _, recall in curve)
    chosen = next(probe for probe, recall in curve if recall >= min(settings.recall_target, reached - 0.002))
    tuned = {"nprobe": chosen, "recall_at_10": dict(curve)[chosen], "queries": len(queries), "curve": curve}
    empty = read_index(trained / "trained.faiss")
    if ivf_of(empty) is not None:
        tuned["lists"] = tune_lists(empty, queries, ids, embeddings, settings.recall_target)
    write_json(work / "tuned.json", tuned)
    return tuned


def tune_lists(
    trained: Any, queries: np.ndarray, ids: np.ndarray, embeddings: ShardedArray, target: float
) -> dict[str, Any]:
    """How many lists hold so large a share of the true neighbors that the recall target is reached.

    Args:
        trained: the trained index, an IVF.
        queries: [n, d] float32.
        ids: [n, k] int64, their true neighbors, -1 = none.
        embeddings: of the chunks in the index.
        target: of the recall.

    Returns:
        {nprobe, recall_at_10}; all lists where the nearest 1,024 do not do.
    """
    ivf: Any = ivf_of(trained)
    real = ids >= 0
    home = ivf.quantizer.search(transformed(trained, to_float32(embeddings.gather(ids[real]))), 1)[1]  # [neighbors, 1]
    probes = ivf.quantizer.search(transformed(trained, queries), min(_MOST_PROBES, ivf.nlist))[1]
    hits = probes[np.nonzero(real)[0]] == home  # [neighbors, probes]
    found = hits.any(1)
    recalls = np.cumsum(np.bincount(hits.argmax(1)[found], minlength=probes.shape[1])) / max(1, len(home))
    nprobe = int(np.searchsorted(recalls, target)) + 1
    if nprobe > len(recalls):
        return {"nprobe": int(ivf.nlist), "recall_at_10": 1.0}
    return {"nprobe": nprobe, "recall_at_10": float(recalls[nprobe - 1])}
