"""Terms of texts and queries: what the sparse index counts, in English, Chinese and code."""

import re
from functools import lru_cache

_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana and Chinese characters
_RUNS = re.compile(rf"[{_UNSPACED}]+|[^\W_{_UNSPACED}]+")
# A question is full of words that say nothing about its subject. Some are rare in other texts, so they would weigh much.
_FUNCTION_WORDS = re.compile(
    "a|an|and|are|did|do|does|for|how|in|is|of|on|the|to|was|were|what|when|where|which|who|whom|whose|why"
)


def terms(text: str) -> list[str]:
    """The terms of a text: lower-cased words without a plural s; for Chinese, characters and pairs of characters.

    Pairs replace words without a dictionary. Single characters help if a question abbreviates.
    """
    found = []
    for run in _RUNS.findall(text.lower()):
        if run[0] >= "\u3040" and not "\uac00" <= run[0] <= "\ud7a3":  # Korean separates words by blanks
            found += run
            found += [run[place : place + 2] for place in range(len(run) - 1)]
        else:
            found.append(_singular(run))
    return found


def query_terms(text: str) -> list[str]:
    """The terms of a query: `terms` without English function words, unless there are no others."""
    words = [term for run in _RUNS.findall(text.lower()) if not _FUNCTION_WORDS.fullmatch(run) for term in terms(run)]
    return words or terms(text)


@lru_cache(maxsize=1 << 16)
def _singular(word: str) -> str:
    """A word without its plural s: the S stemmer of Harman (1991)."""
    if len(word) < 4 or word[-1] != "s" or word[-2] in "us":
        return word
    if word.endswith("ies") and word[-4] not in "ea":
        return word[:-3] + "y"
    return word[:-1]
