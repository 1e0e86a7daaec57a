"""Sliding windows over held-out documents, in batches: each token is scored once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from indexing.store.datastore import Split
from indexing.store.retrieval_set import RetrievalSet
from retro.data.batches import Batch, join, read_sequences
from retro.data.neighbor_choice import NeighborUse
from retro.model.loss import IGNORED_LABEL


@dataclass(frozen=True)
class Window:
    """Chunks [first, stop) of one document, of which the tokens from chunk `scored` on count."""

    first: int
    stop: int
    scored: int


def windows(split: Split, num_chunks: int, stride: int) -> Iterator[Window]:
    """Sliding windows over every document of a split: each token is scored once, with the longest context it gets.

    Args:
        split: usually `valid`.
        num_chunks: chunks in a window.
        stride: chunks between the starts of two windows; the paper's 2048/1024 is half a window.
    """
    for document in range(split.num_documents):
        first, stop = split.chunk_range(document)
        scored = first
        for start in range(first, stop, stride):
            end = min(start + num_chunks, stop)
            yield Window(start, end, scored)
            scored = end
            if end == stop:
                break


def window_batches(
    split: Split, retrieval: RetrievalSet, wanted: Sequence[Window], batch_size: int, use: NeighborUse
) -> Iterator[tuple[list[Window], Batch]]:
    """Batches of windows of similar length, each padded to the longest of its batch, with the windows in it.

    Labels of tokens that an earlier window scores are -100. Neighbors are chosen for each window as for a sequence of
    training; where the windows lie in `train` itself, the documents of a window are excluded too.
    """
    m = split.chunk_length
    ordered = sorted(wanted, key=lambda window: window.first - window.stop)
    for start in range(0, len(ordered), batch_size):
        group = list(ordered[start : start + batch_size])
        ranges = [(window.first, window.stop) for window in group]
        batch = read_sequences(split, retrieval, ranges, group[0].stop - group[0].first, use)
        for row, window in enumerate(group):
            # The label at position t is token t + 1: the first scored token is the label one position earlier.
            batch.labels[row, : max(0, (window.scored - window.first) * m - 1)] = IGNORED_LABEL
        yield group, join([batch], np.arange(len(group)))
