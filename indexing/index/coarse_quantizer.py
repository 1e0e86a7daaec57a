"""Centroids of the inverted lists: k-means, for many lists on a CPU in two levels.

    sample → √L groups → k-means in each group, L centroids in all → k-means from there, where a vector compares itself
    with the centroids of its nearest groups only

Plain k-means compares every vector with every centroid. 64 vectors for each of 65,536 lists are 275 billion comparisons
in one iteration; two levels with 8 of 256 groups are 10 billion. Balance: a group has as many lists as its share of the
vectors.
"""

import math
from typing import Any

import numpy as np

from indexing.index.faiss_gpu import num_gpus, on_gpus

TWO_LEVELS = 16_384
"""Lists from which on two levels are used."""
_GROUP_VECTORS = 256  # training vectors per group: with more, groups hardly change
_NEAREST_GROUPS = 8
_ITERATIONS = 10  # of the second k-means, which starts from good centroids
_IN_LISTS = 5
"""Time of a comparison in a list of an index, against one in a product with all centroids (docs/results/scale.md)."""


def train_centroids(vectors: np.ndarray, count: int, parameters: Any) -> np.ndarray:
    """Return the centroids [count, d] float32 of vectors [n, d] float32.

    Args:
        vectors: the training sample.
        count: number of lists.
        parameters: `faiss.ClusteringParameters`.
    """
    import faiss

    if _has_two_levels(count):
        return two_levels(vectors, count, parameters)
    return _kmeans(vectors, count, parameters, on_gpus(faiss.IndexFlatL2(vectors.shape[1]), "k-means"))


def comparisons(count: int) -> float:
    """Centroids with which an iteration of `train_centroids` compares a vector, in units of the time in a product with
    all.

    In two levels: those of the vector's group, then all √L groups, and √L centroids in each of the nearest ones.
    """
    return (2 + _NEAREST_GROUPS * _IN_LISTS) * math.sqrt(count) if _has_two_levels(count) else float(count)


def _has_two_levels(count: int) -> bool:
    return count >= TWO_LEVELS and not num_gpus()


def two_levels(vectors: np.ndarray, count: int, parameters: Any) -> np.ndarray:
    """`train_centroids` in two levels."""
    import faiss

    d = vectors.shape[1]
    num_groups = 2 ** round(math.log2(count) / 2)
    groups = _kmeans(vectors, num_groups, parameters, faiss.IndexFlatL2(d), max_points_per_centroid=_GROUP_VECTORS)
    quantizer = faiss.IndexFlatL2(d)
    quantizer.add(groups)
    group_of = quantizer.search(vectors, 1)[1][:, 0]
    sizes = np.bincount(group_of, minlength=num_groups)
    rows = np.split(np.argsort(group_of, kind="stable"), np.cumsum(sizes)[:-1])
    centroids = [
        _kmeans(vectors[rows[group]], int(lists), parameters, faiss.IndexFlatL2(d))
        for group, lists in enumerate(shares(sizes, count))
        if lists
    ]
    nearby = faiss.IndexIVFFlat(quantizer, d, num_groups, faiss.METRIC_L2)
    nearby.is_trained, nearby.nprobe = True, min(_NEAREST_GROUPS, num_groups)
    return _kmeans(vectors, count, parameters, nearby, np.concatenate(centroids), niter=_ITERATIONS)


def shares(sizes: np.ndarray, count: int) -> np.ndarray:
    """Divide `count` lists among groups by their number of vectors: [groups] int64, at most one list for each
    vector."""
    exact = sizes / sizes.sum() * count
    lists = np.minimum(np.maximum(exact.astype(np.int64), sizes > 0), sizes)
    while (missing := count - int(lists.sum())) > 0:  # the largest remainders first
        open_groups = np.flatnonzero(lists < sizes)
        lists[open_groups[np.argsort((lists - exact)[open_groups], kind="stable")[:missing]]] += 1
    while (surplus := -missing) > 0:
        large = np.flatnonzero(lists > 1)
        lists[large[np.argsort((exact - lists)[large], kind="stable")[:surplus]]] -= 1
        missing = count - int(lists.sum())
    return lists


def _kmeans(
    vectors: np.ndarray,
    count: int,
    parameters: Any,
    assigns: Any,
    start: np.ndarray | None = None,
    **changes: int,
) -> np.ndarray:
    """k-means of Faiss.

    Args:
        vectors: [n, d] float32.
        count: number of centroids.
        parameters: `faiss.ClusteringParameters`.
        assigns: index that finds the nearest centroid of a vector.
        start: initial centroids [count, d] float32; None: random vectors.
        changes: parameters that differ.
    """
    import faiss

    d = vectors.shape[1]
    if len(vectors) == count:
        return np.ascontiguousarray(vectors)
    kmeans = faiss.Clustering(d, count, parameters)
    for name, value in changes.items():
        setattr(kmeans, name, value)
    if start is not None:
        faiss.copy_array_to_vector(start.ravel(), kmeans.centroids)
    kmeans.train(vectors, assigns)
    return faiss.vector_to_array(kmeans.centroids).reshape(count, d)
