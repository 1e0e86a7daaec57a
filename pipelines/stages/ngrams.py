"""The `ngrams` stage: chunks → sorted lists of their n-grams, for `neighbors.search` = "ngrams"."""

from pathlib import Path

from indexing.ngrams.index import FOLDER, RUNS, Generation, write_ngrams, write_run
from indexing.progress import Advance
from indexing.store.artifact import Recipe, create, fingerprint, is_finished, remove
from indexing.store.datastore import Datastore, shard_name
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages.corpus import generations
from pipelines.stages.shards import fingerprint_of, joint_fingerprint, run_tasks, shard_task, shards


def run_ngrams(config: Config, executor: Executor) -> str:
    """Chunks → the n-grams of all chunks of a generation, each shard a range of their hashes."""
    folder = config.datastore
    train, runs = Datastore.open(folder).train, folder / FOLDER / RUNS
    for numbers in generations(folder):
        generation = Generation(train, numbers)
        inputs = {"chunks": joint_fingerprint(folder, "chunks", numbers)}
        merged = [_merged(folder, shard, numbers, inputs) for shard in numbers]
        missing = {out: recipe for out, recipe in merged if not is_finished(out, recipe)}
        for group in generation.passes():
            wanted = [shard for shard in group if folder / FOLDER / shard_name(shard) in missing]
            if wanted:
                _make(folder, generation, group, wanted, missing, inputs, executor)
    if runs.exists():  # of a build that was killed after its last shard
        remove(runs)
    return fingerprint([fingerprint_of(path) for path in shards(folder, FOLDER)])


def _merged(folder: Path, shard: int, numbers: range, inputs: dict[str, str]) -> tuple[Path, Recipe]:
    return folder / FOLDER / shard_name(shard), Recipe("ngrams", 1, {"shard": shard, "shards": len(numbers)}, inputs)


def _make(
    folder: Path,
    generation: Generation,
    group: range,
    wanted: list[int],
    recipes: dict[Path, Recipe],
    inputs: dict[str, str],
    executor: Executor,
) -> None:
    """Make some shards: first the runs of all chunks, then the shards, then remove the runs."""
    settings = {"first": group.start, "stop": group.stop}
    runs = folder / FOLDER / RUNS / fingerprint([settings, inputs])
    todo = []
    for shard in generation.shards:
        recipe, out = Recipe("ngrams", 1, settings | {"shard": shard}, inputs), runs / shard_name(shard)
        if not is_finished(out, recipe):
            size = generation.train.chunk_rows[shard]
            todo.append(shard_task(out, recipe, generation, shard, group, size=size))
    run_tasks("ngrams", "chunks", run_task, todo, executor)
    outs = [folder / FOLDER / shard_name(shard) for shard in wanted]
    todo = [shard_task(out, recipes[out], generation, runs, group, size=1) for out in outs]
    run_tasks("ngrams", "shards", merge_task, todo, executor, name="ngrams, merge")
    remove(runs.parent)


def run_task(out: Path, recipe: Recipe, generation: Generation, shard: int, group: range, *, advance: Advance) -> None:
    """Sort the n-grams of one shard of chunks."""
    with create(out, recipe) as (work, _):
        write_run(work, generation, shard, group, advance)


def merge_task(
    out: Path, recipe: Recipe, generation: Generation, runs: Path, group: range, *, advance: Advance
) -> None:
    """Merge the runs of a generation into one shard of n-grams."""
    with create(out, recipe) as (work, counts):
        counts |= write_ngrams(work, generation, runs, group, recipe.settings["shard"])
    advance(1)
