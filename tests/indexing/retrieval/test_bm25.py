"""BM25: terms, statistics, and scores equal to the formula."""

import math

import numpy as np
import pytest

from indexing.retrieval.bm25 import ADJACENT, K1, TITLE, B, TermStatistics, bm25, sample_statistics, terms
from indexing.store.datastore import Datastore
from indexing.store.retrieval_set import RetrievalSet
from indexing.tokenization.tokenizer import Tokenizer

Opened = tuple[RetrievalSet, Tokenizer, TermStatistics]


@pytest.fixture(scope="module")
def opened(tiny_datastore: Datastore) -> Opened:
    retrieval = RetrievalSet.of(tiny_datastore)
    tokenizer = Tokenizer.open(tiny_datastore.folder / "tokenizer")
    return retrieval, tokenizer, sample_statistics(retrieval, tokenizer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Stores of READ_FILE(2)!", ["the", "store", "of", "read", "file", "2"]),
        ("cities, buses, glass, is, us", ["city", "buse", "glass", "is", "us"]),
        ("检索模型", ["检", "索", "模", "型", "检索", "索模", "模型"]),
        ("用BM25检", ["用", "bm25", "检"]),
        ("한국어 텍스트", ["한국어", "텍스트"]),
        ("…?! _", []),
    ],
)
def test_terms_are_lowercase_words_and_characters_with_their_pairs(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


def test_scores_equal_the_formula(opened: Opened) -> None:
    retrieval, tokenizer, statistics = opened
    ids = np.array([[7, 40, 3, -1, 7]])
    scores, largest = bm25(["gradient of the title 检索 检索"], ids, retrieval, tokenizer, statistics)

    def text_of(chunk: int) -> list[str]:
        tokens, lengths = retrieval.chunks(np.array([chunk]))
        return terms(tokenizer.decode(tokens[0, : lengths[0]]))

    query = terms("gradient of the title 检索 检索")
    weights = {
        term: math.log(1 + (statistics.num_chunks - n + 0.5) / (n + 0.5))
        for term in query
        if (n := statistics.frequencies.get(term, 0)) is not None
    }
    for column, chunk in enumerate(ids[0].tolist()):
        if chunk < 0:
            assert scores[0, column] == 0
            continue
        adjacent = [each for each in retrieval.adjacent(np.array([chunk]))[0].tolist() if each >= 0]
        title = terms(retrieval.metadata(np.array([chunk]))[0]["title"])
        length = len(text_of(chunk)) + ADJACENT * sum(len(text_of(each)) for each in adjacent)
        expected = 0.0
        for term in query:
            count = text_of(chunk).count(term) + TITLE * title.count(term)
            count += ADJACENT * sum(text_of(each).count(term) for each in adjacent)
            norm = K1 * (1 - B + B * length / statistics.mean_length)
            expected += weights[term] * count * (K1 + 1) / (count + norm)
        assert scores[0, column] == pytest.approx(expected, rel=1e-4)
    assert largest[0] == pytest.approx(sum(weights[term] for term in query) * (K1 + 1), rel=1e-4)
    assert scores.max() < largest[0]


def test_statistics_of_a_small_datastore_count_every_chunk_once(opened: Opened) -> None:
    retrieval, tokenizer, statistics = opened
    tokens, lengths = retrieval.chunks(np.arange(retrieval.num_chunks))
    texts = [set(terms(tokenizer.decode(row[:length]))) for row, length in zip(tokens, lengths, strict=True)]
    assert statistics.num_chunks == retrieval.num_chunks
    for term in ("the", "检索", "gradient"):
        assert statistics.frequencies[term] == sum(term in text for text in texts)
    assert statistics == sample_statistics(retrieval, tokenizer)


def test_scores_do_not_depend_on_other_queries_of_the_batch(opened: Opened) -> None:
    queries = [f"title {number} memory of a chunk" for number in range(40)]
    ids = np.random.default_rng(0).integers(0, opened[0].num_chunks, (40, 20))
    together = bm25(queries, ids, *opened)
    for row in (0, 31, 32, 39):
        alone = bm25([queries[row]], ids[[row]], *opened)
        np.testing.assert_allclose(alone[0][0], together[0][row], rtol=1e-5)
        np.testing.assert_allclose(alone[1][0], together[1][row], rtol=1e-5)


def test_query_without_terms_has_zero_scores(opened: Opened) -> None:
    scores, largest = bm25(["?!"], np.array([[1, 2]]), *opened)
    assert not scores.any()
    assert not largest.any()
