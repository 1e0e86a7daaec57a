"""Faiss uses the same code with and without GPUs. GPU tests need `faiss-gpu`: pip install '.[gpu]'."""

import faiss
import numpy as np
import pytest

from indexing.index.exact_search import exact_search, recall, rerank
from indexing.index.faiss_files import num_lists, search_index
from indexing.index.faiss_gpu import num_gpus, on_cpu, on_gpus
from indexing.progress import STATUS
from tests.indexing.index.test_build import D, build, clustered

needs_gpu = pytest.mark.skipif(num_gpus() == 0, reason="no GPU that Faiss can use")


@pytest.mark.skipif(num_gpus() > 0, reason="Faiss has a GPU")
def test_without_a_gpu_the_index_stays_on_the_cpu_and_the_status_says_so(caplog) -> None:
    index = faiss.IndexFlatL2(D)
    with caplog.at_level(STATUS, "retro"):
        assert on_gpus(index, f"a purpose of {__name__}") is index
    assert f"Faiss, a purpose of {__name__}: on the CPU" in caplog.text
    assert on_cpu(index) is index


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("key", ["Flat", "IVF16,Flat", "IVF16,SQfp16", "OPQ8_32,IVF16,PQ8"])
def test_index_trained_and_searched_on_gpus_finds_the_exact_neighbors(tmp_path, key: str) -> None:
    vectors = clustered(6000)
    index, embeddings = build(tmp_path, vectors, key)
    assert index.max_nprobe == (1 if key == "Flat" else 16)
    queries = clustered(50, seed=1).astype(np.float32)
    exact, _ = exact_search(queries, embeddings, 10)
    found = {}
    for nprobe in (1, 16):
        distances, _ = rerank(queries, index.search(queries, 128, nprobe=nprobe), embeddings)
        found[nprobe] = recall(distances[:, :10], exact)
    assert found[16] > 0.95
    assert found[1] < found[16] or key == "Flat"  # nprobe has an effect on the GPU


@pytest.mark.gpu
@needs_gpu
def test_index_without_a_gpu_implementation_is_searched_on_the_cpu() -> None:
    packed = faiss.index_factory(D, "IVF16,PQ8x4fs")
    packed.train(clustered(2000).astype(np.float32))
    assert on_gpus(packed, "searching") is packed


@pytest.mark.gpu
@needs_gpu
def test_nprobe_applies_to_every_part_of_an_index_on_several_gpus() -> None:
    index = faiss.index_factory(D, "IVF16,Flat")
    index.train(clustered(2000).astype(np.float32))
    vectors = clustered(2000).astype(np.float32)
    index.add(vectors)
    moved = on_gpus(index, "searching")
    assert num_lists(moved) == 16
    few, all_lists = (search_index(moved, vectors[:50], 10, nprobe)[0] for nprobe in (5, 16))
    np.testing.assert_allclose(few, search_index(index, vectors[:50], 10, 5)[0], atol=1e-4)
    assert (few >= all_lists).all()
    assert (few > all_lists).any()
