"""The `chunk` stage: corpus → tokenizer → near copies to remove, if any → chunks."""

from pathlib import Path
from typing import Any

from indexing.corpus import chunks
from indexing.progress import Advance
from indexing.store.artifact import Artifacts, Recipe
from indexing.store.datastore import shard_name
from indexing.store.paths import path_of
from indexing.store.sharded_array import open_array
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages import corpus, dedup
from pipelines.stages.generations import corpus_folders, generations
from pipelines.stages.shards import Shard, finished, prefixed, run_shards, shard_counts
from pipelines.stages.tokenizer import make_tokenizer, nothing_left


def run_chunk(config: Config, executor: Executor) -> Artifacts:
    """Corpus → tokenizer → chunks."""
    folder = config.datastore
    plan = corpus.prepare(config, executor)
    make_tokenizer(config)
    removal = dedup.prepare(config, executor)
    settings = prefixed("chunks", config.chunks) | {"corpus.split": config.corpus.split}
    inputs = {"tokenizer": finished(folder, "tokenizer")}
    if removal:  # the list's fingerprint is known in advance, so wrong settings are rejected before the work
        settings |= dedup.settings_of(config)
        inputs["dedup"] = Artifacts(removal.fingerprint, dedup.REMOVED)

    def shards_of(home: Path, numbers: range) -> list[Shard]:
        made_from = inputs | {"corpus": finished(folder, home.relative_to(folder).as_posix())}
        return [
            Shard(
                path=path_of("chunks", shard),
                recipe=Recipe("chunk", 1, settings | {"shard": shard}, made_from),
                arguments=(
                    plan[shard],
                    config.corpus,
                    config.chunks,
                    folder / "tokenizer",
                    folder / dedup.REMOVED / f"{shard_name(shard)}.npy" if removal else None,
                ),
                size=sum(file_slice.text_bytes for file_slice in plan[shard]),
            )
            for shard in numbers
        ]

    homes = zip(corpus_folders(folder), generations(folder), strict=True)
    made = run_shards(
        folder,
        "chunk",
        "bytes",
        make_chunks,
        [shard for home, numbers in homes for shard in shards_of(home, numbers)],
        executor,
        before=lambda _: dedup.run(config, executor, removal) if removal else None,
    )
    if not any(counts["train"]["chunks"] for counts in shard_counts(folder)):
        raise nothing_left(config.corpus)
    return made


def make_chunks(
    work: Path,
    slices: Any,
    reading: Any,
    settings: Any,
    tokenizer: Path,
    removed: Path | None,
    *,
    advance: Advance,
) -> dict[str, Any]:
    """Make one shard of chunks, without the documents that `removed` lists. The scan has already reported problems."""
    return chunks.chunk_shard(
        work,
        slices,
        reading,
        settings,
        tokenizer,
        on_problem=lambda _: None,
        advance=advance,
        removed=open_array(removed) if removed else None,
    )
