"""Leakage of evaluation chunks from the datastore (paper, sections 2.6 and 2.7).

chunk C, its nearest neighbors [N, F] → s, the longest token run common to C and one of them → r(C) = s/m
bits-per-byte(t) = bits / bytes over the chunks with r(C) ≤ α = t/m; t = m includes all chunks
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from indexing.progress import Advance
from indexing.similarity.overlap import overlap
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from retro.evaluation.bits_per_byte import SetResult
from retro.evaluation.sets import EvaluationSet

log = logging.getLogger("retro")

LEAKAGE_NEIGHBORS = 10
"""Number of nearest neighbors that define the leakage of a chunk (paper, section 2.7)."""

_BLOCK_CHUNKS = 128  # with ten neighbors each, the tables of the comparison fit into the CPU cache


@dataclass(frozen=True)
class Filtered:
    """A measurement over the chunks with leakage up to a threshold.

    Attributes:
        shared_tokens: t, the longest run that a chunk shares with a neighbor.
        threshold: the paper's α = t/m, the largest r(C) of a chunk.
        share: fraction of the scored chunks with r(C) ≤ α.
        result: measurement over these chunks; None if there are none.
    """

    shared_tokens: int
    threshold: float
    share: float
    result: SetResult | None


def leakage_of(
    evaluation_set: EvaluationSet,
    ids: np.ndarray,
    num_neighbors: int = LEAKAGE_NEIGHBORS,
    *,
    source: Datastore | None = None,
    advance: Advance = lambda _: None,
) -> np.ndarray:
    """Compute r(C) of chunks: the longest token run that a chunk shares with one of its nearest neighbors, over its length.

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
    check_source(evaluation_set, source)
    _warn_if_filtered(source)
    split, known = evaluation_set.split, source.split(evaluation_set.split_name)
    retrieval = RetrievalSet.of(source)
    out = np.zeros(len(ids))
    for start in range(0, len(ids), _BLOCK_CHUNKS):
        block = ids[start : start + _BLOCK_CHUNKS]
        tokens, lengths = split.tokens.gather(block), split.lengths.gather(block)
        if not np.array_equal(tokens, known.tokens.gather(block)):
            raise _other_chunks(source, evaluation_set)
        near = retrieval.without_deleted(known.neighbor_ids.gather(block)[:, :num_neighbors])
        rows, columns = np.nonzero(near >= 0)
        neighbors, neighbor_lengths = retrieval.with_continuation(near[rows, columns])
        shared = overlap(tokens[rows], lengths[rows], neighbors, neighbor_lengths)
        np.maximum.at(out, start + rows, shared)
        advance(len(block))
    return out


def check_source(evaluation_set: EvaluationSet, source: Datastore) -> None:
    """Raise InputError if a datastore stores no neighbors, or its sizes show that its chunks differ from the set's."""
    source.require("neighbors")
    ours, theirs = evaluation_set.datastore.manifest, source.manifest
    same = all(ours[key] == theirs[key] for key in ("vocab_size", "chunk_length"))
    name = evaluation_set.split_name
    if not same or sum(theirs["splits"].get(name, {}).get("chunks", ())) != evaluation_set.split.num_chunks:
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
    result: SetResult, leakage: np.ndarray, shared_tokens: Sequence[int], chunk_length: int
) -> Iterator[Filtered]:
    """Restrict a measurement to the chunks with r(C) ≤ α = t/m, for each t in ascending order.

    The last chunk of a document may be shorter than m. It must not share a larger part of itself than a full chunk.

    Args:
        result: a measurement with scores by chunk.
        leakage: [n] r of each chunk in `result.chunks.ids`.
        shared_tokens: values of t; those above m count as m.
        chunk_length: m.
    """
    for tokens in sorted({min(tokens, chunk_length) for tokens in shared_tokens}):
        kept = leakage <= tokens / chunk_length
        yield Filtered(tokens, tokens / chunk_length, float(kept.mean()), _restricted(result, kept))


def _restricted(result: SetResult, kept: np.ndarray) -> SetResult | None:
    """Return the measurement over some of its chunks; None if these have no text."""
    chunks = result.chunks
    assert chunks is not None, "no scores by chunk"
    if not chunks.bytes[kept].any():
        return None
    documents, count = chunks.documents[kept], len(result.nats_by_document)
    return replace(
        result,
        tokens=int(chunks.tokens[kept].sum()),
        nats_by_document=np.bincount(documents, chunks.nats[kept], minlength=count),
        bytes_by_document=np.bincount(documents, chunks.bytes[kept], minlength=count),
        chunks=None,
    )
