"""The middle of the `chunk` stage, if `[dedup]` enables it: choose the training documents to remove as near copies.

dedup/  evaluation/          the files in dedup.paths, scanned like a corpus
        signatures/00000/    signatures of every shard of the corpus, and evaluation-00000/ of the files above
        candidates/          pairs that share a band              (these two are removed when the list is finished)
        grams/00000/         gram sets of the candidates
        removed/             removed.jsonl, and the removed documents of every shard
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from indexing.corpus.scan import FileSlice, list_files
from indexing.dedup import near_duplicates as dedup
from indexing.progress import Advance
from indexing.store.artifact import Recipe, create, is_finished, read_manifest, remove
from indexing.store.datastore import shard_name
from indexing.store.errors import InputError
from indexing.store.files import save_array
from indexing.store.sharded_array import open_array
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages import corpus as corpus_stage
from pipelines.stages.shards import fingerprint_of, prefixed, run_tasks, shard_task

log = logging.getLogger("retro")

FOLDER = "dedup"


def prepare(config: Config, executor: Executor) -> Recipe | None:
    """The recipe of the list of removed documents, or None if `[dedup]` is off. Scans the evaluation files.

    Raises:
        InputError: an evaluation file is missing, or has changed since the finished list was made.
    """
    if not config.dedup.is_on:
        return None
    inputs = {name: fingerprint_of(config.datastore / name) for name in ("corpus", "tokenizer")}
    if config.dedup.paths:
        folder, settings = config.datastore / FOLDER / "evaluation", replace(config.corpus, paths=config.dedup.paths)
        files = list_files(settings, "dedup.paths")
        corpus_stage.require_tokenizer(config, files)
        corpus_stage.look_through(folder, settings, files, executor, "dedup.paths")
        inputs["evaluation"] = fingerprint_of(folder)
    return Recipe("chunk", 1, settings_of(config), inputs)


def settings_of(config: Config) -> dict[str, Any]:
    """The settings that decide which documents are removed, as in recipes. Files are identified by their checksums."""
    return prefixed("dedup", config.dedup, without=("paths",)) | {"corpus.split": config.corpus.split}


def run(config: Config, executor: Executor, recipe: Recipe) -> None:
    """Make the list of removed documents unless it is finished.

    Raises:
        InputError: no training document is left.
    """
    folder = config.datastore / FOLDER
    out, candidates = folder / "removed", folder / "candidates"
    shards = _shards(config)
    signatures, grams = ([folder / kind / name for name in shards] for kind in ("signatures", "grams"))
    # Signatures stay. So signatures that `retro verify --repair` removed are made again even if the list is finished.
    _run_shards(config, executor, recipe, shards, "signatures", sign_task)
    if not is_finished(out, recipe):
        if not is_finished(candidates, recipe):
            task = shard_task(candidates, recipe, signatures, config.dedup, size=config.dedup.sketch.bands)
            run_tasks("chunk", "bands", candidate_task, [task], executor, name="candidates")
        _run_shards(config, executor, recipe, shards, "grams", gram_task)
        arguments = (recipe, signatures, candidates, grams, config.dedup)
        task = shard_task(out, *arguments, size=read_manifest(candidates)["counts"]["train"])
        run_tasks("chunk", "documents", remove_task, [task], executor, name="dedup")
    for name in ("candidates", "grams"):
        remove(folder / name)
    log.info("dedup: %s", summary(out))
    counts = read_manifest(out)["counts"]
    if 0 < counts["documents"]["train"] == sum(counts["removed"].values()):
        raise InputError(
            f"{summary(out)}: none is left for training and the index. Remove training files from dedup.paths, or change the "
            "settings in [dedup], and add `--rebuild`."
        )


def _shards(config: Config) -> dict[str, list[FileSlice]]:
    """The slices of every shard by name: shards of the corpus, then of the evaluation files."""
    plan = corpus_stage.plan_of(config.datastore / "corpus")
    shards = {shard_name(shard): slices for shard, slices in enumerate(plan)}
    if config.dedup.paths:
        more = corpus_stage.plan_of(config.datastore / FOLDER / "evaluation")
        shards |= {f"evaluation-{shard_name(shard)}": slices for shard, slices in enumerate(more)}
    return shards


def _run_shards(
    config: Config,
    executor: Executor,
    recipe: Recipe,
    shards: Mapping[str, list[FileSlice]],
    folder: str,
    function: Callable[..., None],
) -> None:
    """Make the unfinished artifacts of all shards in a folder; their recipe is that of the list, with the shard."""
    todo = []
    for name, slices in shards.items():
        out = config.datastore / FOLDER / folder / name
        own = replace(recipe, settings={**recipe.settings, "shard": name})
        if not is_finished(out, own):
            arguments = (own, slices, config.corpus, config.dedup, config.datastore / "tokenizer")
            todo.append(shard_task(out, *arguments, size=sum(file_slice.text_bytes for file_slice in slices)))
    run_tasks("chunk", "bytes", function, todo, executor, name=folder)


# --- one shard, then all of them -------------------------------------------------------------------------------------


def sign_task(
    out: Path, recipe: Recipe, slices: Any, corpus: Any, settings: Any, tokenizer: Path, *, advance: Advance
) -> None:
    """Make the signatures of one shard."""
    with create(out, recipe) as (work, counts):
        is_evaluation = out.name.startswith("evaluation-")
        counts |= dedup.sign_shard(
            work, slices, corpus, settings, tokenizer, is_evaluation=is_evaluation, advance=advance
        )


def candidate_task(
    out: Path, recipe: Recipe, folders: list[Path], settings: dedup.DedupSettings, *, advance: Advance
) -> None:
    """Compare the bands of all shards: meetings.npy from `find_candidates`, and SHARD.npy, positions of the candidates."""
    with create(out, recipe) as (work, counts):
        signatures = dedup.Signatures.open(folders)
        meetings = dedup.find_candidates(signatures, settings, advance=advance)
        save_array(work / "meetings.npy", meetings)
        documents = np.unique(meetings[:, 0])
        cuts = np.searchsorted(documents, signatures.starts)
        for shard, folder in enumerate(folders):
            positions = documents[cuts[shard] : cuts[shard + 1]] - signatures.starts[shard]
            save_array(work / f"{folder.name}.npy", positions)
        counts |= {"documents": len(documents), "meetings": len(meetings)}
        counts["train"] = int((signatures.splits[documents] == dedup.TRAIN).sum())


def gram_task(
    out: Path, recipe: Recipe, slices: Any, corpus: Any, settings: Any, tokenizer: Path, *, advance: Advance
) -> None:
    """Read the candidates of one shard again."""
    positions = open_array(out.parents[1] / "candidates" / f"{out.name}.npy")
    with create(out, recipe) as (work, counts):
        counts["grams"] = dedup.collect_grams(work, slices, positions, corpus, settings, tokenizer, advance=advance)


def remove_task(
    out: Path,
    recipe: Recipe,
    folders: list[Path],
    candidates: Path,
    grams: list[Path],
    settings: dedup.DedupSettings,
    *,
    advance: Advance,
) -> None:
    """Decide which documents to remove, and list them."""
    with create(out, recipe) as (work, counts):
        signatures = dedup.Signatures.open(folders)
        meetings = open_array(candidates / "meetings.npy")
        sets = dedup.GramSets(grams, np.unique(meetings[:, 0]), signatures)
        removals = dedup.decide(meetings, signatures, sets, settings, advance=advance)
        names = [folder.name for folder in folders if not folder.name.startswith("evaluation-")]
        counts["removed"] = dedup.write_removed(work, removals, signatures, sets, names)
        counts["documents"] = {
            kind: int((signatures.splits == number).sum()) for number, kind in enumerate(dedup.KINDS)
        }


def summary(out: Path) -> str:
    """One line: how many documents were removed, why, and where they are listed."""
    counts = read_manifest(out)["counts"]
    removed, documents = counts["removed"], counts["documents"]
    reasons = ", ".join(f"{removed[kind]:,} near {kind}" for kind in dedup.KINDS if removed[kind])
    total = f"removed {sum(removed.values()):,} of {documents['train']:,} training documents"
    return f"{total}{f' ({reasons})' if reasons else ''}: {out / 'removed.jsonl'}"
