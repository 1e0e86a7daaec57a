"""Common to all stages: their shards, fingerprints, and running the tasks of unfinished shards."""

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from indexing.progress import Advance
from indexing.store.artifact import Recipe, damage, fingerprint, is_finished, parse_manifest, read_manifest
from indexing.store.datastore import shard_name
from indexing.store.errors import InputError
from indexing.store.remote import drop_if_changed, url_of
from pipelines.executors.tasks import Executor, StageName, Task
from pipelines.stages.corpus import generations
from pipelines.terminal.progress import progress


def shards(folder: Path, stage: str) -> list[Path]:
    """The artifact of every shard of a stage (`chunks`, `embeddings`, …), finished or not."""
    return [folder / stage / shard_name(shard) for generation in generations(folder) for shard in generation]


def joint_fingerprint(folder: Path, stage: str, numbers: range) -> str:
    """One fingerprint over some shards of a stage."""
    return fingerprint([fingerprint_of(folder / stage / shard_name(shard)) for shard in numbers])


def shard_counts(folder: Path) -> list[dict[str, Any]]:
    """Counts of each shard of chunks: split → documents, chunks, tokens and bytes."""
    return [read_manifest(path)["counts"] for path in shards(folder, "chunks")]


def fingerprint_of(folder: Path) -> str:
    """The fingerprint of a finished artifact."""
    return read_manifest(folder)["fingerprint"]


def prefixed(section: str, settings: Any, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Settings as `section.key`, the names in messages and on the command line."""
    values = settings if isinstance(settings, dict) else asdict(settings)
    return {f"{section}.{key}": value for key, value in values.items() if key not in without}


def former_setting(out: Path, key: str, value: int) -> int:
    """The value of a setting that was removed: what the recipe of the finished artifact `out` has, else the constant `value`."""
    try:
        return int(parse_manifest(out)["recipe"]["settings"].get(key, value))
    except InputError:  # not made yet, or damaged
        return value


def shard_task(out: Path, recipe: Recipe, *arguments: Any, size: int) -> Task:
    """The task that makes the artifact `out` with this recipe; these are its first two arguments."""
    return Task(f"{out.parent.name}/{out.name}", (out, recipe, *arguments), size)


def make_once(function: Callable[..., Any], out: Path, recipe: Recipe, *arguments: Any, advance: Advance) -> None:
    """Run a shard's task unless it is finished: a worker may have died after the last rename and before reporting it."""
    drop_if_changed(out)
    if damage(out) or not is_finished(out, recipe):
        function(out, recipe, *arguments, advance=advance)


def run_tasks(
    stage: StageName, unit: str, function: Callable[..., Any], todo: list[Task], executor: Executor, name: str = ""
) -> None:
    """Run the tasks of unfinished shards under one progress bar; see `shard_task`."""
    if not todo:
        return
    with progress(name or stage, total=sum(task.size for task in todo), unit=unit) as advance:
        for _ in executor.map(stage, partial(make_once, function), todo, advance):
            pass
    for task in todo:
        _require_seen(task.arguments[0])


def _require_seen(out: Path) -> None:
    """Check that a new artifact is visible. Listing the folder refreshes the cache of a network file system."""
    if url_of(out):
        return
    if not out.parent.is_dir() or out.name not in os.listdir(out.parent):
        raise InputError(
            f"{out} was made, but is not visible on this machine: workers on other machines wrote to their own disks. "
            "Put `datastore` on storage that every machine sees under the same path."
        )
