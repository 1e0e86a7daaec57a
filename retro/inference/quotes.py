"""What an answer has from its passages: words that occur verbatim in them, and what the model copied.

answer ─► words ─► longest runs that a passage has ─► Quote: characters of the answer, passage, characters of its text
tokens ─► copied shares, trust ─────────────────────► Grounding
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from indexing.retrieval.results import Passage
from retro.inference.generation import GeneratedToken
from retro.inference.trust import Trust

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|(?:(?![\u3040-\u30ff\u3400-\u9fff])\w)+")
_LEAST, _LEAST_CHARACTERS = 3, 4  # words, or Chinese characters, of a run without a name or a number


@dataclass(frozen=True)
class NumberedPassage(Passage):
    """A passage with its number in the prompt, from 1."""

    number: int


@dataclass(frozen=True)
class Quote:
    """A run of words of the answer that a passage has too, apart from case and what is between the words."""

    text: Annotated[tuple[int, int], Field(description="Characters [start, stop) of the answer.")]
    passage: Annotated[int, Field(description="Number of the passage.")]
    passage_text: Annotated[tuple[int, int], Field(description="Characters [start, stop) of its text.")]
    words: Annotated[int, Field(description="Words, or Chinese characters.")]


@dataclass(frozen=True)
class Grounding:
    """What an answer has from its passages and from the datastore.

    In a stream, the first event has the passages, and the last one the other fields.
    """

    passages: list[NumberedPassage] | None = None
    quotes: list[Quote] | None = None
    quoted: Annotated[float | None, Field(description="Share of the answer's words that are in quotes, 0 to 1.")] = None
    copied: Annotated[
        float | None,
        Field(
            description="Share of the answer that was copied from neighbors and datastore: the mean over its tokens. Null if the "
            "model copies nothing."
        ),
    ] = None
    trust: Annotated[
        Trust | None,
        Field(
            description="In copying, earned by the prompt without passages and earlier answers. Null if the model copies nothing."
        ),
    ] = None


@dataclass
class GroundedAnswer:
    """Collects what an answer has from its passages, token by token.

    Attributes:
        passages: of the prompt.
        text: the answer so far.
        num_tokens, copied: its tokens, and the sum of their copied shares.
        trust: of the first token.
    """

    passages: Sequence[Passage]
    text: str = ""
    num_tokens: int = 0
    copied: float = 0.0
    trust: Trust | None = None

    def add(self, token: GeneratedToken) -> None:
        """Add the next token."""
        self.text += token.text
        self.num_tokens += 1
        self.copied += token.copied_share or 0.0
        self.trust = self.trust or token.trust

    def numbered(self) -> list[NumberedPassage]:
        """The passages with their numbers."""
        return [NumberedPassage(**vars(passage), number=number) for number, passage in enumerate(self.passages, 1)]

    def result(self) -> Grounding:
        """What is known after the last token, without the passages."""
        quotes = find_quotes(self.text, [passage.text for passage in self.passages])
        words = len(_WORD.findall(self.text))
        copied = None if self.trust is None else self.copied / max(1, self.num_tokens)
        return Grounding(None, quotes, sum(quote.words for quote in quotes) / max(1, words), copied, self.trust)


def find_quotes(answer: str, texts: Sequence[str]) -> list[Quote]:
    """The runs of words of an answer that occur in a text of a passage, from the beginning of the answer on: the longest
    run at each place, of the first passage that has it.

    A run has at least three words (Chinese: four characters), or a number or a name, or is the whole answer.
    """
    words, passages = _words(answer), [_Words(text) for text in texts]
    quotes, first = list[Quote](), 0
    while first < len(words):
        number, at, length = max(
            ((number, *passage.longest(words, first)) for number, passage in enumerate(passages, 1)),
            key=lambda run: run[2],
            default=(0, 0, 0),
        )
        run = words[first : first + length]
        if run and (_tells([word for word, *_ in run], answer, run[0][1]) or length == len(words)):
            there = passages[number - 1].words[at : at + length]
            quotes.append(Quote((run[0][1], run[-1][2]), number, (there[0][1], there[-1][2]), length))
            first += length
        else:
            first += 1
    return quotes


def is_verbatim(answer: str, texts: Sequence[str]) -> bool:
    """Whether all words of an answer occur in a text in this order, without others between them."""
    return any(quote.words == len(_words(answer)) for quote in find_quotes(answer, texts))


_Word = tuple[str, int, int]
"""A word without case, and its characters [start, stop)."""


def _words(text: str) -> list[_Word]:
    return [(match[0].casefold(), *match.span()) for match in _WORD.finditer(text)]


@dataclass
class _Words:
    """The words of a text, and where each is."""

    text: str
    words: list[_Word] = field(init=False)
    places: dict[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.words, self.places = _words(self.text), defaultdict(list)
        for place, (word, *_) in enumerate(self.words):
            self.places[word].append(place)

    def longest(self, words: Sequence[_Word], first: int) -> tuple[int, int]:
        """Place and length of the longest run that words from `first` on begin with; (0, 0) if there is none."""
        runs = ((place, self._run(place, words, first)) for place in self.places.get(words[first][0], ()))
        return max(runs, key=lambda run: run[1], default=(0, 0))

    def _run(self, place: int, words: Sequence[_Word], first: int) -> int:
        most = min(len(self.words) - place, len(words) - first)
        length = 0
        while length < most and self.words[place + length][0] == words[first + length][0]:
            length += 1
        return length


def _tells(words: Sequence[str], answer: str, start: int) -> bool:
    """Whether a run of words says more than single common words do."""
    least = _LEAST_CHARACTERS if len(words[0]) == 1 and words[0] > "\u3000" else _LEAST
    named = any(word.isdecimal() and len(word) > 1 for word in words)
    return len(words) >= least or named or _is_name(answer, start, words[0])


def _is_name(answer: str, start: int, word: str) -> bool:
    """Whether a word of the answer is written as a name, and does not begin a sentence."""
    begins = not answer[:start].rstrip() or answer[:start].rstrip()[-1] in ".!?:\n"
    return len(word) > 2 and answer[start].isupper() and not begins
