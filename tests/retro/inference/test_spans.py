"""Character spans of tokens: tokens cover the whole text, and shared runs are the same characters in both texts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexing.store.datastore import Datastore
from indexing.tokenization.tokenizer import Tokenizer
from retro.inference.spans import character_groups, characters, shared_runs, token_ends

TEXTS = [
    "",
    "plain words of the index",
    "检索 模型 龘龘龘",
    "🙂👩‍👧 mixed 训练 \ufffd \t\n\n x",
    "龘" * 100,
    "\u2581 \u2581",
]


@pytest.fixture(scope="module")
def tokenizer(tiny_datastore: Datastore) -> Tokenizer:
    return Tokenizer.open(tiny_datastore.folder / "tokenizer")


@pytest.mark.parametrize("text", TEXTS)
def test_token_texts_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    whole, ends = token_ends(tokenizer.decode_batch, tokens)
    assert whole == text
    assert len(ends) == len(tokens)
    assert ends == sorted(ends)
    assert (ends or [0])[-1] == len(text)
    groups = character_groups(ends)
    assert [start for start, _ in groups] == [0, *(stop for _, stop in groups)][: len(groups)]
    for start, stop in groups:  # each group is whole characters and decodes on its own
        begin, end = characters(ends, start, stop)
        if "\ufffd" not in text:  # "\ufffd" looks like an incomplete character
            assert tokenizer.decode(tokens[start:stop]) == text[begin:end]


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=300))
def test_any_text_is_covered(tokenizer: Tokenizer, text: str) -> None:
    whole, ends = token_ends(tokenizer.decode_batch, tokenizer.encode(text))
    assert whole == tokenizer.decode(tokenizer.encode(text))
    assert (ends or [0])[-1] == len(whole)


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    tokens = np.array([tokenizer.bos_id, *tokenizer.encode("index 龘"), tokenizer.eos_id])
    text, ends = token_ends(tokenizer.decode_batch, tokens)
    assert text == "index 龘"
    assert ends[0] == 0
    assert sum(stop - start for start, stop in character_groups(ends)) == len(tokens)


def test_partial_characters_match_decode_and_mark_the_whole_character(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a龘b")  # 龘 has three bytes, one token each
    for start in range(len(tokens)):
        for stop in range(start + 1, len(tokens) + 1):
            text, ends = token_ends(tokenizer.decode_batch, tokens[start:stop])
            assert text == tokenizer.decode(tokens[start:stop])
            assert ends[-1] == len(text)
    _, ends = token_ends(tokenizer.decode_batch, tokens)
    first = int(np.flatnonzero(np.array(ends) == 1)[0]) + 1
    for start, stop in [(first, first + 1), (first + 1, first + 2), (first + 2, first + 3), (first, first + 3)]:
        assert characters(ends, start, stop) == (1, 2)


def test_shared_runs_are_found_longest_first_without_overlap() -> None:
    first = np.array([1, 2, 3, 4, 5, 9, 7, 7, 7, 8])
    second = np.array([7, 7, 7, 0, 1, 2, 3, 4, 0, 3, 4, 5])
    assert shared_runs(first, second) == [(0, 4, 4), (6, 0, 3)]
    assert shared_runs(first, second, least=5) == []
    assert shared_runs(first, first) == [(0, 0, 10)]
    assert shared_runs(first, first[:0]) == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=30))
def test_shared_runs_are_equal_tokens_and_include_the_longest(first: list[int], second: list[int]) -> None:
    a, b = np.array(first, dtype=np.int64), np.array(second, dtype=np.int64)
    runs = shared_runs(a, b)
    for i, j, length in runs:
        assert first[i : i + length] == second[j : j + length]
    longest = max(
        (n for n in range(1, len(first) + 1) for i in range(len(first) - n + 1)
         if any(first[i : i + n] == second[j : j + n] for j in range(len(second) - n + 1))),
        default=0,
    )  # fmt: skip
    assert (runs[0][2] if runs else 0) == (longest if longest >= 3 else 0)
