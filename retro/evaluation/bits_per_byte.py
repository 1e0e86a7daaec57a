"""Bits-per-byte of held-out documents, retrieval ON and OFF (paper, section 2.7 and 4).

    documents → sliding windows → nats of every token → sum over chunks and documents / (ln 2 · bytes of their text)

Bits-per-byte does not depend on the tokenizer. ON and OFF use the same weights; OFF reads no neighbors.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from indexing.progress import Advance, status
from indexing.store.datastore import Split
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from retro.data.loader import as_tensors
from retro.data.neighbor_choice import NeighborUse
from retro.device import Placement
from retro.evaluation.layer_progress import counted_by_layer
from retro.evaluation.longest_matches import LongestMatches
from retro.evaluation.sets import EvaluationSet
from retro.evaluation.settings import EvaluationSettings
from retro.evaluation.windows import ScoringWindow, document_windows, window_batches
from retro.model.inputs import Inputs
from retro.model.loss import IGNORED_LABEL
from retro.model.retro import Retro

# Windows that are sorted by length together: little padding, and memory that does not grow with the evaluation set.
_BUFFERED_WINDOWS = 512
# Documents drawn together in a bootstrap.
_BUFFERED_DRAWS = 1 << 20


@dataclass(frozen=True)
class ChunkScores:
    """Scores by chunk. A token belongs to its own chunk, not to the chunk of the position that predicts it.

    Attributes:
        ids: [n] int64 chunk ids, ascending.
        documents: [n] int64 document numbers.
        nats: [n] float64 sums over the scored tokens.
        tokens, bytes: [n] int32 counts of the scored tokens and of their bytes.
    """

    ids: np.ndarray
    documents: np.ndarray
    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray


@dataclass(frozen=True)
class MatchScores:
    """Scores by the longest match in the datastore that ends before each token, in bands of its length.

    Attributes:
        nats, tokens, bytes: [bands, documents] float64 sums over the scored tokens.
    """

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray


@dataclass(frozen=True)
class SetResult:
    """One measurement.

    Attributes:
        set: name of the evaluation set.
        k: neighbors of each chunk.
        votes: whether the model copied from the whole datastore. Without neighbors and votes: retrieval OFF.
        tokens: number of scored tokens.
        tokens_per_second: speed of this measurement.
        nats_by_document, bytes_by_document: [documents] float64 over the scored tokens, for paired comparisons.
        chunks: scores by chunk, if requested.
        matches: scores by longest match, if requested.
    """

    set: str
    k: int
    tokens: int
    tokens_per_second: float
    nats_by_document: np.ndarray
    bytes_by_document: np.ndarray
    chunks: ChunkScores | None = None
    votes: bool = False
    matches: MatchScores | None = None

    @property
    def retrieval(self) -> str:
        """`OFF` or `ON`."""
        return "ON" if self.k or self.votes else "OFF"

    @property
    def mode(self) -> str:
        """What is read, see `mode_of`."""
        return mode_of(self.k, self.votes)

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the text of the scored tokens."""
        return int(self.bytes_by_document.sum())

    @property
    def documents(self) -> int:
        """Number of documents with scored tokens."""
        return int(np.count_nonzero(self.bytes_by_document))

    @property
    def bits_per_byte(self) -> float:
        """Total bits divided by the bytes of the scored tokens."""
        return float(self.nats_by_document.sum() / math.log(2) / self.bytes_by_document.sum())

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return float(math.exp(self.nats_by_document.sum() / self.tokens))

    def as_json(self) -> dict[str, Any]:
        """All values except the arrays."""
        figures = ("bits_per_byte", "perplexity", "documents", "tokens", "bytes", "tokens_per_second")
        return {name: getattr(self, name) for name in ("set", "retrieval", "k", "votes", *figures)}


def mode_of(k: int, votes: bool) -> str:
    """What is read, in words: `OFF`, `ON k=2`, `ON datastore` or `ON k=2 + datastore`."""
    read = [f"k={k}"] * bool(k) + ["datastore"] * votes
    return f"ON {' + '.join(read)}" if read else "OFF"


def evaluate(
    model: Retro,
    evaluation_set: EvaluationSet,
    settings: EvaluationSettings,
    placement: Placement,
    *,
    use: NeighborUse,
    sequence_length: int,
    by_chunk: bool = False,
    matches: LongestMatches | None = None,
    windows: Iterable[ScoringWindow] = (),
    token_losses_of: Callable[[Inputs], Tensor] | None = None,
    advance: Advance = lambda _: None,
) -> SetResult:
    """Score the documents of an evaluation set.

    Args:
        model: the model; its training or evaluation mode is restored.
        evaluation_set: the documents, with the neighbors that their datastore stores.
        settings: window, stride, number of tokens, batch size.
        placement: device and precision.
        use: number and choice of the neighbors that each chunk reads; k = 0 is retrieval OFF.
        sequence_length: size of the window if the settings do not set it.
        by_chunk: also return scores by chunk, which take 24 bytes for each chunk of the set.
        matches: also return scores by longest match.
        windows: the windows to score; empty = all documents in windows of the settings.
        token_losses_of: computes the losses of a batch, for a model that is distributed over processes.
        advance: called with numbers of scored tokens.

    Raises:
        InputError: the set does not fit the model or k, or window and stride do not fit the chunk length.
    """
    evaluation_set.check(model.settings, use.k if use.found is None else 0)
    split, m = evaluation_set.split, evaluation_set.split.chunk_length
    num_chunks, stride = _window_chunks(settings, sequence_length, m)
    token_bytes = evaluation_set.token_bytes
    nats, sizes = np.zeros((2, split.num_documents))
    datastore = evaluation_set.datastore
    retrieval = RetrievalSet.of(datastore) if use.k else RetrievalSet((datastore.train,))
    tokens, started, mode = 0, time.perf_counter(), model.training
    table = np.zeros((3, split.num_chunks if by_chunk else 0))
    by_match = np.zeros((3, len(matches.starts) if matches else 0, split.num_documents))
    model.eval()
    nats_of = token_losses_of or partial(_token_losses, model, placement)
    layers = [] if token_losses_of else list(model.feed_forward.values())
    remaining = iter(windows or document_windows(split, num_chunks, stride))
    full = settings.max_tokens or math.inf
    while tokens < full and (group := list(islice(remaining, _BUFFERED_WINDOWS))):
        if math.isfinite(full):
            group = _first_windows(group, int(full - tokens), m)
        for part, batch in window_batches(split, retrieval, group, settings.batch_size, use):
            documents = np.array([window.text for window in part])
            scored = int((batch.labels != IGNORED_LABEL).sum())
            with counted_by_layer(layers, scored, advance):
                by_position = _score(nats_of, batch, token_bytes, placement)  # nats, tokens, bytes: each [B, T]
            begins = [window.scored == split.chunk_range(window.text)[0] for window in part]
            by_position[2, begins, 0] = (by_position[2, begins, 0] - evaluation_set.added_bytes).clip(0)
            scores = _by_chunk(by_position, m)  # each [B, U]
            np.add.at(nats, documents, scores[0].sum(1))
            np.add.at(sizes, documents, scores[2].sum(1))
            if matches is not None:
                bands = _bands(matches, part, m)  # [B, T]
                for values, sums in zip(by_position, by_match, strict=True):
                    np.add.at(sums, (bands, documents[:, None]), values)
            for row, window in enumerate(part if by_chunk else ()):
                own = slice(window.scored - window.start, window.stop - window.start)  # only this window scores these
                table[:, window.scored : window.stop] = scores[:, row, own]
            tokens += scored
    model.train(mode)
    if sizes.sum() == 0:
        raise InputError(f"evaluation set {evaluation_set.name!r}: its documents have no text to score.")
    return SetResult(
        set=evaluation_set.name,
        k=use.k,
        tokens=tokens,
        tokens_per_second=tokens / (time.perf_counter() - started),
        nats_by_document=nats,
        bytes_by_document=sizes,
        chunks=_chunk_scores(split, table) if by_chunk else None,
        votes=use.votes,
        matches=MatchScores(*by_match) if matches else None,
    )


def joined(parts: Sequence[SetResult]) -> SetResult:
    """One measurement from several of different windows, each by chunk, with the same model and the same reading."""
    chunks = [part.chunks for part in parts if part.chunks is not None]
    order = np.argsort(np.concatenate([each.ids for each in chunks]))
    tokens = sum(part.tokens for part in parts)
    return replace(
        parts[0],
        tokens=tokens,
        tokens_per_second=tokens / sum(part.tokens / part.tokens_per_second for part in parts),
        nats_by_document=np.sum([part.nats_by_document for part in parts], axis=0),
        bytes_by_document=np.sum([part.bytes_by_document for part in parts], axis=0),
        chunks=ChunkScores(*(np.concatenate(values)[order] for values in zip(*map(_columns, chunks), strict=True))),
        matches=None,
    )


def measure_sets(
    model: Retro,
    sets: Sequence[EvaluationSet],
    settings: EvaluationSettings,
    placement: Placement,
    *,
    use: NeighborUse,
    sequence_length: int,
    token_losses_of: Callable[[Inputs], Tensor] | None = None,
) -> dict[str, float]:
    """Measure bits-per-byte of several sets: `NAME_bits_per_byte_off`, and `NAME_bits_per_byte_on` if it is not OFF.

    The status has the percentage, as the bar is that of the training.
    """
    results = [
        evaluate(
            model,
            evaluation_set,
            settings,
            placement,
            use=one,
            sequence_length=sequence_length,
            token_losses_of=token_losses_of,
            advance=_percentage(evaluation_set, settings, one),
        )
        for evaluation_set in sets
        for one in (replace(use, k=0, votes=False), *([use] if use.k or use.votes else []))
    ]
    return {f"{r.set}_bits_per_byte_{r.retrieval.lower()}": r.bits_per_byte for r in results}


def _percentage(evaluation_set: EvaluationSet, settings: EvaluationSettings, use: NeighborUse) -> Advance:
    """A function that counts scored tokens in the status of the running work."""
    total, done = min(settings.max_tokens or evaluation_set.tokens, evaluation_set.tokens), 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        percent = min(100, 100 * done // max(1, total))
        status("evaluation of %s, %s: %d%%", evaluation_set.name, mode_of(use.k, use.votes), percent)

    return advance


def _columns(chunks: ChunkScores) -> tuple[np.ndarray, ...]:
    return chunks.ids, chunks.documents, chunks.nats, chunks.tokens, chunks.bytes


def _window_chunks(settings: EvaluationSettings, sequence_length: int, m: int) -> tuple[int, int]:
    window = settings.window or sequence_length
    stride = settings.stride or max(m, window // 2 // m * m)
    if window % m or stride % m or not 0 < stride < window:
        raise InputError(
            f"evaluation.window = {window} and evaluation.stride = {stride}: both must be multiples of the chunk length "
            f"{m}, and the stride must be smaller than the window, because the first token of a window has no context."
        )
    return window // m, stride // m


def _first_windows(group: list[ScoringWindow], tokens: int, m: int) -> list[ScoringWindow]:
    """Return the first windows that have about this many scored tokens together; at least one."""
    sizes = np.cumsum([(window.stop - window.scored) * m for window in group])
    return group[: int(np.searchsorted(sizes, tokens)) + 1]


@torch.inference_mode()
def _token_losses(model: Retro, placement: Placement, batch: Inputs) -> Tensor:
    with placement.autocast():
        return model.token_losses(batch)


def _score(
    token_losses_of: Callable[[Inputs], Tensor], batch: Inputs, token_bytes: np.ndarray, placement: Placement
) -> np.ndarray:
    """Return nats, number and bytes of the scored labels of a batch: [3, B, T] float64. The label of a position is the next token."""
    nats = token_losses_of(placement.put(as_tensors(batch))).double().cpu().numpy()
    scored = batch.labels != IGNORED_LABEL
    sizes = np.where(scored, token_bytes[np.where(scored, batch.labels, 0)], 0)
    return np.stack([nats, scored, sizes])


def _by_chunk(by_position: np.ndarray, m: int) -> np.ndarray:
    """Sum scores of labels [3, B, T] over the chunks of these tokens: [3, B, U]."""
    # The label at position t is token t + 1. The last position has no label, so no value wraps around.
    by_token = np.roll(by_position, 1, axis=2)
    return by_token.reshape(*by_token.shape[:2], -1, m).sum(3)


def _bands(matches: LongestMatches, windows: Sequence[ScoringWindow], m: int) -> np.ndarray:
    """The band of the match up to each position of a batch: [B, T] int64."""
    longest = max(window.stop - window.start for window in windows)
    ids = [np.minimum(np.arange(window.start, window.start + longest), window.stop - 1) for window in windows]
    return matches.bands(matches.of_tokens(np.concatenate(ids)).reshape(len(ids), longest * m))


def _chunk_scores(split: Split, table: np.ndarray) -> ChunkScores:
    """Return the scored chunks of a table of nats, tokens and bytes [3, chunks]."""
    ids = np.flatnonzero(table[1])
    nats, tokens, sizes = table[:, ids]
    return ChunkScores(ids, split.documents_of(ids)[0], nats, tokens.astype(np.int32), sizes.astype(np.int32))


def compare(measured: SetResult, reference: SetResult, seed: int = 0, rounds: int = 1000) -> tuple[float, float, float]:
    """Compare two measurements of the same documents: difference in percent of the reference's bits-per-byte.

    Args:
        measured: for example, retrieval ON.
        reference: for example, the baseline.
        seed: seed of the bootstrap.
        rounds: samples of the bootstrap.

    Returns:
        the difference (negative = fewer bits), and its 2.5% and 97.5% quantiles in a bootstrap over documents. With a single
        document both quantiles equal the difference: there is no interval.
    """
    assert measured.bytes == reference.bytes, "not the same tokens"
    ratio, low, high = _bootstrap(measured, reference.nats_by_document, seed, rounds)
    return 100 * (ratio - 1), 100 * (low - 1), 100 * (high - 1)


def interval(measured: SetResult, seed: int = 0, rounds: int = 1000) -> tuple[float, float] | None:
    """The 2.5% and 97.5% quantiles of bits-per-byte in a bootstrap over documents; None with a single document."""
    if measured.documents == 1:
        return None
    _, low, high = _bootstrap(measured, measured.bytes_by_document * math.log(2), seed, rounds)
    return low, high


def _bootstrap(measured: SetResult, parts: np.ndarray, seed: int, rounds: int) -> tuple[float, float, float]:
    """The nats over a sum of `parts` [documents], and its 2.5% and 97.5% quantiles over draws of documents."""
    scored = np.flatnonzero(measured.bytes_by_document)
    nats, parts = measured.nats_by_document[scored], parts[scored]
    generator, ratios = np.random.default_rng(seed), []
    at_once = max(1, _BUFFERED_DRAWS // len(scored))
    for start in range(0, rounds, at_once):
        drawn = generator.integers(0, len(scored), (min(at_once, rounds - start), len(scored)))
        ratios.append(nats[drawn].sum(1) / parts[drawn].sum(1))
    low, high = np.quantile(np.concatenate(ratios), [0.025, 0.975])
    return float(nats.sum() / parts.sum()), float(low), float(high)
