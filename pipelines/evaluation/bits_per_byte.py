"""Measurements of `retro eval perplexity`: every evaluation set, retrieval OFF and ON, one model or two.

model, set → Measured (OFF, ON k=2 …) ┬→ all chunks ─────────────────────────┬→ Level: results and changes
chunks, neighbors → leakage r(C) ─────┴→ chunks with r(C) ≤ t/m, for every t ┘
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from pipelines.evaluation.bits_per_byte_tables import interval_in_words
from pipelines.evaluation.settings import PerplexitySettings
from pipelines.terminal import progress
from retro.checkpoints.checkpoint import Checkpoint, load_model
from retro.data.neighbor_choice import NeighborUse
from retro.data.settings import DataSettings
from retro.device import Placement, choose_inference_placement
from retro.evaluation.bits_per_byte import SetResult, compare, evaluate
from retro.evaluation.leakage import by_leakage, check_source, leakage_of
from retro.evaluation.overlap_statistics import OverlapStatistics, overlap_statistics
from retro.evaluation.sets import EvaluationSet, short_names
from retro.evaluation.settings import LEAST_DOCUMENTS
from retro.model.retro import Retro
from retro.model.settings import ModelSettings

_MANY_DOCUMENTS = 50


@dataclass(frozen=True)
class Measured:
    """A result and the name of its model, which is empty if there is only one model."""

    model: str
    result: SetResult

    @property
    def label(self) -> str:
        """`OFF`, `ON k=2`, `baseline OFF`."""
        return " ".join(filter(None, (self.model, self.result.mode)))


@dataclass(frozen=True)
class Change:
    """Difference of bits per byte of `measured` from `reference`, in percent; low to high holds 95% of bootstraps."""

    measured: str
    reference: str
    percent: float
    low: float
    high: float


@dataclass(frozen=True)
class Level:
    """Measurements on one set over the same chunks.

    Attributes:
        set: its name.
        shared_tokens_at_most: t, the longest run that a chunk shares with a neighbor; None = all chunks.
        leakage_at_most: the paper's α = t/m; None = all chunks.
        share_of_chunks: fraction of the chunks that are scored.
        results: of every model, retrieval OFF and ON, without arrays; empty if no chunk is left.
        changes: between them; empty if no chunk is left.
    """

    set: str
    shared_tokens_at_most: int | None
    leakage_at_most: float | None
    share_of_chunks: float
    results: list[dict[str, Any]]
    changes: list[Change]


def measure_all(
    model: Retro,
    evaluation_set: EvaluationSet,
    settings: PerplexitySettings,
    placement: Placement,
    *,
    sequence_length: int,
    use: NeighborUse,
    by_chunk: bool = False,
    note: str = "",
) -> list[SetResult]:
    """Measure with retrieval OFF, then ON for each k if the model can retrieve; with progress bars, whose names have `note`."""
    uses = [replace(use, k=k) for k in ((0, *settings.k) if model.settings.retrieves else (0,))]
    return [
        measure(model, evaluation_set, settings, placement, use, sequence_length, by_chunk=by_chunk, note=note)
        for use in uses
    ]


def measure(
    model: Retro,
    evaluation_set: EvaluationSet,
    settings: PerplexitySettings,
    placement: Placement,
    use: NeighborUse,
    sequence_length: int,
    *,
    by_chunk: bool = False,
    note: str = "",
) -> SetResult:
    """Measure once, with a progress bar; `note` is part of its name."""
    name = f"eval {evaluation_set.name}{note} " + (f"k={use.k}" if use.k else "OFF")
    total = min(settings.max_tokens or evaluation_set.tokens, evaluation_set.tokens)
    with progress(name, total=total, unit="tokens") as advance:
        return evaluate(
            model,
            evaluation_set,
            settings,
            placement,
            use=use,
            sequence_length=sequence_length,
            by_chunk=by_chunk,
            advance=advance,
        )


def measure_checkpoints(
    checkpoints: Sequence[Checkpoint],
    sets: Sequence[EvaluationSet],
    settings: PerplexitySettings,
    device: str,
    source: Datastore | None = None,
) -> list[list[Measured]]:
    """Measure one or two models on every set, with the windows and the precision of the first model.

    Args:
        checkpoints: the model, and the one to compare with.
        sets: sets that fit the first model.
        settings: k, windows, shared tokens.
        device: `auto`, `cpu`, `cuda` …
        source: datastore whose neighbors define leakage; None: the datastore of each set, if it stores neighbors.

    Raises:
        InputError: a model or the source does not fit a set, or the second model is the first one.
    """
    names = _names(checkpoints)
    for each in sets:
        for checkpoint in checkpoints:
            each.check(checkpoint.model, max(settings.k, default=0) if checkpoint.model.retrieves else 0)
        if source is not None:
            check_source(each, source)
    placement = choose_inference_placement(device, checkpoints[0].settings["train"]["precision"])
    measured: list[list[Measured]] = [[] for _ in sets]
    for name, checkpoint in zip(names, checkpoints, strict=True):
        model = load_model(checkpoint, placement.device)
        for each, rows in zip(sets, measured, strict=True):
            results = measure_all(
                model,
                each,
                settings,
                placement,
                sequence_length=checkpoints[0].settings["data"]["sequence_length"],
                use=neighbor_use_of(checkpoint, settings),
                by_chunk=bool(settings.leakage_tokens) and (source or each.datastore).has("neighbors"),
            )
            rows += [Measured(name, result) for result in results]
    return measured


def neighbor_use_of(checkpoint: Checkpoint, settings: PerplexitySettings) -> NeighborUse:
    """How a model's neighbors are chosen: as in its run, except for `settings.max_overlap`. A control keeps random ones."""
    rules = checkpoint.neighbor_rules | ({} if settings.max_overlap is None else {"max_overlap": settings.max_overlap})
    return DataSettings(**rules).neighbor_use


def rules_of(checkpoints: Sequence[Checkpoint], settings: PerplexitySettings) -> str:
    """The rule by which the neighbors of each model are chosen, a line for each model that retrieves."""
    return "\n".join(
        f"{name} neighbors: {neighbor_use_of(checkpoint, settings).rule}".strip()
        for name, checkpoint in zip(_names(checkpoints), checkpoints, strict=True)
        if checkpoint.model.retrieves
    )


def _names(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Names of the models: "" for one; for two the names of their runs, or the steps of one run."""
    if len(checkpoints) == 1:
        return [""]
    folders = [checkpoint.path.resolve() for checkpoint in checkpoints]
    runs = [folder.parent.parent if folder.parent.name == "checkpoints" else folder for folder in folders]
    if len(set(folders)) == 1:
        raise InputError(f"--against {folders[1]}: this is the same checkpoint. Name another one.")
    return short_names(runs if len(set(runs)) > 1 else folders)


def leakage_by_chunk(
    evaluation_set: EvaluationSet,
    measured: Sequence[Measured],
    source: Datastore | None = None,
) -> np.ndarray | None:
    """Leakage r of every scored chunk, with a progress bar; None if the results are not by chunk."""
    if (chunks := measured[0].result.chunks) is None:
        return None
    with progress(f"leakage {evaluation_set.name}", total=len(chunks.ids), unit="chunks") as advance:
        return leakage_of(evaluation_set, chunks.ids, source=source, advance=advance)


def statistics_of(
    evaluation_set: EvaluationSet,
    measured: Sequence[Measured],
    leakage: np.ndarray,
    source: Datastore | None = None,
) -> OverlapStatistics:
    """Overlap of the scored chunks with their neighbors; `leakage` comes from `leakage_by_chunk`."""
    chunks = measured[0].result.chunks
    assert chunks is not None, "not measured by chunk"
    return overlap_statistics(evaluation_set, chunks.ids, leakage, source=source)


def levels_of(
    evaluation_set: EvaluationSet,
    measured: Sequence[Measured],
    settings: PerplexitySettings,
    leakage: np.ndarray | None,
) -> Iterator[Level]:
    """Measurements over all chunks of a set, then, if leakage is known, over the chunks that share at most t tokens, for each t.

    Args:
        evaluation_set: the set.
        measured: on this set: OFF and ON of the first model, then of the second.
        settings: shared tokens, seed of the bootstrap.
        leakage: r of every scored chunk, or None.
    """
    yield Level(evaluation_set.name, None, None, 1.0, *rows_and_changes(measured, settings.seed))
    if leakage is None:
        return
    m = evaluation_set.split.chunk_length
    filtered = [by_leakage(each.result, leakage, settings.leakage_tokens, m) for each in measured]
    for row in zip(*filtered, strict=True):
        left = [Measured(each.model, part.result) for each, part in zip(measured, row, strict=True) if part.result]
        yield Level(
            evaluation_set.name,
            row[0].shared_tokens,
            row[0].threshold,
            row[0].share,
            *rows_and_changes(left, settings.seed),
        )


def rows_and_changes(measured: Sequence[Measured], seed: int) -> tuple[list[dict[str, Any]], list[Change]]:
    """Results as plain values, and the changes between them."""
    rows = [{"model": each.model} | each.result.as_json() for each in measured]
    changes = [
        Change(first.label, second.label, *compare(first.result, second.result, seed))
        for first, second in _pairs(measured)
    ]
    return rows, changes


def _pairs(measured: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """Pairs to compare: ON with OFF of the first model; its OFF and ON with the second model of the same k, or else its OFF."""
    if not measured:
        return []
    ours = [each for each in measured if each.model == measured[0].model]
    theirs = {each.result.k: each for each in measured if each.model != measured[0].model}
    inside = [(each, ours[0]) for each in ours[1:]]
    return inside + [(each, theirs.get(each.result.k, theirs[0])) for each in ours if theirs]


def settings_of(
    checkpoints: Sequence[Checkpoint],
    sets: Sequence[EvaluationSet],
    settings: PerplexitySettings,
    source: Datastore | None = None,
) -> dict[str, Any]:
    """Paths and settings, for people."""
    return {
        "checkpoints": [str(each.path) for each in checkpoints],
        "steps": [each.step for each in checkpoints],
        "datastores": {each.name: f"{each.datastore.folder}:{each.split_name}" for each in sets},
        "leakage_from": str(source.folder) if source else None,
        "sequence_length": checkpoints[0].settings["data"]["sequence_length"],
        "neighbors": {
            str(each.path): {"neighbor_source": use.source, "max_overlap": use.max_overlap, "seed": use.seed}
            for each in checkpoints
            if each.model.retrieves and (use := neighbor_use_of(each, settings))
        },
        "evaluation": asdict(settings),
    }


def as_json(levels: Sequence[Level], statistics: Sequence[OverlapStatistics] = ()) -> dict[str, Any]:
    """Measurements over all chunks and by leakage.

    `results` and `changes`: rows over all chunks; `leakage`: the same for each set and t, with α and the fraction of chunks;
    `overlap`: a row for each set.
    """
    whole = [level for level in levels if level.leakage_at_most is None]
    return {
        "results": [row for level in whole for row in level.results],
        "changes": [{"set": level.set} | asdict(change) for level in whole for change in level.changes],
        "leakage": [asdict(level) for level in levels if level.leakage_at_most is not None],
        "overlap": [asdict(each) for each in statistics],
    }


def gain_in_words(level: Level, model: ModelSettings) -> str:
    """What retrieval brings to a model on a set, in a sentence; empty if it was not measured with retrieval.

    Args:
        level: measurements over all chunks. The best ON counts, and its interval must differ from 0 as printed.
        model: settings of the first model.
    """
    off, *others = level.results
    on = [row for row in others if row["model"] == off["model"]]
    if not on:
        return ""
    best = min(range(len(on)), key=lambda number: on[number]["bits_per_byte"])
    change, documents = level.changes[best], off["documents"]
    measured = f"k = {on[best]['k']}, {documents:,} held-out documents of {level.set}"
    low, high = sorted((abs(change.low), abs(change.high)))
    size = f"{abs(change.percent):.1f}% of the bits per byte ({low:.1f} to {high:.1f}, 95% interval over documents; {measured})"
    plain = f"{in_words(change.percent, change.low, change.high)}; {measured}"
    if documents < LEAST_DOCUMENTS:
        return (
            f"Too few held-out documents to measure a gain: {plain}. Score {LEAST_DOCUMENTS} or more: raise the second weight of "
            "corpus.split, or evaluation.max_tokens if it is set."
        )
    if round(change.high, 1) < 0:
        return f"Retrieval saves {size}."
    if round(change.low, 1) > 0:
        return f"Retrieval costs {size}. {_advice(model, documents)}"
    return f"No measurable gain yet: {plain}. {_advice(model, documents)}"


def _advice(model: ModelSettings, documents: int) -> str:
    """What can make the gain of retrieval larger or its interval smaller."""
    tips = ["train longer", "more text in the datastore"]
    tips += [] if model.copy_head.neighbors else ["a copy head (model.copy_head.neighbors = true)"]
    tips += ["more held-out documents (corpus.split)"] if documents < _MANY_DOCUMENTS else []
    return f"Try: {', '.join(tips)}."


def in_words(percent: float, low: float, high: float) -> str:
    """A change of bits per byte with its uncertainty, as `compare` returns it."""
    return f"{percent:+.2f}% bits per byte (95% of bootstraps over documents: {interval_in_words(low, high)})"
