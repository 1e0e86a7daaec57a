"""Queries are checked, and embedded in batches of similar length."""

import numpy as np
import pytest

from indexing.retrieval.retriever import Retriever
from indexing.store.errors import InputError


@pytest.mark.parametrize(
    ("queries", "options", "words"),
    [
        ([""], {}, "is empty"),
        ([" \n"], {}, "is empty"),
        (["a", [1]], {}, "all texts, all token ids or all vectors"),
        ([np.array([], dtype=np.int64)], {}, "is empty"),
        ([[5, 4000]], {}, "token id 4000: the tokenizer's are 0 to"),
        ([[-1]], {}, "token id -1"),
        (np.zeros((1, 32)), {}, "zero"),
        (np.full((1, 32), np.nan), {}, "not finite"),
        (np.ones((1, 31)), {}, r"shape \[1, 31\]: must be \[queries, 32\]"),
        (np.ones((1, 32)), {"retrieval": "sparse"}, "vectors have no terms"),
        (["a"], {"k": 0}, "k = 0: must be at least 1"),
        (["a"], {"retrieval": "magic"}, "accepted are dense, sparse, hybrid"),
        (["a"], {"filters": {"lang": "en"}}, "no column 'lang'; accepted are id, file, title"),
    ],
)
def test_invalid_queries_are_refused_with_the_reason(retriever: Retriever, queries, options, words: str) -> None:
    with pytest.raises(InputError, match=words):
        retriever.search(queries, **options)


def test_texts_are_padded_in_groups_of_similar_length(retriever: Retriever, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["index " * 300, *("chunk " * number for number in range(1, 20)), "检索 " * 40]
    expected, padded = retriever.queries.vectors(texts), list[int]()
    embed = type(retriever.embedder).embed

    def counted(self: object, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        padded.append(tokens.size)
        return embed(self, tokens, lengths)

    monkeypatch.setattr(type(retriever.embedder), "embed", counted)
    monkeypatch.setattr("indexing.retrieval.queries._PADDED_TOKENS", 1000)
    np.testing.assert_allclose(retriever.queries.vectors(texts), expected, rtol=1e-6)
    assert sum(padded) < 3000  # padding to the longest of 21 texts would give more than 300 for each
    assert len(padded) < 10
