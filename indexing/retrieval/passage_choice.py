"""Choose passages to show: readable, of different documents, with distinctive words that a source has too.

candidates ─┬─ mostly letters, not a copy as a whole ────────────────┬─ the best passage of each document
            └─ rare words of runs that a neighbor or the datastore has ─┘

`retro demo`, the report of a datastore and the page of `retro serve` all choose by this.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np

from indexing.store.datastore import Split
from indexing.store.retrieval_set import RetrievalSet
from indexing.suffixes.search import SuffixIndex, trace
from indexing.tokenization.tokenizer import Tokenizer

_LETTERS = 0.85
"""Share of letters among all characters but blanks from which a text is mostly letters. Prose has 0.95, commented code
0.9."""
_COPIED = 0.8
"""Share of copied tokens from which a passage counts as a copy as a whole, which shows little."""
_SHORTEST = 6  # tokens of a run
# Letters without digits. A Chinese word has two characters, so single clauses of a few characters count.
_WORD = re.compile(r"[^\W\d_\u3040-\u30ff\u3400-\u9fff]{4,}|[\u3040-\u30ff\u3400-\u9fff]{2,}")


@dataclass(frozen=True)
class Candidate:
    """A passage that may be shown.

    Attributes:
        tokens: int64 [t], its tokens.
        document: number of its document.
        sources: tokens of its neighbors.
    """

    tokens: np.ndarray
    document: int
    sources: Sequence[np.ndarray] = field(default_factory=tuple)


def candidates_of(
    split: Split, retrieval: RetrievalSet, chunks: np.ndarray, neighbor_ids: np.ndarray
) -> list[Candidate]:
    """Chunks as candidates: ids [n] int64 of a split, and ids [n, k] of the neighbors of each in a retrieval set, -1 =
    none."""
    k, documents = neighbor_ids.shape[1], split.documents_of(chunks)[0].tolist()
    texts = zip(split.tokens.gather(chunks), split.lengths.gather(chunks), strict=True)
    neighbors = zip(*retrieval.with_continuation(neighbor_ids.ravel()), strict=True)
    sources = [tokens[:length] for tokens, length in neighbors]
    return [
        Candidate(tokens[:length].astype(np.int64), document, sources[row * k : (row + 1) * k])
        for row, ((tokens, length), document) in enumerate(zip(texts, documents, strict=True))
    ]


def choose_passages(
    candidates: Sequence[Candidate],
    count: int,
    tokenizer: Tokenizer,
    index: SuffixIndex | None = None,
    least: int | None = None,
) -> list[int]:
    """Choose passages, the best first: those with the most distinctive copied words. Equal ones stay in order.

    A passage is poor if it is not mostly letters, is copied as a whole, or has no copied word. Poor passages, and a
    second one of a document, are chosen only where others are too few.

    Args:
        candidates: passages of about the same length.
        count: how many are chosen, if there are as many.
        tokenizer: of the tokens.
        index: the datastore's sorted prefixes; with them, its runs count as well as those of neighbors.
        least: from how many on poor passages are left out; None = `count`.

    Returns:
        indices of candidates.
    """
    texts = [tokenizer.decode(candidate.tokens) for candidate in candidates]
    masks = [_copied(candidate, index) for candidate in candidates]
    words = [words_of(text) for text in texts]
    frequency = Counter(word for of_text in words for word in of_text)
    weights, poor = [], []
    for candidate, text, mask, of_text in zip(candidates, texts, masks, words, strict=True):
        copied = of_text & words_of(" ".join(map(tokenizer.decode, _runs(candidate.tokens, mask))))  # no parts of words
        weights.append(_variety(text) * sum(log(1 + len(texts) / frequency[word]) for word in copied))
        poor.append(not mostly_letters(text) or mask.mean() > _COPIED or not copied)
    order = sorted(range(len(texts)), key=lambda row: (poor[row], -weights[row]))
    first = {candidates[row].document: row for row in reversed(order)}
    order.sort(key=lambda row: (poor[row], first[candidates[row].document] != row))
    good = len(poor) - sum(poor)
    return order[: min(count, max(good, count if least is None else least))]


def mostly_letters(text: str) -> bool:
    """Whether a text is mostly letters, blanks aside."""
    characters = "".join(text.split())
    return sum(map(str.isalpha, characters)) >= _LETTERS * max(1, len(characters))


def words_of(text: str) -> set[str]:
    """The different words of a text that are not very short."""
    return {word.casefold() for word in _WORD.findall(text)}


def _variety(text: str) -> float:
    """Share of the characters that different words have: a table repeats its words."""
    different = {word.casefold() for word in re.findall(r"[^\W\d_]+", text)}
    return sum(map(len, different)) / max(1, len("".join(text.split())))


def _copied(candidate: Candidate, index: SuffixIndex | None) -> np.ndarray:
    """Which tokens [t] are in a run of `_SHORTEST` tokens or more that a source has too: bool."""
    tokens = candidate.tokens.tolist()
    grams = {gram for source in candidate.sources for gram in _grams(np.asarray(source).tolist())}
    mask = np.zeros(len(tokens), dtype=bool)
    for start, gram in enumerate(_grams(tokens)):
        if gram in grams:
            mask[start : start + _SHORTEST] = True
    for run in trace(index, candidate.tokens, _SHORTEST) if index is not None else ():
        mask[run.first : run.stop] = True
    return mask


def _grams(tokens: list[int]) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[n:] for n in range(_SHORTEST)), strict=False))


def _runs(tokens: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """The parts of tokens [t] where the mask [t] is true."""
    borders = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokens[start:stop] for start, stop in borders.reshape(-1, 2)]
