"""Bits-per-byte of held-out documents, retrieval ON and OFF (paper, section 2.7 and 4).

    documents → sliding windows → nats of every token → sum over documents / (ln 2 · bytes of their text)

Bits-per-byte does not depend on the tokenizer. ON and OFF are the same weights; only the neighbors are withheld.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from retro.batches import IGNORED_LABEL, Batch, window_batches, windows
from retro.device import Placement
from retro.loss import token_losses
from retro.model import Retro

# Windows sorted by length at a time: little padding, and memory that does not grow with the evaluation set.
_BUFFERED_WINDOWS = 512


@dataclass(frozen=True)
class EvaluationSettings:
    """What is measured on held-out documents."""

    k: tuple[int, ...] = (2,)
    """Numbers of neighbors to measure with retrieval ON."""
    window: int = 0
    """Tokens of context; 0 = the sequence length of training."""
    stride: int = 0
    """Tokens between two windows; 0 = half a window (the paper's 2048/1024)."""
    max_tokens: int = 0
    """Stop after about this many scored tokens; 0 = all held-out documents."""
    batch_size: int = 8
    """Windows in a batch."""
    seed: int = 0
    """Of the bootstrap over documents."""

    def __post_init__(self) -> None:
        if any(k < 1 for k in self.k):
            raise InputError(f"evaluation.k = {self.k}: numbers of neighbors, each at least 1.")
        for key in ("window", "stride", "max_tokens"):
            if getattr(self, key) < 0:
                raise InputError(f"evaluation.{key} = {getattr(self, key)}: must be 0 or more.")
        if self.batch_size < 1:
            raise InputError(f"evaluation.batch_size = {self.batch_size}: must be at least 1.")


@dataclass(frozen=True)
class Result:
    """One measurement.

    Attributes:
        retrieval: `OFF` or `ON`.
        k: neighbors of each chunk; 0 when OFF.
        bits_per_byte: total bits over the bytes of the scored tokens.
        perplexity: per token.
        tokens, bytes: what was scored.
        tokens_per_second: of this measurement.
        nats_by_document, bytes_by_document: [documents], for paired comparisons.
    """

    retrieval: str
    k: int
    bits_per_byte: float
    perplexity: float
    tokens: int
    bytes: int
    tokens_per_second: float
    nats_by_document: np.ndarray
    bytes_by_document: np.ndarray

    def as_json(self) -> dict[str, Any]:
        """Everything but the arrays."""
        return {key: value for key, value in asdict(self).items() if not isinstance(value, np.ndarray)}


def evaluate(
    model: Retro,
    datastore: Datastore,
    token_bytes: np.ndarray,
    settings: EvaluationSettings,
    placement: Placement,
    *,
    k: int,
    sequence_length: int,
    advance: Callable[[int], None] = lambda _: None,
) -> Result:
    """Score the held-out documents of a datastore.

    Args:
        model: in evaluation or training mode; its mode is put back.
        datastore: its `valid` split is scored with neighbors from `train`.
        token_bytes: [vocabulary] bytes of text in each token.
        settings: window, stride, how much.
        placement: device and precision.
        k: neighbors of each chunk; 0 = retrieval OFF.
        sequence_length: window where the settings leave it open.
        advance: told of scored tokens.

    Raises:
        InputError: nothing is held out, or window and stride do not fit the chunk length.
    """
    num_chunks, stride = _window_chunks(settings, sequence_length, datastore.chunk_length)
    _check(model, datastore, k)
    valid = datastore.valid
    nats, sizes = np.zeros((2, valid.num_documents))
    if not len(nats):
        raise InputError(
            f"{datastore.folder} holds no held-out documents; give valid a weight in corpus.split and rebuild."
        )
    tokens, started, mode = 0, time.perf_counter(), model.training
    model.eval()
    wanted = windows(valid, num_chunks, stride)
    full = settings.max_tokens or math.inf
    while tokens < full and (group := list(islice(wanted, _BUFFERED_WINDOWS))):
        if math.isfinite(full):
            group = _first_windows(group, int(full - tokens), datastore.chunk_length)
        for part, batch in window_batches(valid, datastore.train, group, settings.batch_size, k):
            documents = valid.documents_of(np.array([window.first for window in part]))[0]
            losses, bytes_of = _score(model, batch, token_bytes, placement)
            np.add.at(nats, documents, losses)
            np.add.at(sizes, documents, bytes_of)
            scored = int((batch.labels != IGNORED_LABEL).sum())
            tokens += scored
            advance(scored)
    model.train(mode)
    if sizes.sum() == 0:
        raise InputError(f"{datastore.folder}: the held-out documents hold no text to score.")
    seconds = time.perf_counter() - started
    return Result(
        retrieval="ON" if k else "OFF",
        k=k,
        bits_per_byte=float(nats.sum() / math.log(2) / sizes.sum()),
        perplexity=float(math.exp(nats.sum() / max(1, tokens))),
        tokens=tokens,
        bytes=int(sizes.sum()),
        tokens_per_second=tokens / seconds,
        nats_by_document=nats,
        bytes_by_document=sizes,
    )


def _check(model: Retro, datastore: Datastore, k: int) -> None:
    """Raise InputError unless the model can be scored on this datastore with k neighbors."""
    for key in ("vocab_size", "chunk_length"):
        ours, theirs = getattr(model.settings, key), datastore.manifest[key]
        if ours != theirs:
            raise InputError(f"{datastore.folder} has {key} {theirs}, the model {ours}: it was trained on another one.")
    if k:
        datastore.require("neighbors")
        stored = datastore.valid.neighbor_ids.shard(0).shape[1]
        if k > stored:
            raise InputError(f"evaluation.k = {k}: {datastore.folder} stores {stored} neighbors (neighbors.k).")


def _window_chunks(settings: EvaluationSettings, sequence_length: int, m: int) -> tuple[int, int]:
    window = settings.window or sequence_length
    stride = settings.stride or max(m, window // 2 // m * m)
    if window % m or stride % m or not 0 < stride < window:
        raise InputError(
            f"evaluation.window = {window} and evaluation.stride = {stride}: both must be multiples of the chunk length "
            f"{m}, and the stride below the window: the first token of a window has nothing before it."
        )
    return window // m, stride // m


def _first_windows(group: list[Any], tokens: int, m: int) -> list[Any]:
    """As many windows as hold about this many scored tokens, one at least."""
    sizes = np.cumsum([(window.stop - window.scored) * m for window in group])
    return group[: int(np.searchsorted(sizes, tokens)) + 1]


@torch.inference_mode()
def _score(model: Retro, batch: Batch, token_bytes: np.ndarray, placement: Placement) -> tuple[np.ndarray, np.ndarray]:
    """Nats and bytes of every row of a batch, each [B] float64."""
    labels = placement.tensor(batch.labels)
    assert labels is not None
    with placement.autocast():
        logits = model(**placement.tensors(batch))
    losses = token_losses(logits, labels).double().sum(1).cpu().numpy()
    scored = batch.labels != IGNORED_LABEL
    return losses, np.where(scored, token_bytes[np.where(scored, batch.labels, 0)], 0).sum(1).astype(np.float64)


def compare(measured: Result, reference: Result, seed: int = 0, rounds: int = 1000) -> tuple[float, float, float]:
    """How far one measurement lies from another on the same documents, in percent of the reference's bits-per-byte.

    Args:
        measured: say, retrieval ON.
        reference: say, the baseline.
        seed: of the bootstrap.
        rounds: of the bootstrap.

    Returns:
        the difference (negative = fewer bits), and the 2.5% and 97.5% points of a bootstrap over documents.
    """
    assert measured.bytes == reference.bytes, "not the same tokens"
    scored = np.flatnonzero(measured.bytes_by_document)
    ours, theirs = measured.nats_by_document[scored], reference.nats_by_document[scored]
    drawn = np.random.default_rng(seed).integers(0, len(scored), (rounds, len(scored)))
    changes = 100 * (ours[drawn].sum(1) / theirs[drawn].sum(1) - 1)
    low, high = np.quantile(changes, [0.025, 0.975])
    return 100 * (ours.sum() / theirs.sum() - 1), float(low), float(high)
