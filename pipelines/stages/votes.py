"""The `votes` stage: sorted prefixes → for every token, the tokens that follow the longest match of its text in other documents."""

from itertools import pairwise
from pathlib import Path

from indexing.progress import Advance
from indexing.store.artifact import Recipe, create, damage, fingerprint, is_finished, remove
from indexing.store.datastore import Datastore, shard_name
from indexing.store.files import MANIFEST
from indexing.suffixes.votes import (
    FOLDER,
    cuts,
    deletions_of,
    groups_of,
    num_tokens,
    window_dtype,
    write_range,
    write_shard,
)
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages.shards import fingerprint_of, run_tasks, shard_task, shards

_RANGES = "ranges"
_LAST_KEY = 2**64


def run_votes(config: Config, executor: Executor) -> str:
    """Sorted prefixes → the votes of every token: first those of ranges of prefixes, then those of shards."""
    folder = config.datastore
    datastore = Datastore.open(folder)
    inputs = {"suffixes": datastore.manifest["fingerprints"]["suffixes"]}
    deleted = deletions_of(datastore)
    todo = []
    for shard, out in enumerate(shards(folder, FOLDER)):
        recipe = Recipe("votes", 1, {"shard": shard, "deleted": deleted}, inputs)
        if not _is_finished(out, recipe):
            todo.append((out, recipe, shard))
    work = folder / FOLDER / _RANGES
    if todo:
        ranges = _ranges(datastore, work, Recipe("votes", 1, {"deleted": deleted}, inputs), executor)
        size = datastore.train.chunk_rows
        tasks = [shard_task(out, recipe, datastore, shard, ranges, size=size[shard]) for out, recipe, shard in todo]
        run_tasks("sparse", "chunks", shard_votes_task, tasks, executor, name="votes, collect")
    if work.exists():  # also those of a build that was killed after its last shard
        remove(work)
    return fingerprint([fingerprint_of(path) for path in shards(folder, FOLDER)])


def _is_finished(out: Path, recipe: Recipe) -> bool:
    """As `artifact.is_finished`, but votes of other text are removed instead of refused: all they are made from exists."""
    if (out / MANIFEST).exists() and (damage(out) or fingerprint_of(out) != recipe.fingerprint):
        remove(out)
    return is_finished(out, recipe)


def _ranges(datastore: Datastore, work: Path, common: Recipe, executor: Executor) -> list[Path]:
    """Make the votes of every range of prefixes."""
    groups, dtype = groups_of(datastore), window_dtype(datastore)
    borders, outs, todo = [0, *cuts(groups, dtype), _LAST_KEY], [], []
    for number, (first, stop) in enumerate(pairwise(borders)):
        recipe = Recipe("votes", 1, {**common.settings, "first": str(first), "stop": str(stop)}, common.inputs)
        outs.append(work / shard_name(number))
        if not _is_finished(outs[-1], recipe):
            todo.append(
                shard_task(outs[-1], recipe, datastore, first, stop, size=num_tokens(groups) // (len(borders) - 1))
            )
    run_tasks("sparse", "tokens", range_votes_task, todo, executor, name="votes")
    return outs


def range_votes_task(
    out: Path, recipe: Recipe, datastore: Datastore, first: int, stop: int, *, advance: Advance
) -> None:
    """Find the votes of the prefixes of one range."""
    with create(out, recipe) as (work, counts):
        counts["tokens"] = write_range(work, datastore, first, stop, advance)


def shard_votes_task(
    out: Path, recipe: Recipe, datastore: Datastore, shard: int, ranges: list[Path], *, advance: Advance
) -> None:
    """Collect the votes of one shard."""
    with create(out, recipe) as (work, counts):
        counts.update(write_shard(work, datastore, shard, ranges))
        advance(datastore.train.chunk_rows[shard])
