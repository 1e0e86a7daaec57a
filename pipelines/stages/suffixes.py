"""The `suffixes` stage: chunks → the sorted prefixes of the training documents, a group of shards at a time."""

from pathlib import Path

from indexing.progress import Advance
from indexing.store.artifact import Recipe, create, fingerprint, is_finished
from indexing.store.datastore import Datastore, Split, shard_name
from indexing.suffixes.build import FOLDER, planned_groups, write_sorted_prefixes
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages.corpus import generations
from pipelines.stages.shards import fingerprint_of, joint_fingerprint, run_tasks, shard_task


def run_suffixes(config: Config, executor: Executor) -> str:
    """Chunks → sorted prefixes, for exact matches of any length."""
    folder = config.datastore
    train = Datastore.open(folder).train
    outs, todo = [], []
    for group in (group for shards in generations(folder) for group in planned_groups(train, shards)):
        inputs = {"chunks": joint_fingerprint(folder, "chunks", group)}
        recipe = Recipe("suffixes", 3, {"shards": len(group)}, inputs)
        outs.append(folder / FOLDER / shard_name(group.start))
        if not is_finished(outs[-1], recipe):
            size = sum(train.chunk_rows[group.start : group.stop])
            todo.append(shard_task(outs[-1], recipe, train, group, size=size))
    run_tasks("sparse", "chunks", suffixes_task, todo, executor, name="suffixes")
    return fingerprint([fingerprint_of(out) for out in outs])


def suffixes_task(out: Path, recipe: Recipe, train: Split, shards: range, *, advance: Advance) -> None:
    """Sort the prefixes of one group."""
    with create(out, recipe) as (work, counts):
        counts["tokens"] = write_sorted_prefixes(work, train, shards, advance)
