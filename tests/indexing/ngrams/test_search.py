"""Chunks that share rare n-grams: the same candidates and sums as counting n-grams one by one, for any cut into shards."""

import itertools
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from indexing.ngrams import index as ngram_index
from indexing.ngrams import search as ngram_search
from indexing.ngrams.index import FOLDER, Generation, num_passes, write_ngrams, write_run
from indexing.ngrams.search import NgramIndex
from indexing.store.artifact import Recipe, create
from indexing.store.datastore import Split, shard_name, write_datastore_manifest
from indexing.store.errors import InputError
from indexing.store.files import save_array
from indexing.store.retrieval_set import RetrievalSet


def all_kept(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return ids


def split_of(folder: Path, shards: list[tuple[np.ndarray, np.ndarray]]) -> Split:
    """A training split with these tokens and lengths, without documents."""
    for shard, arrays in enumerate(shards):
        for name, array in zip(("tokens", "lengths"), arrays, strict=True):
            path = folder / "chunks" / shard_name(shard) / "train" / f"{name}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            save_array(path, array)
    rows = tuple(len(tokens) for tokens, _ in shards)
    return Split(folder, "train", rows, rows, shards[0][0].shape[1], pad_id=0)


def write_all(split: Split, shards: range) -> None:
    """Write the n-grams of a generation, as the stage does."""
    generation, folder = Generation(split, shards), split.folder / FOLDER
    for made in generation.passes():
        runs = split.folder / "runs" / str(made.start)
        for shard in shards:
            (runs / shard_name(shard)).mkdir(parents=True)
            write_run(runs / shard_name(shard), generation, shard, made, lambda count: None)
        for shard in made:
            recipe = Recipe("ngrams", 1, {"shard": shard, "shards": len(shards)})
            with create(folder / shard_name(shard), recipe) as (work, counts):
                counts |= write_ngrams(work, generation, runs, made, shard)
    rows = {"chunks": list(split.chunk_rows), "documents": list(split.chunk_rows)}
    facts = {"chunk_length": split.chunk_length, "pad_id": split.pad_id, "splits": {"train": rows}}
    write_datastore_manifest(
        split.folder, {"fingerprints": {"ngrams": ""}, "artifacts": {}, "vocab_size": 1 << 31, **facts}
    )


def index_of(
    folder: Path, shards: list[tuple[np.ndarray, np.ndarray]], generations: tuple[int, ...] = ()
) -> NgramIndex:
    """The n-grams of some shards, which are those of generations of these sizes."""
    split, first = split_of(folder, shards), 0
    for size in generations or (len(shards),):
        write_all(split, range(first, first + size))
        first += size
    return NgramIndex.open(RetrievalSet((split,)))


def random_chunks(seed: int, count: int, m: int = 12, vocabulary: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Chunks of tokens of very different frequency, and lengths of 1 to m."""
    rng = np.random.default_rng(seed)
    tokens = np.minimum(rng.geometric(3 / vocabulary, (count, m)), vocabulary - 1).astype(np.uint16)
    return tokens, rng.integers(1, m + 1, count).astype(np.uint16)


def ngrams_of(tokens: np.ndarray, length: int) -> set[tuple[int, ...]]:
    text = tokens[:length].tolist()
    return {tuple(text[i : i + order]) for order in (2, 4) for i in range(int(length) - order + 1)}


def reference(
    chunks: list[set[tuple[int, ...]]], queries: list[set[tuple[int, ...]]], most: int
) -> list[dict[int, float]]:
    """For each query, chunk → the sum of idf, in 256ths, of all shared n-grams that 2 to `most` chunks hold."""
    frequencies = Counter(itertools.chain.from_iterable(chunks))
    holders = defaultdict(list)
    for number, grams in enumerate(chunks):
        for gram in grams:
            holders[gram].append(number)
    out = []
    for grams in queries:
        sums: dict[int, float] = defaultdict(float)
        for gram in grams:
            if 2 <= frequencies[gram] <= most:
                for number in holders[gram]:
                    sums[number] += round(256 * np.log((len(chunks) + 1) / frequencies[gram])) / 256
        out.append(dict(sums))
    return out


@pytest.mark.parametrize(("shards", "part_ngrams", "run_bytes"), [(1, 2**24, 2**34), (3, 2**24, 1), (5, 500, 40_000)])
def test_candidates_are_those_of_counting(tmp_path, monkeypatch, shards: int, part_ngrams: int, run_bytes: int) -> None:
    monkeypatch.setattr(ngram_index, "_PART_NGRAMS", part_ngrams)
    monkeypatch.setattr(ngram_index, "_RUN_BYTES", run_bytes)
    monkeypatch.setattr(ngram_index, "MOST_CHUNKS", 20)
    monkeypatch.setattr(ngram_search, "MOST_CHUNKS", 20)
    tokens, lengths = random_chunks(0, 600)
    cuts = np.sort(np.random.default_rng(1).integers(0, 600, shards - 1))
    index = index_of(tmp_path, list(zip(np.split(tokens, cuts), np.split(lengths, cuts), strict=True)))
    chunks = [ngrams_of(*chunk) for chunk in zip(tokens, lengths, strict=True)]
    query_tokens, query_lengths = random_chunks(2, 50)
    queries = [ngrams_of(*query) for query in zip(query_tokens, query_lengths, strict=True)]
    ids = index.search(query_tokens, query_lengths, 30, 1, all_kept, own=False)
    for row, expected in enumerate(reference(chunks, queries, 20)):
        best = sorted(expected, key=lambda chunk: (-expected[chunk], chunk))[:30]
        assert ids[row].tolist() == best + [-1] * (30 - len(best))


@pytest.mark.parametrize(("chunks", "passes"), [(0, 1), (10**6, 1), (25 * 10**6, 2), (10**9, 4), (4 * 10**9, 4)])
def test_the_chunks_of_a_generation_are_read_a_bounded_number_of_times(chunks: int, passes: int) -> None:
    """In as many as grow with the datastore, the time of `ngrams` would grow with the square."""
    split = Split(Path(), "train", (chunks // 40,) * 40, (1,) * 40, 64, pad_id=0)
    groups = list(Generation(split, range(40)).passes())
    assert len(groups) == num_passes(chunks, 64) == passes
    assert [*itertools.chain.from_iterable(groups)] == list(range(40))


def test_only_the_rarest_ngrams_of_a_query_count(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ngram_search, "_RAREST", 1)
    rare, frequent = [1, 2, 0, 0], [3, 4, 0, 0]
    tokens = np.array([rare] * 2 + [frequent] * 9, dtype=np.uint16)
    lengths = np.full(len(tokens), 2, dtype=np.uint16)
    index = index_of(tmp_path, [(tokens, lengths)])
    query = np.array([[3, 4, 1, 2]], dtype=np.uint16)
    ids = index.search(query, np.array([4]), 4, 1, all_kept, own=False)
    assert sorted(ids[0].tolist()) == [-1, -1, 0, 1]


def test_the_rarest_ngrams_of_a_query_count_until_their_lists_are_long(tmp_path, monkeypatch) -> None:
    held = [[1, 2]] * 2 + [[3, 4]] * 3 + [[5, 6]] * 4  # by 2, 3 and 4 chunks
    index = index_of(tmp_path, [(np.array(held, dtype=np.uint16), np.full(9, 2, dtype=np.uint16))])
    queries = np.array([[5, 6, 1, 2, 3, 4], [5, 6, 3, 4, 5, 6], [7, 7, 7, 7, 7, 7]], dtype=np.uint16)
    for most, expected in ((2, {0, 1}), (3, {0, 1, 2, 3, 4}), (5, {0, 1, 2, 3, 4}), (6, set(range(9)))):
        monkeypatch.setattr(ngram_search, "_MOST_ENTRIES", most)
        ids = index.search(queries, np.full(3, 6), 16, 1, all_kept, own=False)
        assert set(ids[0].tolist()) - {-1} == expected
        assert set(ids[1].tolist()) - {-1} == {2, 3, 4} | ({5, 6, 7, 8} if most > 3 else set())
        assert set(ids[2].tolist()) == {-1}


def test_a_query_alone_has_the_candidates_that_it_has_among_others(tmp_path) -> None:
    tokens, lengths = random_chunks(3, 400)
    index = index_of(tmp_path, [(tokens, lengths)])
    together = index.search(tokens, lengths, 20, 5, all_kept, own=False)
    for row in range(0, 400, 40):
        alone = index.search(tokens[[row]], lengths[[row]], 20, 5, all_kept, own=False)
        np.testing.assert_array_equal(alone[0], together[row])


def test_blocks_and_parts_change_no_candidate(tmp_path, monkeypatch) -> None:
    tokens, lengths = random_chunks(4, 500)
    index = index_of(tmp_path, [(tokens, lengths)])
    whole = index.search(tokens, lengths, 20, 5, all_kept, own=True)
    monkeypatch.setattr(ngram_search, "_BLOCK_ROWS", 128)
    monkeypatch.setattr(ngram_search, "_ENTRIES", 1000)
    parts = index.search(tokens, lengths, 20, 5, all_kept, own=True)
    np.testing.assert_array_equal(parts, whole)


def test_excluded_candidates_are_replaced_by_the_next_ones(tmp_path) -> None:
    tokens, lengths = random_chunks(5, 500)
    index = index_of(tmp_path, [(tokens, lengths)])
    everything = index.search(tokens[:40], lengths[:40], 400, 1, all_kept, own=False)

    def odd(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return np.where(ids % 2 == 1, ids, -1)

    found = index.search(tokens[:40], lengths[:40], 10, 10, odd, own=False)
    for row in range(40):
        expected = [number for number in everything[row].tolist() if number >= 0 and number % 2]
        assert set(found[row][found[row] >= 0].tolist()) <= set(expected)
        assert (found[row] >= 0).sum() == min(10, len(expected))


def test_frequencies_of_generations_are_added_up(tmp_path) -> None:
    """An n-gram that is rare in each generation can be frequent in all."""
    tokens, lengths = random_chunks(6, 600, m=6, vocabulary=400)
    tokens[::4, :2] = 7, 8  # a bigram of 150 chunks in all, in 75 of each half
    halves = list(zip(np.split(tokens, 2), np.split(lengths, 2), strict=True))
    index = index_of(tmp_path, halves, generations=(1, 1))
    assert [lists.num_chunks for lists in index.lists] == [300, 300]
    query = np.array([[7, 8, 0, 0, 0, 0]], dtype=np.uint16)
    ids = index.search(query, np.array([2]), 200, 1, all_kept, own=False)
    chunks = np.flatnonzero([(7, 8) in ngrams_of(*chunk) for chunk in zip(tokens, lengths, strict=True)])
    assert sorted(ids[ids >= 0].tolist()) == chunks.tolist()
    assert chunks[0] < 300 <= chunks[-1]


@pytest.mark.parametrize("m", [1, 2, 3])
def test_chunks_shorter_than_the_longest_ngram(tmp_path, m: int) -> None:
    tokens, lengths = random_chunks(7, 100, m=m)
    index = index_of(tmp_path, [(tokens, lengths)])
    ids = index.search(tokens, lengths, 5, 5, all_kept, own=True)
    shared = np.flatnonzero((ids >= 0).any(axis=1))
    assert (lengths[shared] >= 2).all()
    assert (len(shared) > 0) == (m > 1)


def test_tokens_above_16_bits_are_distinguished(tmp_path) -> None:
    tokens = np.array([[1, 2], [1, 2 + 2**16], [1, 2], [1, 2 + 2**16]], dtype=np.uint32)
    index = index_of(tmp_path, [(tokens, np.full(4, 2, dtype=np.uint16))])
    ids = index.search(tokens, np.full(4, 2), 4, 1, all_kept, own=True)
    assert [sorted(row[row >= 0].tolist()) for row in ids] == [[0, 2], [1, 3], [0, 2], [1, 3]]


@pytest.mark.parametrize("count", [256, 257])
def test_ngrams_of_too_many_chunks_do_not_count(tmp_path, count: int) -> None:
    tokens = np.tile(np.array([5, 6, 7, 8], dtype=np.uint16), (count, 1))
    index = index_of(tmp_path, [(tokens, np.full(count, 4, dtype=np.uint16))])
    ids = index.search(tokens[:3], np.full(3, 4), 10, 10, all_kept, own=True)
    assert (ids >= 0).all() == (count == 256)
    assert (ids < 0).all() == (count > 256)


def test_no_chunks_have_no_ngrams(tmp_path) -> None:
    index = index_of(tmp_path, [random_chunks(8, 0), random_chunks(8, 0)])
    ids = index.search(*random_chunks(9, 5), 4, 2, all_kept, own=False)
    assert (ids == -1).all()


@pytest.mark.usefixtures("not_compared")
def test_damaged_lists_are_named(tmp_path) -> None:
    index_of(tmp_path, [random_chunks(10, 200)])
    path = tmp_path / FOLDER / "00000" / "chunks.npy"
    array = np.load(path)
    array[:] = 2**32 - 1
    np.save(path, array)
    index = NgramIndex.open(RetrievalSet((split_of(tmp_path, [random_chunks(10, 200)]),)))
    with pytest.raises(InputError, match=r"chunks\.npy names chunks from 200 on"):
        index.search(*random_chunks(10, 200), 4, 2, all_kept, own=True)
