"""A string is one text in every function that takes several."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexing.retrieval.queries import query_texts
from indexing.retrieval.retriever import Retriever
from indexing.sparse.terms import query_terms
from indexing.store.errors import InputError
from indexing.tokenization.language import language_of
from indexing.tokenization.settings import TokenizerSettings
from indexing.tokenization.texts import as_texts
from indexing.tokenization.training import train_sentencepiece

TEXT = "retrieval of chunks"


def test_a_string_is_a_list_of_one_text_and_lists_stay_as_they_are() -> None:
    texts = ["a text", "b"]
    assert as_texts(TEXT) == [TEXT]
    assert as_texts(texts) is texts
    assert as_texts(()) == ()


@pytest.mark.parametrize(
    "function",
    [
        *(
            lambda retriever, texts, way=way: retriever.search(texts, 3, retrieval=way).hits
            for way in ("dense", "sparse", "hybrid")
        ),
        lambda retriever, texts: retriever.chunks.rank(texts, 3).ids.tolist(),
        lambda retriever, texts: retriever.queries.vectors(texts).tolist(),
        lambda retriever, texts: query_texts(texts, retriever.tokenizer),
        lambda retriever, texts: [row.tolist() for row in retriever.tokenizer.encode_batch(texts)],
        lambda retriever, texts: [row.tolist() for row in retriever.tokenizer.encode_blocks(texts)],
        lambda retriever, texts: language_of(texts),
    ],
)
def test_a_string_gives_the_result_of_a_list_with_it(
    retriever: Retriever, function: Callable[[Retriever, str | Sequence[str]], Any]
) -> None:
    assert function(retriever, TEXT) == function(retriever, [TEXT])


def test_a_string_is_one_term_of_a_query(retriever: Retriever) -> None:
    index = retriever.chunks._term_search.index
    term = query_terms(TEXT)[0]
    for alone, listed in zip(index.search([term], 3), index.search([[term]], 3), strict=True):
        np.testing.assert_array_equal(alone, listed)
    assert index.largest(term) == index.largest([term])


def test_a_tokenizer_of_one_string_is_that_of_one_text(tmp_path: Path) -> None:
    settings, text = TokenizerSettings(vocab_size=320), f"{TEXT} and their neighbors. " * 50
    train_sentencepiece(text, settings, tmp_path / "string")
    train_sentencepiece([text], settings, tmp_path / "list")
    for file in (tmp_path / "list").iterdir():
        assert (tmp_path / "string" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("queries", [[5, 6], np.array([5, 6])])
def test_token_ids_without_a_list_for_each_query_are_refused(retriever: Retriever, queries: Any) -> None:
    with pytest.raises(InputError, match="a list for each query"):
        retriever.search(queries)
