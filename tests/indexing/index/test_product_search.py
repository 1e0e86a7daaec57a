"""Search by matrix products equals exhaustive search and excludes own documents, on any number of threads."""

import numpy as np
import pytest
import torch

from indexing.index.exact_search import exact_search, recall, rerank
from indexing.index.product_search import ProductIndex
from indexing.store.sharded_array import ShardedArray
from tests.indexing.index.vector_files import stored

D = 32


@pytest.fixture
def embeddings(tmp_path, request) -> ShardedArray:
    """Unit vectors in three files. The test sets their number."""
    total = getattr(request, "param", 5000)
    return stored(tmp_path, np.random.default_rng(0).standard_normal((total, D)).astype(np.float32))


@pytest.mark.parametrize("embeddings", [7, 1023, 1024, 5000], indirect=True)
def test_reranked_product_search_finds_the_exact_neighbors_outside_the_own_document(embeddings: ShardedArray) -> None:
    rows = np.arange(0, len(embeddings), max(1, len(embeddings) // 300))
    queries = embeddings.gather(rows).astype(np.float32)
    excluded = (rows // 5 * 5, np.minimum(rows // 5 * 5 + 5, len(embeddings)))
    ids = ProductIndex(embeddings, "cpu").search(queries, 16, excluded)
    assert not ((ids >= excluded[0][:, None]) & (ids < excluded[1][:, None])).any()
    expected = min(16, len(embeddings) - 5)
    assert ((ids >= 0).sum(1) >= expected).all()
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in ids)
    exact, _ = exact_search(queries, embeddings, 8, excluded)
    assert recall(rerank(queries, ids, embeddings)[0][:, :8], exact) > 0.99


@pytest.mark.parametrize("embeddings", [7, 3000, 5000], indirect=True)
@pytest.mark.parametrize("size", [1, 2, 9])
def test_few_queries_find_what_many_find(embeddings: ShardedArray, size: int) -> None:
    """Few queries are multiplied with more chunks at a time, one query by another kernel."""
    rows = np.arange(0, len(embeddings), max(1, len(embeddings) // 27))[:27]
    queries, excluded = embeddings.gather(rows).astype(np.float32), (rows // 5 * 5, rows // 5 * 5 + 5)
    index = ProductIndex(embeddings, "cpu", keep=True)
    exact = rerank(queries, index.search(queries, 24, excluded), embeddings)[1][:, :8]
    for start in range(0, len(rows), size):
        few = slice(start, start + size)
        ids = index.search(queries[few], 24, (excluded[0][few], excluded[1][few]))
        assert np.array_equal(rerank(queries[few], ids, embeddings)[1][:, :8], exact[few])


def test_results_of_column_blocks_are_merged(embeddings: ShardedArray, monkeypatch) -> None:
    queries = embeddings.read(0, 300).astype(np.float32)
    whole = ProductIndex(embeddings, "cpu").search(queries, 16)
    monkeypatch.setattr("indexing.index.product_search._COLUMNS", 2048)
    parts = ProductIndex(embeddings, "cpu").search(queries, 16)
    same = [len(set(a) & set(b)) for a, b in zip(whole, parts, strict=True)]
    assert np.mean(same) > 15.5  # except for ties in bfloat16


def test_later_blocks_may_hold_nothing_better(embeddings: ShardedArray, monkeypatch) -> None:
    monkeypatch.setattr("indexing.index.product_search._COLUMNS", 2048)
    query = embeddings.read(0, 1).astype(np.float32)
    assert ProductIndex(embeddings, "cpu").search(query, 1).tolist() == [[0]]


def test_only_the_given_chunks_are_searched_and_found_by_their_ids(embeddings: ShardedArray) -> None:
    queries, chosen = embeddings.read(0, 300).astype(np.float32), np.arange(1, len(embeddings), 3)
    index = ProductIndex(embeddings, "cpu", ids=chosen)
    assert index.num_vectors == len(chosen)
    ids = index.search(queries, 16)
    assert np.isin(ids, chosen).all()
    # Compare every third chunk of the three files directly.
    distances = ((queries[:, None] - embeddings.gather(chosen).astype(np.float32)) ** 2).sum(2)
    exact = np.sort(distances, axis=1)[:, :8]
    assert recall(rerank(queries, ids, embeddings)[0][:, :8], exact) > 0.99
    assert (ProductIndex(embeddings, "cpu", ids=chosen[:5]).search(queries, 8) >= 0).sum() == 5 * len(queries)


def test_results_do_not_depend_on_the_number_of_threads(embeddings: ShardedArray) -> None:
    queries = embeddings.read(0, 600).astype(np.float32)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(ProductIndex(embeddings, "cpu").search(queries, 16))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert np.array_equal(*found)


@pytest.mark.gpu
def test_gpu_finds_the_same_neighbors(embeddings: ShardedArray) -> None:
    queries = embeddings.read(0, 600).astype(np.float32)
    exact, _ = exact_search(queries, embeddings, 8)
    ids = ProductIndex(embeddings, "cuda").search(queries, 16)
    assert recall(rerank(queries, ids, embeddings)[0][:, :8], exact) > 0.99
