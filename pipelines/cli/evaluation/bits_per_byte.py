"""Bits per byte of every evaluation set, retrieval OFF and ON, one model or two: measurements.

model, set → Measured (OFF, ON k=2 …) ┬→ all chunks ─────────────────────────┐
longest matches, or leakage r(C) ─────┼→ bands of documents, tokens or chunks┼→ results and changes (JSON)
fractions of the datastore → Measured ┴→ ON with neighbors from a fraction ──┘
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from pipelines.cli.evaluation.settings import PerplexitySettings
from pipelines.terminal.progress import progress
from retro.checkpoints.checkpoint import Checkpoint, load_model
from retro.data.neighbor_choice import NeighborUse
from retro.data.settings import DataSettings
from retro.device import Placement, choose_inference_placement
from retro.evaluation.bits_per_byte import SetResult, compare, evaluate, mode_of
from retro.evaluation.datastore_fractions import PartialDatastore, search_fractions, votes_in_fractions
from retro.evaluation.leakage import (
    by_document_match,
    by_leakage,
    by_token_match,
    check_source,
    leakage_of,
    longest_matches,
)
from retro.evaluation.longest_matches import LongestMatches
from retro.evaluation.sets import EvaluationSet, short_names
from retro.model.retro import Retro
from retro.model.settings import ModelSettings

Row = dict[str, Any]
"""Plain values of the JSON file."""


@dataclass(frozen=True)
class Measured:
    """A result and the name of its model, which is empty if there is only one model."""

    model: str
    result: SetResult

    @property
    def label(self) -> str:
        """`OFF`, `ON k=2`, `baseline OFF`."""
        return f"{self.model} {self.result.mode}".strip()


def evaluate_checkpoints(
    checkpoints: Sequence[Checkpoint],
    sets: Sequence[EvaluationSet],
    settings: PerplexitySettings,
    device: str,
    source: Datastore | None = None,
) -> Row:
    """Everything that `retro eval perplexity` measures, as plain values.

    `results` and `changes`: rows over all chunks; `matches`: the same for each set and band of the longest match of a document and
    before a token, and `longest_matches`: that of each document; `leakage`, of sets without votes: the same for each set and t, with α
    and the fraction of chunks; `datastore_fractions`: size, results and changes for each set and fraction.

    Args:
        checkpoints: the model, and the one to compare with.
        sets: sets that fit the first model.
        settings: k, windows, shared tokens, fractions.
        device: `auto`, `cpu`, `cuda` …
        source: datastore whose votes or neighbors define leakage; None: the datastore of each set, if it has them.

    Raises:
        InputError: a model or the source does not fit a set, or the second model is the first one.
    """
    measured = measure_checkpoints(checkpoints, sets, settings, device, source)
    names = ("results", "changes", "matches", "longest_matches", "leakage", "datastore_fractions")
    out: Row = {name: [] for name in names}
    for evaluation_set, rows in zip(sets, measured, strict=True):
        results, changes = _rows_and_changes(rows, settings.seed)
        out["results"] += results
        out["changes"] += [{"set": evaluation_set.name, **change} for change in changes]
        if (matches := _matches_of(evaluation_set, settings, source)) is not None:
            documents, longest = _longest_by_document(evaluation_set, matches, rows[0].result)
            out["matches"] += _match_levels(evaluation_set.name, rows, settings, matches, longest)
            out["longest_matches"] += documents
        if (leakage := leakage_by_chunk(evaluation_set, rows, source)) is not None:
            out["leakage"] += _leakage_levels(evaluation_set, rows, settings, leakage)
        if settings.datastore_fractions:
            out["datastore_fractions"] += _fraction_levels(checkpoints, evaluation_set, rows, settings, device)
    return out


# --- measurements ----------------------------------------------------------------------------------------------------


def measure(
    model: Retro,
    evaluation_set: EvaluationSet,
    settings: PerplexitySettings,
    placement: Placement,
    use: NeighborUse,
    sequence_length: int,
    *,
    by_chunk: bool = False,
    matches: LongestMatches | None = None,
    note: str = "",
) -> SetResult:
    """Measure once, with a progress bar; `note` is part of its name."""
    name = f"eval {evaluation_set.name}{note} {mode_of(use.k, use.votes)}"
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
            matches=matches,
            advance=advance,
        )


def measure_all(
    model: Retro,
    evaluation_set: EvaluationSet,
    settings: PerplexitySettings,
    placement: Placement,
    *,
    sequence_length: int,
    use: NeighborUse,
    by_chunk: bool = False,
    matches: LongestMatches | None = None,
    note: str = "",
) -> list[SetResult]:
    """Measure a model with all that it can read; see `uses_of`."""
    return [
        measure(
            model,
            evaluation_set,
            settings,
            placement,
            one,
            sequence_length,
            by_chunk=by_chunk,
            matches=matches,
            note=note,
        )
        for one in uses_of(model.settings, use, settings.k)
    ]


def uses_of(model: ModelSettings, use: NeighborUse, ks: Sequence[int]) -> list[NeighborUse]:
    """Retrieval OFF, then each k if the model reads neighbors; the same again with votes if it reads these."""
    return [
        replace(use, k=k, votes=votes)
        for votes in ((False, True) if model.copy_head.datastore else (False,))
        for k in ((0, *ks) if model.retrieves else (0,))
    ]


def measure_checkpoints(
    checkpoints: Sequence[Checkpoint],
    sets: Sequence[EvaluationSet],
    settings: PerplexitySettings,
    device: str,
    source: Datastore | None = None,
) -> list[list[Measured]]:
    """Measure on every set, with the windows and the precision of the first model. See `evaluate_checkpoints`."""
    names = _names(checkpoints)
    for evaluation_set in sets:
        for checkpoint in checkpoints:
            evaluation_set.check(checkpoint.model, max(settings.k, default=0) if checkpoint.model.retrieves else 0)
        if source is not None:
            check_source(evaluation_set, source)
    placement = choose_inference_placement(device, checkpoints[0].settings["train"]["precision"])
    measured: list[list[Measured]] = [[] for _ in sets]
    for name, checkpoint in zip(names, checkpoints, strict=True):
        model = load_model(checkpoint, placement.device)
        for evaluation_set, rows in zip(sets, measured, strict=True):
            matches = _matches_of(evaluation_set, settings, source)
            has_neighbors = (source or evaluation_set.datastore).has("neighbors")
            results = measure_all(
                model,
                evaluation_set,
                settings,
                placement,
                sequence_length=checkpoints[0].settings["data"]["sequence_length"],
                use=neighbor_use_of(checkpoint, settings),
                by_chunk=bool(settings.leakage_tokens) and matches is None and has_neighbors,
                matches=matches,
            )
            rows += [Measured(name, result) for result in results]
    return measured


def neighbor_use_of(checkpoint: Checkpoint, settings: PerplexitySettings) -> NeighborUse:
    """How a model's neighbors are chosen: as in its run, except for `settings.max_overlap`. A control keeps random ones."""
    rules = checkpoint.neighbor_rules | ({} if settings.max_overlap is None else {"max_overlap": settings.max_overlap})
    return DataSettings(**rules).neighbor_use


def _names(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Names of the models: "" for one; for two the names of their runs, or the steps of one run."""
    if len(checkpoints) == 1:
        return [""]
    folders = [checkpoint.path.resolve() for checkpoint in checkpoints]
    runs = [folder.parent.parent if folder.parent.name == "checkpoints" else folder for folder in folders]
    if len(set(folders)) == 1:
        raise InputError(f"--against {folders[1]}: this is the same checkpoint. Name another one.")
    return short_names(runs if len(set(runs)) > 1 else folders)


def _matches_of(
    evaluation_set: EvaluationSet, settings: PerplexitySettings, source: Datastore | None
) -> LongestMatches | None:
    """The longest matches of a set; None if no leakage is to be measured, or it is that of neighbors."""
    return longest_matches(evaluation_set, settings.leakage_tokens, source) if settings.leakage_tokens else None


def _longest_by_document(
    evaluation_set: EvaluationSet, matches: LongestMatches, result: SetResult
) -> tuple[list[Row], np.ndarray]:
    """The longest match of each scored document: rows with its id, and [documents] int64, 0 for the others. With a progress bar."""
    scored = np.flatnonzero(result.bytes_by_document)
    longest = np.zeros(len(result.bytes_by_document), dtype=np.int64)
    with progress(f"leakage {evaluation_set.name}", total=len(scored), unit="documents") as advance:
        longest[scored] = matches.of_documents(scored, advance)
    names = (row["id"] for row in evaluation_set.split.metadata(scored.tolist()))
    rows = zip(names, longest[scored].tolist(), strict=True)
    return [{"set": evaluation_set.name, "id": name, "longest_match": length} for name, length in rows], longest


def _match_levels(
    name: str, measured: Sequence[Measured], settings: PerplexitySettings, matches: LongestMatches, longest: np.ndarray
) -> Iterator[Row]:
    """Measurements over the documents of each band of longest matches, then over the tokens; none if a band is empty."""
    bands = matches.bands(longest)
    by_document = [by_document_match(row.result, bands) for row in measured]
    by_token = [by_token_match(row.result) for row in measured]
    for unit, parts in (("document", by_document), ("token", by_token)):
        for first, stop, level in zip(
            matches.starts, (*matches.starts[1:], None), zip(*parts, strict=True), strict=True
        ):
            left = [Measured(row.model, part) for row, part in zip(measured, level, strict=True) if part]
            results, changes = _rows_and_changes(left, settings.seed)
            sizes = {key: results[0][key] if results else 0 for key in ("documents", "tokens")}
            limits = {"match_at_least": first, "match_at_most": stop and stop - 1}
            yield {"set": name, "of": unit} | limits | sizes | {"results": results, "changes": changes}


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


def _leakage_levels(
    evaluation_set: EvaluationSet, measured: Sequence[Measured], settings: PerplexitySettings, leakage: np.ndarray
) -> Iterator[Row]:
    """Measurements over the chunks that share at most t tokens with a neighbor, for each t; none if no chunk is left."""
    m = evaluation_set.split.chunk_length
    filtered = [by_leakage(row.result, leakage, settings.leakage_tokens, m) for row in measured]
    for level in zip(*filtered, strict=True):
        left = [Measured(row.model, part.result) for row, part in zip(measured, level, strict=True) if part.result]
        results, changes = _rows_and_changes(left, settings.seed)
        yield {
            "set": evaluation_set.name,
            "shared_tokens_at_most": level[0].shared_tokens,
            "leakage_at_most": level[0].threshold,
            "share_of_chunks": level[0].share,
            "results": results,
            "changes": changes,
        }


def check_fractions(checkpoints: Sequence[Checkpoint], settings: PerplexitySettings) -> None:
    """Raise InputError if fractions are set and no model reads the datastore, or one was trained with random neighbors."""
    if not settings.datastore_fractions:
        return
    retrieving = [checkpoint for checkpoint in checkpoints if checkpoint.model.retrieves]
    copying = any(checkpoint.model.copy_head.datastore for checkpoint in checkpoints)
    if not (copying or (retrieving and settings.k)):
        cause = f"{checkpoints[0].path} does not retrieve (model.retrieval.cca_layers, model.copy_head)."
        raise InputError(
            f"evaluation.datastore_fractions = {settings.datastore_fractions}: "
            f"{'--k is empty.' if retrieving else cause}"
        )
    for checkpoint in retrieving:
        if checkpoint.settings["data"].get("neighbor_source", "nearest") != "nearest":
            raise InputError(
                f"evaluation.datastore_fractions: {checkpoint.path} was trained with data.neighbor_source = 'random', "
                "so fractions of the datastore have no effect."
            )


def _fraction_levels(
    checkpoints: Sequence[Checkpoint],
    evaluation_set: EvaluationSet,
    measured: Sequence[Measured],
    settings: PerplexitySettings,
    device: str,
) -> Iterator[Row]:
    """Measure retrieval ON with neighbors and votes from each fraction of the datastore, in ascending order, and add OFF."""
    placement = choose_inference_placement(device, checkpoints[0].settings["train"]["precision"])
    models = [load_model(checkpoint, placement.device) for checkpoint in checkpoints]
    names = list(dict.fromkeys(row.model for row in measured))
    off = [row for row in measured if row.result.retrieval == "OFF"]
    scored = int(np.flatnonzero(off[0].result.bytes_by_document)[-1])
    num_chunks = evaluation_set.split.chunk_range(scored)[1]
    uses = [neighbor_use_of(checkpoint, settings) for checkpoint in checkpoints]
    depth = max(settings.k, default=0) if any(model.settings.retrieves for model in models) else 0
    if depth and any(use.max_overlap < 1 for use in uses):  # the next neighbors replace those that are skipped
        depth = max(depth, evaluation_set.split.neighbor_ids.row_shape[0])
    votes = any(model.settings.copy_head.datastore for model in models)
    length = checkpoints[0].settings["data"]["sequence_length"]
    for part in _fractions(evaluation_set, num_chunks, depth, votes, settings, device):
        rows = []
        for name, model, use in zip(names, models, uses, strict=True):
            rows += [row for row in off if row.model == name]
            found = replace(use, found=part.found, found_votes=part.votes)
            for one in uses_of(model.settings, found, settings.k)[1:]:  # without OFF
                result = measure(model, evaluation_set, settings, placement, one, length, note=f" {part.fraction:g}")
                rows.append(Measured(name, result))
        results, changes = _rows_and_changes(rows, settings.seed)
        yield {
            "set": evaluation_set.name,
            "datastore_fraction": part.fraction,
            "datastore_documents": part.documents,
            "datastore_chunks": part.chunks,
            "results": results,
            "changes": changes,
        }


def _fractions(
    evaluation_set: EvaluationSet, num_chunks: int, k: int, votes: bool, settings: PerplexitySettings, device: str
) -> list[PartialDatastore]:
    """Search k neighbors of each chunk (0 = none), and votes if they are wanted, in each fraction of the datastore."""
    with progress(f"search {evaluation_set.name}", total=None, unit="chunks") as advance:
        common: dict[str, Any] = {"fractions": settings.datastore_fractions, "seed": settings.seed, "advance": advance}
        searches = [search_fractions(evaluation_set, num_chunks, k, device=device, **common)] if k else []
        searches += [votes_in_fractions(evaluation_set, num_chunks, **common)] if votes else []
        return [replace(parts[0], votes=parts[-1].votes) for parts in zip(*searches, strict=True)]


def _rows_and_changes(measured: Sequence[Measured], seed: int) -> tuple[list[Row], list[Row]]:
    """Results, and changes in percent of bits per byte; low to high holds 95% of bootstraps.

    ON is compared with OFF of the first model; its OFF and ON with the second model of the same k, or else its OFF.
    """
    rows = [{"model": row.model} | row.result.as_json() for row in measured]
    ours = [row for row in measured if row.model == measured[0].model]
    theirs = {row.result.mode: row for row in measured if row.model != measured[0].model}
    pairs = [(row, ours[0]) for row in ours[1:]]
    pairs += [(row, theirs.get(row.result.mode, theirs["OFF"])) for row in ours if theirs]
    changes = []
    for row, reference in pairs:
        percent, low, high = compare(row.result, reference.result, seed)
        labels = {"measured": row.label, "reference": reference.label}
        changes.append(labels | {"percent": percent, "low": low, "high": high})
    return rows, changes


def settings_of(
    checkpoints: Sequence[Checkpoint],
    sets: Sequence[EvaluationSet],
    settings: PerplexitySettings,
    source: Datastore | None = None,
) -> Row:
    """Paths and settings, for people."""
    return {
        "checkpoints": [str(checkpoint.path) for checkpoint in checkpoints],
        "steps": [checkpoint.step for checkpoint in checkpoints],
        "datastores": {opened.name: f"{opened.datastore.folder}:{opened.split_name}" for opened in sets},
        "leakage_from": str(source.folder) if source else None,
        "sequence_length": checkpoints[0].settings["data"]["sequence_length"],
        "neighbors": {
            str(checkpoint.path): {"neighbor_source": use.source, "max_overlap": use.max_overlap, "seed": use.seed}
            for checkpoint in checkpoints
            if checkpoint.model.retrieves and (use := neighbor_use_of(checkpoint, settings))
        },
        "evaluation": asdict(settings),
    }


def rules_of(checkpoints: Sequence[Checkpoint], settings: PerplexitySettings) -> str:
    """How the neighbors of each model are chosen, a line for each; also for those that read none, since `--k` changes nothing there."""

    def rule(checkpoint: Checkpoint) -> str:
        if checkpoint.model.retrieves:
            return f"neighbors: {neighbor_use_of(checkpoint, settings).rule}"
        return "" if checkpoint.model.copy_head.datastore else "measured OFF only: the model has no retrieval"

    named = zip(_names(checkpoints), map(rule, checkpoints), strict=True)
    return "\n".join(f"{name} {words}".strip() for name, words in named if words)
