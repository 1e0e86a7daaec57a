"""Score candidates with BM25: which of the retrieved chunks contain the words of the query?

    query → terms ┐
    candidates → text of each, of the adjacent chunks, and of the title → counts of the query's terms ┼→ scores
    a sample of all chunks → document frequencies, mean length ─────────────────────────────────────┘

BM25 (Robertson and Zaragoza 2009) with the fields of BM25F (section 3.6). Terms in the title count twice, and terms in the adjacent
chunks half, because an answer rarely repeats the subject of its paragraph. There is no inverted index, so the cost does not depend
on the size of the datastore. docs/results/passage-retrieval.md reports the effect of the constants.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from indexing.store.retrieval_set import RetrievalSet
from indexing.tokenization.tokenizer import Tokenizer

K1 = 0.9  # saturation: how soon more occurrences of a term stop counting
B = 0.4  # length normalization
TITLE = 2.0  # weight of the title
ADJACENT = 0.5  # weight of the chunks before and after
_SAMPLED_CHUNKS = 20_000  # enough to count all terms but the rarest
_BLOCK_QUERIES = 32  # queries scored at a time: with 256 candidates, the text of at most 25,000 chunks

_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana and Chinese characters
_RUNS = re.compile(rf"[{_UNSPACED}]+|[^\W_{_UNSPACED}]+")


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


@lru_cache(maxsize=1 << 16)
def _singular(word: str) -> str:
    """A word without its plural s: the S stemmer of Harman (1991)."""
    if len(word) < 4 or word[-1] != "s" or word[-2] in "us":
        return word
    if word.endswith("ies") and word[-4] not in "ea":
        return word[:-3] + "y"
    return word[:-1]


@dataclass(frozen=True)
class TermStatistics:
    """Term statistics for BM25, from a sample of all chunks.

    Attributes:
        num_chunks: sampled chunks.
        frequencies: number of sampled chunks that contain each term.
        mean_length: mean weighted terms of a chunk and its adjacent chunks.
    """

    num_chunks: int
    frequencies: dict[str, int]
    mean_length: float

    def weights(self, terms: Sequence[str]) -> np.ndarray:
        """The inverse document frequency of each term, [terms] float32."""
        found = np.array([self.frequencies.get(term, 0) for term in terms], dtype=np.float32)
        return np.log1p((self.num_chunks - found + 0.5) / (found + 0.5))


def sample_statistics(retrieval: RetrievalSet, tokenizer: Tokenizer) -> TermStatistics:
    """Count terms in a uniform sample of the chunks, which is always the same."""
    total = retrieval.num_chunks
    sampled = min(total, _SAMPLED_CHUNKS)
    positions = np.sort(np.random.default_rng(0).choice(total, sampled, replace=False))
    ids = retrieval.ids_at(positions)
    frequencies: Counter[str] = Counter()
    num_terms = 0
    for block in np.array_split(ids, -(-sampled // 4096)):
        for found in map(terms, _texts(retrieval, tokenizer, block)):
            num_terms += len(found)
            frequencies.update(set(found))
    adjacent = float((retrieval.adjacent(ids) >= 0).sum()) / sampled
    return TermStatistics(sampled, dict(frequencies), max(1.0, num_terms / sampled * (1 + ADJACENT * adjacent)))


def bm25(
    queries: Sequence[str], ids: np.ndarray, retrieval: RetrievalSet, tokenizer: Tokenizer, statistics: TermStatistics
) -> tuple[np.ndarray, np.ndarray]:
    """Score candidates with BM25.

    Args:
        queries: n texts.
        ids: [n, c] int64 of the retrieval set, -1 = none.
        retrieval: the chunks that ids name.
        tokenizer: tokenizer of the chunks.
        statistics: term statistics of all chunks.

    Returns:
        scores [n, c] float32, 0 for none, and the maximum possible score of each query [n] float32.
    """
    scores, largest = np.zeros(ids.shape, dtype=np.float32), np.zeros(len(ids), dtype=np.float32)
    for start in range(0, len(ids), _BLOCK_QUERIES):
        block = slice(start, start + _BLOCK_QUERIES)
        counted = [Counter(terms(query)) for query in queries[block]]
        candidates = _TermMatches.of(ids[block], counted, retrieval, tokenizer)
        for row, counts in enumerate(counted, start):
            weights = statistics.weights(list(counts)) * np.array(list(counts.values()), dtype=np.float32) * (K1 + 1)
            occurrences, lengths = candidates.occurrences(ids[row], list(counts))  # [c, terms], [c]
            norms = K1 * (1 - B + B * lengths / statistics.mean_length)
            scores[row] = (occurrences / (occurrences + norms[:, None])) @ weights
            largest[row] = weights.sum()
    return np.where(ids >= 0, scores, 0), largest


@dataclass(frozen=True)
class _TermMatches:
    """Occurrences of the queries' terms in the candidates, in adjacent chunks and in titles.

    Attributes:
        ids: [candidates] int64, sorted and unique.
        columns: column of each term.
        occurrences: [candidates, terms] float32, weighted sum over the fields.
        lengths: [candidates] float32, weighted terms without titles.
    """

    ids: np.ndarray
    columns: dict[str, int]
    counts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(
        cls, ids: np.ndarray, queries: Sequence[Counter[str]], retrieval: RetrievalSet, tokenizer: Tokenizer
    ) -> "_TermMatches":
        columns = {term: column for column, term in enumerate(dict.fromkeys(term for each in queries for term in each))}
        own = np.unique(ids[ids >= 0])
        adjacent = retrieval.adjacent(own)  # [candidates, 2]
        every = np.unique(np.concatenate([own, adjacent[adjacent >= 0]]))
        counts, lengths = _count(_texts(retrieval, tokenizer, every), columns)
        titles = [str(row.get("title") or "") for row in retrieval.metadata(own)]
        of_title = {title: number for number, title in enumerate(dict.fromkeys(titles))}
        in_titles, _ = _count(list(of_title), columns)
        weighted = counts[np.searchsorted(every, own)] + TITLE * in_titles[[of_title[title] for title in titles]]
        total = lengths[np.searchsorted(every, own)]
        for side in adjacent.T:
            present = side >= 0
            places = np.searchsorted(every, side[present])
            weighted[present] += ADJACENT * counts[places]
            total[present] += ADJACENT * lengths[places]
        return cls(own, columns, weighted, total)

    def occurrences(self, ids: np.ndarray, terms: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Occurrences of some terms in some candidates: [c, terms] float32, and their lengths [c]; arbitrary values for -1."""
        if not len(self.ids):
            return np.zeros((len(ids), len(terms)), np.float32), np.ones(len(ids), np.float32)
        rows = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        columns = np.array([self.columns[term] for term in terms], dtype=np.int64)
        return self.counts[rows[:, None], columns], self.lengths[rows]


def _count(texts: Sequence[str], columns: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Occurrences of the terms with a column [texts, columns] float32, and all terms of each text [texts] float32."""
    counts = np.zeros((len(texts), len(columns)), dtype=np.float32)
    lengths = np.zeros(len(texts), dtype=np.float32)
    occurring, sizes = list[int](), list[int]()
    for row, text in enumerate(texts):
        found = terms(text)
        lengths[row] = len(found)
        wanted = [columns[term] for term in found if term in columns]
        occurring += wanted
        sizes.append(len(wanted))
    places = np.repeat(np.arange(len(texts)), sizes) * len(columns) + np.array(occurring, dtype=np.int64)
    places, times = np.unique(places, return_counts=True)
    counts.ravel()[places] = times
    return counts, lengths


def _texts(retrieval: RetrievalSet, tokenizer: Tokenizer, ids: np.ndarray) -> list[str]:
    tokens, lengths = retrieval.chunks(ids)
    return tokenizer.decode_batch([row[:length] for row, length in zip(tokens, lengths, strict=True)])
