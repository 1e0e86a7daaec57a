"""Bits per byte of every evaluation set, retrieval OFF and ON, of one model or two, as plain values.

model, set → results (OFF, ON k=2 …) ┬→ all tokens ───────────────────────────┐
longest matches, or leakage r(C) ────┼→ bands of documents, tokens or chunks ─┼→ results and changes (JSON)
fractions of the datastore → results ┴→ ON with neighbors from a fraction ────┘
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain, islice
from typing import Any

import numpy as np

from indexing.progress import Progress, percentage
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from retro.checkpoints.any_model import load_scorer
from retro.checkpoints.checkpoint import Checkpoint
from retro.data.neighbor_choice import NeighborUse
from retro.data.settings import DataSettings
from retro.device import choose_inference_placement
from retro.evaluation.bits_per_byte import SetResult, compare
from retro.evaluation.datastore_fractions import PartialDatastore, search_fractions, votes_in_fractions
from retro.evaluation.evaluator import Evaluator, uses_of
from retro.evaluation.leakage import by_leakage, check_source, leakage_of, longest_matches
from retro.evaluation.sets import EvaluationSet, short_names
from retro.evaluation.settings import PerplexitySettings

Row = dict[str, Any]
"""Plain values of the JSON file."""


def evaluate_checkpoints(
    checkpoints: Sequence[Checkpoint],
    sets: Sequence[EvaluationSet],
    settings: PerplexitySettings,
    device: str,
    source: Datastore | None = None,
    progress: Progress = percentage,
    on_result: Callable[[SetResult], None] = lambda _: None,
) -> Row:
    """Everything that `retro eval perplexity` measures, as plain values.

    `results` and `changes`: rows over all tokens; `matches`: the same for each set and band of the longest match of a
    document and before a token, and `longest_matches`: that of each document; `leakage`, of sets without votes: the
    same for each set and t, with α and the fraction of chunks; `datastore_fractions`: size, results and changes for
    each set and fraction.

    Args:
        checkpoints: the model, and the one to compare with. All use the windows and the precision of the first one.
        sets: sets that fit the first model.
        settings: k, windows, shared tokens, fractions.
        device: `auto`, `cpu`, `cuda` …
        source: datastore whose votes or neighbors define leakage; None: the datastore of each set, if it has them.
        progress: shows the work.
        on_result: receives each measurement of a whole set as soon as it is finished.

    Raises:
        InputError: a model or the source does not fit a set, or the second model is the first one.
    """
    names = names_of(checkpoints)
    for evaluation_set in sets:
        for checkpoint in checkpoints:
            evaluation_set.check(checkpoint.model, max(settings.k, default=0) if checkpoint.model.retrieves else 0)
        if source is not None:
            check_source(evaluation_set, source)
    placement = choose_inference_placement(device, checkpoints[0].settings["train"]["precision"])
    windows = settings.in_windows_of(checkpoints[0].settings["data"]["sequence_length"])

    def open_evaluator(checkpoint: Checkpoint, name: str) -> Evaluator:
        model = load_scorer(checkpoint, placement)
        return Evaluator(model, placement, windows, name, progress=progress, on_result=on_result)

    measured: list[list[SetResult]] = [[] for _ in sets]
    uses = [neighbor_use_of(checkpoint, settings) for checkpoint in checkpoints]
    for checkpoint, name, use in zip(checkpoints, names, uses, strict=True):
        evaluator = open_evaluator(checkpoint, name)
        for evaluation_set, results in zip(sets, measured, strict=True):
            results += evaluator.score_each(evaluation_set, uses_of(checkpoint.model, use, settings.k))
        del evaluator  # a device may have room for one model only
    out: Row = {
        name: [] for name in ("results", "changes", "matches", "longest_matches", "leakage", "datastore_fractions")
    }
    for evaluation_set, results in zip(sets, measured, strict=True):
        whole = level({}, results, settings.seed)
        out["results"] += whole["results"]
        out["changes"] += [{"set": evaluation_set.name, **change} for change in whole["changes"]]
        for name, rows in _by_copies(evaluation_set, results, settings, source, progress).items():
            out[name] += rows
    if settings.datastore_fractions:
        models = list(zip(map(open_evaluator, checkpoints, names), uses, strict=True))
        for evaluation_set, results in zip(sets, measured, strict=True):
            out["datastore_fractions"] += _by_fraction(evaluation_set, results, models, settings, device)
    return out


def level(labels: Row, results: Sequence[SetResult | None], seed: int) -> Row:
    """Results, and changes in percent of bits per byte; low to high holds 95% of bootstraps. None: that part has no
    text.

    ON is compared with OFF of the first model; its OFF and ON with the second model of the same k, or else its OFF.
    """
    rows = [result for result in results if result]
    first = [row for row in rows if row.model == rows[0].model]
    second = {row.mode: row for row in rows if row.model != rows[0].model}
    pairs = [(row, first[0]) for row in first[1:]]
    pairs += [(row, second.get(row.mode, second["OFF"])) for row in first if second]
    changes = []
    for row, reference in pairs:
        percent, low, high = compare(row, reference, seed)
        names = {"measured": row.label, "reference": reference.label}
        changes.append(names | {"percent": percent, "low": low, "high": high})
    return labels | {"results": [{"model": row.model} | row.as_json() for row in rows], "changes": changes}


# --- by copies in the datastore ---------------------------------------------------------------------------------------


def _by_copies(
    evaluation_set: EvaluationSet,
    results: Sequence[SetResult],
    settings: PerplexitySettings,
    source: Datastore | None,
    progress: Progress,
) -> dict[str, list[Row]]:
    """`matches` and `longest_matches` if the datastore has votes, `leakage` if it has neighbors; nothing if neither is
    wanted."""
    if not settings.leakage_tokens:
        return {}
    name, chunks = evaluation_set.name, results[0].token_scores.chunks
    matches = longest_matches(evaluation_set, settings.leakage_tokens, source)
    if matches is None:
        if not (source or evaluation_set.datastore).has("neighbors"):
            return {}
        with progress(f"leakage {name}", total=len(chunks), unit="chunks") as advance:
            leakage = leakage_of(evaluation_set, chunks, source=source, advance=advance)
        return {"leakage": list(_leakage_levels(name, results, settings, leakage, evaluation_set.split.chunk_length))}
    scored = np.flatnonzero(results[0].bytes_by_document)
    longest = np.zeros(evaluation_set.split.num_documents, dtype=np.int64)
    with progress(f"leakage {name}", total=len(scored), unit="documents") as advance:
        longest[scored] = matches.of_documents(scored, advance)
    documents = (row["id"] for row in evaluation_set.split.metadata(scored.tolist()))
    rows = zip(documents, longest[scored].tolist(), strict=True)
    bands = {
        "document": matches.bands(longest)[results[0].token_scores.documents, None],
        "token": matches.bands(matches.before_tokens(chunks)),
    }
    return {
        "matches": list(_match_levels(name, results, settings, matches.starts, bands)),
        "longest_matches": [{"set": name, "id": document, "longest_match": length} for document, length in rows],
    }


def _match_levels(
    name: str,
    results: Sequence[SetResult],
    settings: PerplexitySettings,
    starts: Sequence[int],
    bands: dict[str, np.ndarray],
) -> Iterator[Row]:
    """Results over the documents of each band of longest matches, then over the tokens; none if a band is empty."""
    for unit, band_of in bands.items():
        for band, (first, stop) in enumerate(zip(starts, (*starts[1:], None), strict=True)):
            parts = [result.part(band_of == band) for result in results]
            limits = {"match_at_least": first, "match_at_most": stop and stop - 1}
            sizes = {key: getattr(parts[0], key, 0) for key in ("documents", "tokens")}
            yield level({"set": name, "of": unit} | limits | sizes, parts, settings.seed)


def _leakage_levels(
    name: str, results: Sequence[SetResult], settings: PerplexitySettings, leakage: np.ndarray, m: int
) -> Iterator[Row]:
    """Results over the chunks that share at most t tokens with a neighbor, for each t; none if no chunk is left."""
    for tokens, chunks in by_leakage(leakage, settings.leakage_tokens, m):
        labels = {
            "shared_tokens_at_most": tokens,
            "leakage_at_most": tokens / m,
            "share_of_chunks": float(chunks.mean()),
        }
        yield level({"set": name} | labels, [result.part(chunks) for result in results], settings.seed)


# --- by size of the datastore -----------------------------------------------------------------------------------------


def check_fractions(checkpoints: Sequence[Checkpoint], settings: PerplexitySettings) -> None:
    """Raise InputError if fractions are set and no model reads the datastore, or one was trained with random
    neighbors."""
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


def _by_fraction(
    evaluation_set: EvaluationSet,
    results: Sequence[SetResult],
    models: Sequence[tuple[Evaluator, NeighborUse]],
    settings: PerplexitySettings,
    device: str,
) -> Iterator[Row]:
    """Measure retrieval ON with neighbors and votes from each fraction of the datastore, in ascending order, and add
    OFF."""
    off = [result for result in results if result.retrieval == "OFF"]
    num_chunks = evaluation_set.split.chunk_range(int(off[0].token_scores.documents[-1]))[1]
    parts = _search(evaluation_set, num_chunks, models, settings, device)
    measured: list[list[SetResult]] = [[] for _ in parts]
    for (evaluator, use), without in zip(models, off, strict=True):
        found = [replace(use, found=part.found, found_votes=part.votes) for part in parts]
        uses = [uses_of(evaluator.model.settings, one, settings.k)[1:] for one in found]  # without OFF
        silent = replace(evaluator, on_result=lambda _: None)  # which fraction it is, the table says
        each = iter(
            silent.score_each(evaluation_set, [*chain.from_iterable(uses)], note=f"{evaluator.name} fractions".strip())
        )
        for rows, of_part in zip(measured, uses, strict=True):
            rows += [without, *islice(each, len(of_part))]
    for part, rows in zip(parts, measured, strict=True):
        sizes = {"documents": part.documents, "chunks": part.chunks}
        labels = {"datastore_fraction": part.fraction} | {f"datastore_{key}": size for key, size in sizes.items()}
        yield level({"set": evaluation_set.name} | labels, rows, settings.seed)


def _search(
    evaluation_set: EvaluationSet,
    num_chunks: int,
    models: Sequence[tuple[Evaluator, NeighborUse]],
    settings: PerplexitySettings,
    device: str,
) -> list[PartialDatastore]:
    """Search the neighbors and the votes that the models read in each fraction of the datastore."""
    read = [evaluator.model.settings for evaluator, _ in models]
    k = max(settings.k, default=0) if any(model.retrieves for model in read) else 0
    if k and any(use.max_overlap < 1 for _, use in models):  # the next neighbors replace those that are skipped
        k = max(k, evaluation_set.split.neighbor_ids.row_shape[0])
    votes = any(model.copy_head.datastore for model in read)
    with models[0][0].progress(f"search {evaluation_set.name}", total=None, unit="chunks") as advance:
        common: dict[str, Any] = {"fractions": settings.datastore_fractions, "seed": settings.seed, "advance": advance}
        searches = [search_fractions(evaluation_set, num_chunks, k, device=device, **common)] if k else []
        searches += [votes_in_fractions(evaluation_set, num_chunks, **common)] if votes else []
        return [replace(parts[0], votes=parts[-1].votes) for parts in zip(*searches, strict=True)]


# --- what is measured -------------------------------------------------------------------------------------------------


def neighbor_use_of(checkpoint: Checkpoint, settings: PerplexitySettings) -> NeighborUse:
    """How a model's neighbors are chosen: as in its run, except for `settings.max_overlap`. A control keeps random
    ones."""
    rules = checkpoint.neighbor_rules | ({} if settings.max_overlap is None else {"max_overlap": settings.max_overlap})
    return DataSettings(**rules).neighbor_use


def names_of(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Names of the models: "" for one; for two the names of their runs, or the steps of one run."""
    if len(checkpoints) == 1:
        return [""]
    folders = [checkpoint.path.resolve() for checkpoint in checkpoints]
    runs = [folder.parent.parent if folder.parent.name == "checkpoints" else folder for folder in folders]
    if len(set(folders)) == 1:
        raise InputError(f"--against {folders[1]}: this is the same checkpoint. Name another one.")
    return short_names(runs if len(set(runs)) > 1 else folders)


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
    """How the neighbors of each model are chosen, a line for each; also for those that read none, since `--k` changes
    nothing there."""

    def rule(checkpoint: Checkpoint) -> str:
        if checkpoint.model.retrieves:
            return f"neighbors: {neighbor_use_of(checkpoint, settings).rule}"
        return "" if checkpoint.model.copy_head.datastore else "measured OFF only: the model has no retrieval"

    named = zip(names_of(checkpoints), map(rule, checkpoints), strict=True)
    return "\n".join(f"{name} {words}".strip() for name, words in named if words)
