"""Search list by list finds the neighbors of Faiss in the same lists and excludes own documents, for any block size."""

from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

from indexing.index.build import tune_lists
from indexing.index.exact_search import exact_search, recall, rerank
from indexing.index.faiss_files import lists_of, write_index
from indexing.neighbors import list_pruning, list_search
from indexing.neighbors.list_search import ListIndex
from indexing.store.datastore import shard_name
from indexing.store.files import write_json
from indexing.store.sharded_array import ShardedArray
from tests.indexing.index.vector_files import stored

D, LISTS = 32, 16


@pytest.fixture(autouse=True, params=[(8, 2**22, 256), (1, 50, 3)], ids=["one-wave", "waves"])
def waves(request, monkeypatch) -> None:
    """All lists at a time; or the nearest first, with few better chunks of the others collected and merged at a time."""
    nearest, found, window = request.param
    monkeypatch.setattr(list_search, "_NEAREST", nearest)
    monkeypatch.setattr(list_pruning, "_FOUND", found)
    monkeypatch.setattr(list_pruning, "_WINDOW", window)


@pytest.fixture
def embeddings(tmp_path, request) -> ShardedArray:
    """Unit vectors around several centers in three files, so lists differ in length."""
    rng, total = np.random.default_rng(0), getattr(request, "param", 5000)
    centers = rng.standard_normal((9, D))
    return stored(tmp_path, centers[(9 * rng.random(total) ** 2).astype(int)] + rng.standard_normal((total, D)))


def written(folder: Path, embeddings: ShardedArray, key: str = f"IVF{LISTS},Flat", nprobe: int = 4) -> faiss.Index:
    """Write the index of a datastore in shards; returns one index of all chunks."""
    index = faiss.index_factory(D, key)
    index.train(embeddings.read(0, min(1000, len(embeddings))).astype(np.float32))
    for name in ("trained", "tuned", *map(shard_name, range(3))):
        (folder / name).mkdir(parents=True)
    write_index(folder / "trained" / "trained.faiss", index)
    write_json(folder / "tuned" / "tuned.json", {"nprobe": 1, "lists": {"nprobe": nprobe, "recall_at_10": 0.9}})
    whole = faiss.clone_index(index)
    for shard in range(3):
        vectors = embeddings.shard(shard).astype(np.float32)
        ids = np.arange(len(vectors)) + embeddings.starts[shard]
        each = faiss.clone_index(index)
        each.add_with_ids(vectors, ids)
        whole.add_with_ids(vectors, ids)
        write_index(folder / shard_name(shard) / "vectors.faiss", each)
    faiss.extract_index_ivf(whole).nprobe = nprobe
    return whole


def opened(folder: Path, embeddings: ShardedArray, device: str = "cpu", shards: range = range(3)) -> ListIndex:
    index = ListIndex.open(folder, embeddings, shards, device)
    assert index is not None
    return index


SEARCHED = [
    *((size, key) for size in (40, 5000) for key in ("{},Flat", "{}_HNSW8,Flat")),
    *((1000, "OPQ8_32,{},PQ8x4"), (5000, "{},PQ8x4fs")),
]
"""Numbers of vectors and their index. Product quantizers cannot be trained on 40 vectors."""


@pytest.mark.parametrize(
    ("embeddings", "key"),
    [(size, key.format(f"IVF{LISTS}")) for size, key in SEARCHED],
    indirect=["embeddings"],
)
def test_list_search_finds_the_exact_nearest_of_the_visited_lists(tmp_path, embeddings: ShardedArray, key: str) -> None:
    whole = written(tmp_path / "index", embeddings, key)
    queries = embeddings.read(0, min(300, len(embeddings))).astype(np.float32)
    index = opened(tmp_path / "index", embeddings)
    found = rerank(queries, index.search(queries, 24), embeddings)[0]
    ivf, turned = faiss.extract_index_ivf(whole), queries
    if isinstance(whole, faiss.IndexPreTransform):
        turned = faiss.downcast_VectorTransform(whole.chain.at(0)).apply(queries)
    visited = ivf.quantizer.search(turned, 4)[1]
    lists = np.empty(len(embeddings), dtype=int)
    for number, ids in lists_of(whole):
        lists[ids] = number
    vectors = embeddings.read(0, len(embeddings)).astype(np.float32)
    distances = ((queries[:, None] - vectors) ** 2).sum(2)
    distances[~(lists == visited[:, :, None]).any(1)] = np.inf
    expected = np.sort(distances, axis=1)[:, :8]
    assert recall(found[:, :8], expected) > 0.98  # bfloat16 can assign a query to an adjacent list


@pytest.mark.parametrize("excluded", [5, 700])
def test_search_of_all_lists_is_exhaustive_and_excludes_the_own_document(tmp_path, embeddings, excluded: int) -> None:
    written(tmp_path / "index", embeddings)
    rows = np.arange(0, len(embeddings), 17)
    queries = embeddings.gather(rows).astype(np.float32)
    own = (rows // excluded * excluded, np.minimum(rows // excluded * excluded + excluded, len(embeddings)))
    index = opened(tmp_path / "index", embeddings)
    ids = index.search(queries, 24, own, nprobe=10**6)
    assert not ((ids >= own[0][:, None]) & (ids < own[1][:, None])).any()
    assert (ids >= 0).all()
    assert all(len(set(row)) == 24 for row in ids)
    exact, _ = exact_search(queries, embeddings, 8, own)
    assert recall(rerank(queries, ids, embeddings)[0][:, :8], exact) > 0.99


@pytest.mark.parametrize(("nprobe", "expected"), [(1, [1]), (32, [32]), (48, [8, 40]), (1000, [8, 56, 448, 488])])
def test_waves_of_lists_grow_and_sum_up_to_nprobe(monkeypatch, nprobe: int, expected: list[int]) -> None:
    monkeypatch.setattr(list_search, "_NEAREST", 8)
    assert list_search.waves(nprobe) == expected
    assert sum(expected) == nprobe


@pytest.mark.parametrize("embeddings", [40], indirect=True)
def test_missing_neighbors_are_minus_one(tmp_path, embeddings: ShardedArray) -> None:
    written(tmp_path / "index", embeddings, nprobe=LISTS)
    queries = embeddings.read(0, 40).astype(np.float32)
    ids = opened(tmp_path / "index", embeddings).search(queries, 64, (np.zeros(40, int), np.full(40, 30)))
    assert np.array_equal(np.sort(ids, axis=1), np.tile(np.r_[[-1] * 54, 30:40], (40, 1)))


def test_appended_shards_can_be_searched_separately(tmp_path, embeddings: ShardedArray) -> None:
    written(tmp_path / "index", embeddings, nprobe=LISTS)
    first, queries = int(embeddings.starts[1]), embeddings.read(0, 200).astype(np.float32)
    index = opened(tmp_path / "index", embeddings, shards=range(1, 3))
    ids = index.search(queries, 16)
    assert index.num_vectors == len(embeddings) - first
    assert ids.min() >= first
    later = ShardedArray(embeddings.paths[1:], np.diff(embeddings.starts[1:]))
    assert recall(rerank(queries, ids, embeddings)[0][:, :8], exact_search(queries, later, 8)[0]) > 0.99


def test_results_do_not_depend_on_parts_of_lists_and_blocks_of_queries(tmp_path, embeddings, monkeypatch) -> None:
    written(tmp_path / "index", embeddings)
    queries = embeddings.read(0, 600).astype(np.float32)
    own = (np.arange(600) // 9 * 9, np.arange(600) // 9 * 9 + 9)
    whole = opened(tmp_path / "index", embeddings).search(queries, 24, own)
    monkeypatch.setattr(list_search, "MEMORY", 2 * D * 700)
    monkeypatch.setattr(list_search, "_ROWS", 100)
    index = opened(tmp_path / "index", embeddings)
    assert len(list(index._parts())) > 4
    parts = index.search(queries, 24, own)
    same = [len(set(a) & set(b)) for a, b in zip(whole, parts, strict=True)]
    assert np.mean(same) > 23.5  # except for ties in bfloat16


def test_queries_of_long_lists_are_searched_in_small_groups(tmp_path, embeddings, monkeypatch) -> None:
    """Appended text differs from the text that the lists were trained on, so most chunks are in one list."""
    trained, lists = written(tmp_path / "index", embeddings), np.zeros(len(embeddings), dtype=np.int32)
    lists[:100] = np.arange(100) % LISTS
    queries = embeddings.read(0, 600).astype(np.float32)
    index = ListIndex(trained, LISTS, embeddings, lists, device="cpu")
    whole, held = index.search(queries, 16), []
    monkeypatch.setattr(list_search, "_PRODUCTS", {"cpu": 200_000})
    monkeypatch.setattr(list_pruning, "_PRODUCTS", 200_000)
    best_of = list_search.best_of
    monkeypatch.setattr(
        list_search, "best_of", lambda points, *rest: (held.append(len(points)), best_of(points, *rest))[1]
    )
    multiply, sizes = torch.mm, []
    monkeypatch.setattr(torch, "mm", lambda *both, out: (sizes.append(out.numel()), multiply(*both, out=out))[1])
    parts = index.search(queries, 16)
    assert sum(held) == len(queries)
    assert max(sizes) < 3 * 200_000
    if len(list_search.waves(LISTS)) == 1:  # all lists are visited together, so their products are held together
        assert max(held) * len(embeddings) < 3 * 200_000
    assert np.mean([len(set(a) & set(b)) for a, b in zip(whole, parts, strict=True)]) > 15.5


def test_results_do_not_depend_on_the_number_of_threads(tmp_path, embeddings: ShardedArray) -> None:
    written(tmp_path / "index", embeddings)
    queries = embeddings.read(0, 600).astype(np.float32)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(opened(tmp_path / "index", embeddings).search(queries, 16))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert np.array_equal(*found)


def test_nprobe_is_the_smallest_that_reaches_the_recall(tmp_path, embeddings: ShardedArray) -> None:
    index = written(tmp_path / "index", embeddings)
    queries = embeddings.read(0, 400).astype(np.float32)
    ids = exact_search(queries, embeddings, 10)[1]
    reached = {}
    for nprobe in range(1, LISTS + 1):
        index.nprobe = nprobe
        found = index.search(queries, 10)[1]
        reached[nprobe] = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, ids, strict=True)])
    for target in (0.5, 0.9, 0.99):
        tuned = tune_lists(index, queries, ids, embeddings, target)
        assert tuned["nprobe"] == next(nprobe for nprobe, share in reached.items() if share >= target)
        assert tuned["recall_at_10"] == pytest.approx(reached[tuned["nprobe"]], abs=0.005)  # except for equal distances


def test_index_without_lists_has_no_list_search(tmp_path, embeddings: ShardedArray) -> None:
    (tmp_path / "index" / "tuned").mkdir(parents=True)
    write_json(tmp_path / "index" / "tuned" / "tuned.json", {"nprobe": 1})
    assert ListIndex.open(tmp_path / "index", embeddings, range(3)) is None


@pytest.mark.gpu
def test_gpu_finds_the_same_neighbors(tmp_path, embeddings: ShardedArray) -> None:
    written(tmp_path / "index", embeddings)
    queries = embeddings.read(0, 600).astype(np.float32)
    found = [
        rerank(queries, opened(tmp_path / "index", embeddings, device).search(queries, 16), embeddings)[0][:, :8]
        for device in ("cpu", "cuda")
    ]
    assert recall(found[1], found[0]) > 0.98
