"""Terms of texts and queries."""

import pytest

from indexing.sparse.terms import query_terms, terms, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Stores of READ_FILE(2)!", ["the", "store", "of", "read", "file", "2"]),
        ("Cities, connected, glass, is, 2018", ["citi", "connect", "glass", "is", "2018"]),
        ("检索模型", ["检", "索", "模", "型", "检索", "索模", "模型"]),
        ("用BM25检", ["用", "bm25", "检"]),
        ("한국어 텍스트", ["한국어", "텍스트"]),
        ("…?! _", []),
    ],
)
def test_terms_are_stems_and_characters_with_their_pairs(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What was the name of the ship?", ["name", "ship"]),
        ("who is who", ["who", "is", "who"]),
        ("这个模型是什么", terms("这个模型是什么")),
        ("", []),
    ],
)
def test_a_query_has_no_function_words_unless_it_has_no_others(text: str, expected: list[str]) -> None:
    assert query_terms(text) == expected


def test_words_are_those_between_blanks_and_chinese_characters() -> None:
    assert words("The towers of 北京塔, 42 한국") == ["the", "towers", "of", "北", "京", "塔", "42", "한국"]
    assert words("") == []
