"""Memmaps → batches: tokens, documents and neighbors side by side, with nothing copied but the batch itself.

    sample number ─ mixture ─ datastore, its how-manyeth sequence ─ permutation ─ a run of chunks ─ neighbors by id

Every step is a pure function of the seed and the sample number, so the position in the data is one integer, no order
depends on how many processes read, and resuming needs no state.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from indexing.store.datastore import Datastore, Split
from indexing.store.errors import InputError
from retro.order import mix, mixture, permuted

IGNORED_LABEL = -100
"""A label that no loss counts: padding, and the last token of a document."""


@dataclass(frozen=True)
class DataSettings:
    """Which datastores are trained on, and in what pieces."""

    datastores: tuple[Path, ...] = ()
    """Datastores to mix; empty: the one of this configuration. They must share one tokenizer."""
    weights: tuple[float, ...] = ()
    """Share of the sequences from each datastore; empty: by their numbers of chunks."""
    sequence_length: int = 512
    """n, tokens of a training sequence: a multiple of the chunk length (paper: 2048)."""
    k: int = 2
    """Neighbors of each chunk in training (paper: 2)."""
    seed: int = 0
    """Of the order of the sequences."""

    def __post_init__(self) -> None:
        if self.weights and len(self.weights) != len(self.datastores):
            raise InputError(
                f"data.weights has {len(self.weights)} numbers for {len(self.datastores)} data.datastores."
            )
        if any(weight <= 0 for weight in self.weights):
            raise InputError(f"data.weights = {self.weights}: all must be above 0.")
        if self.sequence_length < 1:
            raise InputError(f"data.sequence_length = {self.sequence_length}: must be a multiple of the chunk length.")
        if self.k < 0:
            raise InputError(f"data.k = {self.k}: must be 0 (no retrieval) or more.")


@dataclass(frozen=True)
class Batch:
    """What the model reads. B sequences, U chunks of m tokens each, T = U·m, K neighbors of R = 2m tokens.

    Attributes:
        tokens: [B, T] int64.
        labels: [B, T] int64, the next token; -100 where there is none in the same document, and where it is not scored.
        documents: [B, U] int64, equal where chunks share a document; None where every row is one document.
        neighbors: [B, U, K, R] int64, or None: retrieval OFF.
        neighbor_lengths: [B, U, K] int64, real tokens of each neighbor, 0 = none.
    """

    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray | None
    neighbors: np.ndarray | None
    neighbor_lengths: np.ndarray | None


# --- sequences -----------------------------------------------------------------------------------------------------


def usable_neighbors(stored: np.ndarray, k: int, excluded: tuple[int, int]) -> np.ndarray:
    """The first k stored neighbors that are in no document of the sequence.

    Args:
        stored: [U, s] int64 ids, nearest first, -1 = none.
        k: how many.
        excluded: first and stop of the chunk ids of all documents that the sequence touches; they are one range.

    Returns:
        [U, k] int64, -1 where too few remain.
    """
    allowed = (stored >= 0) & ~((stored >= excluded[0]) & (stored < excluded[1]))
    order = np.argsort(~allowed, axis=1, kind="stable")[:, :k]
    chosen = np.where(np.take_along_axis(allowed, order, 1), np.take_along_axis(stored, order, 1), -1)
    return np.pad(chosen, ((0, 0), (0, k - chosen.shape[1])), constant_values=-1)


def sequence(
    split: Split, train: Split, chunks: tuple[int, int], num_chunks: int, k: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One sequence: the chunks [first, stop) of a split, padded to `num_chunks`, with k neighbors each.

    Args:
        split: where the sequence lies.
        train: where its neighbors lie.
        chunks: first and stop.
        num_chunks: U.
        k: neighbors of each chunk; None or 0 for retrieval OFF.

    Returns:
        tokens [U·m], labels [U·m], documents [U], neighbors [U, k, 2m] and their lengths [U, k], all int64.
    """
    first, stop = chunks
    m, real = split.chunk_length, stop - first
    ids = np.arange(first, stop, dtype=np.int64)
    tokens = np.full((num_chunks, m), split.pad_id, dtype=np.int64)
    tokens[:real] = split.tokens.read(first, stop)
    lengths = np.zeros(num_chunks, dtype=np.int64)
    lengths[:real] = split.lengths.read(first, stop)
    documents = np.full(num_chunks, -1, dtype=np.int64)  # chunks that pad the sequence are a document of their own
    documents[:real], starts, stops = split.documents_of(ids)
    neighbors = np.full((num_chunks, k or 0, 2 * m), split.pad_id, dtype=np.int64)
    neighbor_lengths = np.zeros((num_chunks, k or 0), dtype=np.int64)
    if k:
        own = (int(starts[0]), int(stops[-1])) if split.name == train.name else (0, 0)
        used = usable_neighbors(split.neighbor_ids.read(first, stop), k, own)
        found, found_lengths = train.with_continuation(used.ravel())
        neighbors[:real] = found.reshape(real, k, 2 * m)
        neighbor_lengths[:real] = found_lengths.reshape(real, k)
    return tokens.ravel(), _labels(tokens, lengths, documents), documents, neighbors, neighbor_lengths


def _labels(tokens: np.ndarray, lengths: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """The next token [U·m] of the same document, -100 where there is none: tokens [U, m], lengths and documents [U]."""
    num_chunks, m = tokens.shape
    real = (np.arange(m) < lengths[:, None]).ravel()
    of_document = np.repeat(documents, m)
    labels = np.full(num_chunks * m, IGNORED_LABEL, dtype=np.int64)
    followed = real[1:] & (of_document[1:] == of_document[:-1])
    labels[:-1][followed] = tokens.ravel()[1:][followed]
    return labels


def stack(sequences: Sequence[tuple[np.ndarray, ...]]) -> Batch:
    """Join sequences of one length into a batch."""
    tokens, labels, documents, neighbors, neighbor_lengths = (np.stack(parts) for parts in zip(*sequences, strict=True))
    retrieval = neighbors.shape[2] > 0
    return Batch(
        tokens=tokens,
        labels=labels,
        documents=documents if (documents != documents[:, :1]).any() else None,
        neighbors=neighbors if retrieval else None,
        neighbor_lengths=neighbor_lengths if retrieval else None,
    )


# --- training ------------------------------------------------------------------------------------------------------


class TrainingData:
    """The endless stream of training batches of one or several datastores.

    Args:
        folders: the datastores.
        settings: sequence length, k, weights, seed.
        retrieval: whether neighbors are read at all (a baseline needs none).

    Raises:
        InputError: the datastores do not fit together, lack neighbors, or are empty.
    """

    def __init__(self, folders: Sequence[Path], settings: DataSettings, *, retrieval: bool) -> None:
        self.datastores = [Datastore.open(folder) for folder in folders]
        self.k = settings.k if retrieval else 0
        self.seed = settings.seed
        first = self.datastores[0]
        m = first.chunk_length
        if settings.sequence_length % m:
            raise InputError(
                f"data.sequence_length = {settings.sequence_length}: must be a multiple of {m}, the chunk length."
            )
        self.num_chunks = settings.sequence_length // m
        for datastore in self.datastores:
            _check_datastore(datastore, first, self.k)
        sizes = [datastore.train.num_chunks for datastore in self.datastores]
        self.weights = list(settings.weights) or [float(size) for size in sizes]

    @property
    def fingerprints(self) -> list[str]:
        """Of the datastores, in order."""
        return [datastore.fingerprint for datastore in self.datastores]

    def locate(self, sample: int) -> tuple[int, tuple[int, int]]:
        """The datastore of a sample and its chunks [first, stop). Each epoch cuts the chunks at another offset."""
        chosen, number = mixture(sample, self.weights, self.seed)
        total = self.datastores[chosen].train.num_chunks
        per_epoch = max(1, total // self.num_chunks)
        epoch, position = divmod(number, per_epoch)
        spare = total - per_epoch * self.num_chunks
        offset = mix(self.seed ^ mix(epoch)) % (spare + 1) if spare > 0 else 0
        first = offset + self.num_chunks * permuted(position, per_epoch, mix(self.seed + epoch))
        return chosen, (first, min(first + self.num_chunks, total))

    def batch(self, samples: range, dropped: float = 0.0) -> Batch:
        """The batch of some sample numbers; a share `dropped` of the sequences comes without neighbors."""
        sequences = []
        for sample in samples:
            chosen, chunks = self.locate(sample)
            train = self.datastores[chosen].train
            parts = sequence(train, train, chunks, self.num_chunks, self.k)
            if dropped and mix(mix(self.seed + 1) ^ sample) < dropped * 2**64:
                parts[4][:] = 0
            sequences.append(parts)
        return stack(sequences)


def _check_datastore(datastore: Datastore, first: Datastore, k: int) -> None:
    datastore.require("neighbors" if k else "chunk")
    if datastore.train.num_chunks == 0:
        raise InputError(f"{datastore.folder} holds no training chunks.")
    if k and datastore.train.neighbor_ids.shard(0).shape[1] < k:
        stored = datastore.train.neighbor_ids.shard(0).shape[1]
        raise InputError(f"data.k = {k}: {datastore.folder} stores {stored} neighbors of each chunk (neighbors.k).")
    for key in ("vocab_size", "chunk_length", "pad_id"):
        if datastore.manifest[key] != first.manifest[key]:
            raise InputError(
                f"data.datastores: {datastore.folder} has {key} {datastore.manifest[key]}, "
                f"{first.folder} has {first.manifest[key]}; they must share one tokenizer and chunk length."
            )


# --- evaluation ----------------------------------------------------------------------------------------------------


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
    split: Split, train: Split, wanted: Sequence[Window], batch_size: int, k: int | None
) -> Iterator[tuple[list[Window], Batch]]:
    """Batches of windows of similar length, each padded to the longest of its batch, with the windows in it.

    Labels of tokens that an earlier window scores are -100.
    """
    m = split.chunk_length
    ordered = sorted(wanted, key=lambda window: window.first - window.stop)
    for start in range(0, len(ordered), batch_size):
        sequences = []
        group = list(ordered[start : start + batch_size])
        for window in group:
            parts = sequence(split, train, (window.first, window.stop), group[0].stop - group[0].first, k)
            # The label at position t is token t + 1: the first scored token is the label one position earlier.
            parts[1][: max(0, (window.scored - window.first) * m - 1)] = IGNORED_LABEL
            sequences.append(parts)
        yield group, stack(sequences)
