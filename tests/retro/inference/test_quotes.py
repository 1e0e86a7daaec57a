"""Quotes are the words of an answer that a passage has in the same order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexing.retrieval.results import Passage
from retro.inference.generation import GeneratedToken
from retro.inference.quotes import GroundedAnswer, find_quotes, is_verbatim
from retro.inference.trust import Trust

PASSAGES = [
    "Guido van Rossum began Python in December 1989, at CWI.",
    "Beautiful is better than ugly. Explicit is better than implicit.",
    "检索模型从数据库中读取段落。",
]


def quoted(answer: str) -> list[tuple[int, str, str]]:
    return [
        (quote.passage, answer[slice(*quote.text)], PASSAGES[quote.passage - 1][slice(*quote.passage_text)])
        for quote in find_quotes(answer, PASSAGES)
    ]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            "It says that explicit is better than IMPLICIT!",
            [(2, "explicit is better than IMPLICIT", "Explicit is better than implicit")],
        ),
        ("In 1989", [(1, "In 1989", None)]),
        ("It was begun by Guido van Rossum, I think.", [(1, "Guido van Rossum", "Guido van Rossum")]),
        ("better", [(2, "better", "better")]),
        ("I think that it is better", []),
        ("它从数据库中读取", [(3, "从数据库中读取", "从数据库中读取")]),
        ("从中", []),
        ("", []),
    ],
)
def test_runs_of_words_are_found_in_their_passage(answer: str, expected: list) -> None:
    found = quoted(answer)
    if expected and expected[0][2] is None:  # only the year is there
        assert found == [(1, "1989", "1989")]
    else:
        assert found == expected


@given(
    st.text(alphabet="ab cB.12中文", max_size=40), st.lists(st.text(alphabet="ab cB.12中文", max_size=40), max_size=3)
)
def test_both_sides_of_a_quote_have_the_same_words_and_quotes_do_not_overlap(answer: str, texts: list[str]) -> None:
    reached = 0
    for quote in find_quotes(answer, texts):
        here, there = answer[slice(*quote.text)], texts[quote.passage - 1][slice(*quote.passage_text)]
        assert reached <= quote.text[0] < quote.text[1]
        reached = quote.text[1]
        assert here
        assert "".join(filter(str.isalnum, here)).casefold() == "".join(filter(str.isalnum, there)).casefold()


def test_an_answer_is_verbatim_if_one_passage_has_all_its_words() -> None:
    assert is_verbatim("December 1989.", PASSAGES)
    assert not is_verbatim("December 1989, explicit", PASSAGES)
    assert not is_verbatim("Python ugly", PASSAGES)
    assert not is_verbatim("", PASSAGES)


def test_a_grounded_answer_sums_up_its_tokens() -> None:
    passages = [Passage(text, f"d{n}", "", "", 1.0, n, 1, 0, 9) for n, text in enumerate(PASSAGES)]
    answer, trust = GroundedAnswer(passages), Trust(0.3, 20, "short prompt")
    for number, (text, share) in enumerate((("Guido van", 0.5), (" Rossum", 1.0), (" said so", 0.0))):
        answer.add(GeneratedToken(0, 0, text, 0.0, copied_share=share, trust=None if number else trust))
    found = answer.result()
    assert [passage.number for passage in answer.numbered()] == [1, 2, 3]
    assert (found.quoted, found.copied, found.trust) == (3 / 5, 0.5, trust)
    silent = GroundedAnswer([])
    silent.add(GeneratedToken(0, 0, "no", 0.0, copied_share=0.0))
    assert (silent.result().quotes, silent.result().quoted, silent.result().copied) == ([], 0.0, None)
