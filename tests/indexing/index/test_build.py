"""Training, recall, and searches across several shards."""

import numpy as np
import pytest
import torch

from indexing.index.build import IndexSettings, add_shard, train, tune
from indexing.index.exact_search import exact_search, order_by_distance, recall, rerank
from indexing.index.sharded import ShardedIndex
from indexing.store.errors import InputError
from indexing.store.sharded_array import ShardedArray

D = 32


def clustered(rows: int, seed: int = 0) -> np.ndarray:
    """Unit vectors around 50 centers, float16 as stored."""
    rng = np.random.default_rng(seed)
    vectors = np.random.default_rng(99).standard_normal((50, D))[rng.integers(0, 50, rows)]
    vectors = vectors + 0.7 * rng.standard_normal((rows, D))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)


def build(folder, vectors: np.ndarray, key: str, num_shards: int = 3) -> tuple[ShardedIndex, ShardedArray]:
    (folder / "trained").mkdir(parents=True)
    train(folder / "trained", key, vectors.astype(np.float32), 0)
    paths, rows, first = [], [], 0
    for number, part in enumerate(np.array_split(vectors, num_shards)):
        work = folder / f"{number:05d}"
        work.mkdir()
        add_shard(work, folder / "trained", part, first, advance=lambda _: None)
        np.save(work / "vectors.npy", part)
        paths.append(work / "vectors.npy")
        rows.append(len(part))
        first += len(part)
    return ShardedIndex.open(folder, range(num_shards)), ShardedArray(paths, rows)


@pytest.mark.parametrize(
    "key", ["Flat", "IVF16,Flat", "IVF16,PQ8x4fs", "IVF16_HNSW8,PQ8x4", "OPQ8_32,IVF16,PQ8x4fs", "HNSW16"]
)
def test_reranked_search_over_shards_finds_the_exact_neighbors(tmp_path, key: str) -> None:
    vectors = clustered(2000)
    index, embeddings = build(tmp_path, vectors, key)
    queries = clustered(50, seed=1).astype(np.float32)
    distances, ids = rerank(queries, index.search(queries, 100, nprobe=16), embeddings)
    exact, _ = exact_search(queries, embeddings, 10)
    assert recall(distances[:, :10], exact) > 0.95
    found = vectors[ids[:, 0]].astype(np.float32)
    np.testing.assert_allclose(((queries - found) ** 2).sum(1), distances[:, 0], atol=1e-4)


def test_exact_search_equals_brute_force_and_omits_excluded_ids(tmp_path) -> None:
    vectors = clustered(40)
    _, embeddings = build(tmp_path, vectors, "Flat")
    queries = vectors[:5].astype(np.float32)
    first, stop = np.arange(5), np.arange(5) + 3
    distances, ids = exact_search(queries, embeddings, 4, (first, stop))
    full = ((queries[:, None] - vectors[None].astype(np.float32)) ** 2).sum(-1)
    for row in range(5):
        full[row, first[row] : stop[row]] = np.inf
        assert ids[row].tolist() == np.argsort(full[row], kind="stable")[:4].tolist()
    np.testing.assert_allclose(distances, np.sort(full, axis=1)[:, :4], atol=1e-4)


def test_missing_results_are_minus_one(tmp_path) -> None:
    index, embeddings = build(tmp_path, clustered(5), "Flat", num_shards=2)
    distances, ids = rerank(clustered(1, 1).astype(np.float32), index.search(clustered(1, 1), 8), embeddings)
    assert sorted(ids[0, :5].tolist()) == [0, 1, 2, 3, 4]
    assert (ids[0, 5:] == -1).all()
    assert np.isinf(distances[0, 5:]).all()


def test_equal_distances_are_ordered_by_id() -> None:
    distances, ids = order_by_distance(np.array([[1.0, 0.5, 1.0, 0.5]], np.float32), np.array([[7, 9, 3, -1]]))
    assert ids.tolist() == [[9, 3, 7, -1]]
    assert distances.tolist() == [[0.5, 1.0, 1.0, np.inf]]


def test_reranking_few_queries_does_not_change_the_number_of_threads() -> None:
    """A server searches from several threads at once, and all of them share torch's number of threads."""
    before, seen = torch.get_num_threads(), []
    vectors = clustered(40)

    class Watched:
        def gather(self, ids: np.ndarray) -> np.ndarray:
            seen.append(torch.get_num_threads())
            return vectors[ids]

    rerank(vectors[:3].astype(np.float32), np.arange(30).reshape(3, 10), Watched())  # type: ignore[arg-type]
    assert seen == [before]


def test_recall_counts_ties_as_found() -> None:
    assert recall(np.array([[0.1, 0.2]]), np.array([[0.1, 0.2]])) == 1
    assert recall(np.array([[0.1, 0.9]]), np.array([[0.1, 0.2]])) == 0.5
    assert recall(np.array([[0.1, np.inf]]), np.array([[0.1, np.inf]])) == 1


def test_training_twice_gives_the_same_bytes(tmp_path) -> None:
    for name in ("a", "b"):
        build(tmp_path / name, clustered(3000), "IVF32_HNSW8,PQ8x4fs", num_shards=2)
    for path in sorted((tmp_path / "a").rglob("*.faiss")):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes(), path


def test_tuning_selects_the_smallest_nprobe_that_reaches_the_target(tmp_path) -> None:
    index, embeddings = build(tmp_path, clustered(5000), "IVF64,Flat")
    queries = clustered(200, seed=1).astype(np.float32)
    tuned = tune(tmp_path, index, queries, embeddings, 64, IndexSettings(recall_target=0.9))
    below = [value for probe, value in tuned["curve"] if probe < tuned["nprobe"]]
    assert tuned["recall_at_10"] >= 0.9
    assert all(value < 0.9 for value in below)
    assert tuned["nprobe"] > 1


def test_unknown_key_and_too_few_vectors_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match=r"index\.factory = 'IVF4,Nonsense'"):
        train(tmp_path, "IVF4,Nonsense", clustered(100).astype(np.float32), 0)
    with pytest.raises(InputError, match=r"100 training vectors"):
        train(tmp_path, "IVF1000,Flat", clustered(100).astype(np.float32), 0)


@pytest.mark.parametrize("key", ["IDMap,Flat", "Flat,IDMap", "IVF16,Flat,IDMap2"])
def test_key_with_idmap_is_refused_before_any_work(key: str) -> None:
    with pytest.raises(InputError, match=r"index\.factory = .*remove IDMap"):
        IndexSettings(factory=key)


def test_index_without_add_with_ids_is_refused_before_training(tmp_path) -> None:
    key = "IVF16,Flat,RFlat"
    with pytest.raises(InputError, match=r"index\.factory = 'IVF16,Flat,RFlat'.*add_with_ids"):
        train(tmp_path, key, clustered(1000).astype(np.float32), 0)
