"""Terms of texts and queries: what the sparse index counts, in English, Chinese and code."""

import re
from functools import lru_cache
from typing import Any

_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana and Chinese characters
_RUNS = re.compile(rf"[{_UNSPACED}]+|[^\W_{_UNSPACED}]+")
# A question is full of words that say nothing about its subject. Some are rare in other texts, so they would weigh
# much.
_FUNCTION_WORDS = re.compile(
    "a|an|and|are|did|do|does|for|how|in|is|of|on|the|to|was|were|what|when|where|which|who|whom|whose|why"
)


def terms(text: str) -> list[str]:
    """The terms of a text: stems of lower-cased words; for Chinese, characters and pairs of characters.

    Pairs replace words without a dictionary. Single characters help if a question abbreviates.
    """
    out = []
    for run in _RUNS.findall(text.lower()):
        if _is_unspaced(run):
            out += run
            out += [run[start : start + 2] for start in range(len(run) - 1)]
        else:
            out.append(_stem(run))
    return out


def query_terms(text: str) -> list[str]:
    """The terms of a query: `terms` without English function words, unless there are no others."""
    words = [term for run in _RUNS.findall(text.lower()) if not _FUNCTION_WORDS.fullmatch(run) for term in terms(run)]
    return words or terms(text)


def words(text: str) -> list[str]:
    """The words of a text in lower case; for Chinese, its characters."""
    return [word for run in _RUNS.findall(text.lower()) for word in (run if _is_unspaced(run) else [run])]


def _is_unspaced(run: str) -> bool:
    return run[0] >= "\u3040" and not "\uac00" <= run[0] <= "\ud7a3"  # Korean separates words by blanks


@lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    """The English stem of a word: the Porter 2 stemmer of Snowball, which leaves numbers and words of other scripts as
    they are."""
    (stem,) = _stemmer().analyze(word)
    return str(stem)


@lru_cache(maxsize=1)
def _stemmer() -> Any:
    import tantivy

    return tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.raw()).filter(tantivy.Filter.stemmer("english")).build()
