"""Log-probabilities of the tokens of sequences of any length.

    sequences → neighbors of their complete chunks, in one search ┐
              └► windows of a context, overlapping by half ───────┴► batches of similar length → log-probabilities

Each token is scored once, in the first window that contains it, so it has at least half a context of preceding tokens if the
sequence has that many. Rows are padded at the end, where causality hides the padding.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from indexing.store.errors import InputError
from retro.device import Placement, TensorBatch
from retro.evaluation.token_gains import origins_of
from retro.evaluation.windows import ScoringWindow, sliding_windows
from retro.inference.rows import RetrieveNeighbors
from retro.inference.sources import CopiedFrom, Neighbors, ReadChunk
from retro.model.copy_head import Origins
from retro.model.loss import IGNORED_LABEL
from retro.model.retro import Retro

# Limits of a batch: its tokens, padding included, and the tokens of its neighbors.
_BATCH_TOKENS = 8192
_BATCH_NEIGHBOR_TOKENS = 4 * _BATCH_TOKENS
# Tokens whose logits are in memory at a time to find the likeliest tokens.
_BLOCK = 512


@dataclass(frozen=True)
class Scores:
    """Scores of all tokens of a sequence [t] except its first.

    Attributes:
        log_probabilities: [t - 1] float64, in nats.
        likeliest: [t - 1, top] int64, the likeliest tokens at each position, likeliest first.
        likeliest_log_probabilities: [t - 1, top] float32, their log-probabilities.
        read: the complete chunks whose neighbors were read; empty without `sources`.
        copied: the tokens of neighbors that they were copied from, [t - 1]; empty without `sources`.
    """

    log_probabilities: np.ndarray
    likeliest: np.ndarray
    likeliest_log_probabilities: np.ndarray
    read: list[ReadChunk] = field(default_factory=list)
    copied: list[CopiedFrom | None] = field(default_factory=list)


@torch.inference_mode()
def score(
    model: Retro,
    sequences: Sequence[np.ndarray],
    placement: Placement,
    *,
    context: int,
    retrieve: RetrieveNeighbors | None = None,
    top: int = 0,
    wanted: Callable[[int], bool] = lambda sequence: True,
    sources: bool = False,
) -> list[Scores]:
    """Score all tokens of each sequence except its first.

    Args:
        model: model in evaluation mode.
        sequences: token ids [t] int64 of each sequence.
        placement: device and precision.
        context: context length in tokens, a multiple of the chunk length.
        retrieve: finds and reads the neighbors of complete chunks; None = retrieval OFF.
        top: number of likeliest tokens to return at each position.
        wanted: number of a sequence → True if its scores are still needed; called before each batch of windows. Scores of
            sequences that are no longer needed are incomplete.
        sources: return the chunks whose neighbors were read, and the tokens that were copied.

    Raises:
        InputError: the context is one chunk, so windows cannot overlap, and a sequence is longer.
    """
    m, top = model.settings.chunk_length, min(top, model.settings.vocab_size)
    found = _find_neighbors(sequences, m, retrieve) if retrieve is not None else None
    scores = [_no_scores(len(each) - 1, top) for each in sequences]
    if sources:
        for number, scored in enumerate(scores):
            scored.copied.extend([None] * len(scored.log_probabilities))
            scored.read.extend(_read(sequences[number], found[number], m) if found else [])
    neighbor_tokens = int(np.prod(found[0].tokens.shape[1:])) if found else 0  # of a chunk
    for batch in _batches(_windows(sequences, context, m), m, neighbor_tokens):
        group = [window for window in batch if wanted(window.text)]
        if not group:
            continue
        inputs, labels = _batch(group, sequences, found, m)
        with placement.autocast():
            put, targets = placement.put(inputs), placement.put({"labels": labels})["labels"]
            hidden = model.hidden(**put)
            losses = model.losses_of(hidden, targets, **put)
            origins = origins_of(model, hidden, targets, losses, put) if sources else None
            losses = losses.cpu()
        for row, window in enumerate(group):
            of_window = slice(
                window.scored - window.start - 1, window.stop - window.start - 1
            )  # where they are predicted
            of_sequence, scored = slice(window.scored - 1, window.stop - 1), scores[window.text]
            scored.log_probabilities[of_sequence] = -losses[row, of_window].double().numpy()
            if origins is not None:
                scored.copied[of_sequence] = _copied(origins, row, of_window, window.scored, m)
            if top:
                with placement.autocast():
                    of_row = {name: None if value is None else value[row : row + 1] for name, value in put.items()}
                    values, ids = _likeliest(model, hidden[row : row + 1], of_row, of_window, top)
                scored.likeliest[of_sequence] = ids
                scored.likeliest_log_probabilities[of_sequence] = values
    return scores


def _no_scores(number: int, top: int) -> Scores:
    return Scores(np.zeros(number), np.zeros((number, top), np.int64), np.zeros((number, top), np.float32))


def _find_neighbors(sequences: Sequence[np.ndarray], m: int, retrieve: RetrieveNeighbors) -> list[Neighbors] | None:
    """Find the neighbors of all sequences in one search. A sequence's last token predicts nothing, so it completes no chunk."""
    chunks = [each[: (len(each) - 1) // m * m].reshape(-1, m) for each in sequences]
    if not sum(map(len, chunks)):
        return None
    borders = np.cumsum([len(each) for each in chunks])[:-1]
    parts = (np.split(table, borders) for table in retrieve(np.concatenate(chunks)))
    return [Neighbors(*each) for each in zip(*parts, strict=True)]


def _read(sequence: np.ndarray, found: Neighbors, m: int) -> list[ReadChunk]:
    """Return the complete chunks of a sequence [t] with their neighbors."""
    return [ReadChunk(u, sequence[u * m : (u + 1) * m], each) for u, each in enumerate(found.of_chunks())]


def _copied(origins: Origins, row: int, wanted: slice, first: int, m: int) -> list[CopiedFrom | None]:
    """Return where the tokens of a row were copied from; `first` is the number of the first one in its sequence."""
    columns = (each[row, wanted].tolist() for each in (origins.share, origins.neighbors, origins.positions))
    return [
        CopiedFrom(share, number // m - 1, neighbor, position) if neighbor >= 0 else None
        for number, (share, neighbor, position) in enumerate(zip(*columns, strict=True), start=first)
    ]


def _windows(sequences: Sequence[np.ndarray], context: int, m: int) -> list[ScoringWindow]:
    """Return windows of one context that overlap by half, in whole chunks. A sequence's first token has no score."""
    longest = max(map(len, sequences), default=0)
    if longest > context == m:
        raise InputError(
            f"a sequence has {longest} tokens; this model reads one chunk of {m} tokens, so {m} is the limit."
        )
    stride = max(m, context // 2 // m * m)
    return [
        window
        for number, row in enumerate(sequences)
        for window in sliding_windows(number, 0, len(row), size=context, stride=stride, scored=1)
    ]


def _batches(windows: list[ScoringWindow], m: int, neighbor_tokens: int) -> Iterator[list[ScoringWindow]]:
    """Yield batches of windows of similar length, for little padding; the longest first, so that a lack of memory shows at once.

    Args:
        windows: windows of all sequences.
        m: tokens in a chunk.
        neighbor_tokens: tokens in all neighbors of a chunk.
    """
    ordered = sorted(windows, key=lambda window: window.start - window.stop)
    while ordered:
        longest = ordered[0].stop - ordered[0].start
        of_neighbors = longest // m * neighbor_tokens
        size = min(_BATCH_TOKENS // longest, _BATCH_NEIGHBOR_TOKENS // max(1, of_neighbors))
        yield ordered[: max(1, size)]
        ordered = ordered[max(1, size) :]


def _batch(
    windows: list[ScoringWindow], sequences: Sequence[np.ndarray], found: list[Neighbors] | None, m: int
) -> tuple[dict[str, Tensor | None], Tensor]:
    """Return the model's arguments and the labels [B, T]. Missing chunks of shorter rows have neighbors of length 0."""
    width = max(window.stop - window.start for window in windows) - 1
    tokens, labels = np.zeros((2, len(windows), width), dtype=np.int64)
    labels[:] = IGNORED_LABEL
    for row, window in enumerate(windows):
        text = sequences[window.text][window.start : window.stop]
        tokens[row, : len(text) - 1] = text[:-1]
        scored = window.scored - window.start
        labels[row, scored - 1 : len(text) - 1] = text[scored:]
    inputs: dict[str, Tensor | None] = {"tokens": torch.from_numpy(tokens), "neighbors": None, "neighbor_lengths": None}
    if found is not None:
        shape = (len(windows), width // m, *found[0].tokens.shape[1:])
        neighbors, lengths = np.zeros(shape, np.int64), np.zeros(shape[:3], np.int64)
        for row, window in enumerate(windows):
            first, count = window.start // m, (window.stop - window.start - 1) // m
            for table, part in zip((neighbors, lengths), found[window.text][:2], strict=True):
                table[row, :count] = part[first : first + count]
        inputs |= {"neighbors": torch.from_numpy(neighbors), "neighbor_lengths": torch.from_numpy(lengths)}
    return inputs, torch.from_numpy(labels)


def _likeliest(
    model: Retro, hidden: Tensor, inputs: TensorBatch, wanted: slice, top: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities and ids of the likeliest next tokens for activations [1, T, D]: [wanted, top] each."""
    found = []
    for start in range(wanted.start, wanted.stop, _BLOCK):
        kept = slice(start, min(start + _BLOCK, wanted.stop))
        logits = model.mixed(model.logits(hidden[:, kept]), hidden, **inputs, kept=kept)[0]
        found.append(logits.float().log_softmax(-1).topk(top))
    return tuple(torch.cat(parts).cpu().numpy() for parts in zip(*found, strict=True))  # type: ignore[return-value]
