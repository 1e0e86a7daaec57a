"""Search the neighbors of chunks in the sorted prefixes: for a datastore that has no embeddings.

    a chunk ─ the longest match that ends with each token ─ some of its occurrences ─► candidates ─ shared tokens ─► neighbors

Where a part of the chunk occurs, the text around is often of the same kind. The chunk of the datastore that ends where
this one would end comes with its continuation, as a neighbor does (paper, section 2.3). Candidates are ordered as with
`neighbors.rerank = "tokens"`.
"""

import logging
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from indexing.retrieval.candidates import Ranked
from indexing.similarity.shared_tokens import SharedTokens
from indexing.store.datastore import Datastore
from indexing.store.retrieval_set import RetrievalSet
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

    @cached_property
    def _order(self) -> SharedTokens:
        """The order by shared tokens, whose frequencies are estimated from the sorted prefixes."""
        counts = self.index.token_counts()
        weights = np.log((1 + counts.sum()) / (1 + counts)).astype(np.float32)
        weights[self.index.split.pad_id] = 0
        return SharedTokens(weights, RetrievalSet((self.index.split,)))

    def find(self, chunks: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """As `LiveNeighbors.find`; distances are NaN."""
        ranked = self.rank(chunks, k)
        tokens, lengths = self.index.split.with_continuation(ranked.ids.ravel())
        return tokens.reshape(len(chunks), k, -1), lengths.reshape(len(chunks), k), ranked.ids, ranked.distances

    def rank(self, chunks: np.ndarray, k: int, excluded: np.ndarray | None = None) -> Ranked:
        """The first k neighbors of chunks [n, m], without deleted ones.

        Args:
            chunks: token ids.
            k: neighbors of each.
            excluded: chunks [first, stop) of the datastore that are no neighbors of a row, [n, 2]: those of its own
                document. An empty range excludes none.

        Returns:
            ids; scores and distances are NaN.
        """
        candidates = np.full((len(chunks), max(CANDIDATES, 2 * k)), -1, np.int64)
        for row, chunk in enumerate(chunks):
            own = (0, 0) if excluded is None else excluded[row].tolist()
            found = _candidates(self.index.without(*own) if own[0] < own[1] else self.index, chunk)
            candidates[row, : len(found)] = found[: candidates.shape[1]]
        ids = self._order.best(chunks, candidates, k)
        scores, distances = (np.where(ids < 0, none, np.nan).astype(np.float32) for none in (-np.inf, np.inf))
        return Ranked(ids, scores, distances, ())


def _candidates(index: SuffixIndex, chunk: np.ndarray) -> list[int]:
    """Ids of the chunks that end where a chunk would end, if the text around an occurrence of a part of it went on
    alike: at least `CANDIDATES` if there are as many, those of long matches first."""
    split, m = index.split, len(chunk)
    matches = [index.longest_match(chunk[: end + 1]) for end in range(m)]
    lengths = np.array([match.length for match in matches])
    is_whole = np.append(lengths[1:] <= lengths[:-1], True)  # no later match contains it
    ends = np.flatnonzero(is_whole & (lengths >= _LEAST))
    found = dict[int, None]()
    for end in ends[np.argsort(-lengths[ends], kind="stable")].tolist():
        if len(found) >= CANDIDATES:
            break
        places = index.occurrences(matches[end], OCCURRENCES)  # [n, 2]
        _, _, stops = split.documents_of(places[:, 0])
        chunks = places[:, 0] + (places[:, 1] + m - 1 - end) // m
        found |= dict.fromkeys(np.minimum(chunks, stops - 1).tolist())
    return list(found)
