"""Score held-out documents with a model, retrieval ON or OFF (paper, sections 2.7 and 4).

    documents → sliding windows → batches → nats of every token → `SetResult`

ON and OFF use the same weights; OFF reads no neighbors. The model reads a batch once for all uses with which its
activations are equal: copying changes its predictions afterwards. The run, the verbs, the demos and the benchmarks
score with `Evaluator`.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from indexing.progress import Advance, Progress, percentage
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from retro.batch.inputs import Inputs
from retro.batch.loss import IGNORED_LABEL
from retro.copying.model import CopyingModel, MixtureParts
from retro.data.loader import as_tensors
from retro.data.neighbor_choice import NeighborUse, searching
from retro.data.windows import ScoringWindow, document_windows, sampled_windows, scored_tokens, window_batches
from retro.device import Placement
from retro.evaluation.bits_per_byte import SetResult, TokenScores, mode_of
from retro.evaluation.sets import EvaluationSet
from retro.evaluation.settings import LEAST_DOCUMENTS, EvaluationSettings
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
        token_losses_of: computes the losses of a batch, for a model that is distributed over processes; None = the
            model does.
        progress: shows the scored tokens.
        on_result: receives each measurement as soon as it is finished.
    """

    model: CopyingModel
    placement: Placement
    settings: EvaluationSettings
    name: str = ""
    token_losses_of: Callable[[Inputs], Tensor] | None = None
    progress: Progress = percentage
    on_result: Callable[[SetResult], None] = lambda _: None

    def score(
        self, evaluation_set: EvaluationSet, use: NeighborUse, *, windows: Iterable[ScoringWindow] = (), note: str = ""
    ) -> SetResult:
        """As `score_each` for a single use."""
        return self.score_each(evaluation_set, [use], windows=windows, note=note)[0]

    def score_each(
        self,
        evaluation_set: EvaluationSet,
        uses: Sequence[NeighborUse],
        *,
        windows: Iterable[ScoringWindow] = (),
        note: str = "",
    ) -> list[SetResult]:
        """Score the documents of a set with each use of neighbors.

        Args:
            evaluation_set: the documents, with the neighbors that their datastore stores.
            uses: number and choice of the neighbors that each chunk reads; k = 0 without votes is retrieval OFF.
            windows: the windows to score; empty = those of the settings: all documents, or a sample of `max_tokens`.
            note: part of the name of the progress, instead of the model's name.

        Raises:
            InputError: the set does not fit the model or k, or window and stride do not fit the chunk length.
        """
        for use in uses:
            evaluation_set.check(self.model.settings, use.k if use.found is None else 0)
        given, results = tuple(windows), dict[int, SetResult]()
        for numbers in self.readings(uses):
            measured = self._score_together(evaluation_set, [uses[number] for number in numbers], given, note)
            for number, result in zip(numbers, measured, strict=True):
                results[number] = result
                self.on_result(result)
        return [results[number] for number in range(len(uses))]

    def readings(self, uses: Sequence[NeighborUse]) -> list[list[int]]:
        """The numbers of the uses, grouped by the activations of the model: it reads the text once for each group."""
        groups: dict[object, list[int]] = {}
        for number, use in enumerate(uses):
            activations: object = None
            if self.token_losses_of:
                activations = number
            elif self.model.settings.activations_read and use.k:
                activations = replace(use, votes=False, found_votes=None), id(use.found)
            groups.setdefault(activations, []).append(number)
        return list(groups.values())

    def _windows(self, evaluation_set: EvaluationSet) -> tuple[Iterable[ScoringWindow], int]:
        """The windows of the settings, all or some of many documents, and about how many tokens they have."""
        split, limit = evaluation_set.split, self.settings.max_tokens
        size = window_and_stride(self.settings, split.chunk_length)
        if not 0 < limit < evaluation_set.tokens:
            return document_windows(split, *size), evaluation_set.tokens
        drawn = list(sampled_windows(split, *size, limit, LEAST_DOCUMENTS, self.settings.seed))
        return drawn, sum(int(scored_tokens(split, window)[-1]) for window in drawn)

    def _score_together(
        self, evaluation_set: EvaluationSet, uses: Sequence[NeighborUse], given: Sequence[ScoringWindow], note: str
    ) -> list[SetResult]:
        """Score the given windows, or those of the settings, with uses for which the model has the same activations."""
        modes = ", ".join(mode_of(use.k, use.votes) for use in uses)
        name = " ".join(filter(None, ("eval", evaluation_set.name, note or self.name, modes)))
        windows, total = (given, evaluation_set.tokens) if given else self._windows(evaluation_set)
        sums = [_Sums(np.zeros(evaluation_set.split.num_documents)) for _ in uses]
        mode = self.model.training
        self.model.eval()
        with self.progress(name, total=total, unit="tokens") as advance:
            for part, batches in self._batches(evaluation_set, uses, windows):
                for of_use, scored in zip(sums, self._score(batches, advance), strict=True):
                    of_use.add(part, *scored)
        self.model.train(mode)
        return [self._result(evaluation_set, use, of_use) for use, of_use in zip(uses, sums, strict=True)]

    def _result(self, evaluation_set: EvaluationSet, use: NeighborUse, sums: "_Sums") -> SetResult:
        scores = _token_scores(evaluation_set, sums.rows)
        sizes = np.where(scores.scored, scores.bytes, 0).sum(1, dtype=np.float64)
        if sizes.sum() == 0:
            raise InputError(f"evaluation set {evaluation_set.name!r}: its documents have no text to score.")
        tokens = int(scores.scored.sum())
        return SetResult(
            set=evaluation_set.name,
            k=use.k,
            tokens=tokens,
            tokens_per_second=tokens / sums.seconds,
            nats_by_document=sums.nats,
            bytes_by_document=np.bincount(scores.documents, sizes, minlength=len(sums.nats)),
            votes=use.votes,
            model=self.name,
            scores=scores,
        )

    def _batches(
        self, evaluation_set: EvaluationSet, uses: Sequence[NeighborUse], windows: Iterable[ScoringWindow]
    ) -> Iterator[tuple[list[ScoringWindow], list[tuple[Inputs[np.ndarray], float]]]]:
        """Yield batches of windows: the inputs with each use, and the seconds in which they were read."""
        split, datastore, remaining = evaluation_set.split, evaluation_set.datastore, iter(windows)
        uses = searching(datastore, uses)
        retrieval = [RetrievalSet.of(datastore) if use.k else RetrievalSet((datastore.train,)) for use in uses]
        while group := list(islice(remaining, _BUFFERED_WINDOWS)):
            readers = [
                _timed(window_batches(split, searched, group, self.settings.batch_size, use))
                for searched, use in zip(retrieval, uses, strict=True)
            ]
            for reads in zip(*readers, strict=True):  # equal windows, with other neighbors and votes
                yield reads[0][0], [(inputs, seconds) for _, inputs, seconds in reads]

    def _score(
        self, batches: Sequence[tuple[Inputs[np.ndarray], float]], advance: Advance
    ) -> list[tuple[np.ndarray, float]]:
        """Nats of the tokens of a batch with each use, and the seconds that each takes alone.

        Nats are [B, T] float32 at the token, NaN for those that are not scored.
        """
        scored = batches[0][0].labels != IGNORED_LABEL
        layers, found = [] if self.token_losses_of else self.model.steps, list[tuple[np.ndarray, float]]()
        with _counted_by_layer(layers, int(scored.sum()), advance):
            inputs = [self.placement.put(as_tensors(batch)) for batch, _ in batches]
            started = time.perf_counter()
            losses_of = self._losses_of(inputs)
            reading = time.perf_counter() - started
            for losses_with, (_, seconds) in zip(losses_of, batches, strict=True):
                started = time.perf_counter()
                losses = losses_with().float().cpu().numpy()
                # The label at position t is token t + 1. The last position has no label, so no value wraps around.
                nats = np.roll(np.where(scored, losses, np.float32(np.nan)), 1, axis=1)
                found.append((nats, seconds + reading + time.perf_counter() - started))
        return found

    def _losses_of(self, ways: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        """Read a text, and return what computes the losses of its labels with each of the uses."""
        if self.token_losses_of is not None:
            return [partial(self.token_losses_of, inputs) for inputs in ways]
        with torch.inference_mode(), self.placement.autocast():
            reads = self.model.read(ways)
            if len(ways) > 1:
                self.placement.wait()  # for the time of the reading
        return [partial(self._with_copying, *pair) for pair in zip(reads, ways, strict=True)]

    def _with_copying(self, parts: MixtureParts, inputs: Inputs) -> Tensor:
        """Losses of the labels with one of the uses."""
        with torch.inference_mode(), self.placement.autocast():
            return self.model.with_copying(parts, inputs)[0]


@dataclass
class _Sums:
    """What was scored with one use.

    Attributes:
        nats: sums by document, [documents] float64.
        rows: the first chunk that a window scores, and the nats of its chunks [n, m].
        seconds: that the use takes alone.
    """

    nats: np.ndarray
    rows: list[tuple[int, np.ndarray]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, windows: Sequence[ScoringWindow], nats: np.ndarray, seconds: float) -> None:
        """Add a batch: nats [B, T] of windows."""
        num_chunks = windows[0].stop - windows[0].start  # the longest window comes first
        by_chunk = nats.reshape(len(nats), num_chunks, -1)
        documents = [window.text for window in windows]
        np.add.at(self.nats, documents, np.nansum(by_chunk.astype(np.float64), axis=2).sum(1))
        for window, scores in zip(windows, by_chunk, strict=True):
            inside = scores[window.scored - window.start : window.stop - window.start]
            self.rows.append((window.scored, inside.copy()))  # no other window scores these chunks
        self.seconds += seconds


def _timed(
    batches: Iterator[tuple[list[ScoringWindow], Inputs[np.ndarray]]],
) -> Iterator[tuple[list[ScoringWindow], Inputs[np.ndarray], float]]:
    """Yield batches with the seconds in which each was read."""
    while True:
        started = time.perf_counter()
        read = next(batches, None)
        if read is None:
            return
        yield *read, time.perf_counter() - started


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


@contextlib.contextmanager
def _counted_by_layer(layers: Iterable[nn.Module], tokens: int, advance: Advance) -> Iterator[None]:
    """Advance inside of a batch, which takes a CPU up to a minute: an equal part of its tokens after each layer, the
    rest at the end.

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
