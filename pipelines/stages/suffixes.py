"""The `suffixes` stage: chunks → the sorted prefixes of the training documents, shard by shard."""

from pathlib import Path

from indexing.progress import Advance
from indexing.store.artifact import Recipe, create, fingerprint, is_finished
from indexing.store.datastore import Datastore, Split, shard_name
from indexing.suffixes.build import FOLDER, write_sorted_prefixes
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages.shards import fingerprint_of, run_tasks, shard_task, shards


def run_suffixes(config: Config, executor: Executor) -> str:
    """Chunks → sorted prefixes, for exact matches of any length."""
    folder = config.datastore
    train = Datastore.open(folder).train
    todo = []
    for shard, source in enumerate(shards(folder, "chunks")):
        recipe = Recipe("suffixes", 2, {}, {"chunks": fingerprint_of(source)})
        out = folder / FOLDER / shard_name(shard)
        if not is_finished(out, recipe):
            todo.append(shard_task(out, recipe, train, shard, size=train.chunk_rows[shard]))
    run_tasks("sparse", "chunks", suffixes_task, todo, executor, name="suffixes")
    return fingerprint([fingerprint_of(path) for path in shards(folder, FOLDER)])


def suffixes_task(out: Path, recipe: Recipe, train: Split, shard: int, *, advance: Advance) -> None:
    """Sort the prefixes of one shard."""
    with create(out, recipe) as (work, counts):
        counts["tokens"] = write_sorted_prefixes(work, train, shard, advance)
