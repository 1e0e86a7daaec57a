"""Sorted prefixes find what a search through the whole text finds: matches, their places, what follows, and runs of a text."""

import itertools
import json
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexing.store.artifact import Recipe, create
from indexing.store.datastore import Datastore, Split, delete_documents
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_checked
from indexing.suffixes import mapped_files, order, order_build, search
from indexing.suffixes.mapped_files import MappedFiles
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
from indexing.suffixes.order_build import order_of
from indexing.suffixes.search import Run, SuffixIndex, Tracer, trace
from indexing.suffixes.texts import Texts
from indexing.suffixes.votes import KEPT, SAMPLED, SHARES
from indexing.verification.datastore import DatastoreProblem, verify_datastore
from pipelines.stages import suffixes
from tests.conftest import build_local, contents, tiny_config, write_corpus


@pytest.fixture(scope="module")
def datastore(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    folder = tmp_path_factory.mktemp("suffixes")
    config = tiny_config(folder, write_corpus(folder / "corpus.jsonl", 60))
    build_local(config, only="chunk")
    return build_local(config, only="suffixes")


def documents_of(split: Split) -> list[list[int]]:
    """The tokens of every document that is not deleted."""
    tokens, lengths = split.tokens.read(0, split.num_chunks), split.lengths.read(0, split.num_chunks)
    kept = np.setdiff1d(np.arange(split.num_documents), split.deleted_documents)
    return [
        [token for chunk in range(first, stop) for token in tokens[chunk, : lengths[chunk]].tolist()]
        for first, stop in split.chunk_ranges(kept)
    ]


def expected(documents: list[list[int]], text: list[int]) -> tuple[int, int, Counter[int]]:
    """Length of the longest end of a text that is in the documents, its occurrences, and the tokens that follow it."""
    for length in range(len(text), 0, -1):
        ending, count, following = text[-length:], 0, Counter[int]()
        for document in documents:
            for first in range(len(document) - length + 1):
                if document[first : first + length] == ending:
                    count += 1
                    following.update(document[first + length : first + length + 1])
        if count:
            return length, count, following
    return 0, 0, Counter()


def texts(split: Split, documents: list[list[int]]) -> list[list[int]]:
    """Pieces of documents as they are, changed, across two documents, and of tokens that the datastore does not have."""
    random, pieces = np.random.default_rng(0), []
    for _ in range(12):
        document = documents[random.integers(len(documents))]
        first = int(random.integers(0, max(1, len(document) - 40)))
        pieces.append(document[first : first + int(random.integers(1, 40))])
    changed = [[*piece[:-3], 399, *piece[-2:]] for piece in pieces[:4]]
    across = [documents[0][-5:] + documents[1][:6], documents[2][-1:] + documents[3][:1]]
    return [*pieces, *changed, *across, documents[4], [399], [399, 399, documents[0][0]], []]


def assert_equal_to_a_search_through_the_text(split: Split, index: SuffixIndex | None = None) -> None:
    index, documents = index or SuffixIndex(split), documents_of(split)
    for text in texts(split, documents):
        length, count, following = expected(documents, text)
        match = index.longest_match(text)
        places = index.occurrences(match)
        assert (match.length, len(places)) == (length, count)
        assert not len(split.deleted) or not np.isin(split.documents_of(places[:, 0])[0], split.deleted_documents).any()
        for chunk, place in places.tolist():
            before = split.tokens.read(0, split.num_chunks)[: chunk + 1].reshape(-1)[
                : chunk * split.chunk_length + place + 1
            ]
            assert before[-length:].tolist() == text[-length:]
        tokens, counts = index.next_tokens(match)
        assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == following
        assert (np.diff(counts) <= 0).all()


def test_the_longest_match_is_that_of_a_search_through_all_documents(datastore: Datastore) -> None:
    assert len(datastore.train.chunk_rows) > 1
    assert_equal_to_a_search_through_the_text(datastore.train)


@pytest.mark.parametrize("rows", [1, 3])
def test_heads_of_few_rows_and_equal_heads_change_nothing(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (order, order_build):
        monkeypatch.setattr(module, "ROWS_OF_HEAD", rows)
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 60))
    build_local(config, only="chunk")
    split = build_local(config, only="suffixes").train
    assert_equal_to_a_search_through_the_text(split)
    heads = [np.load(file) for file in sorted((split.folder / FOLDER).glob("*/heads.npy"))]
    assert any((own[1:] == own[:-1]).any() for own in heads)
    assert all((own[1:] >= own[:-1]).all() for own in heads)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_words_compare_like_the_tokens_of_prefixes(datastore: Datastore, dtype: type) -> None:
    """Also in the first chunks of a shard, where eight bytes begin before the file does, and with larger token ids."""
    texts = Texts(datastore.train)
    texts.__dict__["dtype"], width = np.dtype(dtype), 8 // np.dtype(dtype).itemsize
    for shard in range(len(texts.starts) - 1):
        positions = texts.shard(shard).positions() + texts.starts[shard]
        available, windows = texts.available(positions), texts.windows(positions, LONGEST).astype(object)
        assert windows[0].tolist()[1:] == [0] * (LONGEST - 1)
        for skip in (0, width, LONGEST - width):
            expected = [0] * len(positions)
            for token in range(skip, skip + width):
                expected = [
                    number << 64 // width | int(row[token]) for number, row in zip(expected, windows, strict=True)
                ]
            assert texts.words(positions, available, skip).tolist() == expected


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_carried_tokens_give_the_order_that_the_text_gives(datastore: Datastore, dtype: type) -> None:
    texts = Texts(datastore.train)
    texts.__dict__["dtype"] = np.dtype(dtype)
    positions = np.concatenate([texts.shard(shard).positions() + texts.starts[shard] for shard in range(2)])
    np.random.default_rng(0).shuffle(positions)
    windows = texts.windows(positions, LONGEST)
    for compared in (texts.head_tokens, LONGEST):
        from_text = order_build.order_of_prefixes(texts, positions, compared)
        assert order_build.order_of_windows(windows, compared).tolist() == from_text.tolist()


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


def ordered_positions(split: Split) -> list[int]:
    """The positions of all prefixes in order: by their last 64 tokens, then by position."""
    tokens, m = split.tokens.read(0, split.num_chunks), split.chunk_length
    lengths, keys = split.lengths.read(0, split.num_chunks), list[tuple[list[int], int]]()
    for first, stop in split.chunk_ranges(np.arange(split.num_documents)):
        text = [token for chunk in range(first, stop) for token in tokens[chunk, : lengths[chunk]].tolist()]
        keys += [(text[max(0, end + 1 - LONGEST) : end + 1][::-1], first * m + end) for end in range(len(text))]
    return [position for _, position in sorted(keys)]


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


def test_some_positions_of_a_shard_are_every_nth_of_all(datastore: Datastore) -> None:
    text = Texts(datastore.train).shard(1)
    for step in (1, 2, 7, 1000, 10**6):
        assert text.positions(step).tolist() == text.positions()[::step].tolist()


def test_positions_have_as_many_bytes_as_they_need() -> None:
    assert [position_bytes(count) for count in (0, 1, 2**32, 2**32 + 1, 2**40, 2**40 + 1)] == [4, 4, 4, 5, 5, 6]


def test_order_is_that_of_the_rows() -> None:
    keys = np.random.default_rng(0).integers(0, 3, (500, 6)).astype(np.uint64)
    found = order_of(500, lambda rows, column: keys[rows, column], 6)
    assert found.tolist() == sorted(range(500), key=lambda row: keys[row].tolist())


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


@pytest.mark.parametrize("recorded", [f"{FOLDER}/00000", None])
def test_orders_of_an_older_version_name_the_command_that_replaces_them(
    recorded: str | None, datastore: Datastore, tmp_path: Path
) -> None:
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder)
    shutil.rmtree(folder / FOLDER)
    with create(folder / FOLDER / "00000", Recipe("suffixes", 3)):
        pass
    manifest = read_json(folder / "manifest.json")
    if recorded:
        manifest["artifacts"][FOLDER] = recorded
    else:
        del manifest["artifacts"]
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


def test_deleted_documents_do_not_occur(datastore: Datastore, tmp_path: Path) -> None:
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder)
    names = [str(row["id"]) for row in datastore.train.metadata(range(datastore.train.num_documents))]
    opened_before = SuffixIndex.open(folder)
    for deleted in (names[::3], [name for name in names if name not in names[1::9]]):
        delete_documents(folder, deleted)
        split = Datastore.open(folder).train
        assert 0 < split.num_documents - len(split.deleted) <= len(names) - len(deleted)
        assert_equal_to_a_search_through_the_text(split)
        assert_equal_to_a_search_through_the_text(split, opened_before)


def test_no_run_is_of_text_that_was_deleted_after_a_trace_began(datastore: Datastore, tmp_path: Path) -> None:
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder)
    split = Datastore.open(folder).train
    index, number, text = SuffixIndex(split), 3, documents_of(split)[3]
    tracer = Tracer(index, 8, text)
    delete_documents(folder, [str(split.metadata([number])[0]["id"])])
    length = expected(documents_of(split), text)[0]
    assert [run.stop - run.first for run in tracer.rest()] == [length] * (length >= 8)
    assert [run.stop - run.first for run in tracer.add(399)] == [length] * (length >= 8)
    assert all(index.count(run.match) for run in trace(index, np.array(text), 1))


@pytest.mark.parametrize("looked_at", [1, 8])
def test_only_occurrences_that_are_left_vote_and_are_drafted(
    looked_at: int, datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they are few among many deleted ones, which would be most of 32 that are spread evenly."""
    monkeypatch.setattr(mapped_files, "LOOKED_AT", looked_at)
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder)
    index = SuffixIndex.open(folder)
    rows = datastore.train.metadata(range(datastore.train.num_documents))
    before = {token: index.count(index.longest_match([token])) for token in range(400)}
    delete_documents(folder, [str(row["id"]) for number, row in enumerate(rows) if number % 20])
    documents, compared = documents_of(index.split), 0
    for token, count in before.items():
        _, left, following = expected(documents, [token])
        if count > 4 * SAMPLED and 0 < left <= SAMPLED and following:
            best = sorted(following.items(), key=lambda item: (-item[1], item[0]))
            (vote,) = index.votes(np.array([token]))
            total = following.total()
            tokens, shares = zip(*((token, SHARES * count // total) for token, count in best[:KEPT]), strict=True)
            none = (0,) * (KEPT - len(tokens))
            assert tuple(vote[: 5 + KEPT].tolist()) == (1, *tokens, *none, total.bit_length(), *shares, *none)
            assert not vote[5 + KEPT :].any()
            assert index.continuation(np.array([token]), 1)[1].tolist() == [best[0][0]]
            compared += 1
    assert compared >= 5


def test_a_continuation_follows_the_longest_match_with_its_most_frequent_token(datastore: Datastore) -> None:
    index, documents = SuffixIndex(datastore.train), documents_of(datastore.train)
    for text in texts(datastore.train, documents):
        length, count, following = expected(documents, text[-LONGEST:])
        found, after = index.continuation(np.array(text, np.int64), 20)
        assert found == length
        assert bool(len(after)) == bool(following)
        if following:
            whole = [*text[-length:], *after.tolist()]
            assert count > SAMPLED or following[after[0]] == max(following.values())
            assert any(
                document[first : first + len(whole)] == whole
                for document in documents
                for first in range(len(document) - len(whole) + 1)
            )


def problems_of(folder: Path) -> tuple[DatastoreProblem, ...]:
    return verify_datastore(folder, lambda name, *, total, unit: nullcontext(lambda units: None)).problems


def test_two_builds_give_the_same_files(datastore: Datastore, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 60))
    build_local(config, only="chunk")
    build_local(config, only="suffixes")
    suffixes = {name: data for name, data in contents(config.datastore).items() if name.startswith("suffixes/")}
    assert suffixes == {name: data for name, data in contents(datastore.folder).items() if name.startswith("suffixes/")}


def appended(folder: Path, documents: int) -> Datastore:
    """The datastore of a folder after a file with new documents was appended, with its sorted prefixes."""
    number = len(list(folder.glob("*.jsonl")))
    write_corpus(folder / f"{number}.jsonl", documents, seed=number)
    config = tiny_config(folder, folder / "*.jsonl")
    build_local(config, only="chunk", append=number > 0)
    return build_local(config, only="suffixes")


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


def test_an_index_is_refused_until_appended_documents_are_sorted(tmp_path: Path) -> None:
    earlier = appended(tmp_path, 60).train
    write_corpus(tmp_path / "more.jsonl", 20, seed=1)
    config = tiny_config(tmp_path, tmp_path / "*.jsonl")
    more = build_local(config, only="chunk", append=True)
    with pytest.raises(InputError, match="--stage suffixes"):
        SuffixIndex.open(more.folder)
    build_local(config, only="suffixes")
    with pytest.raises(InputError, match="other shards than when it was opened"):
        SuffixIndex(earlier)


def test_a_trace_finds_the_runs_that_were_put_into_a_text(datastore: Datastore) -> None:
    index, documents = SuffixIndex(datastore.train), documents_of(datastore.train)
    first, second = documents[0][5:25], documents[1][3:18]
    text = np.array([399, *first, 399, *second, 399])
    runs = trace(index, text, 10)
    assert [(run.first, run.stop) for run in runs] == [(1, 21), (22, 37)]
    for run in runs:
        assert run.match.count == expected(documents, text[run.first : run.stop].tolist())[1]
    assert trace(index, text, 21) == []
    assert trace(index, np.array([], np.int64), 1) == []


def test_a_run_of_any_length_stays_one(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(0, 10**6, 2000)
    corpus = tmp_path / "corpus.jsonl"
    rows = [
        {"id": name, "text": " ".join(map(str, words[part]))} for name, part in (("a", slice(None)), ("b", slice(9)))
    ]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config(tmp_path, corpus)
    config = replace(config, corpus=replace(config.corpus, split=(1, 0, 0)))
    for stage in ("chunk", "suffixes"):
        split = build_local(config, only=stage).train
    index, document = SuffixIndex(split), max(documents_of(split), key=len)
    assert len(document) > 4300
    (run,) = trace(index, np.array([document[7], *document[5:]]), 30)
    assert (run.first, run.stop, index.count(run.match)) == (1, len(document) - 4, 1)
    (place,) = index.places(run.match, 5)
    assert divmod(5, split.chunk_length) == (place.first[0] - split.chunk_range(0)[0], place.first[1])


def test_matches_of_more_than_64_tokens_are_equal_where_their_texts_are(datastore: Datastore) -> None:
    """The server finds the places of equal runs once."""
    index, document = SuffixIndex(datastore.train), documents_of(datastore.train)[2]
    one, again, longer = (index.longest_match(document[start:100]) for start in (20, 20, 10))
    assert (one.length, longer.length) == (80, 90)
    assert {one: 1, longer: 2}[again] == 1


def test_a_trace_of_a_document_is_one_run(datastore: Datastore) -> None:
    document = np.array(documents_of(datastore.train)[2])
    (run,) = trace(SuffixIndex(datastore.train), document, 8)
    assert (run.first, run.stop) == (0, len(document))


@pytest.mark.parametrize("damage", ["", "short"])
def test_a_missing_or_damaged_index_is_refused(datastore: Datastore, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder)
    (file,) = (folder / "suffixes").glob("*/positions.npy")
    file.unlink() if not damage else file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(InputError, match="suffixes/00000-00001-00000"):
        SuffixIndex.open(folder)


def test_a_position_behind_all_texts_is_refused(datastore: Datastore, tmp_path: Path) -> None:
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder)
    (file,) = (folder / "suffixes").glob("*/positions.npy")
    np.save(file, np.full_like(np.load(file), 2**32 - 1))
    index = SuffixIndex.open(folder)
    with pytest.raises(InputError, match=r"position .* behind all texts.*retro verify"):
        index.longest_match(documents_of(index.split)[0][:10])


def test_heads_of_another_order_are_refused(datastore: Datastore, tmp_path: Path) -> None:
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder)
    (file,) = (folder / "suffixes").glob("*/heads.npy")
    np.save(file, np.load(file)[:-1])
    with pytest.raises(InputError, match=r"suffixes/00000-00001-00000.*heads"):
        SuffixIndex.open(folder)


def test_a_text_is_opened_when_a_search_needs_it(datastore: Datastore, monkeypatch: pytest.MonkeyPatch) -> None:
    index, opened, open_text = SuffixIndex(datastore.train), list[int](), MappedFiles._open_text
    monkeypatch.setattr(MappedFiles, "_open_text", lambda self, shard: [opened.append(shard), open_text(self, shard)])
    assert not opened
    tokens = datastore.train.tokens
    for chunk in (0, len(tokens) - 1):
        index.longest_match(tokens.read(chunk, chunk + 1)[0, :20].tolist())
    assert 1 <= len(opened) == len(set(opened)) <= len(datastore.train.chunk_rows)


def test_the_runs_of_a_trace_are_the_longest_of_a_search_through_all_documents(
    datastore: Datastore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if runs are followed to their ends without a search, from any length on."""
    index, documents = SuffixIndex(datastore.train), documents_of(datastore.train)
    text = [399, *documents[0][5:25], *documents[1][3:18], *documents[0][25:31], 399, *documents[4][:9]]
    ends = [(expected(documents, text[:end][-30:])[0], end) for end in range(1, len(text) + 1)]
    starts = [end - length for length, end in ends] + [len(text)]
    longest = [(start, end) for start, (_, end) in zip(starts, ends, strict=False) if starts[end] > start]
    for length in (1, 5, LONGEST):
        monkeypatch.setattr(search, "LONGEST", length)
        found = trace(index, np.array(text), 4)
        assert [(run.first, run.stop) for run in found] == [run for run in longest if run[1] - run[0] >= 4]
    assert len(found) >= 3


@pytest.mark.parametrize("known", [0, 1, 12, 30])
def test_a_trace_of_a_growing_text_gives_each_run_at_its_end(datastore: Datastore, known: int) -> None:
    index, documents = SuffixIndex(datastore.train), documents_of(datastore.train)
    text = [399, *documents[0][5:25], 399, *documents[1][3:18]]
    tracer, given = Tracer(index, 8, text[:known]), list[tuple[int, Run]]()
    for length, token in enumerate(text[known:], start=known + 1):
        given += [(length, run) for run in tracer.add(token)]
    given += [(len(text) + 1, run) for run in tracer.rest()]
    assert [run for _, run in given] == [run for run in trace(index, np.array(text), 8) if run.stop >= max(1, known)]
    assert all(length == run.stop + 1 for length, run in given)


def test_places_name_each_document_once_with_the_first_and_last_token_of_a_run(datastore: Datastore) -> None:
    split = datastore.train
    index, documents = SuffixIndex(split), documents_of(split)
    text = documents[3][7:30]
    for ending in (text, text[-1:]):
        match = index.longest_match(ending)
        places = index.places(match, 3)
        assert 1 <= len(places) <= 3
        assert len({place.document["id"] for place in places}) == len(places)
        for place in places:
            (first, start), (last, stop) = place.first, place.last
            tokens = split.tokens.read(first, last + 1).reshape(-1)
            assert tokens[start : (last - first) * split.chunk_length + stop + 1].tolist() == ending
            assert place.document == split.metadata(split.documents_of(np.array([first, last]))[0].tolist())[0]


def test_occurrences_in_deleted_documents_are_not_counted(datastore: Datastore, tmp_path: Path) -> None:
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder)
    delete_documents(
        folder, [str(row["id"]) for row in datastore.train.metadata(range(0, datastore.train.num_documents, 3))]
    )
    split = Datastore.open(folder).train
    index, documents = SuffixIndex(split), documents_of(split)
    run = documents[0][5:15]
    most_frequent = [Counter(token for document in documents for token in document).most_common(1)[0][0]]
    for ending in (run, most_frequent):
        assert index.count(index.longest_match(ending)) == expected(documents, ending)[1]
    assert index.count(index.longest_match(most_frequent)) < index.longest_match(most_frequent).count
