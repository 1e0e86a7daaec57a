"""The sparse index finds the chunks with the highest BM25, over all shards and datastores."""

import math
import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.sparse import segments
from indexing.sparse.index import SparseIndex
from indexing.sparse.segments import write_segments
from indexing.sparse.terms import terms
from indexing.store.datastore import Datastore, Split
from indexing.store.errors import InputError
from indexing.store.retrieval_set import CHUNK_ID_BITS
from indexing.tokenization.tokenizer import Tokenizer

K1, B = 1.2, 0.75


def counted_terms(split: Split, tokenizer: Tokenizer) -> tuple[list[Counter[str]], list[Counter[str]], np.ndarray]:
    """The terms of each chunk and of each passage of 512 tokens (title 4) as often as they count; passage of each chunk."""
    tokens, lengths = split.tokens.read(0, split.num_chunks), split.lengths.read(0, split.num_chunks)
    rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    numbers, first, _ = split.documents_of(np.arange(split.num_chunks))
    titles = [terms(row["title"]) for row in split.metadata(numbers.tolist())]
    chunks = [Counter(terms(tokenizer.decode(row)) + title) for row, title in zip(rows, titles, strict=True)]
    size = 512 // split.chunk_length
    members: dict[tuple[int, int], list[int]] = {}
    for chunk in range(split.num_chunks):
        members.setdefault((int(first[chunk]), (chunk - int(first[chunk])) // size), []).append(chunk)
    passages = [
        Counter(terms(tokenizer.decode(np.concatenate([rows[each] for each in of]))) + 4 * titles[of[0]])
        for of in members.values()
    ]
    return chunks, passages, np.repeat(np.arange(len(members)), [len(of) for of in members.values()])


def expected_scores(query: list[str], counted: tuple[list[Counter[str]], list[Counter[str]], np.ndarray]) -> np.ndarray:
    """BM25 of each chunk, plus that of its passage if the chunk has a term, or is first in a passage whose chunks have none."""
    chunks, passages, of = counted
    own, around = bm25(query, chunks, counts_matter=False), bm25(query, passages)
    has_any = np.bincount(of, own > 0, len(passages))[of] > 0
    is_first = np.diff(of, prepend=-1) > 0
    weight = 2 * min(1, 8 / max(1, len(set(query))))
    return np.where((own > 0) | (is_first & ~has_any), own + weight * around[of], 0)


def bm25(query: list[str], counted: list[Counter[str]], *, counts_matter: bool = True) -> np.ndarray:
    """The formula of Robertson and Zaragoza (2009), with tantivy's weight of a term."""
    mean = np.mean([counts.total() for counts in counted])
    scores = np.zeros(len(counted))
    for term in query:
        holding = sum(term in counts for counts in counted)
        weight = math.log(1 + (len(counted) - holding + 0.5) / (holding + 0.5))
        for chunk, counts in enumerate(counted):
            count = counts[term] if counts_matter else min(counts[term], 1)
            norm = K1 * (1 - B + B * counts.total() / mean)
            scores[chunk] += weight * (K1 + 1) * count / (count + norm)
    return scores


@pytest.fixture(scope="module")
def tokenizer(tiny_datastore: Datastore) -> Tokenizer:
    return Tokenizer.open(tiny_datastore.folder / "tokenizer")


LONG = "gradient memory retrieval of a chunk returns 42 documents with 检索 and 数据 in the title"
QUERIES = ["title 42 gradient", "检索 检索 the memory", "document 7 return", LONG, "nowhere", ""]


def test_scores_follow_the_formula_over_all_shards(tiny_datastore: Datastore, tokenizer: Tokenizer) -> None:
    split = tiny_datastore.train
    assert len(split.chunk_rows) > 1
    counted = counted_terms(split, tokenizer)
    ids, scores = SparseIndex.open([split]).search([terms(query) for query in QUERIES], split.num_chunks)
    for row, query in enumerate(QUERIES):
        expected = expected_scores(terms(query), counted)
        found = ids[row][ids[row] >= 0]
        assert set(found.tolist()) == set(np.flatnonzero(expected).tolist())
        # tantivy stores the length of a text in a byte.
        np.testing.assert_allclose(scores[row, : len(found)], expected[found], rtol=0.08)
        assert (np.diff(scores[row]) <= 0).all()
    assert len(set(terms(LONG))) > 8
    assert (ids[4:] == -1).all()


def test_number_of_segments_changes_no_result(
    tiny_datastore: Datastore, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = tiny_datastore.train
    monkeypatch.setattr(segments, "_SEGMENT_TOKENS", 150 * split.chunk_length)
    monkeypatch.setattr(segments, "_BLOCK_CHUNKS", 40)
    for shard in range(len(split.chunk_rows)):
        rows = (int(split.tokens.starts[shard]), int(split.tokens.starts[shard + 1]))
        work = tmp_path / "sparse" / f"{shard:05d}"
        work.mkdir(parents=True)
        assert write_segments(work, split, rows, tokenizer, lambda _: None) == rows[1] - rows[0]
    queries = [terms(query) for query in QUERIES]
    divided, whole = SparseIndex.open([replace(split, folder=tmp_path)]), SparseIndex.open([split])
    assert len(divided.chunks.starts) > len(whole.chunks.starts) == len(split.chunk_rows)
    for found, expected in zip(divided.search(queries, 50), whole.search(queries, 50), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_equal_chunks_give_equal_bytes(tiny_datastore: Datastore, tokenizer: Tokenizer, tmp_path: Path) -> None:
    split = tiny_datastore.train
    write_segments(tmp_path, split, (0, split.chunk_rows[0]), tokenizer, lambda _: None)
    made = tiny_datastore.folder / "sparse" / "00000"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in made.iterdir()} - {"manifest.json"}
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (made / path.name).read_bytes(), path.name


def test_search_among_some_chunks_finds_no_others(tiny_datastore: Datastore) -> None:
    index = SparseIndex.open([tiny_datastore.train])
    query = [terms("the memory of a document")]
    ids, scores = index.search(query, index.num_chunks)
    among = ids[0, 1:30:3]
    found, their_scores = index.search(query, 20, among.tolist())
    np.testing.assert_array_equal(found[0, : len(among)], among)
    np.testing.assert_allclose(their_scores[0, : len(among)], scores[0, 1:30:3], rtol=1e-6)
    assert (found[0, len(among) :] == -1).all()


def test_several_datastores_are_searched_with_the_weights_of_all(tiny_datastore: Datastore) -> None:
    """The same chunks twice: both copies of a chunk get the same score."""
    split = tiny_datastore.train
    index = SparseIndex.open([split, split])
    (ids,), (scores,) = index.search([terms("title 42 memory")], index.num_chunks)
    of_copy = [
        dict(zip(ids[chosen].tolist(), scores[chosen].tolist(), strict=True))
        for chosen in (ids >> CHUNK_ID_BITS == 0, ids >> CHUNK_ID_BITS == 1)
    ]
    assert of_copy[0] == {chunk & ((1 << CHUNK_ID_BITS) - 1): score for chunk, score in of_copy[1].items()}
    assert len(of_copy[0]) > 40


def test_files_may_be_moved_after_opening(
    tiny_datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index maps its files when it is opened, and leaves nothing behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other processes of tests use the usual one
    index = SparseIndex.open([tiny_datastore.train])
    assert not list(tmp_path.iterdir())
    assert (index.search([terms("memory")], 3)[0] >= 0).all()


def test_a_missing_shard_is_named(tiny_datastore: Datastore, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"sparse/00000.*--stage sparse"):
        SparseIndex.open([replace(tiny_datastore.train, folder=tmp_path)])


def test_a_folder_is_removed_although_a_thread_still_makes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, left = shutil.rmtree, [2]

    def disturbed(folder: Path, ignore_errors: bool) -> None:
        """What `shutil.rmtree` does if a file appears after it has listed the folder."""
        if left[0]:
            left[0] -= 1
            assert ignore_errors
        else:
            remove(folder)

    monkeypatch.setattr(segments.shutil, "rmtree", disturbed)
    with segments.temporary_folder(tmp_path) as folder:
        (folder / ".tantivy-meta.lock").touch()
    assert left == [0]
    assert list(tmp_path.iterdir()) == []
