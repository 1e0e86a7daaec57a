"""All prefixes are in one order, however it was cut, merged, appended to and interrupted."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexing.store.artifact import Recipe, create
from indexing.store.datastore import Datastore, delete_documents
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_checked
from indexing.suffixes import order, order_build
from indexing.suffixes.order import (
    ALL_HEADS,
    FOLDER,
    LONGEST,
    Prefixes,
    SortedRun,
    carries_tokens,
    planned_orders,
    position_bytes,
    runs_together,
    stored_orders,
)
from indexing.suffixes.order_build import sorted_rows
from indexing.suffixes.search import SuffixIndex
from indexing.suffixes.texts import Texts
from indexing.suffixes.votes import read_votes
from pipelines.stages import suffixes
from tests.conftest import build_local, contents, tiny_config, write_corpus
from tests.indexing.suffixes.whole_search import (
    appended,
    assert_equal_to_a_search_through_the_text,
    ordered_positions,
    problems_of,
)


def test_a_merge_of_runs_that_carry_tokens_does_not_read_the_text(
    datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Texts(datastore.train)
    for shard in range(2):
        (tmp_path / str(shard)).mkdir()
        order_build.write_run(tmp_path / str(shard), texts, shard, carried=True)
    read = list[int]()
    monkeypatch.setattr(Texts, "shard", lambda self, number: read.append(number))
    (tmp_path / "part").mkdir()
    runs = [[tmp_path / "0"], [tmp_path / "1"]]
    count = order_build.write_part(tmp_path / "part", texts, range(2), runs, 0, ALL_HEADS, lambda units: None)
    assert (count, read) == (sum(np.load(tmp_path / str(shard) / "positions.npy").size for shard in range(2)), [])
    assert np.load(tmp_path / "part" / "positions.npy").tolist() == ordered_positions(datastore.train)


@pytest.mark.parametrize(
    ("part", "size", "width", "fan_in"),
    [(1 << 27, 1 << 20, 4, 512), (7000, 1 << 20, 5, 3), (2000, 700, 6, 2)],
)
def test_an_order_is_that_of_all_prefixes_in_parts_and_ranges_of_any_size(
    part: int, size: int, width: int, fan_in: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "FAN_IN", fan_in)
    monkeypatch.setattr(order, "PART_TOKENS", part)
    monkeypatch.setattr(order_build, "RANGE_TOKENS", size)
    for module in (order, order_build):
        monkeypatch.setattr(module, "ROWS_OF_HEAD", 16)
    for module in (order, order_build):
        monkeypatch.setattr(module, "position_bytes", lambda positions: width)
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 60))
    config = replace(config, corpus=replace(config.corpus, shard_bytes=8000))
    for stage in ("chunk", "suffixes"):
        built = build_local(config, only=stage)
    ((shards, parts),) = stored_orders(built.train)
    assert shards == range(len(built.train.chunk_rows))
    assert len(shards) > 1
    prefixes = Prefixes(Texts(built.train), parts)
    assert (len(parts) > 1) == (len(prefixes) > part)
    assert prefixes.positions(0, len(prefixes)).tolist() == ordered_positions(built.train)
    for rows in (range(3, 90, 7), range(1, len(prefixes), 1000)):
        assert prefixes.positions(rows.start, rows.stop, rows.step).tolist() == prefixes.take(np.array(rows)).tolist()
    assert_equal_to_a_search_through_the_text(built.train)
    assert not problems_of(built.folder)
    for folder in parts:
        shutil.rmtree(folder)
        (problem,) = problems_of(built.folder)
        assert problem.artifact == folder.relative_to(built.folder).as_posix()
        build_local(config, only="suffixes")
    assert not (built.folder / FOLDER / "runs").exists()


@pytest.mark.parametrize(
    ("millions", "parts"), [(0, 1), (3, 1), (10, 4), (134, 63), (366, 64), (9000, 68), (10**6, 7451)]
)
def test_an_order_has_parts_for_many_cores(millions: int, parts: int) -> None:
    assert order.num_parts(millions * 10**6) == parts


def test_a_datastore_of_an_earlier_version_keeps_its_shards_and_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 60), skip_stages=("votes",))
    before = contents(build_local(config).folder)
    monkeypatch.setattr(order, "PART_TOKENS", 2000)
    built = build_local(replace(config, corpus=replace(config.corpus, shard_bytes=0)))
    assert contents(built.folder) == before
    assert not problems_of(built.folder)


def test_levels_of_merges_and_carried_tokens_change_no_byte_and_open_few_files(
    datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "PART_TOKENS", 3000)
    merged, write_part = list[int](), suffixes.write_part

    def counted(*arguments: Any, **settings: Any) -> int:
        runs = arguments[3]
        assert all(len(folders) <= 3 for folders in runs)
        merged.append(len(runs))
        return write_part(*arguments, **settings)

    monkeypatch.setattr(suffixes, "write_part", counted)
    written = []
    for fan_in, memory in itertools.product((512, 2, 3), (1 << 30, 0)):
        config = tiny_config(tmp_path / f"{fan_in}-{memory}", datastore.folder.parent / "corpus.jsonl")
        config = replace(config, corpus=replace(config.corpus, shard_bytes=6000))
        monkeypatch.setattr(order, "FAN_IN", fan_in)
        monkeypatch.setattr(suffixes, "usable_memory", lambda: memory)  # noqa: B023
        for stage in ("chunk", "suffixes"):
            built = build_local(config, only=stage)
        shards = len(built.train.chunk_rows)
        assert shards > 2 * 3
        assert max(merged) == min(fan_in, shards)
        assert len(set(merged)) > (fan_in < shards) - 1
        written.append(contents(built.folder / FOLDER))
        merged.clear()
    assert len(written[0]) > 2 * 3
    assert all(files == written[0] for files in written)


@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_a_part_between_equal_borders_is_empty(memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most documents repeat one word, so its head has more prefixes than a part. Runs carry tokens without memory."""
    monkeypatch.setattr(order, "PART_TOKENS", 100)
    monkeypatch.setattr(suffixes, "usable_memory", lambda: memory)
    texts = ["same " * 40 + f"{number % 3}" for number in range(20)]
    lines = [json.dumps({"id": str(number), "text": text, "title": ""}) for number, text in enumerate(texts)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    config = tiny_config(tmp_path, tmp_path / "corpus.jsonl", skip_stages=())
    for stage in ("chunk", "suffixes"):
        built = build_local(config, only=stage)
    ((_, parts),) = stored_orders(built.train)
    prefixes = Prefixes(Texts(built.train), parts)
    assert len(prefixes.folders) < len(parts)
    assert prefixes.positions(0, len(prefixes)).tolist() == ordered_positions(built.train)
    votes = read_votes(build_local(config, only="votes").train, np.arange(built.train.num_chunks))
    assert votes["length"].any()
    assert not problems_of(built.folder)


def test_runs_are_merged_in_as_few_levels_as_they_need() -> None:
    for runs, levels in ((1, 0), (512, 0), (513, 1), (66_667, 1), (512**2, 1), (512**2 + 1, 2), (10**7, 2)):
        count = 0
        while (together := runs_together(runs)) > 1:
            assert together <= order.FAN_IN
            runs, count = -(-runs // together), count + 1
        assert (count, runs <= order.FAN_IN) == (levels, True)


def test_runs_carry_tokens_if_the_memory_is_too_small_and_the_disk_has_room() -> None:
    text = 10**12
    room = 3 * (1 + LONGEST) * text
    assert carries_tokens(text, 2 * text - 1, room + 1)
    assert not carries_tokens(text, 2 * text, room + 1)
    assert not carries_tokens(text, 0, room)


def test_parts_of_runs_are_opened_for_the_heads_that_they_can_have() -> None:
    run = SortedRun(range(3), [Path(name) for name in "abcd"], [0, 10, 10, 20, ALL_HEADS])
    for first, stop, names in ((0, 10, "a"), (0, 11, "abc"), (10, 20, "c"), (12, 13, "c"), (20, ALL_HEADS, "d")):
        assert "".join(map(str, run.between(first, stop))) == names
    assert "".join(map(str, run.between(0, ALL_HEADS))) == "abcd"


def test_positions_have_as_many_bytes_as_they_need() -> None:
    assert [position_bytes(count) for count in (0, 1, 2**32, 2**32 + 1, 2**40, 2**40 + 1)] == [4, 4, 4, 5, 5, 6]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("values", [1, 2, 200, 65_000])
def test_order_is_that_of_the_rows(dtype: type, values: int) -> None:
    """Of few and of many equal ones, which stay in their order, and of documents that end at any place."""
    random, width = np.random.default_rng(0), 8 // np.dtype(dtype).itemsize
    rows = random.integers(1, values + 1, (3000, 1 + LONGEST)).astype(dtype)
    rows[random.integers(0, 3000, 1500)] = rows[random.integers(0, 3000, 1500)]  # equal, or
    rows[::3, 1:30] = rows[0, 1:30]  # equal at first
    for row, length in enumerate(random.integers(0, 4 * LONGEST, len(rows)).tolist()):
        rows[row, 1 + length :] = 0
    for count in (0, 1, 2, 50, 3000):
        for compared in (width, LONGEST):
            key = [tuple(row[1 : 1 + compared]) for row in rows[:count].tolist()]
            order = sorted(range(count), key=key.__getitem__)
            ordered, numbers = sorted_rows(rows[:count], compared)
            assert numbers.tolist() == order
            assert ordered.tolist() == rows[order].tolist()


def test_a_grown_datastore_has_few_orders_each_larger_than_the_next() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        tokens = random.integers(0, 1000, 60).tolist()
        generations, sorted_again = [range(shard, shard + 1) for shard in range(60)], 0
        for count in range(1, 61):
            before, orders = (
                planned_orders(generations[: count - 1], tokens),
                planned_orders(generations[:count], tokens),
            )
            assert [shard for shards in orders for shard in shards] == list(range(count))
            sizes = [sum(tokens[shard] for shard in shards) for shards in orders]
            assert all(larger > 2 * smaller for larger, smaller in itertools.pairwise(sizes))
            sorted_again += sum(size for size, shards in zip(sizes, orders, strict=True) if shards not in before)
        assert sorted_again <= sum(tokens) * np.log(sum(tokens)) / np.log(1.5)


def test_orders_of_an_older_version_name_the_command_that_replaces_them(datastore: Datastore, tmp_path: Path) -> None:
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder)
    shutil.rmtree(folder / FOLDER)
    with create(folder / FOLDER / "00000", Recipe("suffixes", 3)):
        pass
    manifest = read_json(folder / "manifest.json")
    manifest["artifacts"][FOLDER] = f"{FOLDER}/00000"
    write_checked(folder / "manifest.json", manifest)
    config = tiny_config(tmp_path, datastore.folder.parent / "corpus.jsonl")
    for opened in (SuffixIndex.open, lambda folder: build_local(replace(config, datastore=folder), only="votes")):
        with pytest.raises(InputError, match=r"suffixes\b.* Run `retro index CONFIG`"):
            opened(folder)
    build_local(replace(config, datastore=folder), only="suffixes")
    suffixes = {name: data for name, data in contents(folder).items() if name.startswith("suffixes/")}
    assert suffixes == {name: data for name, data in contents(datastore.folder).items() if name.startswith("suffixes/")}


def test_an_order_of_the_version_before_is_replaced(
    datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts have the same names."""
    config = tiny_config(tmp_path, datastore.folder.parent / "corpus.jsonl")
    shutil.copytree(datastore.folder, config.datastore, ignore=shutil.ignore_patterns("suffixes"))
    monkeypatch.setattr(suffixes, "ORDER_VERSION", order.VERSION - 1)
    build_local(config, only="suffixes")
    with pytest.raises(InputError, match=r"Run `retro index CONFIG`"):
        SuffixIndex.open(config.datastore)
    monkeypatch.undo()
    assert contents(build_local(config, only="suffixes").folder / FOLDER) == contents(datastore.folder / FOLDER)


def test_two_builds_give_the_same_files(datastore: Datastore, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 60))
    build_local(config, only="chunk")
    build_local(config, only="suffixes")
    suffixes = {name: data for name, data in contents(config.datastore).items() if name.startswith("suffixes/")}
    assert suffixes == {name: data for name, data in contents(datastore.folder).items() if name.startswith("suffixes/")}


@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_appended_documents_have_an_order_that_is_merged_when_it_has_grown(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suffixes, "usable_memory", lambda: memory)
    appended(tmp_path, 60)
    files = contents(tmp_path / "datastore" / FOLDER)
    few = appended(tmp_path, 20)
    assert len(stored_orders(few.train)) == 2
    assert files.items() <= contents(few.folder / FOLDER).items()
    assert_equal_to_a_search_through_the_text(few.train)
    opened = SuffixIndex(few.train)
    merged = appended(tmp_path, 30)
    ((shards, parts),) = stored_orders(merged.train)
    assert shards == range(len(merged.train.chunk_rows))
    assert {path.name for path in (merged.folder / FOLDER).iterdir()} == {path.name for path in parts}
    assert Prefixes(Texts(merged.train), parts).positions(0, 1 << 30).tolist() == ordered_positions(merged.train)
    assert not problems_of(merged.folder)
    assert_equal_to_a_search_through_the_text(merged.train)
    assert_equal_to_a_search_through_the_text(few.train, opened)  # the files that it reads are removed, and still open


def test_documents_that_are_deleted_before_between_and_after_merges_do_not_occur(tmp_path: Path) -> None:
    for documents in (60, 20, 30):
        grown = appended(tmp_path, documents)
        delete_documents(
            grown.folder, [str(row["id"]) for row in grown.train.metadata([1, grown.train.num_documents - 2])]
        )
        split = Datastore.open(grown.folder).train
        assert len(split.deleted_documents) >= 2
        assert_equal_to_a_search_through_the_text(split)
    assert len(stored_orders(split)) == 1


def test_a_merge_that_was_killed_leaves_the_old_orders_and_is_finished_by_the_next_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    appended(tmp_path, 60)
    shutil.copytree(tmp_path, tmp_path / "other")
    before = contents(tmp_path / "datastore" / FOLDER)

    def killed(*arguments: object, **settings: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(suffixes, "write_part", killed)
    with pytest.raises(KeyboardInterrupt):
        appended(tmp_path, 50)
    found = contents(tmp_path / "datastore" / FOLDER)
    assert before.items() <= found.items()
    assert any(name.startswith("runs/") for name in found)
    monkeypatch.undo()
    config = tiny_config(tmp_path, tmp_path / "*.jsonl")
    finished, other = build_local(config, only="suffixes"), appended(tmp_path / "other", 50)
    assert contents(finished.folder / FOLDER) == contents(other.folder / FOLDER)
    assert len(stored_orders(finished.train)) == 1


@pytest.mark.parametrize(("merge", "memory"), [(1, 0), (4, 1 << 30), (7, 0)])
def test_a_build_that_was_killed_in_a_level_of_merges_resumes_to_the_same_bytes(
    merge: int, memory: int, datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, datastore.folder.parent / "corpus.jsonl")
    config = replace(config, corpus=replace(config.corpus, shard_bytes=6000))
    build_local(config, only="chunk")
    shutil.copytree(config.datastore, tmp_path / "whole")
    whole = build_local(replace(config, datastore=tmp_path / "whole"), only="suffixes")
    monkeypatch.setattr(order, "FAN_IN", 2)
    monkeypatch.setattr(suffixes, "usable_memory", lambda: memory)
    merged, write_part = list[Any](), suffixes.write_part

    def killed(*arguments: Any, **settings: Any) -> int:
        merged.append((*arguments[2:4], *settings.items()))
        if len(merged) == merge:
            raise KeyboardInterrupt
        return write_part(*arguments, **settings)

    monkeypatch.setattr(suffixes, "write_part", killed)
    with pytest.raises(KeyboardInterrupt):
        build_local(config, only="suffixes")
    assert (config.datastore / FOLDER / "runs").exists()
    built = build_local(config, only="suffixes")
    assert len(set(map(str, merged))) == len(merged) - 1  # the killed one is made again, and no other
    assert contents(built.folder / FOLDER) == contents(whole.folder / FOLDER)
