"""Leakage of held-out text from the datastore: by exact search where it has votes, else from neighbors (paper, sections
2.6 and 2.7).

votes: longest match of a document, or before a token, in all training documents → bits-per-byte by bands of its length
neighbors: chunk C, its nearest neighbors [N, F] → s, the longest token run common to C and one of them → r(C) = s/m
    bits-per-byte(t) = bits / bytes over the chunks with r(C) ≤ α = t/m; t = m includes all chunks
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from indexing.progress import Advance
from indexing.similarity.overlap import overlap
from indexing.store.datastore import Datastore, Split
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from indexing.suffixes.order import LONGEST
from indexing.suffixes.votes import all_vote, has_votes, read_votes
from retro.evaluation.sets import EvaluationSet

log = logging.getLogger("retro")

LEAKAGE_NEIGHBORS = 10
"""Number of nearest neighbors that define the leakage of a chunk (paper, section 2.7)."""

_BLOCK_CHUNKS = 128  # with ten neighbors each, the tables of the comparison fit into the CPU cache


# --- by longest match ------------------------------------------------------------------------------------------------


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
        lengths: np.ndarray = read_votes(self.split, ids)["length"]
        return lengths

    def of_documents(self, documents: np.ndarray, advance: Advance = lambda _: None) -> np.ndarray:
        """Tokens of the longest match of each document: numbers [n] int64 → [n] int64. `advance` counts documents."""
        longest = np.zeros(len(documents), dtype=np.int64)
        for row, (first, stop) in enumerate(self.split.chunk_ranges(documents).tolist()):
            longest[row] = self.of_tokens(np.arange(first, stop)).max(initial=0)
            advance(1)
        return longest

    def before_tokens(self, chunks: np.ndarray) -> np.ndarray:
        """Tokens of the longest match that ends before each token: chunk ids [n] int64 → [n, m] uint8.

        The first token of a document has none before it and gets an arbitrary number.
        """
        before = self.of_tokens(np.maximum(chunks - 1, 0))[:, -1:]  # only the last chunk of a document is padded
        return np.concatenate([before, self.of_tokens(chunks)[:, :-1]], axis=1)


def longest_matches(
    evaluation_set: EvaluationSet, starts: Sequence[int], source: Datastore | None = None
) -> LongestMatches | None:
    """The longest matches of a set, in bands of their length; None if not all text that models read votes.

    Votes are searched in the datastore itself only. With `neighbors.extra_datastores` they would miss copies that
    models read, and after an append copies in the appended documents.

    Args:
        evaluation_set: the set.
        starts: lengths at which a band begins.
        source: datastore with the votes; None = the set's.

    Raises:
        InputError: the chunks of the source differ from the set's.
    """
    datastore = source or evaluation_set.datastore
    if not _is_searched(datastore):
        return None
    if source is not None:
        check_source(evaluation_set, source)
        ids = np.arange(evaluation_set.split.num_chunks)
        for first in range(0, len(ids), _BLOCK_CHUNKS):
            _check_tokens(evaluation_set, source, ids[first : first + _BLOCK_CHUNKS])
    return LongestMatches.of(datastore.split(evaluation_set.split_name), starts)


def _is_searched(datastore: Datastore) -> bool:
    """Whether its votes are made from all text that its models read."""
    return has_votes(datastore) and all_vote(datastore) and not datastore.manifest.get("extra_datastores")


# --- by neighbors ----------------------------------------------------------------------------------------------------


def leakage_of(
    evaluation_set: EvaluationSet,
    ids: np.ndarray,
    num_neighbors: int = LEAKAGE_NEIGHBORS,
    *,
    source: Datastore | None = None,
    advance: Advance = lambda _: None,
) -> np.ndarray:
    """Compute r(C) of chunks: the longest token run that a chunk shares with one of its nearest neighbors, over its
    length.

    Leakage depends on the text and the search, not on the model: it always uses the stored nearest neighbors, whichever
    neighbors a model reads.

    Args:
        evaluation_set: the set with the chunks.
        ids: [n] int64 chunk ids.
        num_neighbors: number of stored neighbors to compare with; fewer if fewer are stored.
        source: datastore with the neighbors; None = the set's. Name one to measure several embedders alike.
        advance: called with numbers of compared chunks.

    Returns:
        [n] float64 between 0 and 1.

    Raises:
        InputError: the source stores no neighbors, or its chunks differ from the set's.
    """
    source = source or evaluation_set.datastore
    source.require("neighbors")
    check_source(evaluation_set, source)
    _warn_if_filtered(source)
    split, searched = evaluation_set.split, source.split(evaluation_set.split_name)
    retrieval = RetrievalSet.of(source)
    out = np.zeros(len(ids))
    for start in range(0, len(ids), _BLOCK_CHUNKS):
        block = ids[start : start + _BLOCK_CHUNKS]
        _check_tokens(evaluation_set, source, block)
        tokens, lengths = split.tokens.gather(block), split.lengths.gather(block)
        near = retrieval.without_deleted(searched.neighbor_ids.gather(block)[:, :num_neighbors])
        rows, columns = np.nonzero(near >= 0)
        neighbors, neighbor_lengths = retrieval.with_continuation(near[rows, columns])
        shared = overlap(tokens[rows], lengths[rows], neighbors, neighbor_lengths)
        np.maximum.at(out, start + rows, shared)
        advance(len(block))
    return out


def check_source(evaluation_set: EvaluationSet, source: Datastore) -> None:
    """Raise InputError if a datastore has neither votes nor neighbors, or its sizes show that its chunks differ from
    the set's."""
    if not _is_searched(source):
        source.require("neighbors")
    manifest, other = evaluation_set.datastore.manifest, source.manifest
    same = all(manifest[key] == other[key] for key in ("vocab_size", "chunk_length"))
    name = evaluation_set.split_name
    if not same or sum(other["splits"].get(name, {}).get("chunks", ())) != evaluation_set.split.num_chunks:
        raise _other_chunks(source, evaluation_set)


def _check_tokens(evaluation_set: EvaluationSet, source: Datastore, ids: np.ndarray) -> None:
    """Raise InputError if some chunks of a datastore differ from the set's."""
    tokens = source.split(evaluation_set.split_name).tokens.gather(ids)
    if not np.array_equal(evaluation_set.split.tokens.gather(ids), tokens):
        raise _other_chunks(source, evaluation_set)


def _warn_if_filtered(source: Datastore) -> None:
    """Warn if the stored neighbors exclude near copies, because leakage is then underestimated."""
    if (limit := source.train.neighbor_limit) < 1:
        log.warning(
            "%s was built with neighbors.max_overlap = %s, so its neighbors exclude chunks with more leakage. Measure leakage "
            "from a datastore built with neighbors.max_overlap = 1",
            source.folder,
            limit,
        )


def _other_chunks(source: Datastore, evaluation_set: EvaluationSet) -> InputError:
    return InputError(
        f"leakage from {source.folder}: its chunks differ from those of evaluation set {evaluation_set.name!r} "
        f"({evaluation_set.datastore.folder}). Name a datastore with the same corpus, tokenizer and chunk length."
    )


def by_leakage(
    leakage: np.ndarray, shared_tokens: Sequence[int], chunk_length: int
) -> Iterator[tuple[int, np.ndarray]]:
    """For each t in ascending order: t, and which chunks have r(C) ≤ α = t/m, bool [n, 1] for `SetResult.part`.

    The last chunk of a document may be shorter than m. It must not share a larger part of itself than a full chunk.

    Args:
        leakage: [n] r of each chunk.
        shared_tokens: values of t; those above m count as m.
        chunk_length: m.
    """
    for tokens in sorted({min(tokens, chunk_length) for tokens in shared_tokens}):
        yield tokens, (leakage <= tokens / chunk_length)[:, None]
