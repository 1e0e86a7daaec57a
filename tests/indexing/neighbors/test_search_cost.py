"""The cost model prefers the method that was measured to be faster (docs/results/indexing-speed.md)."""

from dataclasses import replace

import pytest

from indexing.neighbors.search_cost import SearchSize, cheapest, compared_centroids, seconds_by_lists, seconds_exact

MINILM = SearchSize(
    num_vectors=188_796,
    dimension=384,
    nlist=2048,
    nprobe=64,
    centroids=2048,
    code_bytes=96,
    fast_scan=True,
    list_nprobe=48,
    candidates=64,
    precise_candidates=24,
)
LEXICAL = replace(MINILM, num_vectors=172_033, dimension=256, nprobe=1024, code_bytes=64, list_nprobe=900)


def test_clustered_embeddings_are_searched_by_lists_and_others_exhaustively() -> None:
    assert cheapest(MINILM, "bfloat16") == "lists"
    assert cheapest(LEXICAL, "bfloat16") == "exact"


def test_lists_visited_by_few_queries_are_searched_by_their_codes() -> None:
    drawn = replace(MINILM, num_vectors=5_000_000, dimension=64, nlist=16_384, nprobe=64, list_nprobe=64, code_bytes=16)
    assert cheapest(replace(drawn, centroids=compared_centroids(16_384, graph=True)), "bfloat16") == "index"


def test_index_without_lists_is_searched_exhaustively_unless_codes_are_cheaper() -> None:
    flat = replace(
        MINILM, num_vectors=10_000, nlist=1, nprobe=1, centroids=1, list_nprobe=1, fast_scan=False, code_bytes=1536
    )
    assert cheapest(flat, "bfloat16") == "exact"
    assert cheapest(replace(flat, num_vectors=10**7, code_bytes=1, fast_scan=True), "float32") == "index"


def test_embeddings_larger_than_memory_are_searched_by_their_codes() -> None:
    large = replace(MINILM, num_vectors=10**10, nlist=131_072, nprobe=256, list_nprobe=128)
    assert cheapest(large, "bfloat16") == "index"


@pytest.mark.parametrize("hardware", ["bfloat16", "float32", "cuda"])
def test_cost_grows_with_the_number_of_comparisons(hardware) -> None:
    assert seconds_by_lists(MINILM, hardware) < seconds_by_lists(replace(MINILM, list_nprobe=96), hardware)
    assert seconds_exact(MINILM, hardware) < seconds_exact(replace(MINILM, num_vectors=10**6), hardware)


def test_graph_of_centroids_is_not_compared_completely() -> None:
    assert compared_centroids(131_072, graph=True) < 10_000
    assert compared_centroids(131_072, graph=False) == 131_072
