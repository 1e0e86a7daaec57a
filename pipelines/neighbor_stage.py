"""The `neighbors` stage: embeddings and indexes → the neighbors of every chunk of all splits."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from indexing import index, neighbors
from indexing.store.artefact import Recipe, create, fingerprint, is_finished, read_manifest
from indexing.store.datastore import Datastore, shard_name
from pipelines import sharing
from pipelines.config import Config
from pipelines.executors import Advance, Executor
from pipelines.shards import fingerprint_of, prefixed, run_tasks, shard_task, shards

# What the neighbors of a chunk depend on, in every datastore that is searched: the name in the recipe, and the stage.
_SEARCHED = {"chunks": "chunk", "embeddings": "embed", "index": "add"}


def run_neighbors(config: Config, executor: Executor) -> str:
    """Embeddings and indexes → the neighbors of every chunk of all splits."""
    folder = config.datastore
    fingerprints = Datastore.open(folder).manifest["fingerprints"]
    inputs = {name: fingerprints[stage] for name, stage in _SEARCHED.items()}
    searched = [(folder, fingerprint(inputs))]
    for number, other in enumerate(sharing.retrieved_from(config)):
        theirs = fingerprint({name: other.manifest["fingerprints"][stage] for name, stage in _SEARCHED.items()})
        inputs[f"neighbors.also[{number}]"] = theirs  # not the folder: a datastore that was moved is the same
        searched.append((other.folder, theirs))
    todo = []
    for shard, source in enumerate(shards(folder, "chunks")):
        recipe = Recipe(
            stage="neighbors",
            version=1,
            settings=prefixed("neighbors", config.neighbors, without=("also", "materialised")) | {"shard": shard},
            inputs=inputs,
        )
        out = folder / "neighbors" / shard_name(shard)
        if not is_finished(out, recipe):
            size = sum(split["chunks"] for split in read_manifest(source)["counts"].values())
            todo.append(shard_task(out, recipe, shard, config.neighbors, tuple(searched), size=size))
    run_tasks("neighbors", "chunks", neighbor_task, todo, executor)
    return fingerprint([fingerprint_of(path) for path in shards(folder, "neighbors")])


@lru_cache(maxsize=1)
def _open_searched(searched: tuple[tuple[Path, str], ...]) -> list[neighbors.Searchable]:
    """Kept between the shards of one worker; the fingerprints in the key notice another index."""
    datastores = [Datastore.open(folder) for folder, _ in searched]
    return [
        neighbors.Searchable(index.ShardedIndex.open(each.folder / "index", len(each.train.chunk_rows)), each.train)
        for each in datastores
    ]


def neighbor_task(
    out: Path, recipe: Recipe, shard: int, settings: Any, searched: tuple[tuple[Path, str], ...], *, advance: Advance
) -> None:
    """Search the neighbors of one shard's chunks, all splits; the datastore's own folder is the first of `searched`."""
    datastore, opened = Datastore.open(searched[0][0]), _open_searched(searched)
    with create(out, recipe) as (work, counts):
        for split in map(datastore.split, datastore.split_names):
            starts = split.tokens.starts
            rows = (int(starts[shard]), int(starts[shard + 1]))
            counts[split.name] = neighbors.neighbor_shard(
                work / split.name, split, rows, opened, settings, advance=advance
            )
