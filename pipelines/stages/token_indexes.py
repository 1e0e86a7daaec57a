"""The stages that index terms and n-grams of chunks: `sparse` and `ngrams`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from indexing.ngrams.index import FOLDER as NGRAMS
from indexing.ngrams.index import RUNS, Generation, write_ngrams, write_run
from indexing.progress import Advance
from indexing.sparse.index import FOLDER as SPARSE
from indexing.sparse.segments import write_segments
from indexing.store.artifact import Artifacts, Recipe, fingerprint, remove
from indexing.store.datastore import Datastore, Split
from indexing.store.paths import joined, path_of
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages.generations import all_shards, generations
from pipelines.stages.shards import Shard, finished, run_shards

# --- sparse --------------------------------------------------------------------------------------------------------


def run_sparse(config: Config, executor: Executor) -> Artifacts:
    """Chunks → an inverted index over their terms, shard by shard."""
    folder = config.datastore
    train = Datastore.open(folder).train

    def shard_of(shard: int) -> Shard:
        rows = (int(train.tokens.starts[shard]), int(train.tokens.starts[shard + 1]))
        recipe = Recipe("sparse", 2, {"first_id": rows[0]}, {"chunks": finished(folder, path_of("chunks", shard))})
        return Shard(path_of(SPARSE, shard), recipe, (train, rows), train.chunk_rows[shard])

    return run_shards(folder, "sparse", "chunks", sparse_task, map(shard_of, all_shards(folder)), executor)


def sparse_task(work: Path, train: Split, rows: tuple[int, int], *, advance: Advance) -> dict[str, Any]:
    """Write the inverted lists of one shard."""
    return {"chunks": write_segments(work, train, rows, Tokenizer.open(train.folder / "tokenizer"), advance)}


# --- ngrams: for `neighbors.search` = "ngrams" ---------------------------------------------------------------------


def run_ngrams(config: Config, executor: Executor) -> Artifacts:
    """Chunks → the n-grams of all chunks of a generation, each shard a range of their hashes: runs of every shard, then
    merged."""
    folder, made = config.datastore, list[str]()
    train = Datastore.open(folder).train
    for numbers in generations(folder):
        generation, chunks = Generation(train, numbers), finished(folder, path_of("chunks", numbers))
        recipe = partial(Recipe, "ngrams", 1, inputs={"chunks": chunks})
        for group in generation.passes():
            settings = {"first": group.start, "stop": group.stop}
            runs = f"{NGRAMS}/{RUNS}/{fingerprint([settings, {'chunks': chunks.fingerprint}])}"
            sorted_runs = [
                Shard(
                    path=path_of(runs, shard),
                    recipe=recipe(settings | {"shard": shard}),
                    arguments=(generation, shard, group),
                    size=train.chunk_rows[shard],
                )
                for shard in numbers
            ]
            merged = [
                Shard(
                    path=path_of(NGRAMS, shard),
                    recipe=recipe({"shard": shard, "shards": len(numbers)}),
                    arguments=(generation, folder / runs, group, shard),
                    size=1,
                )
                for shard in group
            ]
            _merge_runs(folder, sorted_runs, merged, executor)
            made += [shard.path for shard in merged]
    return finished(folder, joined(made))


def _merge_runs(folder: Path, runs: list[Shard], merged: list[Shard], executor: Executor) -> None:
    """Make the runs if a shard that is merged from them is unfinished, then the shards."""

    def make_runs(unfinished: Sequence[Shard]) -> None:
        if unfinished:
            run_shards(folder, "ngrams", "chunks", run_task, runs, executor)

    run_shards(folder, "ngrams", "shards", merge_task, merged, executor, name="ngrams, merge", before=make_runs)
    if (folder / NGRAMS / RUNS).exists():  # also those of a build that was killed after its last shard
        remove(folder / NGRAMS / RUNS)


def run_task(work: Path, generation: Generation, shard: int, group: range, *, advance: Advance) -> None:
    """Sort the n-grams of one shard of chunks."""
    write_run(work, generation, shard, group, advance)


def merge_task(
    work: Path, generation: Generation, runs: Path, group: range, shard: int, *, advance: Advance
) -> dict[str, Any]:
    """Merge the runs of a generation into one shard of n-grams."""
    counts = write_ngrams(work, generation, runs, group, shard)
    advance(1)
    return counts
