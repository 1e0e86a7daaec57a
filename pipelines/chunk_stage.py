"""The `chunk` stage: corpus → tokenizer → chunks."""

from pathlib import Path
from typing import Any

from indexing import chunks
from indexing.store.artefact import Recipe, create, fingerprint, is_finished
from indexing.store.datastore import shard_name
from pipelines import corpus_stage
from pipelines.config import Config
from pipelines.executors import Advance, Executor
from pipelines.shards import fingerprint_of, prefixed, run_tasks, shard_counts, shard_task, shards


def run_chunk(config: Config, executor: Executor) -> str:
    """Corpus → tokenizer → chunks."""
    folder = config.datastore
    plan = corpus_stage.prepare(config, executor)
    tokenizer_print = fingerprint_of(folder / "tokenizer")
    folders = zip(corpus_stage.corpus_folders(folder), corpus_stage.generations(folder), strict=True)
    corpus_prints = [fingerprint_of(corpus) for corpus, generation in folders for _ in generation]
    todo = []
    for shard, pieces in enumerate(plan):
        recipe = Recipe(
            stage="chunk",
            version=1,
            settings=prefixed("chunks", config.chunks) | {"corpus.split": config.corpus.split, "shard": shard},
            inputs={"corpus": corpus_prints[shard], "tokenizer": tokenizer_print},
        )
        out = folder / "chunks" / shard_name(shard)
        if not is_finished(out, recipe):
            size = sum(piece.text_bytes for piece in pieces)
            arguments = (recipe, pieces, config.corpus, config.chunks, folder / "tokenizer")
            todo.append(shard_task(out, *arguments, size=size))
    run_tasks("chunk", "bytes", chunk_task, todo, executor)
    if not any(counts["train"]["chunks"] for counts in shard_counts(folder)):
        raise corpus_stage.nothing_left(config.corpus)
    return fingerprint([fingerprint_of(path) for path in shards(folder, "chunks")])


def chunk_task(
    out: Path, recipe: Recipe, pieces: Any, corpus: Any, settings: Any, tokenizer: Path, *, advance: Advance
) -> None:
    """Make one shard of chunks. Problems were listed when the corpus was scanned."""
    with create(out, recipe) as (work, counts):
        counts |= chunks.chunk_shard(
            work, pieces, corpus, settings, tokenizer, on_problem=lambda _: None, advance=advance
        )
