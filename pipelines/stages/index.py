"""The `train-index` and `add` stages: embeddings → a trained index → filled shards and a tuned `nprobe`."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from indexing.index import build as index
from indexing.index.floats import to_float32
from indexing.index.key import choose_key
from indexing.index.merged import merge_shards
from indexing.index.sharded import ShardedIndex
from indexing.progress import Advance
from indexing.store.artifact import Recipe, create, fingerprint, is_finished, made_by
from indexing.store.datastore import Datastore, Split, shard_name
from indexing.store.remote import present
from indexing.store.sharded_array import open_array
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages.corpus import generations
from pipelines.stages.shards import (
    fingerprint_of,
    former_setting,
    joint_fingerprint,
    prefixed,
    run_tasks,
    shard_task,
    shards,
)


def run_train_index(config: Config, executor: Executor) -> str:
    """Embeddings → an empty trained index."""
    folder, settings = config.datastore, config.index
    first = generations(folder)[0]
    train = Datastore.open(folder).train.first_shards(len(first))
    out = folder / "index" / "trained"
    points = former_setting(out, "index.points_per_list", index.POINTS_PER_LIST)
    recipe = Recipe(
        stage="train-index",
        version=3,
        settings=prefixed("index", settings, without=("recall_target",)) | {"index.points_per_list": points},
        inputs={"embeddings": joint_fingerprint(folder, "embeddings", first)},
    )
    if not is_finished(out, recipe):
        key = choose_key(train.num_chunks, train.embeddings.row_shape[0], settings)
        size = index.sample_size(train.num_chunks, key, points)
        task = shard_task(out, recipe, train, key, settings.seed, points, size=size)
        run_tasks("train_index", "vectors", train_task, [task], executor, name=f"train-index {key}")
    return fingerprint_of(out)


def train_task(out: Path, recipe: Recipe, train: Split, key: str, seed: int, points: int, *, advance: Advance) -> None:
    """Train an empty index on a sample of all shards."""
    with create(out, recipe) as (work, counts):
        sample = index.training_sample(train, index.sample_size(train.num_chunks, key, points), seed)
        index.train(work, key, sample, seed, points)
        counts["vectors"] = len(sample)
        advance(len(sample))


def run_add(config: Config, executor: Executor) -> str:
    """Embeddings → the trained index, filled shard by shard, with `nprobe` tuned on the first generation."""
    folder = config.datastore
    trained_print = fingerprint_of(folder / "index" / "trained")
    train = Datastore.open(folder).train
    todo = []
    for shard, source in enumerate(shards(folder, "embeddings")):
        first_id = int(train.tokens.starts[shard])
        recipe = Recipe(
            "add", 2, {"first_id": first_id}, {"trained": trained_print, "embeddings": fingerprint_of(source)}
        )
        out = folder / "index" / shard_name(shard)
        # Shards of version 1 hold the quantizer, and are read as well.
        if not made_by(out, [replace(recipe, version=1)]) and not is_finished(out, recipe):
            arguments = (recipe, folder, source / "train.npy", first_id)
            todo.append(shard_task(out, *arguments, size=train.chunk_rows[shard]))
    run_tasks("add", "chunks", add_task, todo, executor)
    tuned_print = _tune(config, executor, generations(folder)[0])
    appended = [fingerprint_of(path) for path in shards(folder, "index")[len(generations(folder)[0]) :]]
    return fingerprint([tuned_print, *appended]) if appended else tuned_print


def add_task(out: Path, recipe: Recipe, folder: Path, source: Path, first_id: int, *, advance: Advance) -> None:
    """Add one shard's embeddings to a copy of the trained index."""
    with create(out, recipe) as (work, counts):
        embeddings = open_array(source)
        index.add_shard(work, folder / "index" / "trained", embeddings, first_id, advance=advance)
        counts["vectors"] = len(embeddings)


def _tune(config: Config, executor: Executor, first: range) -> str:
    folder, settings = config.datastore, config.index
    out = folder / "index" / "tuned"
    queries = former_setting(out, "index.tune_queries", index.TUNE_QUERIES)
    recipe = Recipe(
        stage="add",
        version=2,
        settings={
            "index.recall_target": settings.recall_target,
            "index.tune_queries": queries,
            "neighbors.candidates": config.neighbors.candidates,
        },
        inputs={shard_name(shard): fingerprint_of(folder / "index" / shard_name(shard)) for shard in first},
    )
    if not is_finished(out, recipe):
        size = min(queries, Datastore.open(folder).train.num_chunks)
        task = shard_task(out, recipe, folder, len(first), config.neighbors.candidates, settings, queries, size=size)
        run_tasks("add", "queries", tune_task, [task], executor, name="tune nprobe")
    return fingerprint_of(out)


def tune_task(
    out: Path,
    recipe: Recipe,
    folder: Path,
    num_shards: int,
    candidates: int,
    settings: index.IndexSettings,
    num_queries: int,
    *,
    advance: Advance,
) -> None:
    """Choose `nprobe` for the recall target."""
    datastore = Datastore.open(folder)
    with create(out, recipe) as (work, counts):
        queries = sample_queries(datastore, num_queries, settings.seed, num_shards)[1]
        opened = ShardedIndex.open(folder / "index", range(num_shards))
        embeddings = datastore.train.first_shards(num_shards).embeddings
        trained = folder / "index" / "trained"
        tuned = index.tune(work, opened, trained, queries, embeddings, candidates, settings)
        counts |= {"nprobe": tuned["nprobe"], "recall_at_10": tuned["recall_at_10"]}
        advance(len(queries))


def run_merge(config: Config, executor: Executor) -> str:
    """The shards of the index → one index with its lists on disk, for serving."""
    folder = config.datastore
    filled = shards(folder, "index")
    recipe = Recipe("merge", 2, {}, {path.name: fingerprint_of(path) for path in filled})
    out = folder / "index" / "merged"
    if not is_finished(out, recipe):
        size = Datastore.open(folder).train.num_chunks
        run_tasks("add", "chunks", merge_task, [shard_task(out, recipe, filled, size=size)], executor, name="merge")
    return fingerprint_of(out)


def merge_task(out: Path, recipe: Recipe, filled: list[Path], *, advance: Advance) -> None:
    """Merge all shards on disk."""
    with create(out, recipe) as (work, counts):
        for path in filled:
            present(path / "vectors.faiss")
        counts["vectors"] = merge_shards(work, out.parent / "trained", filled, advance=advance)


def sample_queries(
    datastore: Datastore, wanted: int, seed: int, num_shards: int | None = None
) -> tuple[np.ndarray, np.ndarray, str]:
    """Sample held-out chunks, or chunks of `train` if almost none are held out.

    Args:
        datastore: datastore to sample from.
        wanted: number of chunks; fewer if there are fewer.
        seed: seed of the sample.
        num_shards: sample only the first shards.

    Returns:
        ids [n] int64, embeddings [n, d] float32, and the name of their split.
    """
    valid, train = (
        split.first_shards(num_shards) if num_shards else split for split in (datastore.valid, datastore.train)
    )
    split = valid if valid.num_chunks >= min(100, wanted) else train
    size = min(wanted, split.num_chunks)
    ids = np.sort(np.random.default_rng(seed).choice(split.num_chunks, size, replace=False)).astype(np.int64)
    return ids, to_float32(split.embeddings.gather(ids)), split.name
