"""Score held-out documents with a model, retrieval ON or OFF (paper, sections 2.7 and 4).

    documents → sliding windows → batches → nats of every token → `SetResult`

ON and OFF use the same weights; OFF reads no neighbors. The run, the verbs, the demos and the benchmarks score with `Evaluator`.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from indexing.progress import Advance, Progress, percentage
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.copying.model import CopyingModel
from retro.data.loader import as_tensors
from retro.data.neighbor_choice import NeighborUse
from retro.data.windows import ScoringWindow, document_windows, window_batches
from retro.device import Placement
from retro.evaluation.bits_per_byte import SetResult, TokenScores, mode_of
from retro.evaluation.sets import EvaluationSet
from retro.evaluation.settings import EvaluationSettings
from retro.model_settings import ModelSettings

# Windows that are sorted by length together: little padding, and memory that does not grow with the evaluation set.
_BUFFERED_WINDOWS = 512


@dataclass(frozen=True)
class Evaluator:
    """Scores evaluation sets with a model.

    Attributes:
        model: its training or evaluation mode is restored.
        placement: device and precision.
        settings: window (see `in_windows_of`), stride, number of tokens, batch size.
        name: of the model, if there are several.
        token_losses_of: computes the losses of a batch, for a model that is distributed over processes; None = the model does.
        progress: shows the scored tokens.
    """

    model: CopyingModel
    placement: Placement
    settings: EvaluationSettings
    name: str = ""
    token_losses_of: Callable[[Inputs], Tensor] | None = None
    progress: Progress = percentage

    def score(
        self, evaluation_set: EvaluationSet, use: NeighborUse, *, windows: Iterable[ScoringWindow] = (), note: str = ""
    ) -> SetResult:
        """Score the documents of a set.

        Args:
            evaluation_set: the documents, with the neighbors that their datastore stores.
            use: number and choice of the neighbors that each chunk reads; k = 0 without votes is retrieval OFF.
            windows: the windows to score; empty = all documents in windows of the settings.
            note: part of the name of the progress, instead of the model's name.

        Raises:
            InputError: the set does not fit the model or k, or window and stride do not fit the chunk length.
        """
        evaluation_set.check(self.model.settings, use.k if use.found is None else 0)
        name = " ".join(filter(None, ("eval", evaluation_set.name, note or self.name, mode_of(use.k, use.votes))))
        total = min(self.settings.max_tokens or evaluation_set.tokens, evaluation_set.tokens)
        split, rows = evaluation_set.split, list[tuple[int, np.ndarray]]()
        windows = windows or document_windows(split, *window_and_stride(self.settings, split.chunk_length))
        nats = np.zeros(split.num_documents)
        started, mode = time.perf_counter(), self.model.training
        self.model.eval()
        with self.progress(name, total=total, unit="tokens") as advance:
            for part, batch in self._batches(evaluation_set, use, windows):
                by_chunk = self._score(batch, split.chunk_length, advance)  # [B, U, m]
                np.add.at(nats, [window.text for window in part], np.nansum(by_chunk.astype(np.float64), axis=2).sum(1))
                for window, scores in zip(part, by_chunk, strict=True):
                    inside = scores[window.scored - window.start : window.stop - window.start]
                    rows.append((window.scored, inside.copy()))  # no other window scores these chunks
        self.model.train(mode)
        seconds, scores = time.perf_counter() - started, _token_scores(evaluation_set, rows)
        sizes = np.where(scores.scored, scores.bytes, 0).sum(1, dtype=np.float64)
        if sizes.sum() == 0:
            raise InputError(f"evaluation set {evaluation_set.name!r}: its documents have no text to score.")
        tokens = int(scores.scored.sum())
        return SetResult(
            set=evaluation_set.name,
            k=use.k,
            tokens=tokens,
            tokens_per_second=tokens / seconds,
            nats_by_document=nats,
            bytes_by_document=np.bincount(scores.documents, sizes, minlength=len(nats)),
            votes=use.votes,
            model=self.name,
            scores=scores,
        )

    def _batches(
        self, evaluation_set: EvaluationSet, use: NeighborUse, windows: Iterable[ScoringWindow]
    ) -> Iterator[tuple[list[ScoringWindow], Inputs]]:
        """Yield batches of windows, up to about the number of tokens of the settings."""
        split, datastore = evaluation_set.split, evaluation_set.datastore
        retrieval = RetrievalSet.of(datastore) if use.k else RetrievalSet((datastore.train,))
        remaining, tokens, full = iter(windows), 0, self.settings.max_tokens or math.inf
        while tokens < full and (group := list(islice(remaining, _BUFFERED_WINDOWS))):
            if math.isfinite(full):
                group = _first_windows(group, int(full - tokens), split.chunk_length)
            for part, batch in window_batches(split, retrieval, group, self.settings.batch_size, use):
                yield part, batch
                tokens += int((batch.labels != IGNORED_LABEL).sum())

    def _score(self, batch: Inputs, m: int, advance: Advance) -> np.ndarray:
        """Nats of the tokens of a batch by chunk: [B, U, m] float32, NaN for those that are not scored."""
        scored = batch.labels != IGNORED_LABEL
        layers = [] if self.token_losses_of else self.model.steps
        with _counted_by_layer(layers, int(scored.sum()), advance):
            losses = (self.token_losses_of or self._token_losses)(self.placement.put(as_tensors(batch)))
            nats = np.where(scored, losses.float().cpu().numpy(), np.float32(np.nan))
        # The label at position t is token t + 1. The last position has no label, so no value wraps around.
        return np.roll(nats, 1, axis=1).reshape(len(nats), -1, m)

    @torch.inference_mode()
    def _token_losses(self, batch: Inputs) -> Tensor:
        with self.placement.autocast():
            return self.model.token_losses(batch)


def uses_of(model: ModelSettings, use: NeighborUse, ks: Sequence[int]) -> list[NeighborUse]:
    """Retrieval OFF, then each k if the model reads neighbors; the same again with votes if it reads these."""
    return [
        replace(use, k=k, votes=votes)
        for votes in ((False, True) if model.copy_head.datastore else (False,))
        for k in ((0, *ks) if model.retrieves else (0,))
    ]


def window_and_stride(settings: EvaluationSettings, m: int) -> tuple[int, int]:
    """Window and stride in chunks of m tokens.

    Raises:
        InputError: they do not fit the chunk length.
    """
    window = settings.window
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


@contextlib.contextmanager
def _counted_by_layer(layers: Iterable[nn.Module], tokens: int, advance: Advance) -> Iterator[None]:
    """Advance inside of a batch, which takes a CPU up to a minute: an equal part of its tokens after each layer, the rest at the end.

    Args:
        layers: modules that run one after the other. If they run more than once, only the first times count.
        tokens: of the batch.
        advance: receives numbers of tokens.
    """
    blocks, finished, counted = list(layers), 0, 0

    def after_layer(*_: object) -> None:
        nonlocal finished, counted
        finished = min(finished + 1, len(blocks))
        reached = tokens * finished // (len(blocks) + 1)  # the output layer comes last
        advance(reached - counted)
        counted = reached

    hooks = [block.register_forward_hook(after_layer) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    advance(tokens - counted)


def _token_scores(evaluation_set: EvaluationSet, rows: Sequence[tuple[int, np.ndarray]]) -> TokenScores:
    """Scores of the chunks with a scored token, from the first chunk and the nats [chunks, m] of each window."""
    ids = np.concatenate([np.arange(first, first + len(nats)) for first, nats in rows])
    nats = np.concatenate([nats for _, nats in rows])
    scored = np.flatnonzero(~np.isnan(nats).all(1))
    scored = scored[np.argsort(ids[scored])]
    ids = ids[scored]
    return TokenScores(ids, evaluation_set.split.documents_of(ids)[0], nats[scored], evaluation_set.text_bytes(ids))
