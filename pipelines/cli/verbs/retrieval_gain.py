"""What retrieval brings to a model without training, on a window of each held-out document until the time is up.

model, datastore → bits per byte OFF, with neighbors, ON ─┬─ bars, a sentence
                                                          └─ passages colored by the gain of their tokens
"""

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from indexing.progress import Advance, during
from indexing.store.datastore import Datastore, Split
from pipelines.cli.verbs.comparison import Comparison, difference, passages_by_gain
from pipelines.cli.verbs.demo import K
from pipelines.terminal.output import echo
from pipelines.terminal.progress import progress
from pipelines.terminal.units import counted, human_seconds
from retro.data.neighbor_choice import NeighborUse
from retro.evaluation.settings import LEAST_DOCUMENTS, EvaluationSettings

if TYPE_CHECKING:
    from retro.data.windows import ScoringWindow
    from retro.evaluation.bits_per_byte import SetResult
    from retro.evaluation.evaluator import Evaluator
    from retro.evaluation.sets import EvaluationSet

_CONTEXT = 1024
_COLORED = 2
"""Documents that could be measured in the time that the colored passages take."""
_USES = NeighborUse(0), NeighborUse(K), NeighborUse(K, votes=True)


def compare_retrieval(
    model: str | Path,
    datastore: str | Path,
    *,
    minutes: float = 2.0,
    device: str = "auto",
    seed: int = 0,
    name: str = "",
    documents: int = 0,
) -> Comparison:
    """Score held-out documents OFF, with neighbors, and with the whole datastore too, and color passages by the gain.

    Args:
        model: a checkpoint, or a decoder of transformers: a folder, a name on the Hugging Face Hub, a `.gguf` file.
        datastore: made with the tokenizer of the model.
        minutes: time limit, the loading of the model included. At least five documents are measured, for an interval.
        device: `auto`, `cpu`, `cuda` …
        seed: of the windows and their order.
        name: of the model, in the results; empty = the end of its path.
        documents: number of documents to measure; 0 = as many as fit into the time.

    Raises:
        InputError: there is no such model or datastore, or they do not fit each other.
    """
    from retro.checkpoints.any_model import for_datastore, load_scorer, open_model
    from retro.device import choose_inference_placement
    from retro.evaluation.bits_per_byte import compare
    from retro.evaluation.evaluator import Evaluator
    from retro.evaluation.sets import EvaluationSet

    deadline, name = time.monotonic() + 60 * minutes, name or Path(model).name
    checkpoint = for_datastore(open_model(Path(model)), datastore)
    placement = choose_inference_placement(device, checkpoint.settings["train"]["precision"])
    window = min(_CONTEXT, checkpoint.settings["data"]["sequence_length"])
    evaluator = Evaluator(load_scorer(checkpoint, placement), placement, EvaluationSettings(window=window))
    held_out = EvaluationSet("valid", Datastore.open(datastore))
    off, near, on = measured(evaluator, held_out, seed, deadline, documents)
    changes = {"neighbors": compare(near, off), "retrieval ON": compare(on, off)}
    verdict = difference(name, "without it", changes["retrieval ON"], on.documents)
    rows = {"retrieval OFF": off, "neighbors": near, "retrieval ON": on}
    passages = passages_by_gain(evaluator, off, on, held_out)
    return Comparison(rows, "against OFF", changes, verdict, _words(name, on), passages)


def _words(name: str, on: "SetResult") -> dict[str, str]:
    """What the rows and columns of the table mean."""
    return {
        "bits per byte": "bits that a model needs for a byte of text that is not in the datastore; fewer is better",
        "retrieval OFF": f"{name}, as it came; it may have been trained on text like this",
        "neighbors": f"the same weights; each chunk can copy from {on.k} neighbors: similar chunks of other documents",
        "retrieval ON": "the same; at each word it can also copy the words after the last ones in the whole datastore",
        "measured on": f"{on.tokens:,} tokens: up to {_CONTEXT:,} in a row of each of {on.documents:,} held-out documents",
    }


def measured(
    evaluator: "Evaluator", held_out: "EvaluationSet", seed: int, deadline: float, documents: int = 0
) -> "list[SetResult]":
    """Score held-out documents with each of `_USES` until the deadline, or that number of documents, a window of each.

    What is measured is printed first: the first document shows how many fit.
    """
    from retro.evaluation.bits_per_byte import joined

    held_out.check(evaluator.model.settings, K)
    length = evaluator.settings.window
    windows, sizes = zip(*_with_sizes(held_out.split, one_window_each(held_out.split, length, seed)), strict=True)
    begun = time.monotonic()

    def scored(window: "ScoringWindow", advance: Advance = lambda _: None) -> "list[SetResult]":
        silent = replace(evaluator, progress=lambda *_, **__: contextlib.nullcontext(advance))
        return silent.score_each(held_out, _USES, windows=[window])

    with during("a first held-out document"):
        parts = [scored(windows[0])]
    per_token = (time.monotonic() - begun) / sizes[0]
    until = deadline - _COLORED * per_token * length
    fitting = int(np.searchsorted(np.cumsum(sizes[1:]) * per_token, until - time.monotonic())) + 1
    planned = documents or min(len(windows), max(LEAST_DOCUMENTS, fitting))
    tokens = sum(sizes[:planned])
    echo(
        f"   measured next: {tokens:,} tokens of {planned:,} of {counted(len(windows), 'held-out document')}, each without retrieval, "
        f"with neighbors, and with the whole datastore too: about {human_seconds(per_token * sum(sizes[1:planned]))}"
    )
    with progress("eval", total=len(evaluator.readings(_USES)) * sum(sizes[1:planned]), unit="tokens") as advance:
        for window, size in zip(windows[1:planned], sizes[1:planned], strict=True):
            is_late = time.monotonic() + per_token * size > until
            if is_late and not documents and len(parts) >= LEAST_DOCUMENTS:
                echo(f"   the time is up after {counted(len(parts), 'document')}")
                break
            parts.append(scored(window, advance))
    return [joined(of_use) for of_use in zip(*parts, strict=True)]


def _with_sizes(split: Split, windows: "list[ScoringWindow]") -> "list[tuple[ScoringWindow, int]]":
    """Windows and their numbers of tokens. The first one has whole chunks after its first, if there is such a one, to
    color."""
    sized = [(window, int(split.lengths.read(window.start, window.stop).sum())) for window in windows]
    sized = [(window, size) for window, size in sized if size > 1] or sized  # a single token has no text before it
    colored = next((number for number, (window, _) in enumerate(sized) if window.stop - window.start > 2), 0)
    return [sized[colored], *sized[:colored], *sized[colored + 1 :]]


def one_window_each(split: Split, num_tokens: int, seed: int) -> "list[ScoringWindow]":
    """Draw a window of each document, in random order: the first documents alone would say little about the others."""
    from retro.data.windows import ScoringWindow

    random, size, windows = np.random.default_rng(seed), num_tokens // split.chunk_length, []
    for document in random.permutation(split.num_documents).tolist():
        first, stop = split.chunk_range(document)
        start = int(random.integers(first, max(first, stop - size) + 1))
        windows.append(ScoringWindow(document, start, min(stop, start + size), start))
    return windows
