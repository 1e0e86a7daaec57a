"""k-means in two levels: as good as plain k-means, the right number of lists, the same each time."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from indexing.index import coarse_quantizer
from indexing.index.build import ITERATIONS, POINTS_PER_LIST, train
from indexing.index.coarse_quantizer import shares, train_centroids, two_levels
from indexing.index.faiss_files import ivf_of, read_index


def vectors(rows: int) -> np.ndarray:
    """Unit vectors of 32 dimensions around 300 centers of unequal popularity."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((300, 32))[(300 * rng.random(rows) ** 2).astype(int)]
    found = centers + 0.5 * rng.standard_normal((rows, 32))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def parameters() -> Any:
    """Those of an IVF index with the default settings."""
    import faiss

    chosen = faiss.ClusteringParameters()
    chosen.niter, chosen.seed = ITERATIONS, 0
    chosen.max_points_per_centroid, chosen.min_points_per_centroid = POINTS_PER_LIST, 1
    return chosen


def distances(sample: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Squared distance of each vector to its nearest centroid: [n]."""
    import faiss

    index = faiss.IndexFlatL2(sample.shape[1])
    index.add(centroids)
    return index.search(sample, 1)[0][:, 0]


def test_two_levels_are_nearly_as_near_as_plain_k_means() -> None:
    sample = vectors(16_384)
    plain, ours = train_centroids(sample, 256, parameters()), two_levels(sample, 256, parameters())
    assert ours.shape == plain.shape == (256, 32)
    assert distances(sample, ours).mean() < 1.02 * distances(sample, plain).mean()
    np.testing.assert_array_equal(ours, two_levels(sample, 256, parameters()))


def test_an_index_with_many_lists_gets_its_centroids_in_two_levels(tmp_path, monkeypatch) -> None:
    import faiss

    monkeypatch.setattr("indexing.index.build.TWO_LEVELS", 64)
    monkeypatch.setattr(coarse_quantizer, "TWO_LEVELS", 64)
    sample = vectors(4096)
    train(tmp_path, "IVF64,PQ8x4", sample, 0)
    trained = read_index(tmp_path / "trained.faiss")  # owns the quantizer
    quantizer = faiss.downcast_index(ivf_of(trained).quantizer)
    np.testing.assert_array_equal(quantizer.reconstruct_n(0, 64), two_levels(sample, 64, parameters()))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.data())
def test_groups_get_lists_in_proportion_to_their_vectors(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    filled = sum(size > 0 for size in sizes)
    if total == 0:
        return
    count = data.draw(st.integers(filled, total))
    lists = shares(np.array(sizes), count)
    assert lists.sum() == count
    assert all((size > 0) <= number <= size for size, number in zip(sizes, lists.tolist(), strict=True))
