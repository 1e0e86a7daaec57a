"""The middle of the `chunk` stage, if `[dedup]` enables it: choose the training documents to remove as near copies.

dedup/  evaluation/          the files in dedup.paths, scanned like a corpus
        signatures/00000/    signatures of every shard of the corpus, and evaluation-00000/ of the files above
        candidates/          pairs that share a band              (these two are removed when the list is finished)
        grams/00000/         gram sets of the candidates
        removed/             removed.jsonl, and the removed documents of every shard
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from indexing.corpus.documents import CorpusSettings
from indexing.corpus.scan import FileSlice, list_corpus
from indexing.dedup import near_duplicates as dedup
from indexing.progress import Advance
from indexing.store.artifact import Artifacts, Recipe, damage, read_manifest, remove
from indexing.store.datastore import shard_name
from indexing.store.errors import InputError
from indexing.store.files import save_array
from indexing.store.paths import joined
from indexing.store.sharded_array import open_array
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages import corpus
from pipelines.stages.generations import plan_of
from pipelines.stages.shards import Shard, finished, prefixed, run_shards
from pipelines.stages.tokenizer import require_tokenizer

log = logging.getLogger("retro")

REMOVED = "dedup/removed"
_EVALUATION, _CANDIDATES, _GRAMS = "dedup/evaluation", "dedup/candidates", "dedup/grams"


def prepare(config: Config, executor: Executor) -> Recipe | None:
    """The recipe of the list of removed documents, or None if `[dedup]` is off. Scans the evaluation files.

    Raises:
        InputError: an evaluation file is missing, or has changed since the finished list was made.
    """
    if not config.dedup.is_on:
        return None
    folder = config.datastore
    inputs = {name: finished(folder, name) for name in ("corpus", "tokenizer")}
    if config.dedup.paths:
        # What the corpus excludes may be an evaluation file.
        settings = replace(config.corpus, paths=config.dedup.paths, exclude=())
        listing = list_corpus(settings, "dedup.paths")
        require_tokenizer(config, listing.files)
        corpus.make_corpus(folder / _EVALUATION, settings, listing, executor, "dedup.paths")
        inputs["evaluation"] = finished(folder, _EVALUATION)
    return Recipe("chunk", 1, settings_of(config), inputs)


def settings_of(config: Config) -> dict[str, Any]:
    """The settings that decide which documents are removed, as in recipes. Files are identified by their checksums."""
    return prefixed("dedup", config.dedup, without=("paths",)) | {"corpus.split": config.corpus.split}


def run(config: Config, executor: Executor, recipe: Recipe) -> None:
    """Make the list of removed documents unless it is finished.

    Raises:
        InputError: no training document is left.
    """
    folder, settings = config.datastore, config.dedup
    out, candidates = folder / REMOVED, folder / _CANDIDATES
    # Signatures stay. So signatures that `retro verify --repair` removed are made again even if the list is finished.
    signatures = _run_shards(config, executor, recipe, "dedup/signatures", sign_task)
    size = 0
    if damage(out):
        bands = Shard(_CANDIDATES, recipe, (signatures, settings), settings.sketch.bands)
        run_shards(folder, "chunk", "bands", candidate_task, [bands], executor, name="candidates")
        _run_shards(config, executor, recipe, _GRAMS, gram_task, candidates)
        size = read_manifest(candidates)["counts"]["train"]
    inputs = {
        **recipe.inputs,
        "signatures": Artifacts(None, joined([f"dedup/signatures/{p.name}" for p in signatures])),
    }
    arguments = (signatures, candidates, [folder / _GRAMS / path.name for path in signatures], settings)
    removed = Shard(REMOVED, replace(recipe, inputs=inputs), arguments, size)
    run_shards(folder, "chunk", "documents", remove_task, [removed], executor, name="dedup")
    for name in (_CANDIDATES, _GRAMS):
        remove(folder / name)
    log.info("dedup: %s", summary(out))
    counts = read_manifest(out)["counts"]
    if 0 < counts["documents"]["train"] == sum(counts["removed"].values()):
        raise InputError(
            f"{summary(out)}: none is left for training and the index. Remove training files from dedup.paths, or change the "
            "settings in [dedup], and add `--rebuild`."
        )


def _run_shards(
    config: Config,
    executor: Executor,
    recipe: Recipe,
    folder: str,
    function: Callable[..., dict[str, Any]],
    *arguments: object,
) -> list[Path]:
    """Make an artifact of every shard of the corpus, then of the evaluation files, in a folder; returns all of them."""
    sources = {"": "corpus"} | ({"evaluation-": _EVALUATION} if config.dedup.paths else {})
    slices = {
        f"{prefix}{shard_name(shard)}": of_shard
        for prefix, source in sources.items()
        for shard, of_shard in enumerate(plan_of(config.datastore / source))
    }
    shards = [
        Shard(
            path=f"{folder}/{name}",
            recipe=replace(recipe, settings={**recipe.settings, "shard": name}),
            arguments=(name, of_shard, config.corpus, config.dedup, config.datastore / "tokenizer", *arguments),
            size=sum(file_slice.text_bytes for file_slice in of_shard),
        )
        for name, of_shard in slices.items()
    ]
    run_shards(config.datastore, "chunk", "bytes", function, shards, executor, name=folder.rpartition("/")[2])
    return [config.datastore / shard.path for shard in shards]


# --- one shard, then all of them -------------------------------------------------------------------------------------


def sign_task(
    work: Path,
    name: str,
    slices: list[FileSlice],
    reading: CorpusSettings,
    settings: dedup.DedupSettings,
    tokenizer: Path,
    *,
    advance: Advance,
) -> dict[str, Any]:
    """Make the signatures of one shard."""
    is_evaluation = name.startswith("evaluation-")
    return dedup.sign_shard(work, slices, reading, settings, tokenizer, is_evaluation=is_evaluation, advance=advance)


def candidate_task(
    work: Path, folders: list[Path], settings: dedup.DedupSettings, *, advance: Advance
) -> dict[str, Any]:
    """Compare the bands of all shards: meetings.npy from `find_candidates`, and SHARD.npy, positions of the
    candidates."""
    signatures = dedup.Signatures.open(folders)
    meetings = dedup.find_candidates(signatures, settings, advance=advance)
    save_array(work / "meetings.npy", meetings)
    documents = np.unique(meetings[:, 0])
    cuts = np.searchsorted(documents, signatures.starts)
    for shard, folder in enumerate(folders):
        positions = documents[cuts[shard] : cuts[shard + 1]] - signatures.starts[shard]
        save_array(work / f"{folder.name}.npy", positions)
    num_train = int((signatures.splits[documents] == dedup.TRAIN).sum())
    return {"documents": len(documents), "meetings": len(meetings), "train": num_train}


def gram_task(
    work: Path,
    name: str,
    slices: list[FileSlice],
    reading: CorpusSettings,
    settings: dedup.DedupSettings,
    tokenizer: Path,
    candidates: Path,
    *,
    advance: Advance,
) -> dict[str, Any]:
    """Read the candidates of one shard again."""
    positions = open_array(candidates / f"{name}.npy")
    return {"grams": dedup.collect_grams(work, slices, positions, reading, settings, tokenizer, advance=advance)}


def remove_task(
    work: Path,
    folders: list[Path],
    candidates: Path,
    grams: list[Path],
    settings: dedup.DedupSettings,
    *,
    advance: Advance,
) -> dict[str, Any]:
    """Decide which documents to remove, and list them."""
    signatures = dedup.Signatures.open(folders)
    meetings = open_array(candidates / "meetings.npy")
    sets = dedup.GramSets(grams, np.unique(meetings[:, 0]), signatures)
    removals = dedup.decide(meetings, signatures, sets, settings, advance=advance)
    names = [folder.name for folder in folders if not folder.name.startswith("evaluation-")]
    kinds = {kind: int((signatures.splits == number).sum()) for number, kind in enumerate(dedup.KINDS)}
    return {"removed": dedup.write_removed(work, removals, signatures, sets, names), "documents": kinds}


def summary(out: Path) -> str:
    """One line: how many documents were removed, why, and where they are listed."""
    counts = read_manifest(out)["counts"]
    removed, documents = counts["removed"], counts["documents"]
    reasons = ", ".join(f"{removed[kind]:,} near {kind}" for kind in dedup.KINDS if removed[kind])
    total = f"removed {sum(removed.values()):,} of {documents['train']:,} training documents"
    return f"{total}{f' ({reasons})' if reasons else ''}: {out / 'removed.jsonl'}"
