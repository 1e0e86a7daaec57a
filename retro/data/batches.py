"""Memmaps → batches: tokens, documents and neighbors side by side, with nothing copied but the batch itself.

    sample number ─ mixture ─ datastore, index of the sequence in it ─ permutation ─ a run of chunks ─ neighbors by id

Every step is a pure function of the seed and the sample number, so the position in the data is one integer, no order
depends on how many processes read, and resuming needs no state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from indexing.splitmix64 import mix
from indexing.store.datastore import Datastore, Split
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet, check_tokenizer
from retro.data.datastore_mixture import MixtureEntry, announce, check_budgets, mixture_weights, shares
from retro.data.neighbor_choice import NeighborUse, Queries, read_neighbors
from retro.data.sample_order import mixture, permuted
from retro.data.settings import DataSettings
from retro.model.loss import IGNORED_LABEL


@dataclass(frozen=True)
class Batch:
    """What the model reads. B sequences, U chunks of m tokens each, T = U·m, K neighbors of R = 2m tokens.

    Attributes:
        tokens: [B, T] int64.
        labels: [B, T] int64, the next token; -100 where there is none in the same document, and where it is not scored.
        documents: [B, U] int64, equal where chunks share a document; None where every row is one document.
        neighbors: [B, U, K, R] int64, or None: retrieval OFF.
        neighbor_lengths: [B, U, K] int64, real tokens of each neighbor, 0 = none.
        lengths: [B, U] int64, real tokens of each chunk, an incomplete one included; what follows them is padding.
    """

    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray | None
    neighbors: np.ndarray | None
    neighbor_lengths: np.ndarray | None
    lengths: np.ndarray


# --- sequences -----------------------------------------------------------------------------------------------------


def read_sequences(
    split: Split,
    retrieval: RetrievalSet,
    ranges: Sequence[tuple[int, int]],
    num_chunks: int,
    use: NeighborUse,
    epochs: Sequence[int] = (),
) -> Batch:
    """Runs of chunks as a batch, each padded to the same length.

    Args:
        split: where the sequences lie.
        retrieval: where their neighbors lie.
        ranges: first and stop of the chunks of each of B sequences.
        num_chunks: U.
        use: how their neighbors are chosen; k = 0 for retrieval OFF.
        epochs: how often the data was read before each sequence; empty: never.
    """
    first, stop = np.array(ranges, dtype=np.int64).T[:, :, None]  # [B, 1]
    ids = first + np.arange(num_chunks)  # [B, U]
    real, m = ids < stop, split.chunk_length
    tokens = np.full((*ids.shape, m), split.pad_id, dtype=np.int64)
    tokens[real] = split.tokens.gather(ids[real])
    lengths = np.zeros(ids.shape, dtype=np.int64)
    lengths[real] = split.lengths.gather(ids[real])
    # Chunks that pad a sequence are a document of their own.
    documents, starts, stops = np.stack([np.full(ids.shape, -1), np.full(ids.shape, split.num_chunks), 0 * ids])
    documents[real], starts[real], stops[real] = split.documents_of(ids[real])
    neighbors = neighbor_lengths = None
    if use.k:
        own = np.stack([starts.min(axis=1), stops.max(axis=1)], axis=1)  # [B, 2]: the documents of a run are one range
        followed = np.zeros(ids.shape, dtype=bool)
        followed[:, :-1] = documents[:, 1:] == documents[:, :-1]
        queries = Queries(
            ids=ids[real],
            excluded=np.repeat(own * (split.name == retrieval.own.name), real.sum(axis=1), axis=0),
            tokens=tokens[real],
            lengths=lengths[real],
            followed=followed[real],
            epochs=np.repeat(epochs or [0] * len(ids), real.sum(axis=1)),
        )
        neighbors = np.full((*ids.shape, use.k, 2 * m), split.pad_id, dtype=np.int64)  # [B, U, K, R]
        neighbor_lengths = np.zeros((*ids.shape, use.k), dtype=np.int64)  # [B, U, K]
        neighbors[real], neighbor_lengths[real] = read_neighbors(split, retrieval, queries, use)
    return Batch(
        tokens=tokens.reshape(len(ids), -1),
        labels=_labels(tokens, lengths, documents),
        documents=documents,
        neighbors=neighbors,
        neighbor_lengths=neighbor_lengths,
        lengths=lengths,
    )


def join(parts: Sequence[Batch], rows: np.ndarray) -> Batch:
    """One batch of several, of which row i becomes row `rows[i]`; `documents` only where a row holds more than one."""
    order = np.argsort(rows)

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    documents, retrieval = joined("documents"), parts[0].neighbors is not None
    return Batch(
        tokens=joined("tokens"),
        labels=joined("labels"),
        documents=documents if (documents != documents[:, :1]).any() else None,
        neighbors=joined("neighbors") if retrieval else None,
        neighbor_lengths=joined("neighbor_lengths") if retrieval else None,
        lengths=joined("lengths"),
    )


def drawn_use(uses: Sequence[NeighborUse], seed: int, first: int) -> NeighborUse:
    """How neighbors are chosen in the batch whose first sample number this is, where several ways are drawn from.

    One number of neighbors for a batch, and few in all, so that its arrays have few shapes.
    """
    return uses[mix(mix(seed + 2) ^ first) % len(uses)]


def drop_neighbors(batch: Batch, samples: range, retrieval_dropout: float, seed: int) -> None:
    """Remove, in place, the neighbors of a share of the sequences, drawn by sample number."""
    if retrieval_dropout and batch.neighbor_lengths is not None:
        for row, sample in enumerate(samples):
            if mix(mix(seed + 1) ^ sample) < retrieval_dropout * 2**64:
                batch.neighbor_lengths[row] = 0


def _labels(tokens: np.ndarray, lengths: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """The next token [B, T] of the same document, -100 where there is none: tokens [B, U, m], the others [B, U]."""
    batch_size, num_chunks, m = tokens.shape
    text = tokens.reshape(batch_size, num_chunks * m)
    real = (np.arange(m) < lengths[:, :, None]).reshape(text.shape)
    of_document = np.repeat(documents, m, axis=1)
    followed = real[:, 1:] & (of_document[:, 1:] == of_document[:, :-1])
    labels = np.full(text.shape, IGNORED_LABEL, dtype=np.int64)
    labels[:, :-1][followed] = text[:, 1:][followed]
    return labels


# --- training ------------------------------------------------------------------------------------------------------


class TrainingData:
    """The endless stream of training batches of one or several datastores.

    Args:
        folders: the datastores.
        settings: sequence length, neighbors, weights, seed.
        retrieval: whether neighbors are read at all (a baseline needs none).

    Raises:
        InputError: the datastores do not fit together, lack neighbors, or are empty.
    """

    def __init__(self, folders: Sequence[Path], settings: DataSettings, *, retrieval: bool) -> None:
        self._arguments = (tuple(folders), settings, retrieval)
        self.datastores = [Datastore.open(folder, settings.reading) for folder in folders]
        self.uses = [settings.neighbor_use(k) for k in settings.k_choices or (settings.k,)]
        if not retrieval:
            self.uses = [NeighborUse(0)]
        self.seed = settings.seed
        first = self.datastores[0]
        m = first.chunk_length
        if settings.sequence_length % m:
            raise InputError(
                f"data.sequence_length = {settings.sequence_length}: must be a multiple of {m}, the chunk length."
            )
        self.num_chunks = settings.sequence_length // m
        asked = f"data.k_choices = {settings.k_choices}" if settings.k_choices else f"data.k = {settings.k}"
        most = max(self.uses, key=lambda use: use.k)
        for datastore in self.datastores:
            _check_datastore(datastore, first, most, asked)
        # A baseline reads no neighbors, and needs none of the datastores that they come from.
        self.retrieval = [RetrievalSet.of(each) if most.k else RetrievalSet((each.train,)) for each in self.datastores]
        sizes = [datastore.train.num_chunks for datastore in self.datastores]
        self.token_budgets = settings.token_budgets
        self.weights = mixture_weights(sizes, settings.weights, settings.temperature, settings.token_budgets)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the files itself: pickling a memory map would copy what it maps."""
        return _reopened, self._arguments

    @property
    def fingerprints(self) -> list[str]:
        """Of the datastores, in order."""
        return [datastore.fingerprint for datastore in self.datastores]

    def plan(self, num_samples: int) -> list[MixtureEntry]:
        """What a run of so many samples reads of each datastore, logged and checked.

        Raises:
            InputError: it needs more tokens than `data.token_budgets` hold.
        """
        m = self.datastores[0].chunk_length
        tokens = num_samples * self.num_chunks * m
        check_budgets(self.token_budgets, tokens)
        folders = [datastore.folder for datastore in self.datastores]
        sizes = [datastore.train.num_chunks * m for datastore in self.datastores]
        found = shares(folders, sizes, self.weights, tokens)
        announce(found)
        return found

    def locate(self, sample: int) -> tuple[int, tuple[int, int]]:
        """The datastore of a sample and its chunks [first, stop). Each epoch cuts the chunks at another offset."""
        chosen, _, chunks = self._locate(sample)
        return chosen, chunks

    def _locate(self, sample: int) -> tuple[int, int, tuple[int, int]]:
        """As `locate`, with the epoch of the datastore between."""
        chosen, number = mixture(sample, self.weights, self.seed)
        total = self.datastores[chosen].train.num_chunks
        per_epoch = max(1, total // self.num_chunks)
        epoch, position = divmod(number, per_epoch)
        spare = total - per_epoch * self.num_chunks
        offset = mix(self.seed ^ mix(epoch)) % (spare + 1) if spare > 0 else 0
        first = offset + self.num_chunks * permuted(position, per_epoch, mix(mix(self.seed) + epoch))
        return chosen, epoch, (first, min(first + self.num_chunks, total))

    def neighbor_use(self, first: int) -> NeighborUse:
        """How neighbors are chosen in the batch whose first sample number this is; the same for all of its datastores."""
        return drawn_use(self.uses, self.seed, first)

    def batch(self, samples: range, retrieval_dropout: float = 0.0, use: NeighborUse | None = None) -> Batch:
        """The batch of some sample numbers.

        Args:
            samples: their numbers.
            retrieval_dropout: share of the sequences that get no neighbors.
            use: how neighbors are chosen; None: `neighbor_use(samples.start)`. Several processes that share a step must
                hand in that of the step's first sample, so that they agree about the number of neighbors.
        """
        use = use or self.neighbor_use(samples.start)
        located = [self._locate(sample) for sample in samples]
        parts, rows = [], []
        for number in sorted({chosen for chosen, _, _ in located}):
            retrieval = self.retrieval[number]
            rows.append([row for row, (chosen, _, _) in enumerate(located) if chosen == number])
            epochs, ranges = zip(*(located[row][1:] for row in rows[-1]), strict=True)
            parts.append(read_sequences(retrieval.own, retrieval, ranges, self.num_chunks, use, epochs))
        batch = join(parts, np.concatenate(rows))
        drop_neighbors(batch, samples, retrieval_dropout, self.seed)
        return batch

    def origin(self, sample: int) -> dict[str, Any]:
        """Where the sequence of a sample number lies: its datastore, chunks [first, stop), and documents in order.

        The ids of documents stand in Parquet files; where pyarrow is missing, as training needs none, they are None.
        """
        chosen, (first, stop) = self.locate(sample)
        datastore = self.datastores[chosen]
        numbers = np.unique(datastore.train.documents_of(np.arange(first, stop))[0]).tolist()
        try:
            ids = [row["id"] for row in datastore.train.metadata(numbers)]
        except ImportError:
            ids = None
        return {
            "sample": sample,
            "datastore": str(datastore.folder),
            "chunks": [first, stop],
            "document_numbers": numbers,
            "document_ids": ids,
        }


def _reopened(folders: Sequence[Path], settings: DataSettings, retrieval: bool) -> TrainingData:
    return TrainingData(folders, settings, retrieval=retrieval)


def _check_datastore(datastore: Datastore, first: Datastore, use: NeighborUse, asked: str) -> None:
    stored = use.k and use.source == "nearest"
    datastore.require("neighbors" if stored else "chunk")
    if use.k and use.materialized and not datastore.has("materialize"):
        raise InputError(
            f"data.materialized: {datastore.folder} has no materialized neighbors. Make them: set neighbors.materialized "
            "and run `retro index CONFIG --stage materialize`."
        )
    if datastore.train.num_chunks == 0:
        raise InputError(f"{datastore.folder} holds no training chunks.")
    if stored and (found := datastore.train.neighbor_ids.row_shape[0]) < use.k:
        raise InputError(f"{asked}: {datastore.folder} stores {found} neighbors of each chunk (neighbors.stored).")
    for key in ("vocab_size", "chunk_length", "pad_id"):
        if datastore.manifest[key] != first.manifest[key]:
            raise InputError(
                f"data.datastores: {datastore.folder} has {key} {datastore.manifest[key]}, "
                f"{first.folder} has {first.manifest[key]}; they must share one tokenizer and chunk length."
            )
    if datastore is not first:
        check_tokenizer(first, datastore, "data.datastores")
