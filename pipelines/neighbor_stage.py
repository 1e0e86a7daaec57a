"""The `neighbors` stage: embeddings and indexes → the neighbors of every chunk of all splits."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from indexing import neighbors
from indexing.device import has_bfloat16, resolve
from indexing.product_search import ProductIndex
from indexing.search_cost import Hardware, Method, cheaper, describe
from indexing.sharded_index import ShardedIndex
from indexing.store.artefact import MANIFEST, Recipe, create, fingerprint, is_finished, read_manifest
from indexing.store.datastore import Datastore, Split, shard_name
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
    todo, method = [], None
    for shard, source in enumerate(shards(folder, "chunks")):
        recipe = Recipe(
            stage="neighbors",
            version=2,
            settings=prefixed("neighbors", config.neighbors, without=("also",)) | {"shard": shard},
            inputs=inputs,
        )
        out = folder / "neighbors" / shard_name(shard)
        if not is_finished(out, recipe):
            size = sum(split["chunks"] for split in read_manifest(source)["counts"].values())
            method = method or _method(config, Datastore.open(folder).train)
            todo.append(shard_task(out, recipe, shard, config.neighbors, tuple(searched), method, size=size))
    run_tasks("neighbors", "chunks", neighbor_task, todo, executor)
    return fingerprint([fingerprint_of(path) for path in shards(folder, "neighbors")])


@lru_cache(maxsize=1)
def _open_searched(searched: tuple[tuple[Path, str], ...], method: Method) -> list[neighbors.Searchable]:
    """Kept between the shards of one worker; the fingerprints in the key notice another index."""
    return [neighbors.Searchable(_open_index(train, method), train) for train in map(_train_of, searched)]


def _train_of(searched: tuple[Path, str]) -> Split:
    return Datastore.open(searched[0]).train


def _open_index(train: Split, method: Method) -> ShardedIndex | ProductIndex:
    if method == "exact":
        return ProductIndex(train.embeddings)
    return ShardedIndex.open(train.folder / "index", len(train.chunk_rows), big_batch=method == "big-batch")


def _method(config: Config, train: Split) -> Method:
    """The way of searching: as set, or as an earlier run of this stage chose, or the cheaper one."""
    if config.neighbors.search != "auto":
        return config.neighbors.search
    for shard in shards(config.datastore, "neighbors"):
        if (shard / MANIFEST).exists():
            return read_manifest(shard)["counts"]["search"]
    resources = config.executor.neighbors
    cuda = resources.gpus > 0 if config.executor.kind == "ray" else resolve("auto") == "cuda"
    hardware: Hardware = "cuda" if cuda else "bfloat16" if has_bfloat16("cpu") else "float32"
    return cheaper(describe(train, config.neighbors.candidates), hardware)


def neighbor_task(
    out: Path,
    recipe: Recipe,
    shard: int,
    settings: Any,
    searched: tuple[tuple[Path, str], ...],
    method: Method,
    *,
    advance: Advance,
) -> None:
    """Search the neighbors of one shard's chunks, all splits; the datastore's own folder is the first of `searched`."""
    datastore, opened = Datastore.open(searched[0][0]), _open_searched(searched, method)
    with create(out, recipe) as (work, counts):
        counts["search"] = method
        for split in map(datastore.split, datastore.split_names):
            starts = split.tokens.starts
            rows = (int(starts[shard]), int(starts[shard + 1]))
            counts[split.name] = neighbors.neighbor_shard(
                work / split.name, split, rows, opened, settings, advance=advance
            )
