"""Cloze questions from passages: a sentence with a gap, and the text of the gap as the answer.

    passage → sentences → spans (names, numbers, phrases) → words around a span, some dropped, and a question word

They are training data for a reader with few real questions (Lewis et al. 2019, arXiv 1906.04980, use a parser and a
translator; here regular expressions do the work). The reader learns to find the place in a passage that shares words
with the question, and to copy the text at the position of the question word.
"""

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from retro.question_answering.answer_metrics import Language

_AROUND = {"en": 14, "zh": 24}
"""Largest number of words (English) or characters (Chinese) on each side of the gap."""
_DROPPED = {"en": 0.15, "zh": 0.05}
"""Fraction of these that are dropped, so that questions do not repeat their sentences word for word."""

_FUNCTION_WORDS = frozenset(
    [
        "a",
        "about",
        "after",
        "all",
        "also",
        "although",
        "an",
        "and",
        "any",
        "are",
        "as",
        "at",
        "be",
        "because",
        "been",
        "before",
        "being",
        "both",
        "but",
        "by",
        "can",
        "could",
        "did",
        "do",
        "does",
        "during",
        "each",
        "either",
        "for",
        "from",
        "had",
        "has",
        "have",
        "he",
        "her",
        "his",
        "how",
        "however",
        "if",
        "in",
        "into",
        "is",
        "it",
        "its",
        "many",
        "may",
        "more",
        "most",
        "much",
        "not",
        "of",
        "on",
        "one",
        "only",
        "or",
        "other",
        "over",
        "own",
        "same",
        "she",
        "should",
        "so",
        "some",
        "such",
        "than",
        "that",
        "the",
        "their",
        "them",
        "then",
        "there",
        "these",
        "they",
        "this",
        "those",
        "through",
        "to",
        "under",
        "until",
        "up",
        "upon",
        "was",
        "we",
        "were",
        "what",
        "when",
        "where",
        "which",
        "while",
        "who",
        "whose",
        "will",
        "with",
        "would",
    ]
)
_CAPITALS = r"[A-Z][\w'’-]*"
_ENGLISH_SPANS = re.compile(
    rf"(?P<year>\b(?:{_CAPITALS} \d{{1,2}}, )?(?:1[0-9]|20)\d\d\b)"
    r"|(?P<number>[$£€]?\b\d[\d,.]*\d%?|\b\d+\b%?(?: (?:percent|million|billion|years|miles|km))?)"
    rf"|(?P<name>\b{_CAPITALS}(?:(?: of| of the| de)? {_CAPITALS})*)"
    r"|(?P<phrase>\b[a-z][a-z'-]+(?: [a-z][a-z'-]+){0,2}\b)"
)
_ENGLISH_WORDS = {
    "year": ("when", "what year", "in what year"),
    "number": ("how many", "how much", "what"),
    "name": ("who", "what", "which", "where"),
    "phrase": ("what", "what", "what kind of"),
}
_CHINESE_SPANS = re.compile(
    r"(?P<year>\d{2,4}年(?:\d{1,2}月)?(?:\d{1,2}日)?)"
    r"|(?P<number>\d[\d,.]*[%万亿多]?[个人名年岁种座公米里次位部]?)"
    r"|(?P<title>《[^《》]{1,20}》)"
    r"|(?P<latin>[A-Za-z][A-Za-z .·-]*[A-Za-z])"
    r"|(?P<phrase>[^\W\d_A-Za-z的了是在和与为于被由以及等也不有而其之将从到对这该此并或但都就]{2,8})"
)
_CHINESE_WORDS = {
    "year": ("什么时候", "哪一年", "何时"),
    "number": ("多少", "几"),
    "title": ("什么", "哪部作品"),
    "latin": ("什么", "谁"),
    "phrase": ("什么", "谁", "哪里", "哪个"),
}


def cloze_questions(
    passages: Iterable[Mapping[str, Any]], language: Language, each: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield questions in the format of a question set. Each has one answer from the passage of its `positive_ids`.

    Args:
        passages: rows with `id` and `text`.
        language: language of the passages.
        each: largest number of questions per passage.
        seed: random seed; the passage's id is added to it.
    """
    for passage in passages:
        drawn = random.Random(f"{seed} {passage['id']}")
        found = list(_spans(passage["text"], language))
        kinds = sorted({kind for kind, *_ in found})
        for number in range(min(each, len(found))):
            kind = drawn.choice(kinds)  # phrases are frequent, years are rare
            chosen = drawn.choice([span for span in found if span[0] == kind])
            found.remove(chosen)
            kinds = sorted({kind for kind, *_ in found})
            _, answer, before, after = chosen
            yield {
                "id": f"{passage['id']}#{number}",
                "question": _question(kind, before, after, language, drawn),
                "answers": [answer],
                "positive_ids": [passage["id"]],
            }


def _spans(text: str, language: Language) -> Iterator[tuple[str, str, str, str]]:
    """Yield (kind, text, text before, text after) of each span of a sentence that can be an answer."""
    pattern, ends = (_ENGLISH_SPANS, r"(?<=[.!?])\s+") if language == "en" else (_CHINESE_SPANS, r"(?<=[。！？；])")
    for sentence in re.split(ends, text):
        for match in pattern.finditer(sentence):
            before, after = sentence[: match.start()], sentence[match.end() :]
            if language == "en":
                words = match[0].split()
                first = not before.strip() and len(words) == 1  # every sentence begins with a capital letter
                if first or any(word.lower() in _FUNCTION_WORDS for word in (words[0], words[-1])):
                    continue
            if len(before) + len(after) >= 3 * len(match[0]) and match.lastgroup:
                yield match.lastgroup, match[0], before, after


def _question(kind: str, before: str, after: str, language: Language, drawn: random.Random) -> str:
    units, joint = (str.split, " ") if language == "en" else (list, "")
    around = _AROUND[language]
    sides = [
        units(before.strip())[-drawn.randint(3, around) :],
        units(after.strip(" .。；！？"))[: drawn.randint(3, around)],
    ]
    left, right = ([unit for unit in side if drawn.random() >= _DROPPED[language]] for side in sides)
    if language == "zh":  # the question word replaces the answer
        return joint.join([*left, drawn.choice(_CHINESE_WORDS[kind]), *right]) + "？"
    question_word = drawn.choice(_ENGLISH_WORDS[kind])
    words = [*left, question_word, *right] if drawn.random() < 0.5 else [question_word, *right, *left]
    if left and words[0] != question_word and len(left[0]) > 1 and left[0][1:].islower():
        words[0] = words[0][0].upper() + words[0][1:]
    return joint.join(words).rstrip(",;:") + "?"
