"""The table of stages, and the build that runs the unfinished ones.

    chunk → embed → train-index → add → sparse (→ ngrams) → neighbors (→ materialize, merge) → suffixes → votes

Each stage reads the manifests of earlier stages, writes a recipe for each of its artifacts, skips finished artifacts,
and runs a plain function of `indexing/` for the rest. The executor decides where the tasks run.
"""

import contextlib
import fcntl
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from indexing.store import remote
from indexing.store.artifact import Artifacts, leftovers, remove
from indexing.store.datastore import (
    SPLITS,
    Datastore,
    check_version,
    read_datastore_manifest,
    record_deletions,
    write_datastore_manifest,
)
from indexing.store.deletions import locked, read_deletions, write_deletions
from indexing.store.errors import InputError
from indexing.store.retrieval_set import entries_of
from indexing.store.stages import NEEDS, left_out
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages import corpus
from pipelines.stages.choices import with_choices
from pipelines.stages.chunk import run_chunk
from pipelines.stages.embed import run_embed
from pipelines.stages.generations import missing_generation
from pipelines.stages.index import run_add, run_merge, run_train_index
from pipelines.stages.neighbors import run_materialize, run_neighbors
from pipelines.stages.shards import shard_counts
from pipelines.stages.suffixes import remove_other_orders, run_suffixes, run_votes
from pipelines.stages.token_indexes import run_ngrams, run_sparse
from pipelines.terminal.stages import StagesView

log = logging.getLogger("retro")


@dataclass(frozen=True)
class Stage:
    """A row of the table of stages.

    Attributes:
        run: makes every unfinished artifact of the stage and returns all of them.
        outputs: globs of the artifacts, relative to the datastore; `--rebuild` removes them.
        included: whether `all` includes the stage under these settings, unless `skip_stages` leaves it out.
        reads: another stage that it reads under some settings; empty: none.
        clean: called when the datastore's manifest names what the stage has made: removes what that replaces.
    """

    run: Callable[[Config, Executor], Artifacts]
    outputs: tuple[str, ...]
    included: Callable[[Config], bool] = lambda config: True
    reads: str = ""
    clean: Callable[[Path], None] = lambda folder: None


STAGES: dict[str, Stage] = {
    "chunk": Stage(run_chunk, ("corpus", "appended/*", "tokenizer", "dedup", "chunks/*")),
    "embed": Stage(run_embed, ("embedder", "embeddings/*")),
    "train-index": Stage(run_train_index, ("index/trained",)),
    "add": Stage(run_add, ("index/[0-9]*", "index/tuned")),
    "sparse": Stage(run_sparse, ("sparse/*",)),
    "ngrams": Stage(run_ngrams, ("ngrams/*",), lambda config: with_choices(config).neighbors.search == "ngrams"),
    "neighbors": Stage(run_neighbors, ("neighbors/*", "report.json", "report.html"), reads="ngrams"),
    "materialize": Stage(run_materialize, ("materialized/*",), lambda config: config.neighbors.materialized > 0),
    "merge": Stage(run_merge, ("index/merged",), lambda config: False),
    "suffixes": Stage(run_suffixes, ("suffixes/*",), clean=remove_other_orders),
    "votes": Stage(run_votes, ("votes/*",)),
}
"""The stages in the order of a build; `merge` runs only by name."""


def stages_of(config: Config) -> list[str]:
    """The stages of a whole build under these settings, in order."""
    out = left_out(config.skip_stages)
    return [name for name, stage in STAGES.items() if name not in out and stage.included(config)]


def build(
    config: Config,
    executor: Executor,
    *,
    only: str = "all",
    rebuild: bool = False,
    append: bool = False,
    view: StagesView | None = None,
) -> Datastore:
    """Bring a datastore up to date with its settings. A datastore at a URL is built in its local mirror and uploaded.

    Args:
        config: the settings.
        executor: where the tasks run.
        only: one stage of `STAGES`, or `all`.
        rebuild: first remove the artifacts of this stage and of all that depend on it. Deleted documents stay deleted.
        append: first add the files of the corpus that the datastore does not have, as new shards. Other files need not
            be named.
        view: shows the stages; afterwards it holds their results and times.

    Raises:
        InputError: a finished artifact was made with other settings, an earlier stage is missing, the input is invalid,
            or another process is building the same datastore.
    """
    if rebuild and append:
        raise InputError("--rebuild removes what --append adds to: run one after the other.")
    folder = remote.local_folder(config.datastore)
    config = replace(config, datastore=folder)
    folder.mkdir(parents=True, exist_ok=True)
    view = view or StagesView()
    with lock(folder):
        remote.pull(folder)
        if (manifest := _manifest_so_far(folder)) and not (rebuild and only in ("all", "chunk")):
            check_version(folder, manifest)
        if rebuild:
            if only in ("all", "chunk"):
                corpus.list_files_before_rebuild(config)
            _remove_from(folder, "chunk" if only == "all" else only)
        if only == "neighbors" or (only == "all" and "neighbors" not in left_out(config.skip_stages)):
            config = with_choices(config)
        names = stages_of(config) if only == "all" else [only]
        with view.shown(names):
            if append:
                config = _append(config, executor, names)
            for name in names:
                with view.stage(name):
                    _run(config, executor, name)
    return Datastore.open(folder)


def _append(config: Config, executor: Executor, names: list[str]) -> Config:
    """Add the files of the corpus that the datastore does not have; returns settings without files."""
    new, skipped = corpus.files_to_append(config, executor)
    appended, config = config, replace(config, corpus=replace(config.corpus, paths=()))
    if new and _manifest_so_far(config.datastore) and not missing_generation(config.datastore):
        for name in names:  # nothing is added unless every finished stage agrees with the settings
            _run(config, executor, name)
    if new:
        corpus.append(appended, new, skipped)
    return config


def _run(config: Config, executor: Executor, name: str) -> None:
    if needed := NEEDS.get(name):
        Datastore.open(config.datastore).require(needed)
    made = STAGES[name].run(config, executor)
    for parent in {(config.datastore / output).parent for output in STAGES[name].outputs}:
        for left in leftovers(parent):  # by killed builds, next to artifacts that others have finished
            shutil.rmtree(left, ignore_errors=True)
    _write_manifest(config, name, made)
    STAGES[name].clean(config.datastore)


def _depending_on(name: str) -> list[str]:
    """A stage and all stages that read what it makes, also through others, in the order of the table."""
    names, affected = list(STAGES), [name]
    for other in names[names.index(name) + 1 :]:
        if NEEDS[other] in affected or STAGES[other].reads in affected:
            affected.append(other)
    return affected


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock a datastore against other builds.

    Raises:
        InputError: another process is building it.
    """
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{folder} is being built by another process; wait for it or stop it.") from error
        try:
            yield
        finally:
            if [path.name for path in folder.iterdir()] == [".lock"]:  # rejected before anything was made
                shutil.rmtree(folder)


def _remove_from(folder: Path, first: str) -> None:
    """Remove the artifacts of a stage and of all that depend on it: from the manifest, then from the disk, the last
    stage first."""
    affected, whole = _depending_on(first), first == next(iter(STAGES))
    manifest = _manifest_so_far(folder)
    if whole and read_deletions(folder).documents:
        with locked(folder):  # all shards will be made without them
            deletions = read_deletions(folder)
            write_deletions(folder, replace(deletions, documents=dict.fromkeys(deletions.documents, 0)))
    if manifest:
        write_datastore_manifest(folder, _without(manifest, affected))
    for name in reversed(affected):
        for pattern in STAGES[name].outputs:
            for output in folder.glob(pattern):
                if output.is_dir():
                    remove(output)
                else:
                    _unlink(output)
    if whole:
        _unlink(folder / "manifest.json")


def _unlink(path: Path) -> None:
    remote.remove(path)
    path.unlink(missing_ok=True)


def _manifest_so_far(folder: Path) -> dict[str, Any]:
    """The datastore's manifest; empty if it is damaged, because it can be written again from the shards."""
    path = folder / "manifest.json"
    if not path.exists():
        return {}
    try:
        return read_datastore_manifest(folder)
    except ValueError as error:
        log.warning("%s cannot be read (%s); it is written again", path, error)
        return {}


def _without(manifest: dict[str, Any], stages: list[str]) -> dict[str, Any]:
    """The datastore's manifest with only the other stages recorded."""
    prints, artifacts = (manifest.get(key, {}) for key in ("fingerprints", "artifacts"))
    kept = {name: value for name, value in prints.items() if name not in stages}
    left = {key: value for key, value in manifest.items() if key != "extra_datastores" or "neighbors" in kept}
    named = {name: paths for name, paths in artifacts.items() if name in kept}
    return left | {"fingerprints": kept, "artifacts": named}


def _write_manifest(config: Config, name: str, made: Artifacts) -> None:
    """Record that a stage is finished. Stages that depend on it stay recorded only if its fingerprint has not
    changed."""
    folder = config.datastore
    old = _manifest_so_far(folder)
    if old:
        Datastore.open(folder)  # rejects another format version
    is_same = old.get("fingerprints", {}).get(name) == made.fingerprint
    manifest = _without(old, [] if is_same else _depending_on(name))
    manifest["fingerprints"][name] = made.fingerprint
    manifest["artifacts"][name] = made.paths
    if name == "neighbors":
        manifest["extra_datastores"] = entries_of(Datastore.open(folder), config.neighbors.extra_datastores)
    if name == "chunk":
        manifest |= _properties_of_chunks(config)
    if name == "chunk" and read_deletions(folder).documents:
        with locked(folder):  # no reader sees new chunks before the deleted ones among them are recorded
            record_deletions(Datastore(folder, manifest), read_deletions(folder).documents)
            write_datastore_manifest(folder, manifest)
    elif manifest != old:
        write_datastore_manifest(folder, manifest)


def _properties_of_chunks(config: Config) -> dict[str, Any]:
    """The part of the datastore's manifest that a reader of chunks needs."""
    tokenizer, counts = Tokenizer.open(config.datastore / "tokenizer"), shard_counts(config.datastore)
    return {
        "chunk_length": config.chunks.chunk_length,
        "pad_id": tokenizer.pad_id,
        "vocab_size": tokenizer.vocab_size,
        "splits": {
            split: {key: [count[split][key] for count in counts] for key in ("documents", "chunks", "tokens", "bytes")}
            for split in SPLITS
        },
    }
