"""Read batches of tokens, documents and neighbors from memory-mapped files. Only the batch itself is copied.

    sample number ─ mixture ─ datastore, index of the sequence in it ─ permutation ─ a run of chunks ─ neighbors by id

Every step is a pure function of the seed and the sample number. So the position in the data is one integer, the order
does not depend on the number of processes, and resuming needs no state.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from indexing.splitmix64 import mix
from indexing.store.datastore import Datastore, Split
from indexing.store.deletions import inside
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet, check_tokenizer
from indexing.suffixes.votes import COLUMNS, read_columns, require_votes, within_limit
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.data.live_votes import live_votes
from retro.data.neighbor_choice import NeighborUse, Queries, read_neighbors, searching
from retro.data.sample_order import mixture, permuted
from retro.data.settings import DataSettings

log = logging.getLogger("retro")


# --- sequences -----------------------------------------------------------------------------------------------------


def read_sequences(
    split: Split,
    retrieval: RetrievalSet,
    ranges: Sequence[tuple[int, int]],
    num_chunks: int,
    use: NeighborUse,
    epochs: Sequence[int] = (),
) -> Inputs[np.ndarray]:
    """Read ranges of chunks as a batch, padded to equal length. Chunks of deleted documents are padding: neither text
    nor labels.

    Args:
        split: the split of the sequences.
        retrieval: the datastores of the neighbors.
        ranges: chunks [first, stop) of each of B sequences.
        num_chunks: U.
        use: how neighbors are chosen; k = 0 = retrieval OFF.
        epochs: number of earlier passes over the data for each sequence; empty = 0.
    """
    first, stop = np.array(ranges, dtype=np.int64).T[:, :, None]  # [B, 1]
    ids = first + np.arange(num_chunks)  # [B, U]
    # [B, U] bool. Every table is gathered for the C = real.sum() chunks only and written through the mask; the rest is
    # padding.
    real, m = (ids < stop) & ~inside(ids, split.deleted), split.chunk_length
    tokens = np.full((*ids.shape, m), split.pad_id, dtype=np.int64)
    tokens[real] = split.tokens.gather(ids[real])
    lengths = np.zeros(ids.shape, dtype=np.int64)
    lengths[real] = split.lengths.gather(ids[real])
    # Padding chunks form a separate document, also between others.
    documents, starts, stops = np.stack([np.full(ids.shape, -1), np.full(ids.shape, split.num_chunks), 0 * ids])
    documents[real], starts[real], stops[real] = split.documents_of(ids[real])
    neighbors = neighbor_lengths = votes = None
    if use.votes:
        found = _votes(split, ids[real], use)
        votes = within_limit(found, split, use.max_overlap)
        if not real.all():  # the usual batch is not copied
            votes = np.zeros((*ids.shape, m, COLUMNS), dtype=np.int64)
            votes[real] = found
        votes = votes.reshape(len(ids), -1, COLUMNS)  # [B, T, 32]
    if use.k:
        # The documents of a range of chunks are a range of chunks too.
        own = np.stack([starts.min(axis=1), stops.max(axis=1)], axis=1)  # [B, 2]
        # The chunk that reads a chunk's neighbors is the next one of its row, if it is of the same document.
        followed = np.zeros(ids.shape, dtype=bool)
        followed[:, :-1] = documents[:, 1:] == documents[:, :-1]
        queries = Queries(
            ids=ids[real],
            # [C, 2]; the range [0, 0) of another split excludes none.
            excluded=np.repeat(own * (split.name == retrieval.own.name), real.sum(axis=1), axis=0),
            tokens=tokens[real],
            lengths=lengths[real],
            followed=followed[real],
            epochs=np.repeat(epochs or [0] * len(ids), real.sum(axis=1)),
        )
        neighbors = np.full((*ids.shape, use.k, 2 * m), split.pad_id, dtype=np.int64)  # [B, U, K, R]
        neighbor_lengths = np.zeros((*ids.shape, use.k), dtype=np.int64)  # [B, U, K]
        if real.any():
            neighbors[real], neighbor_lengths[real] = read_neighbors(split, retrieval, queries, use)
    return Inputs(
        tokens=tokens.reshape(len(ids), -1),
        labels=_labels(tokens, lengths, documents),
        documents=documents,
        neighbors=neighbors,
        neighbor_lengths=neighbor_lengths,
        lengths=lengths,
        votes=votes,
    )


def _votes(split: Split, ids: np.ndarray, use: NeighborUse) -> np.ndarray:
    """The votes for the tokens of chunks, ids [n] int64 → [n, m, 32] int64: given, searched or stored."""
    if use.found_votes is not None:
        return use.found_votes[ids]
    return live_votes(use.live_votes, split, ids) if use.live_votes is not None else read_columns(split, ids)


def join(parts: Sequence[Inputs[np.ndarray]], rows: np.ndarray) -> Inputs[np.ndarray]:
    """Concatenate batches; row i becomes row `rows[i]`."""
    order = np.argsort(rows)  # the inverse of the permutation `rows`
    joined: Iterator[Any] = (
        None if values[0] is None else np.concatenate(values)[order] for values in zip(*parts, strict=True)
    )
    return Inputs(*joined)


def without_single_documents(batch: Inputs[np.ndarray]) -> Inputs[np.ndarray]:
    """The batch with `documents` None if every row is a single document."""
    several = (batch.documents != batch.documents[:, :1]).any()
    return batch if several else batch._replace(documents=None)


def drop_neighbors(batch: Inputs[np.ndarray], samples: Sequence[int], retrieval_dropout: float, seed: int) -> None:
    """Remove, in place, neighbors and votes of a share of the sequences, drawn by sample number."""
    for row, sample in enumerate(samples):
        if mix(mix(seed + 1) ^ sample) < retrieval_dropout * 2**64:
            for values in (batch.neighbor_lengths, batch.votes):
                if values is not None:
                    values[row] = 0


def readers_first(batch: Inputs[np.ndarray], num_absent: int) -> Inputs[np.ndarray]:
    """The batch without the neighbors of `num_absent` sequences that have none, which come last; unchanged if it has
    fewer.

    So encoder and cross-attention compute B' = B - num_absent sequences. A fixed number gives batches of two shapes,
    and each is compiled once.
    """
    if batch.neighbors is None or batch.neighbor_lengths is None or num_absent == 0:
        return batch
    reads = batch.neighbor_lengths.any(axis=(1, 2))  # [B]
    if (~reads).sum() < num_absent:
        return batch
    order = np.argsort(~reads, kind="stable")  # those that read come first, in their order
    readers = order[: len(order) - num_absent]
    return batch.rows(order)._replace(
        neighbors=batch.neighbors[readers], neighbor_lengths=batch.neighbor_lengths[readers]
    )


def _labels(tokens: np.ndarray, lengths: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """The next token of the same document [B, T], -100 if there is none. `tokens` is [B, U, m], the others [B, U]."""
    batch_size, num_chunks, m = tokens.shape
    text = tokens.reshape(batch_size, num_chunks * m)
    real = (np.arange(m) < lengths[:, :, None]).reshape(text.shape)
    of_document = np.repeat(documents, m, axis=1)  # [B, U] → [B, U m]
    followed = real[:, 1:] & (of_document[:, 1:] == of_document[:, :-1])
    labels = np.full(text.shape, IGNORED_LABEL, dtype=np.int64)
    labels[:, :-1][followed] = text[:, 1:][followed]
    return labels


# --- training ------------------------------------------------------------------------------------------------------


class TrainingData:
    """The endless stream of training batches of one or several datastores.

    Args:
        folders: folders or URLs of the datastores.
        settings: sequence length, neighbors, weights, seed.
        retrieval: whether neighbors are read; a baseline needs none.
        votes: whether the datastore's votes for each token are read (`model.copy_head.datastore`).
        search: search votes and neighbors that are not stored, for a few batches; a run reads its text several times.

    Raises:
        InputError: the datastores do not fit together, lack neighbors or are empty.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        settings: DataSettings,
        *,
        retrieval: bool,
        votes: bool = False,
        search: bool = False,
    ) -> None:
        made = partial(TrainingData, retrieval=retrieval, votes=votes, search=search)
        self._arguments = (made, (tuple(folders), settings))
        self.datastores = [Datastore.open(folder, settings.reading) for folder in folders]
        use = settings.neighbor_use
        self.use = replace(use if retrieval else NeighborUse(0, max_overlap=use.max_overlap), votes=votes)
        self.seed = settings.seed
        first = self.datastores[0]
        m = first.chunk_length
        if settings.sequence_length % m:
            raise InputError(
                f"data.sequence_length = {settings.sequence_length}: must be a multiple of {m}, the chunk length."
            )
        self.num_chunks = settings.sequence_length // m
        self._uses = [searching(datastore, [self.use])[0] if search else self.use for datastore in self.datastores]
        for datastore, of_datastore in zip(self.datastores, self._uses, strict=True):
            _check_datastore(datastore, first, of_datastore)
        # A baseline reads no neighbors, so it needs no other datastores.
        self.retrieval = [
            RetrievalSet.of(datastore) if self.use.k else RetrievalSet((datastore.train,))
            for datastore in self.datastores
        ]
        sizes = [datastore.train.num_chunks for datastore in self.datastores]
        self.weights = tuple(settings.weights or (size / max(sizes) for size in sizes))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the arguments only: another process opens the files itself, because pickling a memory map would copy
        it."""
        return self._arguments

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprints of the datastores, in order. A run can resume after a deletion."""
        return [datastore.built for datastore in self.datastores]

    def announce(self, num_samples: int) -> None:
        """Log what a run of `num_samples` samples reads from each datastore."""
        m = self.datastores[0].chunk_length
        tokens = num_samples * self.num_chunks * m
        for datastore, weight in zip(self.datastores, self.weights, strict=True):
            own, chunks = tokens * weight / sum(self.weights), datastore.train.num_chunks
            log.info(
                "data: %s: %.1f%% of the sequences, %s tokens, %.2f epochs",
                *(datastore.folder, 100 * own / tokens, f"{round(own):,}", own / (chunks * m)),
            )
            if deleted := int(np.diff(datastore.train.deleted).sum()):
                log.info(
                    "data: %s: %s chunks of deleted documents are padding until a rebuild",
                    *(datastore.folder, f"{deleted:,} of {chunks:,}"),
                )

    def locate(self, sample: int) -> tuple[int, tuple[int, int]]:
        """The datastore of a sample and its chunks [first, stop). Each epoch starts at another offset."""
        chosen, _, chunks = self._locate(sample)
        return chosen, chunks

    def _locate(self, sample: int) -> tuple[int, int, tuple[int, int]]:
        """The datastore of a sample, the epoch of that datastore, and the chunks [first, stop)."""
        chosen, earlier = mixture(sample, self.weights, self.seed)
        total = self.datastores[chosen].train.num_chunks
        per_epoch = max(1, total // self.num_chunks)
        epoch, position = divmod(earlier, per_epoch)
        # Each epoch leaves over other chunks, and its sequences begin at other ones.
        spare = total - per_epoch * self.num_chunks
        offset = mix(self.seed ^ mix(epoch)) % (spare + 1) if spare > 0 else 0
        first = offset + self.num_chunks * permuted(position, per_epoch, mix(mix(self.seed) + epoch))
        return chosen, epoch, (first, min(first + self.num_chunks, total))

    def batch(self, samples: range, retrieval_dropout: float = 0.0) -> Inputs[np.ndarray]:
        """The batch of these sample numbers; `retrieval_dropout` is the share of the sequences that get no
        neighbors."""
        return without_single_documents(self.rows(samples, retrieval_dropout))

    def rows(self, samples: Sequence[int], retrieval_dropout: float = 0.0) -> Inputs[np.ndarray]:
        """The sequences of some samples, always with `documents`. So a row depends on no other one."""
        located = [self._locate(sample) for sample in samples]
        parts, rows = [], []
        for index in sorted({chosen for chosen, _, _ in located}):
            retrieval = self.retrieval[index]
            rows.append([row for row, (chosen, _, _) in enumerate(located) if chosen == index])
            epochs, ranges = zip(*(located[row][1:] for row in rows[-1]), strict=True)
            parts.append(read_sequences(retrieval.own, retrieval, ranges, self.num_chunks, self._uses[index], epochs))
        batch = join(parts, np.concatenate(rows))
        drop_neighbors(batch, samples, retrieval_dropout, self.seed)
        return batch

    def origin(self, sample: int) -> dict[str, Any]:
        """Datastore, chunks [first, stop) and documents of a sample.

        Ids of documents are None without pyarrow, which training does not need otherwise.
        """
        chosen, (first, stop) = self.locate(sample)
        datastore = self.datastores[chosen]
        documents = np.unique(datastore.train.documents_of(np.arange(first, stop))[0]).tolist()
        try:
            ids = [row["id"] for row in datastore.train.metadata(documents)]
        except ImportError:
            ids = None
        return {
            "sample": sample,
            "datastore": str(datastore.folder),
            "chunks": [first, stop],
            "document_numbers": documents,
            "document_ids": ids,
        }


def _check_datastore(datastore: Datastore, first: Datastore, use: NeighborUse) -> None:
    stored = use.k and use.source == "nearest" and use.live_neighbors is None
    datastore.require("neighbors" if stored else "chunk")
    if use.votes and use.live_votes is None:
        require_votes(datastore)
    if use.k and use.materialized and not datastore.has("materialize"):
        raise InputError(
            f"data.materialized: {datastore.folder} has no materialized neighbors. Make them: set neighbors.materialized "
            "and run `retro index CONFIG --stage materialize`."
        )
    if datastore.train.num_chunks == np.diff(datastore.train.deleted).sum():
        raise InputError(f"{datastore.folder} has no training chunks that are not deleted.")
    if stored and (count := datastore.train.neighbor_ids.row_shape[0]) < use.k:
        raise InputError(
            f"data.k = {use.k}: {datastore.folder} stores {count} neighbors of each chunk (neighbors.stored). "
            f"Use data.k = {count} or less, or store more: `retro index CONFIG --neighbors.stored {use.k} --stage neighbors --rebuild`."
        )
    for key in ("vocab_size", "chunk_length", "pad_id"):
        if datastore.manifest[key] != first.manifest[key]:
            raise InputError(
                f"data.datastores: {datastore.folder} has {key} {datastore.manifest[key]}, "
                f"{first.folder} has {first.manifest[key]}; they must share one tokenizer and chunk length."
            )
    if datastore is not first:
        check_tokenizer(first, datastore, "data.datastores")
