"""Exact match and F1 of answers in English and Chinese, as the benchmarks' own scripts define them, and whether an
answer contains a right one.

    answer, right answers → normalized → equal? (exact match)   shared words or characters → precision, recall (F1)

English follows SQuAD's evaluation (Rajpurkar et al. 2016): it ignores case, punctuation and articles; F1 is over words.
Chinese follows CMRC 2018's evaluation (Cui et al. 2019): it ignores punctuation; F1 is over characters (over words for
other scripts) and counts the characters of the longest common run.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

import numpy as np

from indexing.store.errors import InputError
from indexing.tokenization.language import Language
from indexing.tokenization.texts import as_texts
from retro.evaluation.bits_per_byte import ratio_with_interval

_REFUSAL = re.compile(
    r"\b(?:(?:do|does|did|can|could|is|are|was|were)(?:n't| not) (?:\w+ )?"
    r"(?:know|mention|say|answer|provide|contain|specif|state|include|find|give|sure|clear|able)"
    r"|cannot (?:\w+ )?(?:answer|find|provide|determine)|no (?:\w+ )?(?:information|answer|mention)"
    r"|(?:not|un)known|not (?:mentioned|stated|specified|provided|given)|unable to|i'm (?:not sure|sorry)|i am (?:not sure|sorry))"
    r"|不知道|无法|不清楚|未提及|未提到|未说明|未提供|没有(?:提到|提及|说明|提供|相关|答案|信息)"
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CHINESE_PUNCTUATION = frozenset("-:_*^/\\~`+=，。：？！“”；’《》…·、「」（）－～『』")
_ENGLISH_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(answer: str, right: Sequence[str], language: Language) -> float:
    """Return 1 if the normalized answer equals a right answer, else 0. A string is one right answer.

    Raises:
        InputError: `right` is empty.
    """
    normalize = _normalized_english if language == "en" else _normalized_chinese
    return _best(lambda reference: float(normalize(answer) == normalize(reference)), right)


def contains(answer: str, right: Sequence[str], language: Language) -> float:
    """Return 1 if a right answer is in the answer, as whole words of the normalized text (Chinese: as characters), else 0:
    for models that answer in sentences.

    Raises:
        InputError: `right` is empty.
    """
    if language == "zh":
        given = _normalized_chinese(answer)
        return _best(lambda reference: float(_normalized_chinese(reference) in given), right)
    given = f" {_normalized_english(answer)} "
    return _best(lambda reference: float(f" {_normalized_english(reference)} " in given), right)


def f1(answer: str, right: Sequence[str], language: Language) -> float:
    """Return the largest F1 over the right answers: the harmonic mean of precision and recall, between 0 and 1.

    Raises:
        InputError: `right` is empty.
    """
    return _best(
        lambda reference: _english_f1(answer, reference) if language == "en" else _chinese_f1(answer, reference), right
    )


def is_refusal(answer: str) -> bool:
    """Whether an answer says that it does not know, or that the passages do not say it. By phrases, in both
    languages."""
    return not answer.strip() or _REFUSAL.search(answer.lower().replace("’", "'")) is not None


def mean_with_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Return the mean of values [n] and its 2.5% and 97.5% bootstrap quantiles."""
    return ratio_with_interval(values, np.ones(len(values)), seed)


def _best(score: Callable[[str], float], right: Sequence[str]) -> float:
    if not right:
        raise InputError('a question has no answers to compare with; list them in its "answers".')
    return max(map(score, as_texts(right)))


def _normalized_english(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_ENGLISH_PUNCTUATION)).split())


def _english_f1(answer: str, right: str) -> float:
    ours, theirs = _normalized_english(answer).split(), _normalized_english(right).split()
    return _harmonic((Counter(ours) & Counter(theirs)).total(), len(ours), len(theirs))


def _normalized_chinese(text: str) -> str:
    return "".join(character for character in text.lower().strip() if character not in _CHINESE_PUNCTUATION)


def _chinese_f1(answer: str, right: str) -> float:
    ours, theirs = (_segments(_normalized_chinese(text)) for text in (answer, right))
    shared = SequenceMatcher(None, ours, theirs, autojunk=False).find_longest_match().size
    return _harmonic(shared, len(ours), len(theirs))


def _segments(text: str) -> list[str]:
    """Split a text into Chinese characters, words of other scripts, and other single characters."""
    return re.findall(r"[\u4e00-\u9fa5]|(?:(?![\u4e00-\u9fa5])\w)+|[^\w\s]", text)


def _harmonic(shared: int, ours: int, theirs: int) -> float:
    if not ours or not theirs:
        return float(ours == theirs)  # an empty answer matches only an empty right answer
    return 2 * shared / (ours + theirs)
