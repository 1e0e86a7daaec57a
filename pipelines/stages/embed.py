"""The `embed` stage: chunks → embedder → embeddings."""

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from indexing.embedding.embedder import embed_shard, open_embedder
from indexing.embedding.lexical import fit_lexical
from indexing.embedding.settings import FIT_CHUNKS, Embedder, EmbedderSettings, write_settings
from indexing.embedding.transformer import model_fingerprint
from indexing.progress import Advance
from indexing.store.artifact import Recipe, create, fingerprint, is_finished, read_manifest
from indexing.store.datastore import SPLITS, Datastore, shard_name
from indexing.store.documents import DocumentTable
from indexing.store.sharded_array import open_array
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages import other_datastores as sharing
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
from pipelines.terminal.progress import progress


def run_embed(config: Config, executor: Executor) -> str:
    """Chunks → embedder → embeddings."""
    folder = config.datastore
    _make_embedder(config)
    embedder_print = fingerprint_of(folder / "embedder")
    todo = []
    for shard, source in enumerate(shards(folder, "chunks")):
        recipe = Recipe("embed", 1, {"shard": shard}, {"chunks": fingerprint_of(source), "embedder": embedder_print})
        out = folder / "embeddings" / shard_name(shard)
        if not is_finished(out, recipe):
            size = sum(split["chunks"] for split in read_manifest(source)["counts"].values())
            todo.append(shard_task(out, recipe, folder, embedder_print, source, config.embedder, size=size))
    _open_embedder.cache_clear()  # from an earlier build in this process: a repaired embedder has the same fingerprint
    run_tasks("embed", "chunks", embed_task, todo, executor)
    return fingerprint([fingerprint_of(path) for path in shards(folder, "embeddings")])


def _make_embedder(config: Config) -> None:
    folder, settings = config.datastore, config.embedder
    datastore, first = Datastore.open(folder), generations(folder)[0]
    inputs = {"chunks": joint_fingerprint(folder, "chunks", first)}
    if settings.kind == "transformer":
        inputs = {"model": model_fingerprint(settings.path)}
    elif settings.path:
        inputs = {"embedder.path": fingerprint(sharing.embedder_files(datastore, settings))}
    recipe_settings, fit_chunks = prefixed("embedder", settings.recipe()), 0
    if settings.kind == "lexical" and not settings.path:
        fit_chunks = former_setting(folder / "embedder", "embedder.fit_chunks", FIT_CHUNKS)
        recipe_settings["embedder.fit_chunks"] = fit_chunks
    recipe = Recipe("embed", 1, recipe_settings, inputs)
    if is_finished(folder / "embedder", recipe):
        return
    train = datastore.train.first_shards(len(first))
    with create(folder / "embedder", recipe) as (work, counts):
        if settings.kind == "transformer":
            write_settings(work, settings)
            return
        if settings.path:
            sharing.copy_embedder(datastore, settings, work)
            return
        total = train.num_chunks
        rng = np.random.default_rng(settings.seed)
        size = min(total, fit_chunks)
        ids = np.sort(rng.choice(total, size, replace=False)).astype(np.int64)
        is_special = Tokenizer.open(folder / "tokenizer").token_bytes == 0
        counts["chunks"] = size
        with progress("embed: count n-grams", total=size, unit="chunks") as advance:
            fit_lexical(work, settings, train.tokens.gather(ids), train.lengths.gather(ids), is_special)
            advance(size)


@lru_cache(maxsize=1)
def _open_embedder(folder: Path, _: str, settings: EmbedderSettings) -> Embedder:
    """Cached for the shards of one worker, so that a model is loaded once. The fingerprint in the key detects another embedder."""
    return open_embedder(folder / "embedder", Tokenizer.open(folder / "tokenizer").decode, settings)


def embed_task(
    out: Path, recipe: Recipe, folder: Path, embedder_print: str, source: Path, settings: Any, *, advance: Advance
) -> None:
    """Make one shard of embeddings for all splits."""
    embedder = _open_embedder(folder, embedder_print, settings)
    with create(out, recipe) as (work, counts):
        for split in SPLITS:
            tokens, lengths = (open_array(source / split / f"{name}.npy") for name in ("tokens", "lengths"))
            name_of = partial(_name_of_chunk, source / split)
            out_file = work / f"{split}.npy"
            counts[split] = embed_shard(out_file, embedder, tokens, lengths, name_of=name_of, advance=advance)


def _name_of_chunk(folder: Path, chunk: int) -> str:
    """The document of a chunk in one shard and split, for a message."""
    offsets = open_array(folder / "documents.npy")
    document = int(np.searchsorted(offsets, chunk, side="right")) - 1
    row = DocumentTable([folder / "documents.parquet"], [len(offsets) - 1]).take([document])[0]
    return f"document {row['id']!r} of {row['file']}, chunk {chunk - int(offsets[document]) + 1}"
