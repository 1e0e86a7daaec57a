"""Whether an answer is right: exact match and F1, as the benchmarks' own scripts define them, for English and Chinese.

    answer, right answers → normalised → equal? (exact match)   shared words or characters → precision, recall (F1)

English follows SQuAD's evaluation (Rajpurkar et al. 2016): case, punctuation and articles do not count, F1 is over words.
Chinese follows CMRC 2018's (Cui et al. 2019): punctuation does not count, F1 is over characters (words in runs of other
scripts), of which those count that stand in the longest run common to both.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Literal

import numpy as np

from indexing.store.errors import InputError

Language = Literal["en", "zh"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_HAN = re.compile(r"[\u4e00-\u9fa5]")
_CHINESE_PUNCTUATION = frozenset("-:_*^/\\~`+=，。：？！“”；’《》…·、「」（）－～『』")
_ENGLISH_PUNCTUATION = str.maketrans("", "", string.punctuation)
_HAN_SHARE = 0.2  # of the characters of questions in Chinese; names and numbers are of other scripts


def language_of(texts: Sequence[str]) -> Language:
    """Chinese where a fifth of the characters and more are Chinese, else English."""
    characters = sum(map(len, texts))
    return "zh" if sum(len(_HAN.findall(text)) for text in texts) >= _HAN_SHARE * max(1, characters) else "en"


def exact_match(answer: str, right: Sequence[str], language: Language) -> float:
    """1 if the normalised answer is one of the right ones, else 0.

    Raises:
        InputError: there is no right answer.
    """
    normalise = _normalised_english if language == "en" else _normalised_chinese
    return _best(lambda each: float(normalise(answer) == normalise(each)), right)


def f1(answer: str, right: Sequence[str], language: Language) -> float:
    """The harmonic mean of precision and recall against the right answer that gives most, between 0 and 1.

    Raises:
        InputError: there is no right answer.
    """
    return _best(lambda each: _english_f1(answer, each) if language == "en" else _chinese_f1(answer, each), right)


def mean_with_interval(values: np.ndarray, seed: int = 0, rounds: int = 1000) -> tuple[float, float, float]:
    """The mean of values [n] and the 2.5% and 97.5% points of a bootstrap of it."""
    generator = np.random.default_rng(seed)
    means = [values[generator.integers(0, len(values), len(values))].mean() for _ in range(rounds)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def _best(score: Callable[[str], float], right: Sequence[str]) -> float:
    if not right:
        raise InputError("a question without answers cannot be scored.")
    return max(map(score, right))


def _normalised_english(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_ENGLISH_PUNCTUATION)).split())


def _english_f1(answer: str, right: str) -> float:
    ours, theirs = _normalised_english(answer).split(), _normalised_english(right).split()
    return _harmonic((Counter(ours) & Counter(theirs)).total(), len(ours), len(theirs))


def _normalised_chinese(text: str) -> str:
    return "".join(character for character in text.lower().strip() if character not in _CHINESE_PUNCTUATION)


def _chinese_f1(answer: str, right: str) -> float:
    ours, theirs = (_segments(_normalised_chinese(text)) for text in (answer, right))
    shared = SequenceMatcher(None, ours, theirs, autojunk=False).find_longest_match().size
    return _harmonic(shared, len(ours), len(theirs))


def _segments(text: str) -> list[str]:
    """Chinese characters one by one; of other scripts words and single signs."""
    return re.findall(r"[\u4e00-\u9fa5]|(?:(?![\u4e00-\u9fa5])\w)+|[^\w\s]", text)


def _harmonic(shared: int, ours: int, theirs: int) -> float:
    if not ours or not theirs:
        return float(ours == theirs)  # nothing is right where nothing was asked for
    return 2 * shared / (ours + theirs)
