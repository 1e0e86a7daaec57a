"""Batches of prepared examples: rows of one or several examples, in an order that is a function of the sample number.

    sample number ─ epoch, position in it ─ permutation ─ row ─ its examples ─ tokens, labels, documents, neighbors

The examples of a row are fixed for the run. They do not attend to each other, so losses do not depend on the packing.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from indexing.splitmix64 import mix
from indexing.store.errors import InputError
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.data.batches import drop_neighbors
from retro.data.sample_order import permuted
from retro.data.settings import DataSettings
from retro.finetuning.prepared_examples import Prepared

log = logging.getLogger("retro")


@dataclass(frozen=True)
class Rows:
    """Examples packed into rows.

    Attributes:
        prepared: the examples.
        rows: numbers of the examples of each row.
        row_length: T, tokens of a row; a longer example loses its end.
        pad_id: token that fills a row.
    """

    prepared: Prepared
    rows: Sequence[Sequence[int]]
    row_length: int
    pad_id: int

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indexes: Sequence[int], k: int) -> Inputs[np.ndarray]:
        """The rows of these indexes with k neighbors of each chunk; 0 = retrieval OFF."""
        m = self.prepared.tokens.row_shape[0]
        num_chunks, num_complete = -(-self.row_length // m), self.row_length // m
        # Chunk and example at each position of a row, -1 = padding.
        ids, documents = np.full((2, len(indexes), num_chunks), -1, dtype=np.int64)
        lengths = np.zeros(ids.shape, dtype=np.int64)
        for row, index in enumerate(indexes):
            at = 0
            for example in self.rows[index]:
                first, stop = self.prepared.first_chunks[example : example + 2].tolist()
                count = min(stop - first, num_chunks - at)
                ids[row, at : at + count] = np.arange(first, first + count)
                documents[row, at : at + count] = example
                lengths[row, at : at + count] = (self.prepared.lengths[example] - m * np.arange(count)).clip(0, m)
                at += count
        real = ids >= 0
        tokens = np.full((*ids.shape, m), self.pad_id, dtype=np.int64)
        labels = np.full((*ids.shape, m), IGNORED_LABEL, dtype=np.int64)
        tokens[real], labels[real] = (table.gather(ids[real]) for table in (self.prepared.tokens, self.prepared.labels))
        neighbors = neighbor_lengths = None
        if k:
            complete = real[:, :num_complete]
            neighbors = np.full((*complete.shape, k, 2 * m), self.pad_id, dtype=np.int64)  # [B, U, K, R]
            neighbor_lengths = np.zeros((*complete.shape, k), dtype=np.int64)
            neighbors[complete], neighbor_lengths[complete] = self.prepared.neighbors(
                ids[:, :num_complete][complete], k
            )
        return Inputs(
            tokens=tokens.reshape(len(ids), -1)[:, : self.row_length],
            labels=labels.reshape(len(ids), -1)[:, : self.row_length],
            # Padding is at the end, where causality hides it: a single example needs no documents.
            documents=documents if any(len(self.rows[index]) > 1 for index in indexes) else None,
            neighbors=neighbors,
            neighbor_lengths=neighbor_lengths,
            lengths=lengths,
        )


def arrange(
    prepared: Prepared, settings: DataSettings, pad_id: int, *, held_out: float, packed: bool
) -> tuple[Rows, Rows]:
    """The rows to learn, and the held-out rows.

    Args:
        prepared: the examples.
        settings: `sequence_length` and `seed`.
        pad_id: token that fills rows.
        held_out: fraction of the examples.
        packed: whether a row may hold several.

    Raises:
        InputError: no example is left to learn.
    """
    length = settings.sequence_length
    kept = prepared.first_labels < length
    apart = prepared.places < np.uint64(held_out * 2**64)
    if not (kept & ~apart).any():
        raise InputError(
            f"finetune.examples: none of {len(kept):,} is left to learn: {(~kept).sum():,} have their answer beyond "
            f"data.sequence_length = {length}, {(kept & apart).sum():,} are held out."
        )

    def rows_of(chosen: np.ndarray) -> Rows:
        numbers = np.flatnonzero(chosen)
        lengths = prepared.lengths[numbers]
        m = prepared.tokens.row_shape[0]
        rows = pack(lengths, length, m, settings.seed) if packed else [[row] for row in range(len(lengths))]
        return Rows(prepared, [numbers[row].tolist() for row in rows], length, pad_id)

    return rows_of(kept & ~apart), rows_of(kept & apart)


def pack(lengths: np.ndarray, row_length: int, chunk_length: int, seed: int) -> list[list[int]]:
    """The examples of each row, in order: the longest first, each into the fullest row that has room for it (best fit).

    Args:
        lengths: [n] tokens of each example; longer ones are cut to a row.
        row_length: tokens of a row.
        chunk_length: m; an example begins at a multiple of it.
        seed: of the order of examples of equal length.
    """
    order = np.random.default_rng(seed).permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # number of occupied chunks → rows
    for example, length in zip(order.tolist(), np.minimum(lengths[order], row_length).tolist(), strict=True):
        most = (row_length - length) // chunk_length
        taken = next((taken for taken in range(most, 0, -1) if open_rows.get(taken)), 0)
        if taken:
            row = open_rows[taken].pop()
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(example)
        open_rows.setdefault(taken - -length // chunk_length, []).append(row)
    return rows


class ExampleData:
    """The endless stream of training batches of prepared examples, as `TrainingData` is for datastores.

    Args:
        folder: of the prepared examples.
        files: the files of the examples.
        settings: sequence length, neighbors, seed.
        datastores: fingerprints of the datastores of tokenizer and neighbors.
        pad_id: token that fills rows.
        held_out: fraction of the examples that is not learned.
        packed: whether a row may hold several.
        retrieval: whether neighbors are read.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[Path],
        settings: DataSettings,
        datastores: Sequence[str],
        pad_id: int,
        *,
        held_out: float,
        packed: bool,
        retrieval: bool,
    ) -> None:
        reopen = partial(ExampleData, held_out=held_out, packed=packed, retrieval=retrieval)
        self._arguments = reopen, (folder, files, settings, datastores, pad_id)
        self.prepared, self.files, self.seed = Prepared(folder), files, settings.seed
        self.rows, self.held_out = arrange(self.prepared, settings, pad_id, held_out=held_out, packed=packed)
        self.fingerprints = [*datastores, self.prepared.fingerprint]
        self.k = settings.k if retrieval else 0

    def __reduce__(self) -> tuple[object, ...]:
        """Another process opens the files itself."""
        return self._arguments

    def announce(self) -> None:
        """Log the number of examples and rows."""
        learned, held_out = (sum(map(len, rows.rows)) for rows in (self.rows, self.held_out))
        longer = int((self.prepared.lengths > self.rows.row_length).sum())
        words = (
            f"{learned:,} examples in {len(self.rows):,} rows of {self.rows.row_length:,} tokens, {held_out:,} held out"
        )
        log.info("data: %s", words)
        if longer:
            log.warning(
                "%d examples are longer than data.sequence_length = %d and are cut", longer, self.rows.row_length
            )
        if left_out := len(self.prepared.lengths) - learned - held_out:
            log.warning("%d examples are left out: cutting them would remove the whole answer", left_out)

    def row_of(self, sample: int) -> int:
        """The row of a sample number. Each epoch reads all rows in another order."""
        epoch, position = divmod(sample, len(self.rows))
        return permuted(position, len(self.rows), mix(mix(self.seed) + epoch))

    def batch(self, samples: range, retrieval_dropout: float = 0.0) -> Inputs[np.ndarray]:
        """See `TrainingData`."""
        batch = self.rows.batch([self.row_of(sample) for sample in samples], self.k)
        drop_neighbors(batch, samples, retrieval_dropout, self.seed)
        return batch

    def origin(self, sample: int) -> dict[str, Any]:
        """The examples of a sample number, as `file:line`."""
        lines = self.prepared.lines[self.rows.rows[self.row_of(sample)]].tolist()
        return {"sample": sample, "examples": [f"{self.files[file]}:{number}" for file, number in lines]}
