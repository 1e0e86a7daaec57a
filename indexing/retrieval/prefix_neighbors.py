"""Search the neighbors of chunks in the sorted prefixes: for a datastore that has no embeddings.

    a chunk ─ the longest match that ends with each token ─ some of its occurrences ─► chunks of the datastore
    ─ those that share most tokens and bigrams with the chunk ─► neighbors

Where a part of the chunk occurs, the text around is often of the same kind. The chunk of the datastore that ends where
this one would end comes with its continuation, as a neighbor does (paper, section 2.3).
"""

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from indexing.retrieval.candidates import Ranked
from indexing.store.datastore import Datastore, Split
from indexing.suffixes.order import FOLDER as SUFFIXES
from indexing.suffixes.search import SuffixIndex

log = logging.getLogger("retro")

CANDIDATES = 64
"""Chunks that are compared with a chunk, at least twice as many as its neighbors."""
OCCURRENCES = 16
"""Occurrences of a match that are candidates."""
_LEAST = 2  # tokens of such a match


def searches_prefixes(datastore: Datastore) -> bool:
    """Whether neighbors of a datastore are searched here: it has sorted prefixes, and no embeddings in an index."""
    return datastore.has(SUFFIXES) and not datastore.has("add")


@cache
def _say(folder: Path) -> None:
    log.info("neighbors are searched in the sorted prefixes: %s has no embeddings", folder)


@dataclass(frozen=True)
class PrefixNeighbors:
    """The search of neighbors in the sorted prefixes of a datastore."""

    index: SuffixIndex

    @classmethod
    def of(cls, index: SuffixIndex) -> "PrefixNeighbors":
        """The search of a datastore without embeddings, which is logged once: a model may have read other neighbors in
        training."""
        _say(index.split.folder)
        return cls(index)

    @property
    def _split(self) -> Split:
        return self.index.split

    def find(self, chunks: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """As `LiveNeighbors.find`; distances are NaN."""
        ranked = self.rank(chunks, k)
        tokens, lengths = self._split.with_continuation(ranked.ids.ravel())
        return tokens.reshape(len(chunks), k, -1), lengths.reshape(len(chunks), k), ranked.ids, ranked.distances

    def rank(self, chunks: np.ndarray, k: int, excluded: np.ndarray | None = None) -> Ranked:
        """The first k neighbors of full chunks [n, m], without deleted ones.

        Args:
            chunks: token ids.
            k: neighbors of each.
            excluded: chunks [first, stop) of the datastore that are no neighbors of a row, [n, 2]: those of its own
                document. An empty range excludes none.

        Returns:
            ids, scores: tokens and bigrams of the chunk that the neighbor and its continuation have; distances of NaN.
        """
        ids, scores = np.full((len(chunks), k), -1, np.int64), np.full((len(chunks), k), -np.inf, np.float32)
        for row, chunk in enumerate(chunks):
            own = (0, 0) if excluded is None else excluded[row].tolist()
            index = self.index.without(*own) if own[0] < own[1] else self.index
            if len(candidates := _candidates(index, chunk, max(CANDIDATES, 2 * k))):
                found, shared = self._compared(chunk, candidates)
                ids[row, : len(found)], scores[row, : len(found)] = found[:k], shared[:k]
        return Ranked(ids, scores, np.where(ids < 0, np.inf, np.nan).astype(np.float32), ())

    def _compared(self, chunk: np.ndarray, candidates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Candidates [n] without equal texts in the order of what they share with a chunk, and how much that is."""
        tokens, lengths = self._split.with_continuation(candidates)
        tokens[np.arange(tokens.shape[1]) >= lengths[:, None]] = -1
        _, first = np.unique(tokens, axis=0, return_index=True)
        rows = np.sort(first)  # of several with the same text, the one with the longest match
        ends, others = _bigrams(chunk), _bigrams(tokens[rows])
        shared = np.zeros(len(rows), np.float32)
        for wanted, text in ((np.unique(chunk), tokens[rows]), (np.unique(ends), others)):
            # Each number of the chunk counts once, however often a candidate has it.
            found = np.searchsorted(wanted, text).clip(max=len(wanted) - 1)
            has = np.zeros((len(rows), len(wanted)), bool)
            at = wanted[found] == text
            has[np.nonzero(at)[0], found[at]] = True
            shared += has.sum(axis=1)
        order = np.argsort(-shared, kind="stable")
        return candidates[rows][order], shared[order]


def _bigrams(tokens: np.ndarray) -> np.ndarray:
    """Two tokens in a row as one number, [..., t] → [..., t - 1]; below 0 where the second one is padding."""
    return np.where(tokens[..., 1:] < 0, -1, tokens[..., :-1] << 32 | tokens[..., 1:])


def _candidates(index: SuffixIndex, chunk: np.ndarray, most: int) -> np.ndarray:
    """The chunks that end where a chunk would end if the text around an occurrence of a part of it went on alike, [n]
    ids, those of long matches first."""
    split, m = index.split, len(chunk)
    matches = [index.longest_match(chunk[: end + 1]) for end in range(m)]
    lengths = np.array([match.length for match in matches])
    is_whole = np.append(lengths[1:] <= lengths[:-1], True)  # otherwise the next match has its occurrences, if not all
    ends = np.flatnonzero(is_whole & (lengths >= _LEAST))
    found = dict[int, None]()
    for end in ends[np.argsort(-lengths[ends], kind="stable")].tolist():
        if len(found) >= most:
            break
        places = index.occurrences(matches[end], OCCURRENCES)  # [n, 2]
        _, _, stops = split.documents_of(places[:, 0])
        chunks = places[:, 0] + (places[:, 1] + m - 1 - end) // m
        found |= dict.fromkeys(np.minimum(chunks, stops - 1).tolist())
    return np.array(list(found), np.int64)[:most]
