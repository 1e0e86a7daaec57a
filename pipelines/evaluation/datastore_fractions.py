"""Bits per byte with neighbors from fractions of the datastore: what a smaller datastore is worth.

chunks, fractions of the datastore → new search of neighbors → Measured (OFF, ON k=2 …) → FractionLevel: results and changes
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from indexing.store.errors import InputError
from pipelines.evaluation.bits_per_byte import Change, Measured, measure, neighbor_use_of, rows_and_changes
from pipelines.evaluation.settings import PerplexitySettings
from pipelines.terminal import progress
from retro.checkpoints.checkpoint import Checkpoint, load_model
from retro.device import choose_inference_placement
from retro.evaluation.datastore_fractions import search_fractions
from retro.evaluation.sets import EvaluationSet


@dataclass(frozen=True)
class FractionLevel:
    """Measurements on one set with a fraction of its datastore.

    Attributes:
        set: its name.
        datastore_fraction: of the documents.
        datastore_documents, datastore_chunks: in this fraction.
        results: OFF of every model, then ON with neighbors from the fraction.
        changes: between them.
    """

    set: str
    datastore_fraction: float
    datastore_documents: int
    datastore_chunks: int
    results: list[dict[str, Any]]
    changes: list[Change]


def check_fractions(checkpoints: Sequence[Checkpoint], settings: PerplexitySettings) -> None:
    """Raise InputError if fractions are set and no model retrieves, or one was trained with random neighbors."""
    retrieving = [checkpoint for checkpoint in checkpoints if checkpoint.model.retrieves]
    if settings.datastore_fractions and not (retrieving and settings.k):
        raise InputError(
            f"evaluation.datastore_fractions = {settings.datastore_fractions}: "
            + (
                "--k is empty."
                if retrieving
                else f"{checkpoints[0].path} does not retrieve (model.retrieval.cca_layers)."
            )
        )
    for checkpoint in retrieving if settings.datastore_fractions else ():
        if checkpoint.settings["data"].get("neighbor_source", "nearest") != "nearest":
            raise InputError(
                f"evaluation.datastore_fractions: {checkpoint.path} was trained with data.neighbor_source = 'random', "
                "so fractions of the datastore have no effect."
            )


def measure_fractions(
    checkpoints: Sequence[Checkpoint],
    evaluation_set: EvaluationSet,
    measured: Sequence[Measured],
    settings: PerplexitySettings,
    device: str,
) -> Iterator[FractionLevel]:
    """Measure retrieval ON with neighbors from each fraction of the datastore, in ascending order, and add OFF.

    Args:
        checkpoints: the measured models, in the same order; one without retrieval has only OFF.
        evaluation_set: a set.
        measured: results of every model on this set.
        settings: fractions, k, windows.
        device: `auto`, `cpu`, `cuda` …
    """
    placement = choose_inference_placement(device, checkpoints[0].settings["train"]["precision"])
    models = [load_model(checkpoint, placement.device) for checkpoint in checkpoints]
    names = list(dict.fromkeys(each.model for each in measured))
    off = [each for each in measured if not each.result.k]
    scored = int(np.flatnonzero(off[0].result.bytes_by_document)[-1])
    num_chunks = evaluation_set.split.chunk_range(scored)[1]
    uses = [neighbor_use_of(checkpoint, settings) for checkpoint in checkpoints]
    depth = max(settings.k)
    if any(use.max_overlap < 1 for use in uses):  # the next neighbors replace those that are skipped
        depth = max(depth, evaluation_set.split.neighbor_ids.row_shape[0])
    with progress(f"search {evaluation_set.name}", total=None, unit="chunks") as advance:
        parts = list(
            search_fractions(
                evaluation_set,
                num_chunks,
                depth,
                settings.datastore_fractions,
                seed=settings.seed,
                device=device,
                advance=advance,
            )
        )
    length = checkpoints[0].settings["data"]["sequence_length"]
    for part in parts:
        on = [
            Measured(
                name,
                measure(
                    model,
                    evaluation_set,
                    settings,
                    placement,
                    replace(use, k=k, found=part.found),
                    length,
                    note=f" {part.fraction:g}",
                ),
            )
            for name, model, use in zip(names, models, uses, strict=True)
            if model.settings.retrieves
            for k in settings.k
        ]
        ordered = [row for name in names for row in (*off, *on) if row.model == name]
        rows, changes = rows_and_changes(ordered, settings.seed)
        yield FractionLevel(evaluation_set.name, part.fraction, part.documents, part.chunks, rows, changes)


def as_json(levels: Sequence[FractionLevel]) -> dict[str, Any]:
    """`datastore_fractions`: size, results and changes for each set and fraction."""
    return {"datastore_fractions": [asdict(level) for level in levels]}
