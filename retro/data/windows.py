"""Sliding windows over texts, and batches of windows over held-out documents. Each token is scored once."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from indexing.store.datastore import Split
from indexing.store.retrieval_set import RetrievalSet
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.data.batches import read_sequences, without_single_documents
from retro.data.neighbor_choice import NeighborUse


@dataclass(frozen=True)
class ScoringWindow:
    """Positions [start, stop) of a text, in chunks or in tokens. The window scores [scored, stop).

    Attributes:
        text: number of the document or sequence.
        start, stop, scored: positions in it.
    """

    text: int
    start: int
    stop: int
    scored: int


def sliding_windows(
    text: int, start: int, stop: int, *, size: int, stride: int, scored: int | None = None
) -> Iterator[ScoringWindow]:
    """Slide a window over positions [start, stop) of a text: every position is scored once, in the first window that
    has it.

    Args:
        text: number of the text.
        start: first position of the text.
        stop: position after its last one.
        size: positions in a window.
        stride: positions between the starts of two windows; at most `size`.
        scored: first position to score; None = `start`.
    """
    scored = start if scored is None else scored
    for first in range(start, stop, stride):
        end = min(first + size, stop)
        if end > scored:
            yield ScoringWindow(text, first, end, scored)
            scored = end


def document_windows(split: Split, num_chunks: int, stride: int) -> Iterator[ScoringWindow]:
    """Slide a window over every document of a split that is not deleted; positions are chunk ids.

    Args:
        split: usually `valid`.
        num_chunks: chunks in a window.
        stride: chunks between the starts of two windows; the paper's 2048/1024 is half a window.
    """
    deleted = set(split.deleted_documents.tolist())
    for document in itertools.filterfalse(deleted.__contains__, range(split.num_documents)):
        yield from sliding_windows(document, *split.chunk_range(document), size=num_chunks, stride=stride)


def sampled_windows(
    split: Split, num_chunks: int, stride: int, num_tokens: int, num_documents: int, seed: int
) -> Iterator[ScoringWindow]:
    """Draw windows of `document_windows` that score at most `num_tokens` tokens, but one chunk at least.

    Documents come in random order, each with one random window; then each with another one. A window scores at most an
    equal part for `num_documents`, so that a low limit is not used up by fewer documents.

    Args:
        split: usually `valid`.
        num_chunks: chunks in a window.
        stride: chunks between the starts of two windows.
        num_tokens: the limit.
        num_documents: documents to score at least, if the split has as many.
        seed: of the order.
    """
    random, left = np.random.default_rng(seed), num_tokens
    most = max(num_tokens // num_documents, split.chunk_length)
    deleted = set(split.deleted_documents.tolist())
    waiting = deque(
        document for document in random.permutation(split.num_documents).tolist() if document not in deleted
    )
    windows: dict[int, list[ScoringWindow]] = {}
    while waiting and left > 0:
        document = waiting.popleft()
        if document not in windows:
            chunks = split.chunk_range(document)
            windows[document] = list(sliding_windows(document, *chunks, size=num_chunks, stride=stride))
            random.shuffle(windows[document])  # type: ignore[arg-type]
        window = windows[document].pop()
        sizes = scored_tokens(split, window)
        fitting = int(np.searchsorted(sizes, min(most, left), side="right"))
        if not fitting and left < num_tokens:
            return
        fitting = max(1, fitting)
        left -= int(sizes[fitting - 1])
        yield replace(window, stop=window.scored + fitting)
        if windows[document]:
            waiting.append(document)


def scored_tokens(split: Split, window: ScoringWindow) -> np.ndarray:
    """How many tokens a window of a document scores up to each of its scored chunks, int64 [chunks]."""
    sizes = np.cumsum(split.lengths.read(window.scored, window.stop).astype(np.int64))
    return sizes - (window.scored == window.start)  # the first token of a window has no text before it


def window_batches(
    split: Split, retrieval: RetrievalSet, windows: Sequence[ScoringWindow], batch_size: int, use: NeighborUse
) -> Iterator[tuple[list[ScoringWindow], Inputs[np.ndarray]]]:
    """Yield batches of windows of similar length, padded to the longest one, together with the windows in them.

    Labels of tokens that an earlier window scores are `IGNORED_LABEL`. Neighbors are chosen for each window as for a
    training sequence; for windows of the split `train`, this excludes neighbors from the window's documents.
    """
    m = split.chunk_length
    ordered = sorted(windows, key=lambda window: window.start - window.stop)
    for start in range(0, len(ordered), batch_size):
        group = list(ordered[start : start + batch_size])
        ranges = [(window.start, window.stop) for window in group]
        batch = read_sequences(split, retrieval, ranges, group[0].stop - group[0].start, use)
        for row, window in enumerate(group):
            # The label at position t is token t + 1: the first scored token is the label one position earlier.
            batch.labels[row, : max(0, (window.scored - window.start) * m - 1)] = IGNORED_LABEL
        yield group, without_single_documents(batch)
