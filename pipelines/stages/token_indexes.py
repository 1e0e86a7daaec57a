"""The stages that index the tokens of chunks: `sparse`, `ngrams`, `suffixes` and `votes`."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from indexing.ngrams.index import FOLDER as NGRAMS
from indexing.ngrams.index import RUNS, Generation, write_ngrams, write_run
from indexing.progress import Advance
from indexing.sparse.index import FOLDER as SPARSE
from indexing.sparse.segments import write_segments
from indexing.store.artifact import Artifacts, Recipe, fingerprint, made_by, remove
from indexing.store.datastore import Datastore, Split
from indexing.store.errors import InputError
from indexing.store.files import MANIFEST
from indexing.store.paths import joined, path_of
from indexing.suffixes.build import FOLDER as SUFFIXES
from indexing.suffixes.build import planned_groups, stored_groups, write_sorted_prefixes
from indexing.suffixes.votes import FOLDER as VOTES
from indexing.suffixes.votes import LARGEST_VOCABULARY, VERSION, deletions_of
from indexing.suffixes.votes_build import cuts, groups_of, num_tokens, window_dtype, write_range, write_shard
from indexing.tokenization.tokenizer import Tokenizer
from pipelines.config import Config
from pipelines.executors.tasks import Executor
from pipelines.stages.generations import all_shards, generations
from pipelines.stages.shards import Shard, finished, run_shards

_RANGES = f"{VOTES}/ranges"
_LAST_KEY = 2**64

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
    """Chunks → the n-grams of all chunks of a generation, each shard a range of their hashes: runs of every shard, then merged."""
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


# --- suffixes: exact matches of any length -------------------------------------------------------------------------


def run_suffixes(config: Config, executor: Executor) -> Artifacts:
    """Chunks → the sorted prefixes of the training documents, a group of shards at a time."""
    folder = config.datastore
    train = Datastore.open(folder).train
    groups = [
        Shard(
            path=path_of(SUFFIXES, group.start),
            recipe=Recipe(
                "suffixes", 3, {"shards": len(group)}, {"chunks": finished(folder, path_of("chunks", group))}
            ),
            arguments=(train, group),
            size=sum(train.chunk_rows[group.start : group.stop]),
        )
        for shards in generations(folder)
        for group in planned_groups(train, shards)
    ]
    return run_shards(folder, "sparse", "chunks", suffixes_task, groups, executor, name="suffixes")


def suffixes_task(work: Path, train: Split, shards: range, *, advance: Advance) -> dict[str, Any]:
    """Sort the prefixes of one group."""
    return {"tokens": write_sorted_prefixes(work, train, shards, advance)}


# --- votes: for every token, the tokens that follow its text in other documents -----------------------------------


def run_votes(config: Config, executor: Executor) -> Artifacts:
    """Sorted prefixes → the votes of every token: first those of ranges of prefixes, then those of shards.

    Raises:
        InputError: the vocabulary is too large for the format.
    """
    folder = config.datastore
    datastore = Datastore.open(folder)
    if datastore.manifest["vocab_size"] > LARGEST_VOCABULARY:
        raise InputError(
            f"{folder} has a vocabulary of {datastore.manifest['vocab_size']:,}; the stage 'votes' stores token ids below "
            f'{LARGEST_VOCABULARY:,}. Set skip_stages = ["votes"].'
        )
    rows, deleted = datastore.train.chunk_rows, deletions_of(datastore)
    groups = joined([path_of(SUFFIXES, group.start) for group in stored_groups(datastore.train)])
    recipe = partial(Recipe, "votes", VERSION, inputs={"suffixes": finished(folder, groups)})
    ranges = list[Path]()

    def shard_of(shard: int) -> Shard:
        of_shard = recipe({"shard": shard, "deleted": deleted})
        return Shard(path_of(VOTES, shard), of_shard, (datastore, shard, ranges), rows[shard])

    def make_ranges(unfinished: Sequence[Shard]) -> None:  # the arguments of these shards
        if unfinished:
            ranges.extend(_ranges(datastore, lambda cut: recipe({"deleted": deleted} | cut), executor))

    shards = [shard_of(shard) for shard in all_shards(folder)]
    _remove_others(folder, shards)
    votes = run_shards(
        folder, "sparse", "chunks", shard_votes_task, shards, executor, name="votes, collect", before=make_ranges
    )
    if (folder / _RANGES).exists():  # also those of a build that was killed after its last shard
        remove(folder / _RANGES)
    return votes


def _remove_others(folder: Path, shards: list[Shard]) -> None:
    """Remove votes of other text, and damaged ones, instead of refusing them: all they are made from exists."""
    for out, recipe in ((folder / shard.path, shard.recipe) for shard in shards):
        if (out / MANIFEST).exists() and not made_by(out, [recipe]):
            remove(out)


def _ranges(datastore: Datastore, recipe: Callable[[dict[str, Any]], Recipe], executor: Executor) -> list[Path]:
    """Make the votes of every range of prefixes."""
    groups = groups_of(datastore)
    borders = list(pairwise([0, *cuts(groups, window_dtype(datastore)), _LAST_KEY]))
    shards = [
        Shard(
            path=path_of(_RANGES, number),
            recipe=recipe({"first": str(first), "stop": str(stop)}),
            arguments=(datastore, first, stop),
            size=num_tokens(groups) // len(borders),
        )
        for number, (first, stop) in enumerate(borders)
    ]
    _remove_others(datastore.folder, shards)
    run_shards(datastore.folder, "sparse", "tokens", range_votes_task, shards, executor, name="votes")
    return [datastore.folder / shard.path for shard in shards]


def range_votes_task(work: Path, datastore: Datastore, first: int, stop: int, *, advance: Advance) -> dict[str, Any]:
    """Find the votes of the prefixes of one range."""
    return {"tokens": write_range(work, datastore, first, stop, advance)}


def shard_votes_task(
    work: Path, datastore: Datastore, shard: int, ranges: list[Path], *, advance: Advance
) -> dict[str, Any]:
    """Collect the votes of one shard."""
    counts = write_shard(work, datastore, shard, ranges)
    advance(datastore.train.chunk_rows[shard])
    return counts
