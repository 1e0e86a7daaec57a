"""Log-probabilities of the tokens of sequences of any length.

    sequences → windows of a context, overlapping by half ───────┬► batches of similar length → log-probabilities
              └► neighbors of their complete chunks, in one search ┘

The windows of a sequence can be scored in any order, together with those of others and in several calls. Each token is
scored once, in the first window that contains it, so it has at least half a context of preceding tokens if the sequence
has that many. Rows are padded at the end, where causality hides the padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from indexing.store.errors import InputError
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL, TokenLosses
from retro.copying.head import Origins
from retro.copying.model import CopyingModel
from retro.copying.neighbors import NEIGHBORS
from retro.copying.provenance import ChunkWithNeighbors, CopiedFrom, Neighbors
from retro.copying.rows import RetrieveNeighbors, WholeDatastore
from retro.copying.sources import SOURCES
from retro.data.windows import sliding_windows
from retro.device import Placement
from retro.inference.neighbor_cache import NeighborCache
from retro.inference.sampling import without

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
    read: list[ChunkWithNeighbors] = field(default_factory=list)
    copied: list[CopiedFrom | None] = field(default_factory=list)


@dataclass(eq=False)
class ScoredSequence:
    """A sequence that is being scored.

    Attributes:
        tokens: int64 [t].
        scores: complete once all windows have been scored.
        neighbors: of its complete chunks, once a window has been scored with retrieval ON. A sequence's last token
            predicts nothing, so it completes no chunk.
        votes: of the datastore for all tokens but the last, [t - 1, 32] int64, as the neighbors.
        windows: all of them, in order.
        off: log-probabilities with retrieval OFF, [t - 1] float64, if they are computed together with those of ON.
    """

    tokens: np.ndarray
    scores: Scores
    neighbors: Neighbors | None = None
    votes: np.ndarray | None = None
    windows: list["Window"] = field(default_factory=list)
    off: np.ndarray | None = None

    def chunks(self, m: int) -> np.ndarray:
        """Return its complete chunks [n, m]."""
        return self.tokens[: (len(self.tokens) - 1) // m * m].reshape(-1, m)


@dataclass(frozen=True)
class Window:
    """Positions [start, stop) of a sequence. The window scores [scored, stop)."""

    sequence: ScoredSequence
    start: int
    stop: int
    scored: int

    def __len__(self) -> int:
        return self.stop - self.start


def to_score(
    model: CopyingModel, sequences: Sequence[np.ndarray], *, context: int, top: int = 0
) -> list[ScoredSequence]:
    """Cut sequences into windows of one context that overlap by half, in whole chunks, to score all tokens except the
    first.

    Args:
        model: model in evaluation mode.
        sequences: token ids [t] int64 of each sequence.
        context: context length in tokens, a multiple of the chunk length.
        top: number of likeliest tokens to return at each position.

    Raises:
        InputError: the context is one chunk, so windows cannot overlap, and a sequence is longer.
    """
    m, longest = model.settings.chunk_length, max(map(len, sequences), default=0)
    if longest > context == m:
        raise InputError(
            f"a sequence has {longest} tokens; this model reads one chunk of {m} tokens, so {m} is the limit."
        )
    stride, top = max(m, context // 2 // m * m), min(top, model.settings.vocab_size)
    begun = [ScoredSequence(tokens, _no_scores(len(tokens) - 1, top)) for tokens in sequences]
    for sequence in begun:
        windows = sliding_windows(0, 0, len(sequence.tokens), size=context, stride=stride, scored=1)
        sequence.windows += [Window(sequence, window.start, window.stop, window.scored) for window in windows]
    return begun


@torch.inference_mode()
def score_windows(
    model: CopyingModel,
    windows: Sequence[Window],
    placement: Placement,
    *,
    retrieve: RetrieveNeighbors | None = None,
    datastore: WholeDatastore | None = None,
    top: int = 0,
    sources: bool = False,
    neighbor_cache: NeighborCache | None = None,
    masked: Tensor | None = None,
) -> None:
    """Score windows of any sequences; the arguments are equal for all windows of a sequence.

    Args:
        model: see `to_score`.
        windows: some windows of sequences `to_score`.
        placement: device and precision.
        retrieve: finds and reads the neighbors of complete chunks; None = retrieval OFF.
        datastore: with retrieval ON, finds the tokens that follow the text; None = the copy head does not use it.
        top: see `to_score`.
        sources: return the chunks whose neighbors were read, and the tokens that were copied.
        neighbor_cache: of a model whose decoder reads neighbors; None = it encodes all of them.
        masked: bool [V], True for ids that are not returned as likeliest tokens; None = there are none.
    """
    m, top = model.settings.chunk_length, min(top, model.settings.vocab_size)
    if retrieve is not None:
        _find_neighbors(windows, m, retrieve, sources)
        if datastore is not None:
            _find_votes(windows, datastore)
    for group in _batches(windows, m):
        batch = _batch(group, m)
        inputs = placement.put(batch)
        with placement.autocast():
            hidden, _ = model.hidden(inputs, _cached_neighbors(batch, model, neighbor_cache))
            compared = group[0].sequence.off is not None
            read, *read_off = model.read([inputs, inputs.off()] if compared else [inputs], hidden)
            losses, trust = model.with_copying(read, inputs)
            origins = origins_of(model, read.vocabulary, losses, inputs, trust) if sources else None
            losses, without = losses.cpu(), None
            if read_off:
                without = model.with_copying(read_off[0], inputs.off())[0].cpu()
        for row, window in enumerate(group):
            # A token is predicted at the position before it.
            of_window = slice(window.scored - window.start - 1, window.stop - window.start - 1)
            of_sequence, scored = slice(window.scored - 1, window.stop - 1), window.sequence.scores
            scored.log_probabilities[of_sequence] = -losses[row, of_window].double().numpy()
            if without is not None and window.sequence.off is not None:
                window.sequence.off[of_sequence] = -without[row, of_window].double().numpy()
            if sources:
                scored.copied.extend([None] * (len(scored.log_probabilities) - len(scored.copied)))
            if origins is not None:
                scored.copied[of_sequence] = _copied(origins, row, of_window, window.scored, m)
            if top:
                with placement.autocast():
                    own = slice(row, row + 1)
                    of_row = None if trust is None else trust[own]
                    values, ids = _likeliest(model, hidden[own], inputs.rows(own), of_window, top, masked, of_row)
                scored.likeliest[of_sequence] = ids
                scored.likeliest_log_probabilities[of_sequence] = values


def origins_of(
    model: CopyingModel, vocabulary: TokenLosses, losses: Tensor, inputs: Inputs, trust: Tensor | None
) -> Origins:
    """Where the labels were copied from, with what `CopyingModel.scored` returned: nowhere without a copy head."""
    if model.copy_head is None or inputs.neighbors is None:
        none = torch.full_like(inputs.labels, -1)
        return Origins(losses.new_zeros(*losses.shape, len(SOURCES)), none, none, none)
    sources, neighbor_length = model.copy_sources(inputs), inputs.neighbors.shape[3]
    _, log_top, log_best = vocabulary
    return model.copy_head.origins(log_top, log_best, inputs.labels, losses, sources, neighbor_length, trust)


def _no_scores(count: int, top: int) -> Scores:
    return Scores(np.zeros(count), np.zeros((count, top), np.int64), np.zeros((count, top), np.float32))


def _find_neighbors(windows: Sequence[Window], m: int, retrieve: RetrieveNeighbors, sources: bool) -> None:
    """Find the neighbors of the windows' sequences, unless they have been found, in one search."""
    unique = dict.fromkeys(window.sequence for window in windows)
    sequences = [sequence for sequence in unique if sequence.neighbors is None]
    chunks = [sequence.chunks(m) for sequence in sequences]
    if not sum(map(len, chunks)):
        return
    # One search for all sequences: their chunks [n, m] go in together, and its tables [n, …] are cut between sequences.
    borders = np.cumsum(list(map(len, chunks)))[:-1]
    parts = (np.split(table, borders) for table in retrieve(np.concatenate(chunks)))
    for sequence, *tables in zip(sequences, *parts, strict=True):
        sequence.neighbors = Neighbors(*tables)
        if sources:
            sequence.scores.read.extend(_read(sequence.chunks(m), sequence.neighbors))


def _find_votes(windows: Sequence[Window], datastore: WholeDatastore) -> None:
    """Find the votes of the windows' sequences, unless they are known."""
    for sequence in dict.fromkeys(window.sequence for window in windows):
        if sequence.votes is None:
            sequence.votes = datastore.votes(sequence.tokens[:-1])


def _read(chunks: np.ndarray, neighbors: Neighbors) -> list[ChunkWithNeighbors]:
    """Return complete chunks [n, m] of a sequence with their neighbors."""
    return [ChunkWithNeighbors(u, *pair) for u, pair in enumerate(zip(chunks, neighbors.of_chunks(), strict=True))]


def _copied(origins: Origins, row: int, scored: slice, first: int, m: int) -> list[CopiedFrom | None]:
    """Return where the tokens of a row were copied from; `first` is the number of the first one in its sequence."""
    columns = (table[row, scored].tolist() for table in (origins.of(NEIGHBORS), origins.neighbors, origins.positions))
    return [
        CopiedFrom(share, token // m - 1, neighbor, position) if neighbor >= 0 else None
        for token, (share, neighbor, position) in enumerate(zip(*columns, strict=True), start=first)
    ]


def _batches(windows: Sequence[Window], m: int) -> Iterator[list[Window]]:
    """Yield batches of windows of similar length, for little padding; the longest first, so that a lack of memory shows
    at once."""
    ordered = sorted(windows, key=len, reverse=True)
    shape = _shape_of_neighbors(ordered)
    while ordered:
        of_neighbors = len(ordered[0]) // m * int(np.prod(shape))
        size = min(_BATCH_TOKENS // len(ordered[0]), _BATCH_NEIGHBOR_TOKENS // max(1, of_neighbors))
        yield ordered[: max(1, size)]
        ordered = ordered[max(1, size) :]


def _shape_of_neighbors(windows: Sequence[Window]) -> tuple[int, ...]:
    """Return (K, R) of a chunk's neighbors; (0,) if there are none."""
    all_neighbors = (window.sequence.neighbors for window in windows)
    return next((neighbors.tokens.shape[1:] for neighbors in all_neighbors if neighbors is not None), (0,))


def _batch(windows: list[Window], m: int) -> Inputs:
    """Return the model's inputs. Missing chunks of shorter rows have neighbors of length 0."""
    # A window of t tokens is t - 1 inputs and t - 1 labels, one to the left of them. Labels that an earlier window
    # scored stay ignored, and so does padding.
    width = max(map(len, windows)) - 1
    tokens, labels = np.zeros((2, len(windows), width), dtype=np.int64)
    labels[:] = IGNORED_LABEL
    for row, window in enumerate(windows):
        text = window.sequence.tokens[window.start : window.stop]
        tokens[row, : len(text) - 1] = text[:-1]
        scored = window.scored - window.start
        labels[row, scored - 1 : len(text) - 1] = text[scored:]
    inputs = Inputs(tokens, labels=labels)
    shape = (len(windows), width // m, *_shape_of_neighbors(windows))
    if len(shape) == 4:
        neighbors, lengths = np.zeros(shape, np.int64), np.zeros(shape[:3], np.int64)
        for row, window in enumerate(windows):
            if window.sequence.neighbors is not None:
                # Windows begin at a chunk of their sequence, so chunk u of the row is chunk first + u there.
                first, count = window.start // m, (len(window) - 1) // m
                for table, part in zip((neighbors, lengths), window.sequence.neighbors[:2], strict=True):
                    table[row, :count] = part[first : first + count]
        inputs = inputs._replace(neighbors=neighbors, neighbor_lengths=lengths)
    if windows[0].sequence.votes is not None:
        votes = np.zeros((*tokens.shape, windows[0].sequence.votes.shape[1]), np.int64)
        for row, window in enumerate(windows):
            assert window.sequence.votes is not None
            votes[row, : len(window) - 1] = window.sequence.votes[window.start : window.stop - 1]
        inputs = inputs._replace(votes=votes)
    return inputs.map(torch.from_numpy)


def _cached_neighbors(batch: Inputs, model: CopyingModel, cache: NeighborCache | None) -> tuple[Tensor, Tensor] | None:
    """Keys and values of the neighbors of a batch from the cache of a decoder that reads them."""
    if cache is None or not batch.retrieves:
        return None
    neighbors, lengths = (part.flatten(0, 1).numpy() for part in (batch.neighbors, batch.neighbor_lengths))
    return cache.encode(neighbors, lengths)


def _likeliest(
    model: CopyingModel,
    hidden: Tensor,
    inputs: Inputs,
    scored: slice,
    top: int,
    masked: Tensor | None,
    trust: Tensor | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities and ids of the likeliest next tokens for activations [1, T, D]: [scored, top] each."""
    # Matches need all T tokens. Logits [1, block, V] are made for some positions at a time: they are the largest
    # tensor.
    blocks, sources, head = [], model.copy_sources(inputs), model.copy_head
    # Shares do not depend on labels, so these can be any.
    evidence = None if head is None else head.evidence(sources, torch.zeros_like(inputs.tokens))
    for start in range(scored.start, scored.stop, _BLOCK):
        kept = slice(start, min(start + _BLOCK, scored.stop))
        logits = model.logits(hidden[:, kept])
        if head is not None and evidence is not None and sources:
            logits = head.mix(logits, sources, evidence, kept, trust)
        blocks.append(without(logits[0].float().log_softmax(-1), masked).topk(top))
    values, ids = (torch.cat(parts).cpu().numpy() for parts in zip(*blocks, strict=True))
    return values, ids
