"""`retro plan gain CONFIG --checkpoint MODEL`: what more text would bring, from a sample of the corpus at three sizes.

    corpus ─ draw_sample ─┬─ held-out documents ─ windows ───────────────────────┐
                          └─ others ─ a datastore in a temporary folder ─ parts ─┴─► SizeCurve ─► its line, at larger sizes

The figures are measured up to the size of the sample, and extrapolated above.
"""

import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from indexing.corpus.documents import Document
from indexing.corpus.megatron import is_megatron
from indexing.corpus.scan import list_files
from indexing.progress import during
from indexing.store.errors import InputError
from indexing.store.settings import settings
from pipelines.cli.planning.sample import CorpusSample, draw_sample, with_text
from pipelines.cli.results import ResultOptions, Table
from pipelines.config import Config
from pipelines.terminal.progress import progress
from pipelines.terminal.units import human_count
from retro.evaluation.settings import LEAST_DOCUMENTS

if TYPE_CHECKING:
    from indexing.store.datastore import Datastore
    from retro.checkpoints.checkpoint import Checkpoint
    from retro.evaluation.datastore_size import Interval, Part, SizeCurve, WindowScores

FRACTIONS = (1 / 9, 1 / 3, 1.0)
"""Of the documents of the sample: three sizes."""
_LEAST_BYTES = 6  # of a held-out document for each token of a window, at least: about two windows
_MOST_DISTANCE = 1 / 3  # from the line, of what it promises of more text
_MOST_HELD_OUT = 0.2  # of the bytes of the sample


@settings
class PlanGainOptions(Config, ResultOptions):
    """Estimate what more text in the datastore would bring to a model: build a sample of the corpus, and score held-out
    documents of it with a ninth, a third and all of the other documents.

    The model copies from the whole datastore; it is not trained, and reads no neighbors. Figures beyond the sample
    extrapolate a line in the logarithm of the tokens.
    """

    checkpoint: str = ""
    """The model: a run, a checkpoint, a file of `retro import`, or a local folder in the format of Hugging Face."""
    documents: Annotated[int, Field(ge=LEAST_DOCUMENTS)] = 32
    """Held-out documents, one window of each. More give narrower intervals and take longer."""
    window: Annotated[int, Field(ge=16)] = 256
    """Tokens of a window, from the middle of its document."""
    sample_bytes: Annotated[int, Field(ge=10**5)] = 16 * 2**20
    """Bytes of text in the sample. More give a better estimate and take longer."""
    device: str = "auto"
    """Device of the model: `auto`, `cpu`, `cuda` …"""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the sample, the held-out documents and the sizes."""
    times: Annotated[int, Field(ge=2)] = 10
    """How many times more text the estimate is for."""


def plan_gain(options: PlanGainOptions) -> int:
    """`retro plan gain CONFIG`."""
    from retro.checkpoints.any_model import open_model

    if not options.checkpoint:
        raise InputError("checkpoint is empty. Name the model that will copy from the datastore: --checkpoint MODEL.")
    if not options.corpus.paths:
        raise InputError("corpus.paths is empty. Name the text of the datastore: --corpus.paths data/")
    if tokens := [file.path for file in list_files(options.corpus) if is_megatron(file.name)]:
        raise InputError(f"corpus.paths: {tokens[0]} has tokens, and a sample needs text. Name files of text.")
    checkpoint = open_model(Path(options.checkpoint))
    with during("drawing the sample"):
        drawn = draw_sample(options.corpus, options.sample_bytes, options.seed)
    held_out, others = divided(drawn, options)
    with tempfile.TemporaryDirectory(prefix="retro-gain-") as folder:
        parts, scores = measured(checkpoint, options, held_out, others, Path(folder))
    of_byte = parts[-1].tokens / sum(document.size for document in others)
    results = estimate(parts, scores, of_byte * drawn.text_bytes, options.times)
    options.deliver(results, text_of(results))
    return 0


def divided(drawn: CorpusSample, options: PlanGainOptions) -> tuple[list[Document], list[Document]]:
    """Held-out documents of a sample, and the others without copies of these. Documents are drawn from all that are
    long enough, at random, with a fifth of the bytes at most.

    Raises:
        InputError: too few documents are long enough.
    """
    documents = [*drawn.documents, *drawn.valid]
    random.Random(options.seed).shuffle(documents)
    left, texts = _MOST_HELD_OUT * sum(document.size for document in documents), dict[str, Document]()
    for document in documents:
        is_long = document.size >= _LEAST_BYTES * options.window
        if is_long and document.size <= left and document.text not in texts and len(texts) < options.documents:
            texts[document.text] = document
            left -= document.size
    if len(texts) < LEAST_DOCUMENTS:
        raise InputError(
            f"{len(texts)} of {len(documents):,} documents of the sample can be held out: at least {LEAST_DOCUMENTS} are needed, of "
            f"{_LEAST_BYTES * options.window:,} bytes or more, with {_MOST_HELD_OUT:.0%} of the sample together. Lower --window, or raise "
            "--sample-bytes."
        )
    return [*texts.values()], [document for document in documents if document.text not in texts]


def measured(
    checkpoint: "Checkpoint",
    options: PlanGainOptions,
    held_out: Sequence[Document],
    others: Sequence[Document],
    work: Path,
) -> "tuple[list[Part], list[WindowScores]]":
    """Build a datastore of the other documents, and score a window of each held-out document with each part of it.

    Raises:
        InputError: the tokenizer is not that of the model, or too few documents have a window.
    """
    from indexing.suffixes.search import SuffixIndex
    from indexing.tokenization.tokenizer import Tokenizer
    from retro.checkpoints.any_model import for_tokens_of, load_scorer, tokenizer_settings
    from retro.device import choose_inference_placement
    from retro.evaluation.datastore_size import copy_head_of, middle_window, nested_parts, open_parts, score_window

    own = options.tokenizer if options.tokenizer.path else tokenizer_settings(checkpoint)
    with during("building the sample"):
        datastore = _built(replace(options, tokenizer=own), others, work)
    checkpoint = for_tokens_of(checkpoint, datastore)
    tokenizer = Tokenizer.open(datastore.folder / "tokenizer")
    windows = [middle_window(document, tokenizer, options.window) for document in held_out]
    parts = nested_parts(datastore.train, FRACTIONS, options.seed)
    placement = choose_inference_placement(options.device, checkpoint.settings["train"]["precision"])
    model = load_scorer(checkpoint, placement)
    head = copy_head_of(model, placement)
    indexes = open_parts(SuffixIndex.open(datastore.folder), parts, work / "parts")
    scores = []
    with progress("plan gain", total=len(windows), unit="windows") as advance:
        for window in windows:
            if window is not None:
                scores.append(score_window(model, head, window, indexes, placement))
            advance(1)
    kept = [one for one in scores if not one.is_copy]
    if len(kept) < LEAST_DOCUMENTS:
        raise InputError(
            f"{len(kept)} of {len(held_out)} held-out documents can be scored: {len(windows) - len(scores)} have fewer than {options.window} "
            f"tokens after their middle, and others are copies; at least {LEAST_DOCUMENTS} are needed. Lower --window, or raise --documents."
        )
    return parts, kept


def _built(options: PlanGainOptions, documents: Sequence[Document], work: Path) -> "Datastore":
    """A datastore of documents, with what copying from it needs."""
    from pipelines.executors.tasks import LocalExecutor
    from pipelines.stages.table import build
    from pipelines.terminal.stages import StagesView
    from retro.evaluation.datastore_size import SKIPPED_STAGES

    plain = Config(skip_stages=SKIPPED_STAGES, tokenizer=options.tokenizer, chunks=options.chunks)
    sampled = with_text(plain, [], documents, work / "sample")
    sampled = replace(sampled, corpus=replace(sampled.corpus, split=(1, 0, 0)))
    return build(sampled, LocalExecutor(options.executor), view=StagesView(quiet=True))


# --- the estimate -----------------------------------------------------------------------------------------------------


def estimate(
    parts: "Sequence[Part]", scores: "Sequence[WindowScores]", corpus_tokens: float, times: int
) -> dict[str, Any]:
    """What was measured, and the line at larger sizes, as plain values.

    Args:
        parts: of the sample.
        scores: of the windows, at least one.
        corpus_tokens: of the whole corpus, about.
        times: how many times more text.
    """
    from retro.evaluation.datastore_size import SizeCurve, without_long_matches

    tokens, short = [part.tokens for part in parts], without_long_matches(scores)
    curve = SizeCurve.of(tokens, scores)
    assert curve.line is not None  # there are three sizes
    sizes = {"sample": float(tokens[-1])} | ({"corpus": corpus_tokens} if corpus_tokens > tokens[-1] else {})
    larger = {f"{times} times the {name}": times * size for name, size in sizes.items()}
    return {
        "documents": len(scores),
        "tokens": sum(one.nats.shape[1] for one in scores),
        "measured": [{"tokens": count, "change": one} for count, one in zip(tokens, curve.changes, strict=True)],
        "extrapolated": [
            {"size": name, "tokens": size, "change": curve.line.at(size)}
            for name, size in sorted((sizes | larger).items(), key=lambda item: item[1])
            if size > tokens[-1]
        ],
        "times": times,
        "more_text": _points(curve, times),
        "largest_distance": curve.line.distance,
        "without_long_matches": {
            "documents": len(short),
            "more_text": _points(SizeCurve.of(tokens, short), times) if short else None,
        },
    }


def _points(curve: "SizeCurve", times: int) -> "Interval":
    """The change of the change, in points, with `times` as much text."""
    assert curve.line is not None
    value, low, high = (math.log10(times) * points for points in curve.line.per_decade)
    return value, low, high


def text_of(results: Mapping[str, Any]) -> str:
    """The table of an estimate, and what it is not."""
    from retro.evaluation.datastore_size import LONG_MATCH

    rows = [[human_count(row["tokens"]), _words(row["change"]), "measured"] for row in results["measured"]]
    rows += [[human_count(row["tokens"]), _words(row["change"]), row["size"]] for row in results["extrapolated"]]
    short, times = results["without_long_matches"], results["times"]
    points = f": {_words(short['more_text'])} points" if short["documents"] else ""
    return f"""{Table(["tokens of the datastore", "change of the bits in %", ""], rows).text}

{times} times more text: {_words(results["more_text"])} points
windows without a match of {LONG_MATCH} tokens, {short["documents"]} of {results["documents"]}{points}
largest distance of a measured size from the line: {results["largest_distance"]:.2f} points{_fit(results)}

Measured on {results["tokens"]:,} tokens of {results["documents"]} held-out documents, with parts of the sample as the datastore.
Rows beyond the sample are extrapolated: a line through three sizes, in the logarithm of the tokens. Intervals are over the
documents only. The corpus itself was not measured. Text of another kind, or of another source, can bring more or less, and so
can a model that is trained."""


def _fit(results: Mapping[str, Any]) -> str:
    """A warning if the measured sizes are not on a line."""
    if results["largest_distance"] <= _MOST_DISTANCE * abs(results["more_text"][0]):
        return ""
    return """
**The rows beyond the sample are a guess**: the measured sizes are not on a line. Measure again with a larger sample (--sample-bytes)
and more documents (--documents). The gain of a model that has read little text may follow no line."""


def _words(change: "Interval") -> str:
    return "{:+.2f} ({:+.2f} to {:+.2f})".format(*change)
