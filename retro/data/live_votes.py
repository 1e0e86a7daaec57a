"""Votes of text, searched in the sorted prefixes: a datastore without the stage `votes` has none stored."""

from itertools import pairwise

import numpy as np

from indexing.machine import for_each
from indexing.store.datastore import Split
from indexing.suffixes.order import LONGEST
from indexing.suffixes.search import SuffixIndex
from indexing.suffixes.votes import COLUMNS


def live_votes(index: SuffixIndex, split: Split, ids: np.ndarray) -> np.ndarray:
    """Search the votes for the tokens of chunks, on all cores: of held-out documents those that the stage `votes` would
    store.

    A document does not vote for itself. Of training documents the votes can be those of other occurrences than the
    stored ones: these are drawn from all, and those of the own document left out.

    Args:
        index: the sorted prefixes of training documents.
        split: a split of the same datastore.
        ids: [n] int64 chunk ids of the split.

    Returns:
        [n, m, 32] int64, as `votes.as_columns`; 0 in padding.
    """
    m = split.chunk_length
    votes = np.zeros((len(ids), m, COLUMNS), dtype=np.int64)
    _, begins, ends = split.documents_of(ids)
    is_searched = split.name == index.split.name
    is_first = (np.diff(ids, prepend=-2) != 1) | (np.diff(begins, prepend=-1) != 0)

    def fill(run: tuple[int, int]) -> None:
        start, stop = run
        first = max(int(begins[start]), int(ids[start]) + (1 - LONGEST) // m)  # a match reads the text before its token
        last = int(ids[stop - 1]) + 1
        is_text = np.arange(m) < split.lengths.read(first, last)[:, None]
        before, text = int(ids[start]) - first, split.tokens.read(first, last)[is_text]
        others = index.without(int(begins[start]), int(ends[start])) if is_searched else index
        votes[start:stop][is_text[before:]] = others.votes(text, int(is_text[:before].sum()))

    for_each(fill, [*pairwise([*np.flatnonzero(is_first).tolist(), len(ids)])])
    return votes
