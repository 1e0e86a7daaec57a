"""The `chunk` stage: corpus → tokenizer → near copies to remove, if any → chunks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from indexing.corpus import chunks
from indexing.corpus.documents import CorpusSettings
from indexing.corpus.scan import FileSlice
from indexing.progress import Advance
from indexing.store.artifact import Artifacts, Recipe
from indexing.store.datastore import shard_name
from indexing.store.paths import path_of
from indexing.store.sharded_array import open_array
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.config import Config
from pipelines.executors.tasks import Executor, kept_for_stage
from pipelines.stages import corpus, dedup
from pipelines.stages.generations import corpus_folders, generations
from pipelines.stages.shards import Shard, finished, prefixed, run_shards, shard_counts
from pipelines.stages.tokenizer import make_tokenizer, nothing_left


def run_chunk(config: Config, executor: Executor) -> Artifacts:
    """Corpus → tokenizer → chunks."""
    folder = config.datastore
    plan = corpus.prepare(config, executor)
    make_tokenizer(config, executor)
    removal = dedup.prepare(config, executor)
    settings = prefixed("chunks", config.chunks) | {"corpus.split": config.corpus.split}
    inputs = {"tokenizer": finished(folder, "tokenizer")}
    if removal:  # the list's fingerprint is known in advance, so wrong settings are rejected before the work
        settings |= dedup.settings_of(config)
        inputs["dedup"] = Artifacts(removal.fingerprint, dedup.REMOVED)

    corpora = list[Artifacts]()  # of each shard
    for corpus_folder, numbers in zip(corpus_folders(folder), generations(folder), strict=True):
        corpora += [finished(folder, corpus_folder.relative_to(folder).as_posix())] * len(numbers)

    def shard_of(shard: int) -> Shard:
        recipe = Recipe("chunk", 1, settings | {"shard": shard}, inputs | {"corpus": corpora[shard]})
        removed = folder / dedup.REMOVED / f"{shard_name(shard)}.npy" if removal else None
        arguments = (plan[shard], config.corpus, config.chunks, folder / "tokenizer", removed)
        return Shard(path_of("chunks", shard), recipe, arguments, sum(part.text_bytes for part in plan[shard]))

    def remove_copies(_: Sequence[Shard]) -> None:
        if removal:
            dedup.run(config, executor, removal)

    shards = map(shard_of, range(len(plan)))
    made = run_shards(folder, "chunk", "bytes", chunk_task, shards, executor, before=remove_copies)
    if not any(counts["train"]["chunks"] for counts in shard_counts(folder)):
        raise nothing_left(config.corpus)
    return made


def chunk_task(
    work: Path,
    slices: list[FileSlice],
    reading: CorpusSettings,
    settings: chunks.ChunkSettings,
    tokenizer: Path,
    removed: Path | None,
    *,
    advance: Advance,
) -> dict[str, Any]:
    """Make one shard of chunks, without the documents that `removed` lists. The scan has already reported problems."""
    left_out, opened = open_array(removed) if removed else None, _tokenizer(tokenizer)
    return chunks.chunk_shard(
        work, slices, reading, settings, opened, on_problem=lambda _: None, advance=advance, removed=left_out
    )


@kept_for_stage
def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.open(folder, chunks.threads_of_a_batch())
