"""Shown passages are mostly letters, of different documents, and have distinctive words in common with a source."""

from pathlib import Path

import numpy as np
import pytest

from indexing.retrieval.passage_choice import Candidate, choose_passages, mostly_letters
from indexing.store.datastore import Datastore
from indexing.suffixes.search import SuffixIndex
from indexing.tokenization.tokenizer import Tokenizer

SHARED = "the harbor master counted every lantern along the frozen pier before midnight"
OWN = "nobody else remembered which of those ships had carried salt across the bay"
TABLE = "0x41 -> LETTER A # 0x42 -> LETTER B # 0x43 -> LETTER C # 0x44 -> LETTER D # 0x45 -> LETTER E"


@pytest.fixture(scope="module")
def tokenizer(tiny_datastore: Datastore) -> Tokenizer:
    return Tokenizer.open(tiny_datastore.folder / "tokenizer")


def candidate(tokenizer: Tokenizer, document: int, text: str, source: str = "") -> Candidate:
    return Candidate(tokenizer.encode(text).astype(np.int64), document, [tokenizer.encode(source)] if source else [])


def test_a_table_and_a_passage_without_a_source_are_chosen_last(tokenizer: Tokenizer) -> None:
    texts = [(TABLE, TABLE[:40]), (OWN, ""), (f"{SHARED} {OWN}", SHARED)]
    passages = [candidate(tokenizer, number, *text) for number, text in enumerate(texts)]
    assert choose_passages(passages, 1, tokenizer) == [2]
    assert choose_passages(passages, 3, tokenizer, least=1) == [2]
    assert sorted(choose_passages(passages, 3, tokenizer)) == [0, 1, 2]


def test_passages_of_different_documents_come_first(tokenizer: Tokenizer) -> None:
    halves = SHARED[:40], SHARED
    passages = [candidate(tokenizer, 7, f"{SHARED} {OWN}", SHARED), candidate(tokenizer, 7, f"{OWN} {SHARED}", SHARED)]
    passages.append(candidate(tokenizer, 8, f"{SHARED} {OWN}", halves[0]))
    chosen = choose_passages(passages, 3, tokenizer)
    assert [passages[row].document for row in chosen] == [7, 8, 7]


def test_words_that_many_passages_have_count_less(tokenizer: Tokenizer) -> None:
    common = "the garden wall beside the orchard gate was painted white"
    passages = [candidate(tokenizer, number, f"{common} {OWN}", common) for number in range(4)]
    passages.append(candidate(tokenizer, 4, f"{SHARED[: len(common)]} {OWN}", SHARED))
    assert choose_passages(passages, 1, tokenizer) == [4]


def test_a_copy_as_a_whole_comes_after_a_passage_that_copies_a_part(tokenizer: Tokenizer) -> None:
    passages = [candidate(tokenizer, 0, SHARED, SHARED), candidate(tokenizer, 1, f"{SHARED} {OWN}", SHARED)]
    assert choose_passages(passages, 1, tokenizer) == [1]


def test_runs_of_the_whole_datastore_count_without_neighbors(voting_datastore: Datastore, tokenizer: Tokenizer) -> None:
    split, index = voting_datastore.train, SuffixIndex.open(Path(voting_datastore.folder))
    stored = split.tokens.read(3, 4)[0][: split.lengths.read(3, 4)[0]].astype(np.int64)
    copying = Candidate(np.concatenate([stored, tokenizer.encode(OWN)]).astype(np.int64), 1)
    passages = [candidate(tokenizer, 0, f"{OWN} {OWN}"), copying]
    assert choose_passages(passages, 1, tokenizer, index) == [1]
    assert choose_passages(passages, 1, tokenizer) == [0]  # without it, none has a source


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SHARED, True),
        ("检索增强语言模型，复制原文。", True),
        (TABLE, False),
        ("'a': 'b', '_c': '_d'", False),
        ("", False),
    ],
)
def test_letters_of_all_scripts_count(text: str, expected: bool) -> None:
    assert mostly_letters(text) == expected
