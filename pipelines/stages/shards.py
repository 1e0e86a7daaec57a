"""The shards of a stage: what it makes each of them from, and running its function for those that are not finished."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from indexing.machine import keep_freed_memory
from indexing.progress import Advance
from indexing.store.artifact import (
    Artifacts,
    Recipe,
    create,
    damage,
    fingerprint,
    is_finished,
    parse_manifest,
    read_manifest,
)
from indexing.store.datastore import shard_name
from indexing.store.errors import InputError
from indexing.store.paths import fingerprint_at, joined
from indexing.store.remote import drop_if_changed, url_of
from pipelines.executors.tasks import Executor, StageName, Task
from pipelines.stages.generations import all_shards
from pipelines.terminal.progress import progress


@dataclass(frozen=True)
class Shard:
    """A shard that a stage makes, or another artifact of it.

    Attributes:
        path: its folder in the datastore.
        recipe: the recipe.
        arguments: of the stage's function, after the folder to fill.
        size: units that it adds to the progress bar.
    """

    path: str
    recipe: Recipe
    arguments: tuple[object, ...]
    size: int


def run_shards(
    folder: Path,
    stage: StageName,
    unit: str,
    function: Callable[..., dict[str, Any] | None],
    shards: Iterable[Shard],
    executor: Executor,
    *,
    name: str = "",
    before: Callable[[Sequence[Shard]], object] = lambda _: None,
) -> Artifacts:
    """Make the unfinished shards of a stage under one progress bar; returns all of them.

    Args:
        folder: the datastore.
        stage: the section of `[executor]` with the resources of a worker.
        unit: unit of the progress bar.
        function: `function(work, *arguments, advance=…)` fills the folder `work` and returns the counts for the
            manifest.
        shards: finished and unfinished ones.
        executor: where the function runs.
        name: name of the progress bar, if it is not the stage's.
        before: called with the unfinished shards when all recipes have been compared, before any of them is made.

    Raises:
        InputError: a finished shard has another recipe.
    """
    shards = list(shards)
    todo = [shard for shard in shards if not is_finished(folder / shard.path, shard.recipe)]
    before(todo)
    tasks = [Task(shard.path, (folder / shard.path, shard.recipe, *shard.arguments), shard.size) for shard in todo]
    if tasks:
        with progress(name or stage, total=sum(task.size for task in tasks), unit=unit) as advance:
            for _ in executor.map(stage, partial(_make_once, function), tasks, advance):
                pass
    _require_seen([folder / shard.path for shard in todo])
    return Artifacts(fingerprint([shard.recipe.fingerprint for shard in shards]), joined([s.path for s in shards]))


def _make_once(
    function: Callable[..., dict[str, Any] | None], out: Path, recipe: Recipe, *arguments: object, advance: Advance
) -> None:
    """Make a shard unless it is finished: a worker may have died after the last rename and before reporting it."""
    keep_freed_memory()
    drop_if_changed(out)
    if damage(out) or not is_finished(out, recipe):
        with create(out, recipe) as (work, counts):
            counts |= function(work, *arguments, advance=advance) or {}


def _require_seen(made: Sequence[Path]) -> None:
    """Check that new artifacts are visible. Listing a folder refreshes the cache of a network file system."""
    parents = {out.parent for out in made if not url_of(out)}
    seen = {parent: set(os.listdir(parent)) if parent.is_dir() else set() for parent in parents}
    if lost := next((out for out in made if out.parent in seen and out.name not in seen[out.parent]), None):
        raise InputError(
            f"{lost} was made, but is not visible on this machine: workers on other machines wrote to their own disks. "
            "Put `datastore` on storage that every machine sees under the same path."
        )


def finished(folder: Path, paths: object) -> Artifacts:
    """The finished artifacts at these paths of a datastore."""
    return Artifacts(fingerprint_at(paths, lambda path: read_manifest(folder / path)["fingerprint"]), paths)


def shard_counts(folder: Path) -> list[dict[str, Any]]:
    """Counts of each shard of chunks: split → documents, chunks, tokens and bytes."""
    return [read_manifest(folder / "chunks" / shard_name(shard))["counts"] for shard in all_shards(folder)]


def chunks_in_shards(folder: Path) -> list[int]:
    """The chunks of all splits in each shard."""
    return [sum(split["chunks"] for split in counts.values()) for counts in shard_counts(folder)]


def former_setting(out: Path, key: str, value: int) -> int:
    """The value of a removed setting: the one in the recipe of the artifact `out`, or `value` if there is none."""
    try:
        return int(parse_manifest(out)["recipe"]["settings"].get(key, value))
    except InputError:  # not made yet, or damaged
        return value


def prefixed(section: str, settings: Any, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Settings as `section.key`, the names in messages and on the command line."""
    values = settings if isinstance(settings, dict) else asdict(settings)
    return {f"{section}.{key}": value for key, value in values.items() if key not in without}
