"""Answer metrics equal those of SQuAD's and CMRC 2018's own scripts."""

import numpy as np
import pytest

from indexing.store.errors import InputError
from indexing.tokenization.language import Language
from retro.evaluation.answer_metrics import contains, exact_match, f1, is_refusal, mean_with_interval


@pytest.mark.parametrize(
    ("answer", "right", "same"),
    [
        ("The Eiffel Tower!", ["eiffel  tower"], 1),
        ("an apple", ["Apple."], 1),
        ("Theatre", ["atre"], 0),  # an article is a word, not a prefix
        ("twenty-one", ["twentyone"], 1),
        ("1973", ["October 1973", "1973"], 1),
        ("October", ["October 1973"], 0),
        ("", ["October"], 0),
    ],
)
def test_english_exact_match_ignores_case_punctuation_and_articles(answer, right, same) -> None:
    assert exact_match(answer, right, "en") == same


@pytest.mark.parametrize(
    ("answer", "right", "value"),
    [
        ("October 1973", ["October 1973"], 1),
        ("in October 1973", ["October 1973"], 4 / 5),
        ("1973 October", ["the October, 1973"], 1),  # a bag of words
        ("October October", ["October"], 2 / 3),
        ("March", ["October", "March or April"], 2 / 4),
        ("March", ["October"], 0),
        ("", ["October"], 0),
    ],
)
def test_english_f1_counts_words(answer, right, value) -> None:
    assert f1(answer, right, "en") == pytest.approx(value)


@pytest.mark.parametrize(
    ("answer", "right", "same"),
    [
        ("《红楼梦》", ["红楼梦"], 1),
        ("踢爆。", ["踢爆"], 1),
        ("WTO", ["wto"], 1),
        ("红楼", ["红楼梦"], 0),
    ],
)
def test_chinese_exact_match_ignores_punctuation_and_case(answer, right, same) -> None:
    assert exact_match(answer, right, "zh") == same


@pytest.mark.parametrize(
    ("answer", "right", "value"),
    [
        ("红楼梦", ["红楼梦"], 1),
        ("红楼", ["红楼梦"], 2 * 2 / 5),
        ("梦红楼", ["红楼梦"], 2 * 2 / 6),  # only the longest common run counts, not single characters
        ("308分", ["308"], 2 * 1 / 3),  # a number is one word
        ("windows操作系统", ["Windows 操作系统"], 1),
        ("三国", ["红楼梦"], 0),
        ("。", ["红楼梦"], 0),
    ],
)
def test_chinese_f1_counts_the_longest_common_run(answer, right, value) -> None:
    assert f1(answer, right, "zh") == pytest.approx(value)


def test_a_question_without_answers_is_rejected() -> None:
    for measure in (exact_match, f1, contains):
        with pytest.raises(InputError, match="no answers"):
            measure("x", [], "en")


def test_the_interval_contains_the_mean_and_narrows_with_more_questions() -> None:
    few = mean_with_interval(np.array([0.0, 1.0] * 10))
    many = mean_with_interval(np.array([0.0, 1.0] * 1000))
    for mean, low, high in (few, many):
        assert mean == 0.5
        assert low < mean < high
    assert many[2] - many[1] < 0.2 * (few[2] - few[1])
    assert mean_with_interval(np.ones(5)) == (1, 1, 1)


def test_a_string_is_one_right_answer() -> None:
    assert exact_match("Eiffel", "Eiffel", "en") == f1("Eiffel", "Eiffel", "en") == 1
    assert exact_match("i", "Eiffel", "en") == f1("i", "Eiffel", "en") == 0


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ("I don't know.", True),
        ("I don’t know.", True),
        ("The passages do not mention who wrote it.", True),
        ("The passage does not provide that.", True),
        ("There is no information about it.", True),
        ("I'm sorry, but I cannot answer it.", True),
        ("文中未提及。", True),
        ("我不知道", True),
        (" ", True),
        ("Guido van Rossum", False),
        ("The United Nations", False),
        ("It is not a chunk.", False),
        ("1989年12月", False),
    ],
)
def test_refusals_are_recognized_by_their_words(answer: str, refused: bool) -> None:
    assert is_refusal(answer) == refused


@pytest.mark.parametrize(
    ("answer", "right", "language", "found"),
    [
        ("The tower was built by Gustave Eiffel, in 1889.", ["gustave eiffel"], "en", 1),
        ("It was built in 1889.", ["1788", "in the 1889"], "en", 1),  # articles do not count
        ("It was built in 18890.", ["1889"], "en", 0),  # whole words
        ("", ["1889"], "en", 0),
        ("该塔由古斯塔夫·埃菲尔设计。", ["古斯塔夫埃菲尔"], "zh", 1),
        ("该塔由别人设计。", ["埃菲尔"], "zh", 0),
    ],
)
def test_an_answer_in_a_sentence_contains_a_right_one(
    answer: str, right: list[str], language: Language, found: float
) -> None:
    assert contains(answer, right, language) == found
