"""The `chunk` stage: corpus → tokenizer → near copies to remove, if any → chunks."""

from pathlib import Path
from typing import Any

from indexing.corpus import chunks
from indexing.progress import Advance
from indexing.store.artifact import Recipe, create, fingerprint, is_finished
from indexing.store.datastore import shard_name
from indexing.store.sharded_array import open_array
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages import corpus as corpus_stage
from pipelines.stages import dedup as dedup_stage
from pipelines.stages.shards import fingerprint_of, prefixed, run_tasks, shard_counts, shard_task, shards


def run_chunk(config: Config, executor: Executor) -> str:
    """Corpus → tokenizer → chunks."""
    folder = config.datastore
    plan = corpus_stage.prepare(config, executor)
    tokenizer_print = fingerprint_of(folder / "tokenizer")
    folders = zip(corpus_stage.corpus_folders(folder), corpus_stage.generations(folder), strict=True)
    corpus_prints = [fingerprint_of(corpus) for corpus, generation in folders for _ in generation]
    removal = dedup_stage.prepare(config, executor)
    settings = prefixed("chunks", config.chunks) | {"corpus.split": config.corpus.split}
    inputs = {"tokenizer": tokenizer_print}
    if removal:  # the list's fingerprint is known in advance, so wrong settings are rejected before the work
        settings |= dedup_stage.settings_of(config)
        inputs["dedup"] = removal.fingerprint
    todo = []
    for shard, slices in enumerate(plan):
        recipe = Recipe("chunk", 1, settings | {"shard": shard}, inputs | {"corpus": corpus_prints[shard]})
        out = folder / "chunks" / shard_name(shard)
        if not is_finished(out, recipe):
            size = sum(file_slice.text_bytes for file_slice in slices)
            removed = folder / dedup_stage.FOLDER / "removed" / f"{shard_name(shard)}.npy" if removal else None
            arguments = (recipe, slices, config.corpus, config.chunks, folder / "tokenizer", removed)
            todo.append(shard_task(out, *arguments, size=size))
    if removal:
        dedup_stage.run(config, executor, removal)
    run_tasks("chunk", "bytes", chunk_task, todo, executor)
    if not any(counts["train"]["chunks"] for counts in shard_counts(folder)):
        raise corpus_stage.nothing_left(config.corpus)
    return fingerprint([fingerprint_of(path) for path in shards(folder, "chunks")])


def chunk_task(
    out: Path,
    recipe: Recipe,
    slices: Any,
    corpus: Any,
    settings: Any,
    tokenizer: Path,
    removed: Path | None,
    *,
    advance: Advance,
) -> None:
    """Make one shard of chunks, without the documents that `removed` lists. The scan has already reported problems."""
    left_out = open_array(removed) if removed else None
    with create(out, recipe) as (work, counts):
        counts |= chunks.chunk_shard(
            work, slices, corpus, settings, tokenizer, on_problem=lambda _: None, advance=advance, removed=left_out
        )
