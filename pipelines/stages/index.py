"""The `train-index` and `add` stages: embeddings → a trained index → filled shards and a tuned `nprobe`."""

from pathlib import Path
from typing import Any

import numpy as np

from indexing.index import build as index
from indexing.index.floats import to_float32
from indexing.index.key import choose_key
from indexing.index.merged import merge_shards
from indexing.index.sharded import ShardedIndex
from indexing.progress import Advance
from indexing.store.artifact import Artifacts, Recipe, damage, is_finished
from indexing.store.datastore import Datastore, Split, shard_name
from indexing.store.paths import path_of
from indexing.store.remote import present
from indexing.store.sharded_array import open_array
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages.generations import all_shards, generations
from pipelines.stages.shards import Shard, finished, former_setting, prefixed, run_shards

TRAINED, TUNED = "index/trained", "index/tuned"


def run_train_index(config: Config, executor: Executor) -> Artifacts:
    """Embeddings → an empty trained index."""
    folder, settings = config.datastore, config.index
    first = generations(folder)[0]
    train = Datastore.open(folder).train.first_shards(len(first))
    points = former_setting(folder / TRAINED, "index.points_per_list", index.POINTS_PER_LIST)
    recipe = Recipe(
        stage="train-index",
        version=3,
        settings=prefixed("index", settings, without=("recall_target",)) | {"index.points_per_list": points},
        inputs={"embeddings": finished(folder, path_of("embeddings", first))},
    )
    if not damage(folder / TRAINED) and is_finished(folder / TRAINED, recipe):
        return finished(folder, TRAINED)
    key = choose_key(train.num_chunks, train.embeddings.row_shape[0], settings)
    size = index.sample_size(train.num_chunks, key, points)
    trained = Shard(TRAINED, recipe, (train, key, size, settings.seed, points), size)
    run_shards(folder, "train_index", "vectors", train_task, [trained], executor, name=f"train-index {key}")
    return finished(folder, TRAINED)


def train_task(
    work: Path, train: Split, key: str, size: int, seed: int, points: int, *, advance: Advance
) -> dict[str, Any]:
    """Train an empty index on a sample of all shards."""
    sample = index.training_sample(train, size, seed)
    index.train(work, key, sample, seed, points)
    advance(len(sample))
    return {"vectors": len(sample)}


def run_add(config: Config, executor: Executor) -> Artifacts:
    """Embeddings → the trained index, filled shard by shard, with `nprobe` tuned on the first generation."""
    folder = config.datastore
    trained, train = finished(folder, TRAINED), Datastore.open(folder).train

    def shard_of(shard: int) -> Shard:
        first_id, embeddings = int(train.tokens.starts[shard]), finished(folder, path_of("embeddings", shard))
        recipe = Recipe("add", 2, {"first_id": first_id}, {"trained": trained, "embeddings": embeddings})
        return Shard(
            path_of("index", shard), recipe, (folder, folder / embeddings.paths, first_id), train.chunk_rows[shard]
        )

    run_shards(folder, "add", "chunks", add_task, map(shard_of, all_shards(folder)), executor)
    first = generations(folder)[0]
    appended = all_shards(folder)[len(first) :]
    _tune(config, executor, first)
    return finished(folder, [TUNED, path_of("index", appended)] if appended else TUNED)


def add_task(work: Path, folder: Path, source: Path, first_id: int, *, advance: Advance) -> dict[str, Any]:
    """Add one shard's embeddings to a copy of the trained index."""
    embeddings = open_array(source / "train.npy")
    index.add_shard(work, folder / TRAINED, embeddings, first_id, advance=advance)
    return {"vectors": len(embeddings)}


def _tune(config: Config, executor: Executor, first: range) -> None:
    """Choose `nprobe` for the first generation."""
    folder, settings, candidates = config.datastore, config.index, config.neighbors.candidates
    queries = former_setting(folder / TUNED, "index.tune_queries", index.TUNE_QUERIES)
    recipe = Recipe(
        stage="add",
        version=2,
        settings={
            "index.recall_target": settings.recall_target,
            "index.tune_queries": queries,
            "neighbors.candidates": candidates,
        },
        inputs={shard_name(shard): finished(folder, path_of("index", shard)) for shard in first},
    )
    size = min(queries, Datastore.open(folder).train.num_chunks)
    tuned = Shard(TUNED, recipe, (folder, len(first), candidates, settings, queries), size)
    run_shards(folder, "add", "queries", tune_task, [tuned], executor, name="tune nprobe")


def tune_task(
    work: Path,
    folder: Path,
    num_shards: int,
    candidates: int,
    settings: index.IndexSettings,
    num_queries: int,
    *,
    advance: Advance,
) -> dict[str, Any]:
    """Choose `nprobe` for the recall target."""
    datastore = Datastore.open(folder)
    queries = sample_queries(datastore, num_queries, settings.seed, num_shards)[1]
    opened = ShardedIndex.open(folder / "index", range(num_shards))
    embeddings = datastore.train.first_shards(num_shards).embeddings
    tuned = index.tune(work, opened, queries, embeddings, candidates, settings)
    advance(len(queries))
    return {"nprobe": tuned["nprobe"], "recall_at_10": tuned["recall_at_10"]}


def run_merge(config: Config, executor: Executor) -> Artifacts:
    """The shards of the index → one index with its lists on disk, for serving."""
    folder = config.datastore
    filled = {shard_name(shard): path_of("index", shard) for shard in all_shards(folder)}
    recipe = Recipe("merge", 2, {}, {name: finished(folder, path) for name, path in filled.items()})
    arguments = (folder, [folder / path for path in filled.values()])
    merged = Shard("index/merged", recipe, arguments, Datastore.open(folder).train.num_chunks)
    run_shards(folder, "add", "chunks", merge_task, [merged], executor, name="merge")
    return finished(folder, merged.path)


def merge_task(work: Path, folder: Path, filled: list[Path], *, advance: Advance) -> dict[str, Any]:
    """Merge all shards on disk."""
    for path in filled:
        present(path / "vectors.faiss")
    return {"vectors": merge_shards(work, folder / TRAINED, filled, advance=advance)}


def sample_queries(
    datastore: Datastore, count: int, seed: int, num_shards: int | None = None
) -> tuple[np.ndarray, np.ndarray, str]:
    """Sample held-out chunks, or chunks of `train` if almost none are held out.

    Args:
        datastore: datastore to sample from.
        count: number of chunks; fewer if there are fewer.
        seed: seed of the sample.
        num_shards: sample only the first shards.

    Returns:
        ids [n] int64, embeddings [n, d] float32, and the name of their split.
    """
    valid, train = (
        split.first_shards(num_shards) if num_shards else split for split in (datastore.valid, datastore.train)
    )
    split = valid if valid.num_chunks >= min(100, count) else train
    size = min(count, split.num_chunks)
    ids = np.sort(np.random.default_rng(seed).choice(split.num_chunks, size, replace=False)).astype(np.int64)
    return ids, to_float32(split.embeddings.gather(ids)), split.name
