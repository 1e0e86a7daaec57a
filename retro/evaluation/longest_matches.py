"""Longest matches of held-out text in the datastore, in bands of their length.

stored votes of a held-out split → length of the match up to each token ┬→ the longest one of each document ─┬→ bands
                                                                        └→ the one before each token ────────┘
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from indexing.progress import Advance
from indexing.store.datastore import Split
from indexing.suffixes.votes import LONGEST


@dataclass(frozen=True)
class LongestMatches:
    """Lengths of matches in the training documents, and bands of lengths.

    Attributes:
        split: the held-out split; its votes are stored. Their lengths end at 64, which stands for longer matches.
        starts: lengths at which a band begins, ascending, from 0. The last band has no end.
    """

    split: Split
    starts: tuple[int, ...]

    @classmethod
    def of(cls, split: Split, starts: Sequence[int]) -> "LongestMatches":
        """Bands that begin at 0 and at these lengths, in any order; those above 64 count as 64."""
        return cls(split, tuple(sorted({0, *(min(start, LONGEST) for start in starts)})))

    def bands(self, lengths: np.ndarray) -> np.ndarray:
        """The number of the band of each length: [...] → [...] int64."""
        return np.searchsorted(self.starts, lengths, side="right") - 1

    def of_tokens(self, ids: np.ndarray) -> np.ndarray:
        """Tokens of the longest match that ends in each token: chunk ids [n] int64 → [n, m] uint8; 0 in padding."""
        lengths: np.ndarray = self.split.votes.gather(ids)["length"]
        return lengths

    def of_documents(self, documents: np.ndarray, advance: Advance = lambda _: None) -> np.ndarray:
        """Tokens of the longest match of each document: numbers [n] int64 → [n] int64. `advance` counts documents."""
        longest = np.zeros(len(documents), dtype=np.int64)
        for row, (first, stop) in enumerate(self.split.chunk_ranges(documents).tolist()):
            longest[row] = self.of_tokens(np.arange(first, stop)).max(initial=0)
            advance(1)
        return longest
