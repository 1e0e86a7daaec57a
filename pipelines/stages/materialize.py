"""The `materialize` stage: chunks and neighbors → the tokens of each chunk's first neighbors, next to the chunk."""

from pathlib import Path

from indexing.neighbors.materialize import materialize_shard
from indexing.progress import Advance
from indexing.store.artifact import Recipe, create, fingerprint, is_finished
from indexing.store.datastore import SPLITS, Datastore, shard_name
from indexing.store.errors import InputError
from indexing.store.retrieval_set import RetrievalSet
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages.shards import fingerprint_of, run_tasks, shard_counts, shard_task, shards


def run_materialize(config: Config, executor: Executor) -> str:
    """Chunks and neighbors → the tokens of each chunk's first neighbors.

    Raises:
        InputError: neighbors.materialized is 0, or a datastore that neighbors come from has changed.
    """
    folder, num_neighbors = config.datastore, config.neighbors.materialized
    if not num_neighbors:
        raise InputError(
            "neighbors.materialized = 0: set how many neighbors of each chunk to write, for example data.k + 2."
        )
    todo, counts = [], shard_counts(folder)
    for shard, source in enumerate(shards(folder, "neighbors")):
        # The recipe of the neighbors names all chunks that were searched.
        inputs = {"neighbors": fingerprint_of(source)}
        recipe = Recipe("materialize", 1, {"neighbors.materialized": num_neighbors, "shard": shard}, inputs)
        out = folder / "materialized" / shard_name(shard)
        if not is_finished(out, recipe):
            size = sum(split["chunks"] for split in counts[shard].values())
            todo.append(shard_task(out, recipe, folder, shard, num_neighbors, size=size))
    # It reads as many data as the search, so it runs on the workers of the search.
    run_tasks("neighbors", "chunks", materialize_task, todo, executor, name="materialize")
    return fingerprint([fingerprint_of(path) for path in shards(folder, "materialized")])


def materialize_task(
    out: Path, recipe: Recipe, folder: Path, shard: int, num_neighbors: int, *, advance: Advance
) -> None:
    """Write the neighbors of one shard's chunks for all splits."""
    datastore = Datastore.open(folder)
    retrieval = RetrievalSet.of(datastore)
    with create(out, recipe) as (work, counts):
        for split in map(datastore.split, SPLITS):
            starts = split.tokens.starts
            rows = (int(starts[shard]), int(starts[shard + 1]))
            counts[split.name] = materialize_shard(
                work / split.name, split, rows, retrieval, num_neighbors, advance=advance
            )
