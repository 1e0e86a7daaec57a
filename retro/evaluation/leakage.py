"""Bits-per-byte of what does not stand in the datastore already (paper, sections 2.6 and 2.7).

chunk C, its nearest neighbors [N, F] → s, the longest run of tokens common to C and one of them → r(C) = s/m
bits-per-byte(α) = bits / bytes over the chunks with r(C) ≤ α; α = 1 is all of them
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from indexing.overlap import overlap
from indexing.store.artifact import read_manifest
from indexing.store.datastore import Datastore, shard_name
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from retro.evaluation.bits_per_byte import Result
from retro.evaluation.sets import EvaluationSet

log = logging.getLogger("retro")

_BLOCK_CHUNKS = 128  # with ten neighbors each, the tables of the comparison stay in cache


@dataclass(frozen=True)
class Filtered:
    """A measurement over the chunks that leak little.

    Attributes:
        threshold: α, the largest r(C) that counts.
        share: of the scored chunks that count.
        result: over these chunks; None where there are none.
    """

    threshold: float
    share: float
    result: Result | None


def leakage_of(
    evaluation_set: EvaluationSet,
    ids: np.ndarray,
    num_neighbors: int,
    *,
    source: Datastore | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> np.ndarray:
    """r(C) of some chunks: the largest part of each that stands, as one run of tokens, in one of its nearest neighbors.

    It is a property of the text and of the search, not of a model: always from the nearest neighbors as they are
    stored, whichever ones a model reads.

    Args:
        evaluation_set: where the chunks lie.
        ids: [n] int64.
        num_neighbors: how many of the stored neighbors count; fewer if fewer are stored.
        source: datastore that stores the neighbors, if not that of the set: one measure for several embedders.
        advance: told of chunks.

    Returns:
        [n] float64 between 0 and 1.

    Raises:
        InputError: the source stores no neighbors, or holds other chunks than the set.
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
        near = known.neighbor_ids.gather(block)[:, :num_neighbors]
        rows, columns = np.nonzero(near >= 0)
        neighbors, neighbor_lengths = retrieval.with_continuation(near[rows, columns])
        shared = overlap(tokens[rows], lengths[rows], neighbors, neighbor_lengths)
        np.maximum.at(out, start + rows, shared)
        advance(len(block))
    return out


def check_source(evaluation_set: EvaluationSet, source: Datastore) -> None:
    """Raise InputError unless a datastore stores neighbors and seems to hold the chunks of a set, as far as sizes tell."""
    source.require("neighbors")
    ours, theirs = evaluation_set.datastore.manifest, source.manifest
    same = all(ours[key] == theirs[key] for key in ("vocab_size", "chunk_length"))
    name = evaluation_set.split_name
    if not same or sum(theirs["splits"].get(name, {}).get("chunks", ())) != evaluation_set.split.num_chunks:
        raise _other_chunks(source, evaluation_set)


def _warn_if_filtered(source: Datastore) -> None:
    """Where near copies were kept out of the stored neighbors, leaks cannot be seen."""
    settings = read_manifest(source.folder / "neighbors" / shard_name(0))["recipe"]["settings"]
    if (limit := settings.get("neighbors.max_overlap", 1)) < 1:
        log.warning(
            "%s was built with neighbors.max_overlap = %s: what leaks more is not among its neighbors. Measure the leakage "
            "from a datastore built with neighbors.max_overlap = 1",
            source.folder,
            limit,
        )


def _other_chunks(source: Datastore, evaluation_set: EvaluationSet) -> InputError:
    return InputError(
        f"leakage from {source.folder}: it does not hold the chunks of evaluation set {evaluation_set.name!r} "
        f"({evaluation_set.datastore.folder}). Name a datastore of the same corpus, tokenizer and chunk length."
    )


def by_leakage(result: Result, leakage: np.ndarray, thresholds: Sequence[float]) -> Iterator[Filtered]:
    """A measurement over the chunks that leak at most this much, for each threshold α.

    Args:
        result: measured by chunk.
        leakage: [n] r of each of `result.chunks.ids`.
        thresholds: α, in this order.
    """
    for threshold in thresholds:
        kept = leakage <= threshold
        yield Filtered(threshold, float(kept.mean()), _restricted(result, kept))


def _restricted(result: Result, kept: np.ndarray) -> Result | None:
    """The measurement over some of its chunks; None where these hold no text."""
    chunks = result.chunks
    assert chunks is not None, "not measured by chunk"
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
