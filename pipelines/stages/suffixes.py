"""The stages `suffixes`, exact matches of any length, and `votes`, what follows them in other documents."""

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from indexing.machine import usable_memory
from indexing.progress import Advance
from indexing.store.artifact import Artifacts, Recipe, fingerprint, made_by, parse_manifest, remove
from indexing.store.datastore import Datastore, Split
from indexing.store.errors import InputError
from indexing.store.files import MANIFEST
from indexing.store.paths import path_of
from indexing.store.stages import left_out
from indexing.suffixes.order import (
    ALL_HEADS,
    LONGEST,
    RUNS,
    SortedRun,
    carries_tokens,
    num_parts,
    part_path,
    planned_orders,
    recorded_parts,
    runs_together,
    shards_of,
    stored_orders,
)
from indexing.suffixes.order import FOLDER as SUFFIXES
from indexing.suffixes.order import VERSION as ORDER_VERSION
from indexing.suffixes.order_build import copy_part, cuts, write_part, write_run
from indexing.suffixes.texts import Texts
from indexing.suffixes.votes import FOLDER as VOTES
from indexing.suffixes.votes import LARGEST_VOCABULARY, VERSION, deletions_of
from indexing.suffixes.votes_build import (
    Voting,
    num_ranges,
    open_prefixes,
    ranges_of_task,
    shards_of_block,
    write_block,
    write_held_out,
    write_ranges,
    write_shard,
)
from pipelines.config import Config
from pipelines.executors.tasks import Executor, kept_for_stage
from pipelines.stages.generations import all_shards, generations
from pipelines.stages.shards import Shard, finished, former_setting, run_shards

log = logging.getLogger("retro")

_PREFIX_RUNS = f"{SUFFIXES}/{RUNS}"
_HELD_OUT, _RANGES, _BLOCKS = TEMPORARY_VOTES = tuple(f"{VOTES}/{name}" for name in ("held-out", "ranges", "blocks"))

# --- suffixes: exact matches of any length -------------------------------------------------------------------------


def run_suffixes(config: Config, executor: Executor) -> Artifacts:
    """Chunks → the prefixes of the training documents in one order, or in a few if the datastore has grown."""
    folder = config.datastore
    datastore = Datastore.open(folder)
    tokens = datastore.manifest["splits"]["train"]["tokens"]
    votes = "votes" not in left_out(config.skip_stages)
    orders = [
        _Order(folder, datastore.train, shards, tokens, votes) for shards in planned_orders(generations(folder), tokens)
    ]
    for order in orders:
        order.make(executor)
    runs = folder / _PREFIX_RUNS  # also those of a build that was killed after its last part
    kept = {folder / _run_path(path) for order in orders if order.keeps_tokens for path, _ in order.parts}
    for path in {*runs.glob("*")} - kept if kept else [runs] * runs.exists():
        remove(path)
    return finished(folder, [path for order in orders for path, _ in order.parts])


@dataclass(frozen=True)
class _Order:
    """The order of some shards of a datastore.

    Attributes:
        folder: the datastore.
        train: its training documents.
        shards: their numbers.
        tokens: training tokens of every shard of the datastore.
        votes: whether the stage `votes` follows.
    """

    folder: Path
    train: Split
    shards: range
    tokens: Sequence[int]
    votes: bool

    @cached_property
    def size(self) -> int:
        """Its tokens."""
        return sum(self.tokens[self.shards.start : self.shards.stop])

    @cached_property
    def parts(self) -> list[tuple[str, Recipe]]:
        """The path and the recipe of each part."""
        # As many as a finished order has: an earlier version made fewer.
        count = former_setting(self.folder / part_path(self.shards, 0), "parts", num_parts(self.size))
        recipe = partial(Recipe, "suffixes", ORDER_VERSION, inputs={"chunks": self._chunks(self.shards)})
        return [(part_path(self.shards, part), recipe({"part": part, "parts": count})) for part in range(count)]

    @cached_property
    def carried(self) -> bool:
        """Whether its runs carry tokens. A build that was killed has filled some of the room with runs."""
        runs = sum(path.stat().st_size for path in (self.folder / _PREFIX_RUNS).glob("*/*"))
        room = shutil.disk_usage(self.folder).free + runs
        return carries_tokens(self.size * self.train.tokens.dtype.itemsize, usable_memory(), room)

    @property
    def keeps_tokens(self) -> bool:
        """Whether a run of all its shards is kept for `votes`, because it carries tokens."""
        return self.carried and self.votes

    @cached_property
    def borders(self) -> list[int]:
        """Heads between which those of each part are, [parts + 1]."""
        return [0, *cuts(Texts(self.train), self.shards, len(self.parts)), ALL_HEADS]

    def make(self, executor: Executor) -> None:
        """Make the unfinished parts."""
        merges, task = [list[Any]() for _ in self.parts], copied_part_task if self.keeps_tokens else suffixes_task

        def make_runs(unfinished: Sequence[Shard]) -> None:  # the arguments of these parts
            if unfinished:
                runs = self._merged(self._runs(executor), executor)
                for arguments, merge in zip(merges, self._merges(runs), strict=True):
                    arguments.extend(merge)

        parts = [
            Shard(path, recipe, (self.folder, self.shards, merge), self.size // len(self.parts))
            for (path, recipe), merge in zip(self.parts, merges, strict=True)
        ]
        _remove_others(self.folder, parts)
        run_shards(self.folder, "sparse", "tokens", task, parts, executor, name="suffixes", before=make_runs)

    def _merges(self, runs: Sequence[SortedRun]) -> list[tuple[list[Sequence[Path]], int, int]]:
        """What each part is merged from: the folders of the parts of each run, and between which heads."""
        return [([run.between(first, stop) for run in runs], first, stop) for first, stop in pairwise(self.borders)]

    def _runs(self, executor: Executor) -> list[SortedRun]:
        """What is merged: whole orders of some of the shards, and of all others one run each, which is made.

        An order carries no tokens. If runs do, its shards are sorted again instead: that reads their text in sequence.
        """
        runs, made, first = list[SortedRun](), list[Shard](), self.shards.start
        stored = {shards_of(path.relative_to(self.folder).as_posix()) for path in self.folder.glob(f"{SUFFIXES}/*-*-*")}
        while first < self.shards.stop:
            if not self.carried and (order := self._whole_order(first, stored)):
                runs.append(SortedRun(order.shards, [self.folder / path for path, _ in order.parts], order.borders))
            else:
                own, path = range(first, first + 1), path_of(_PREFIX_RUNS, first)
                settings = {"run": first, "carried": self.carried}
                recipe = Recipe("suffixes", ORDER_VERSION, settings, {"chunks": self._chunks(own)})
                made.append(Shard(path, recipe, (self.folder, first, self.carried), self.train.chunk_rows[first]))
                runs.append(SortedRun(own, [self.folder / path], [0, ALL_HEADS]))
            first = runs[-1].shards.stop
        _remove_others(self.folder, made)
        run_shards(self.folder, "sparse", "chunks", prefix_run_task, made, executor, name="suffixes, runs")
        return runs

    def _merged(self, runs: list[SortedRun], executor: Executor) -> list[SortedRun]:
        """The same prefixes in at most `FAN_IN` runs, or in one whose tokens are kept."""
        while (together := runs_together(len(runs))) > 1:
            groups = [runs[first : first + together] for first in range(0, len(runs), together)]
            runs = self._longer_runs(groups, False, executor)
        return self._longer_runs([runs], True, executor) if self.keeps_tokens else runs

    def _longer_runs(self, groups: Sequence[list[SortedRun]], whole: bool, executor: Executor) -> list[SortedRun]:
        """Merge each group of runs into one longer run; `whole`: in the order of 64 tokens."""
        longer, made = list[SortedRun](), list[Shard]()
        for runs in groups:
            if len(runs) == 1 and not whole:
                longer += runs
                continue
            order = replace(self, shards=range(runs[0].shards.start, runs[-1].shards.stop))
            merged = fingerprint([folder.name for run in runs for folder in run.folders])
            settings = {"merged": merged, "carried": self.carried, "whole": whole}
            parts = [
                Shard(
                    path=_run_path(path),
                    recipe=replace(recipe, settings={**recipe.settings, **settings}),
                    arguments=(self.folder, order.shards, merge, self.carried, whole),
                    size=order.size // len(order.parts),
                )
                for (path, recipe), merge in zip(order.parts, order._merges(runs), strict=True)
            ]
            made += parts
            longer.append(SortedRun(order.shards, [self.folder / part.path for part in parts], order.borders))
        _remove_others(self.folder, made)
        run_shards(self.folder, "sparse", "tokens", longer_run_task, made, executor, name="suffixes, longer runs")
        return longer

    def _whole_order(self, first: int, stored: set[range | None]) -> "_Order | None":
        """The largest whole order among the stored ones that begins with this shard, and is a part of this one."""
        inner = [shards for shards in stored if shards and shards.start == first and shards.stop <= self.shards.stop]
        for order in (replace(self, shards=shards) for shards in sorted(inner, key=len, reverse=True)):
            if all(made_by(self.folder / path, [recipe]) for path, recipe in order.parts):
                return order
        return None

    def _chunks(self, shards: range) -> Artifacts:
        return finished(self.folder, path_of("chunks", shards))


@kept_for_stage
def _train(folder: Path) -> Texts:
    return Texts(Datastore.open(folder).train)


def _run_path(part: str) -> str:
    """The path of a part of a longer run, from that of the part of an order of the same shards."""
    return f"{_PREFIX_RUNS}/{part.rpartition('/')[2]}"


def prefix_run_task(work: Path, folder: Path, shard: int, carried: bool, *, advance: Advance) -> None:
    """Sort the prefixes of one shard by their last tokens."""
    write_run(work, _train(folder), shard, advance, carried=carried)


def longer_run_task(
    work: Path,
    folder: Path,
    shards: range,
    merge: tuple[list[list[Path]], int, int],
    carried: bool,
    whole: bool,
    *,
    advance: Advance,
) -> None:
    """Merge the runs of some shards into one part of a longer run."""
    texts = _train(folder)
    compared = LONGEST if whole else texts.head_tokens
    write_part(work, texts, shards, *merge, advance, compared=compared, carried=carried)


def suffixes_task(
    work: Path, folder: Path, shards: range, merge: tuple[list[list[Path]], int, int], *, advance: Advance
) -> dict[str, Any]:
    """Merge the runs of some shards into one part of their order."""
    return {"tokens": write_part(work, _train(folder), shards, *merge, advance)}


def copied_part_task(
    work: Path, folder: Path, shards: range, merge: tuple[list[list[Path]], int, int], *, advance: Advance
) -> dict[str, Any]:
    """Take one part of an order from the run of all its shards, without its tokens."""
    (parts,) = merge[0]
    if not parts:  # its borders are equal, so there is nothing between them
        return suffixes_task(work, folder, shards, merge, advance=advance)
    (source,) = parts
    tokens = copy_part(work, _train(folder), source)
    advance(tokens)
    return {"tokens": tokens}


def remove_other_orders(datastore: Path) -> None:
    """Remove orders that the datastore's manifest does not name: those of an older version, and those that were merged
    into others."""
    named = {name for name, _ in recorded_parts(Datastore.open(datastore))}
    for path in (datastore / SUFFIXES).glob("[0-9]*"):
        if path.relative_to(datastore).as_posix() not in named:
            remove(path)


# --- votes: for every token, the tokens that follow its text in other documents -----------------------------------


def run_votes(config: Config, executor: Executor) -> Artifacts:
    """Sorted prefixes → the votes of every token: first those of ranges of prefixes, then those of shards.

    Tokens that had votes before documents were appended keep them.

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
    numbers, ranges, rows = all_shards(folder), list[Path](), datastore.train.chunk_rows
    kept = _kept(datastore)
    voters, block = _voters(datastore, kept), shards_of_block(len(numbers))

    def shard_of(shard: int) -> Shard:
        collected = ([folder / path_of(_BLOCKS, shard // block)], shard % block) if block > 1 else (ranges, shard)
        recipe = kept.get(shard, voters).recipe(shard=shard)
        return Shard(path_of(VOTES, shard), recipe, (datastore, shard, *collected), rows[shard])

    def make_ranges(unfinished: Sequence[Shard]) -> None:
        if unfinished:
            _tell_kept(sum(rows[shard] for shard in kept if shard not in voters.shards))
            ranges.extend(_ranges(voters, executor))  # arguments of the shards
            if block > 1:
                _make_blocks(voters, ranges, block, executor)

    shards = [shard_of(shard) for shard in numbers]
    _remove_others(folder, shards)
    votes = run_shards(
        folder, "sparse", "chunks", shard_votes_task, shards, executor, name="votes, collect", before=make_ranges
    )
    for temporary in (*TEMPORARY_VOTES, _PREFIX_RUNS):
        if (folder / temporary).exists():  # also those of a build that was killed after its last shard
            remove(folder / temporary)
    return votes


@dataclass(frozen=True)
class _Voters:
    """The documents that vote for some shards.

    Attributes:
        datastore: the datastore.
        stops: the last shard + 1 of each order of these documents.
        searched: how many orders are searched, the first ones. The others have the shards, and are read whole.
        shards: the shards whose votes are made.
    """

    datastore: Datastore
    stops: tuple[int, ...]
    searched: int
    shards: tuple[int, ...] = ()

    @property
    def whole(self) -> range:
        """The shards of the orders that are read whole."""
        return range((0, *self.stops)[self.searched], self.stops[-1])

    @cached_property
    def _inputs(self) -> tuple[str, Artifacts]:
        chunks = finished(self.datastore.folder, path_of("chunks", range(self.stops[-1])))
        return deletions_of(self.datastore), chunks

    def recipe(self, **settings: object) -> Recipe:
        """The recipe of something that is made from these documents."""
        deleted, chunks = self._inputs
        made_from = {"deleted": deleted, "orders": self.stops, "searched": self.searched}
        return Recipe("votes", VERSION, made_from | settings, {"chunks": chunks})


def _kept(datastore: Datastore) -> dict[int, _Voters]:
    """The shards that have votes, and the documents that voted: all of their generation and of those before it at
    least."""
    kept, known = dict[int, _Voters](), dict[tuple[tuple[int, ...], int], _Voters]()
    for shard in all_shards(datastore.folder):
        out = datastore.folder / path_of(VOTES, shard)
        try:
            settings = parse_manifest(out)["recipe"]["settings"]
            stops, searched = tuple(map(int, settings["orders"])), int(settings["searched"])
        except (InputError, KeyError):  # not made yet, damaged, or of an older version
            continue
        if shard < stops[-1] <= len(datastore.train.chunk_rows):
            voters = known.setdefault((stops, searched), _Voters(datastore, stops, searched))
            if made_by(out, [voters.recipe(shard=shard)]):
                kept[shard] = voters
    return kept


def _voters(datastore: Datastore, kept: dict[int, _Voters]) -> _Voters:
    """The documents that vote for the other shards: all. Shards that all documents voted for are among these, so that a
    build that was killed continues with the same ranges."""
    stops = tuple(shards.stop for shards, _ in stored_orders(datastore.train))
    shards = [
        shard for shard in all_shards(datastore.folder) if shard not in kept or kept[shard].stops[-1] == stops[-1]
    ]
    searched = sum(stop <= min(shards, default=0) for stop in stops)
    return _Voters(datastore, stops, searched, tuple(shards))


def _tell_kept(chunks: int) -> None:
    if chunks:
        log.info(
            "votes: %s earlier chunks keep their votes. To count the new documents for them too: "
            "retro index CONFIG --stage votes --rebuild",
            f"{chunks:,}",
        )


def _remove_others(folder: Path, shards: list[Shard]) -> None:
    """Remove what is of other text or of an older version, and damaged, instead of refusing it: all it is made from
    exists."""
    for out, recipe in ((folder / shard.path, shard.recipe) for shard in shards):
        if (out / MANIFEST).exists() and not made_by(out, [recipe]):
            remove(out)


def _ranges(voters: _Voters, executor: Executor) -> list[Path]:
    """Make the votes of every range of prefixes."""
    datastore, folder, wanted = voters.datastore, voters.datastore.folder, fingerprint(voters.shards)
    tokens = sum(datastore.manifest["splits"]["train"]["tokens"][voters.whole.start : voters.whole.stop])
    held_out = [
        Shard(path_of(_HELD_OUT, shard), voters.recipe(held_out=shard), (datastore, shard), 1)
        for shard in voters.shards
    ]
    _remove_others(folder, held_out)
    run_shards(folder, "sparse", "shards", held_out_task, held_out, executor, name="votes, held-out documents")
    inner = cuts(Texts(datastore.train), voters.whole, num_ranges(tokens))
    borders = [0, *(head for head in sorted(set(inner)) if head), ALL_HEADS]
    together = ranges_of_task(len(borders) - 1)
    groups = [borders[first : first + together + 1] for first in range(0, len(borders) - 1, together)]
    shards = [
        Shard(
            path=path_of(_RANGES, number),
            recipe=voters.recipe(borders=[str(border) for border in own], shards=wanted),
            arguments=(datastore, folder / _HELD_OUT, voters.shards, voters.searched, own),
            size=tokens // len(groups),
        )
        for number, own in enumerate(groups)
    ]
    _remove_others(folder, shards)
    run_shards(folder, "sparse", "tokens", range_votes_task, shards, executor, name="votes")
    return [folder / shard.path for shard in shards]


def _make_blocks(voters: _Voters, ranges: list[Path], block: int, executor: Executor) -> None:
    """Collect the votes of all ranges in blocks of shards."""
    folder, numbers = voters.datastore.folder, all_shards(voters.datastore.folder)
    shards = [
        Shard(
            path=path_of(_BLOCKS, number),
            recipe=voters.recipe(block=[own[0], own[-1]], shards=fingerprint(voters.shards)),
            arguments=(ranges, own),
            size=len(own),
        )
        for number in sorted({shard // block for shard in voters.shards})
        for own in [numbers[number * block : (number + 1) * block]]
    ]
    _remove_others(folder, shards)
    run_shards(folder, "sparse", "shards", block_votes_task, shards, executor, name="votes, blocks of shards")


def held_out_task(work: Path, datastore: Datastore, shard: int, *, advance: Advance) -> None:
    """Sort the prefixes of the held-out documents of one shard."""
    write_held_out(work, datastore, shard)
    advance(1)


def range_votes_task(
    work: Path,
    datastore: Datastore,
    held_out: Path,
    shards: tuple[int, ...],
    searched: int,
    borders: list[int],
    *,
    advance: Advance,
) -> dict[str, Any]:
    """Find the votes of the prefixes of consecutive ranges."""
    prefixes = _open_prefixes(datastore.folder, held_out, shards, searched)
    return write_ranges(work, datastore, prefixes, borders, advance)


@kept_for_stage
def _open_prefixes(folder: Path, held_out: Path, shards: tuple[int, ...], searched: int) -> Voting:
    return open_prefixes(Datastore.open(folder), held_out, shards, searched)


def block_votes_task(work: Path, ranges: list[Path], shards: range, *, advance: Advance) -> None:
    """Collect the votes of consecutive shards."""
    write_block(work, ranges, shards)
    advance(len(shards))


def shard_votes_task(
    work: Path, datastore: Datastore, shard: int, collected: list[Path], number: int, *, advance: Advance
) -> dict[str, Any]:
    """Collect the votes of one shard."""
    counts = write_shard(work, datastore, shard, collected, number)
    advance(datastore.train.chunk_rows[shard])
    return counts
