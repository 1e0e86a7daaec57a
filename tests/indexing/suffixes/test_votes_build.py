"""Stored votes are those of a search through the whole text, without the own document and without what comes later."""

import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexing.store.artifact import Recipe, create
from indexing.store.datastore import SPLITS, Datastore, Split, delete_documents
from indexing.store.errors import InputError
from indexing.store.files import read_json, write_checked
from indexing.suffixes import votes_build
from indexing.suffixes.order import LONGEST, stored_orders
from indexing.suffixes.search import SuffixIndex
from indexing.suffixes.texts import Texts
from indexing.suffixes.votes import (
    COLUMNS,
    KEPT,
    LARGEST_SIZE,
    LENGTHS,
    SAMPLED,
    SHARES,
    all_vote,
    as_columns,
    has_votes,
    read_votes,
    require_votes,
    within_limit,
)
from indexing.suffixes.votes_build import votes_in_range
from pipelines.config import Config
from pipelines.stages import suffixes
from tests.conftest import build_local, contents, tiny_config, write_corpus
from tests.indexing.suffixes.whole_search import documents_of


@pytest.fixture(scope="module")
def datastore(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    folder = tmp_path_factory.mktemp("votes")
    config = tiny_config(folder, write_corpus(folder / "corpus.jsonl", 60))
    for stage in ("chunk", "suffixes"):
        build_local(config, only=stage)
    return build_local(config, only="votes")


def votes_by_document(split: Split) -> list[np.ndarray]:
    """The votes of all tokens of every document that is not deleted, each [tokens, 32]."""
    lengths, kept = (
        split.lengths.read(0, split.num_chunks),
        np.setdiff1d(np.arange(split.num_documents), split.deleted_documents),
    )
    return [
        as_columns(
            np.concatenate(
                [read_votes(split, np.arange(chunk, chunk + 1))[0, : lengths[chunk]] for chunk in range(first, stop)]
            )
        )
        for first, stop in split.chunk_ranges(kept)
    ]


def expected(documents: list[list[int]], own: int, text: list[int]) -> tuple[int, Counter[int]]:
    """Length of the longest end of a text in other documents, and the tokens that follow it there."""
    for length in range(min(len(text), LONGEST), 0, -1):
        ending, following, occurs = text[-length:], Counter[int](), False
        for number, document in enumerate(documents):
            for first in range(len(document) - length + 1) if number != own else ():
                if document[first : first + length] == ending:
                    occurs = True
                    following.update(document[first + length : first + length + 1])
        if occurs:
            return length, following
    return 0, Counter()


class Voting:
    """A search for the votes of a text through all tokens of some documents."""

    def __init__(self, documents: list[list[int]], deleted: Iterable[list[int]] = ()) -> None:
        """`deleted` documents do not vote, but can be drawn."""
        self.documents = documents
        self.deleted = Counter(
            tuple(text[end - length : end])
            for text in deleted
            for end in range(len(text) + 1)
            for length in LENGTHS
            if length <= end
        )
        self.ends = defaultdict[tuple[int, ...], dict[int, list[int]]](dict)  # of a match in each document
        self.after = defaultdict[tuple[int, ...], Counter[int]](Counter)
        for number, document in enumerate(documents):
            for end in range(1, len(document) + 1):
                for length in (length for length in LENGTHS if length <= end):
                    match = tuple(document[end - length : end])
                    self.ends[match].setdefault(number, []).append(end)
                    self.after[match].update(document[end : end + 1])

    def longest(self, text: list[int], own: int) -> int:
        """Tokens of the longest match outside of the own document."""
        for length in reversed([length for length in LENGTHS if length <= len(text)]):
            others = {number: ends for number, ends in self.ends[tuple(text[-length:])].items() if number != own}
            if others and length + 1 in LENGTHS:
                return length
            if others:
                return max(self.shared(text, number, end) for number, ends in others.items() for end in ends)
        return 0

    def shared(self, text: list[int], number: int, end: int) -> int:
        pairs = zip(text[: -LONGEST - 1 : -1], self.documents[number][:end][::-1], strict=False)
        return next((length for length, (one, other) in enumerate(pairs) if one != other), min(len(text), end, LONGEST))

    def check(self, columns: list[int], text: list[int], own: int = -1) -> bool:
        """Compare the votes after a text with those of the search, as far as all occurrences vote; True if at all lengths."""
        longest = self.longest(text, own)
        (length, *tokens), levels = columns[: 1 + KEPT], np.reshape(columns[1 + KEPT :], (-1, 1 + KEPT)).tolist()
        best, exact, any_votes = list[int](), True, False
        for size, (code, *shares) in reversed([*zip(LENGTHS, levels, strict=True)]):
            match = tuple(text[-size:]) if size <= longest else ()
            own_text = self.documents[own] if own >= 0 else []
            after = self.after[match] - Counter(
                token for end in self.ends[match].get(own, []) for token in own_text[end : end + 1]
            )
            total, drawn = after.total(), sum(map(len, self.ends[match].values())) + self.deleted[match]
            all_vote = drawn <= SAMPLED
            any_votes |= total > 0
            if all_vote:
                assert code == min(LARGEST_SIZE, total.bit_length())
                assert shares == [SHARES * after[token] // max(1, total) for token in tokens]
            else:
                assert abs(code - min(LARGEST_SIZE, total.bit_length())) <= 1 or total < 2 * SAMPLED
                assert all(token in after for token, share in zip(tokens, shares, strict=True) if share)
                assert sum(shares) <= SHARES
            if exact := exact and all_vote:
                ordered = sorted(after, key=lambda token: (-after[token], token))
                best += [token for token in ordered if token not in best]
        assert tokens[: len(best)] == best[:KEPT]
        assert not exact or tokens == [*best, *[0] * KEPT][:KEPT]
        assert length == longest * any_votes
        return exact


def test_votes_are_those_of_a_search_through_all_documents(datastore: Datastore) -> None:
    assert len(datastore.train.chunk_rows) > 1
    voting, exact = Voting(documents_of(datastore.train)), 0
    for split in map(datastore.split, SPLITS):
        trained = split.name == "train"
        pairs = list(enumerate(zip(documents_of(split), votes_by_document(split), strict=True)))
        for number, (text, stored) in pairs[:: 3 if trained else 1]:
            own = number if trained else -1
            exact += sum(voting.check(row, text[:end], own) for end, row in enumerate(stored.tolist(), start=1))
    assert exact > 50


def test_deleted_documents_do_not_vote(datastore: Datastore, tmp_path: Path) -> None:
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder)
    config = tiny_config(tmp_path, datastore.folder.parent / "corpus.jsonl")
    names = [str(row["id"]) for row in datastore.train.metadata(range(0, datastore.train.num_documents, 3))]
    delete_documents(folder, names)
    changed = build_local(config, only="votes")
    documents, stored = documents_of(changed.train), votes_by_document(changed.train)
    voting, index = Voting(documents), SuffixIndex.open(folder)
    for number, text in enumerate(documents):
        for end in range(len(text) - 9, len(text) + 1):
            voting.check(stored[number][end - 1].tolist(), text[:end], number)
    for text in documents_of(changed.valid):
        for end, row in enumerate(index.votes(np.array(text)).tolist(), start=1):
            voting.check(row, text[:end])


@pytest.mark.parametrize("grown", [False, True])
def test_live_votes_are_the_stored_ones_of_held_out_documents(grown: bool, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 60))
    config = replace(config, corpus=replace(config.corpus, shard_bytes=8000))
    build_local(config, only="chunk")
    if grown:
        write_corpus(tmp_path / "more.jsonl", 10, seed=1)
        config = replace(config, corpus=replace(config.corpus, paths=(str(tmp_path / "*.jsonl"),)))
        build_local(config, only="chunk", append=True)
    for stage in ("suffixes", "votes"):
        datastore = build_local(config, only=stage)
    assert len(stored_orders(datastore.train)) == 1 + grown
    index, voting, equal = SuffixIndex(datastore.train), Voting(documents_of(datastore.train)), list[bool]()
    for text, stored in zip(documents_of(datastore.valid), votes_by_document(datastore.valid), strict=True):
        live = index.votes(np.array(text))
        assert np.array_equal(index.votes(np.array(text), len(text) - 9), live[-9:])
        assert np.array_equal(live[:, 0], stored[:, 0])
        for end, (row, same) in enumerate(zip(live.tolist(), (live == stored).all(axis=1), strict=True), start=1):
            assert same or not voting.check(row, text[:end])
            voting.check(stored[end - 1].tolist(), text[:end])
            equal.append(same)
    # Of more than 32 occurrences, others are counted if several orders have them.
    assert np.mean(equal) > 0.1 if grown else all(equal)


def with_neighbor_limit(datastore: Datastore, folder: Path, limit: float) -> Datastore:
    """A copy of a datastore whose stored neighbors have a limit on near copies."""
    shutil.copytree(datastore.folder, folder)
    with create(folder / "neighbors" / "00000", Recipe("neighbors", 1, {"neighbors.max_overlap": limit}, {})):
        pass
    manifest = read_json(folder / "manifest.json")
    manifest["fingerprints"]["neighbors"] = "0"
    write_checked(folder / "manifest.json", manifest)
    return Datastore.open(folder)


def test_the_limit_of_the_stored_neighbors_holds_for_stored_and_live_votes(
    planted_datastore: Datastore, tmp_path: Path
) -> None:
    limited = with_neighbor_limit(planted_datastore, tmp_path / "limited", 0.25)
    for split, limit in ((planted_datastore.valid, 1.0), (limited.valid, 0.25)):
        index = SuffixIndex.open(split.folder)
        first, stop = split.chunk_range(1)
        text = split.tokens.read(first, stop).ravel()[: 16 * (stop - first - 1)]
        stored = as_columns(read_votes(split, np.arange(first, stop))).reshape(-1, COLUMNS)[: len(text)]
        assert (stored[:, 0] == LONGEST).any()
        read = within_limit(stored.copy(), split)
        kept = stored[:, 0] <= (4 if limit < 1 else LONGEST)
        assert np.array_equal(read, stored * kept[:, None])
        assert np.array_equal(index.votes(text)[:, 0], read[:, 0])


def test_later_tokens_and_the_own_document_change_nothing() -> None:
    random = np.random.default_rng(0)
    window = random.integers(0, 5, (300, LONGEST)).astype(np.uint16)
    window = window[np.lexsort(window.T[::-1])]
    own, voting, following = random.integers(0, 6, 300), random.random(300) < 0.7, random.integers(-1, 5, 300)
    before = votes_in_range(window, following, own, voting, np.dtype(np.uint16))
    changed = np.where(own == 2, 4, following)
    after = votes_in_range(window, changed, own, voting, np.dtype(np.uint16))
    assert np.array_equal(before[own == 2], after[own == 2])
    assert not np.array_equal(before[own != 2], after[own != 2])


def rebuilt(datastore: Datastore, folder: Path) -> Datastore:
    """The votes of a copy of a datastore, made again."""
    shutil.copytree(datastore.folder, folder / "datastore", ignore=shutil.ignore_patterns("votes"))
    return build_local(tiny_config(folder, datastore.folder.parent / "corpus.jsonl"), only="votes")


def test_several_ranges_give_nearly_the_same_votes(
    datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(votes_build, "RANGE_TOKENS", 1500)
    cut = rebuilt(datastore, tmp_path)
    one, other = (
        as_columns(read_votes(split, np.arange(0, split.num_chunks))) for split in (datastore.train, cut.train)
    )
    assert (one[..., 0] == other[..., 0]).mean() > 0.95
    assert (one == other).all(axis=-1).mean() > 0.85


def test_a_range_without_prefixes_has_no_votes(
    datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one, if more documents begin with the smallest token than a range has tokens."""
    monkeypatch.setattr(votes_build, "RANGE_TOKENS", 20)
    rows, found = list[int](), votes_build.votes_in_range
    monkeypatch.setattr(
        votes_build, "votes_in_range", lambda window, *rest: rows.append(len(window)) or found(window, *rest)
    )
    again = rebuilt(datastore, tmp_path)
    assert 0 in rows
    for split in ("train", "valid"):
        chunks = np.arange(again.split(split).num_chunks)
        one, other = (read_votes(each.split(split), chunks)["length"] for each in (datastore, again))
        assert (one == other).mean() > 0.8


def test_tasks_of_several_ranges_and_blocks_of_shards_give_the_same_votes(
    datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(votes_build, "RANGE_TOKENS", 700)
    one = rebuilt(datastore, tmp_path / "one")
    assert len(one.train.chunk_rows) == 2
    monkeypatch.setattr(votes_build, "_LEAST_TASKS", 3)
    monkeypatch.setattr(votes_build, "FAN_OUT", 1)
    other = rebuilt(datastore, tmp_path / "other")
    assert contents(one.folder / "votes") == contents(other.folder / "votes")


def test_tokens_that_sorted_prefixes_carry_give_the_same_votes_without_reading_the_training_text(
    datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suffixes, "usable_memory", lambda: 0)
    ignored = shutil.ignore_patterns("votes", "suffixes")
    shutil.copytree(datastore.folder, tmp_path / "datastore", ignore=ignored)
    config = replace(tiny_config(tmp_path, datastore.folder.parent / "corpus.jsonl"), skip_stages=())
    build_local(config, only="suffixes")
    kept, rows, read = config.datastore / "suffixes" / "runs", Texts.rows, set[str]()
    assert [path.name for path in kept.iterdir()] == ["00000-00001-00000"]
    build_local(config, only="suffixes")
    assert kept.exists()

    def counted(texts: Texts, positions: np.ndarray, count: int) -> np.ndarray:
        read.add(texts.split.name)
        return rows(texts, positions, count)

    monkeypatch.setattr(Texts, "rows", counted)
    build_local(config, only="votes")
    assert read
    assert "train" not in read
    assert not kept.exists()
    for folder in ("suffixes", "votes"):
        assert contents(config.datastore / folder) == contents(datastore.folder / folder)


def test_larger_token_ids_give_the_same_votes() -> None:
    random = np.random.default_rng(0)
    window = random.integers(1, 6, (300, LONGEST)).astype(np.uint16)
    window = window[np.lexsort(window.T[::-1])]
    own, voting, following = random.integers(0, 6, 300), random.random(300) < 0.7, random.integers(-1, 5, 300)
    one = as_columns(votes_in_range(window, following, own, voting, np.dtype(np.uint16)))
    wide, many = window * np.uint32(100_000), np.where(following < 0, -1, following * 100_000)
    other = as_columns(votes_in_range(wide, many, own, voting, np.dtype(np.uint32)))
    assert np.array_equal(one[:, 1 : 1 + KEPT] * 100_000, other[:, 1 : 1 + KEPT])
    assert np.array_equal(np.delete(one, [1, 2, 3], axis=1), np.delete(other, [1, 2, 3], axis=1))


def test_a_frequent_match_of_the_own_document_leaves_the_vote_to_the_nearest_other_one() -> None:
    window = np.ones((200, LONGEST), np.uint16)
    own, following = np.zeros(200, np.int64), np.full(200, 7)
    own[101], following[101] = 1, 9  # not among the 32 that are drawn
    columns = as_columns(votes_in_range(window, following, own, own >= 0, np.dtype(np.uint16)))
    alone, others = columns[0].tolist(), columns[101].tolist()
    assert alone == [LONGEST, 9, 0, 0, *[1, SHARES, 0, 0] * len(LENGTHS)]
    assert others == [LONGEST, 7, 0, 0, *[8, SHARES, 0, 0] * len(LENGTHS)]


def test_votes_of_an_older_version_are_refused_and_made_again(
    datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, datastore.folder.parent / "corpus.jsonl")
    shutil.copytree(datastore.folder, config.datastore, ignore=shutil.ignore_patterns("votes"))
    monkeypatch.setattr(suffixes, "VERSION", 1)
    older = build_local(config, only="votes")
    assert not has_votes(older)
    with pytest.raises(InputError, match=r"older version.* --stage votes"):
        require_votes(older)
    monkeypatch.undo()
    newer = build_local(config, only="votes")
    require_votes(newer)
    assert contents(newer.folder / "votes") == contents(datastore.folder / "votes")


def votes_of(folder: Path) -> dict[str, bytes]:
    """The files of the stage `votes`."""
    return {name: data for name, data in contents(folder).items() if name.startswith("votes/")}


def test_two_builds_are_equal(datastore: Datastore, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 60))
    for stage in ("chunk", "suffixes", "votes"):
        build_local(config, only=stage)
    assert votes_of(config.datastore) == votes_of(datastore.folder)


def appended(datastore: Datastore, folder: Path, documents: int) -> Config:
    """A copy of a datastore with more documents, without the votes of these."""
    shutil.copytree(datastore.folder, folder / "datastore")
    write_corpus(folder / "more.jsonl", documents, seed=1)
    shutil.copy(datastore.folder.parent / "corpus.jsonl", folder)
    config = tiny_config(folder, folder / "*.jsonl")
    build_local(config, only="chunk", append=True)
    build_local(config, only="suffixes")
    assert not Datastore.open(config.datastore).has("votes")
    return config


def check_appended(datastore: Datastore, first_shard: int, deleted: Iterable[list[int]] = ()) -> int:
    """Compare the votes of all documents of these shards with those of a search; returns for how many tokens all occurrences vote."""
    voting, exact = Voting(documents_of(datastore.train), deleted), 0
    for split in (datastore.train, datastore.valid):
        first = sum(split.document_rows[:first_shard]) - len(split.first_shards(first_shard).deleted)
        texts, votes = documents_of(split), votes_by_document(split)
        assert len(texts) > first
        for number in range(first, len(texts)):
            own = number if split.name == "train" else -1
            for end, row in enumerate(votes[number].tolist(), start=1):
                exact += voting.check(row, texts[number][:end], own)
    return exact


@pytest.mark.parametrize(("documents", "orders"), [(20, 2), (60, 1)])
def test_an_append_makes_only_its_own_votes_with_all_documents(
    datastore: Datastore, tmp_path: Path, documents: int, orders: int
) -> None:
    config, before = appended(datastore, tmp_path, documents), votes_of(datastore.folder)
    grown = build_local(config, only="votes")
    assert len(stored_orders(grown.train)) == orders
    after = votes_of(grown.folder)
    assert before.items() < after.items()
    assert check_appended(grown, len(datastore.train.chunk_rows)) > 20
    assert has_votes(grown)
    assert not all_vote(grown)
    build_local(config, only="votes", rebuild=True)
    assert all_vote(grown)
    rebuilt = votes_of(grown.folder)
    shutil.rmtree(grown.folder / "votes")
    build_local(config, only="votes")
    assert votes_of(grown.folder) == rebuilt


def test_votes_of_appended_documents_do_not_come_from_deleted_ones(datastore: Datastore, tmp_path: Path) -> None:
    shutil.copytree(datastore.folder, tmp_path / "first" / "datastore")
    shutil.copy(datastore.folder.parent / "corpus.jsonl", tmp_path / "first")
    deleted = tiny_config(tmp_path / "first", tmp_path / "first" / "corpus.jsonl")
    numbers, texts = range(0, 40, 3), documents_of(datastore.train)
    delete_documents(deleted.datastore, [row["id"] for row in datastore.train.metadata(numbers)])
    before = votes_of(build_local(deleted, only="votes").folder)
    assert before != votes_of(datastore.folder)
    grown = build_local(appended(Datastore.open(deleted.datastore), tmp_path / "grown", 20), only="votes")
    assert before.items() < votes_of(grown.folder).items()
    check_appended(grown, len(datastore.train.chunk_rows), [texts[number] for number in numbers])
    names = [row["id"] for row in grown.train.metadata([grown.train.num_documents - 1])]
    delete_documents(grown.folder, names)
    assert not has_votes(grown)
    changed = build_local(tiny_config(tmp_path / "grown", tmp_path / "grown" / "*.jsonl"), only="votes")
    assert has_votes(changed)
    assert all_vote(changed)


def test_a_killed_append_continues_and_makes_the_same_votes(
    datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = appended(datastore, tmp_path, 60)
    whole = shutil.copytree(config.datastore, tmp_path / "whole")
    build_local(replace(config, datastore=whole), only="votes")
    numbers = iter(range(100))
    write = suffixes.write_shard

    def killed(*arguments: Any) -> dict[str, int]:
        if next(numbers) == 1:
            raise RuntimeError("killed")
        return write(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(suffixes, "write_shard", killed)
        with pytest.raises(RuntimeError, match="killed"):
            build_local(config, only="votes")
    monkeypatch.setattr(suffixes, "write_ranges", None)  # the ranges that are finished stay
    build_local(config, only="votes")
    assert votes_of(config.datastore) == votes_of(whole)


def test_lost_votes_of_a_shard_are_made_again_with_all_documents(datastore: Datastore, tmp_path: Path) -> None:
    config = appended(datastore, tmp_path, 20)
    before = votes_of(build_local(config, only="votes").folder)
    last = f"votes/{len(Datastore.open(config.datastore).train.chunk_rows) - 1:05d}"
    shutil.rmtree(config.datastore / last)
    build_local(config, only="votes")
    assert votes_of(config.datastore) == before
    shutil.rmtree(config.datastore / "votes" / "00000")
    after = votes_of(build_local(config, only="votes").folder)
    assert {name.split("/")[1] for name in after if after[name] != before[name]} == {"00000"}


def test_several_ranges_and_blocks_give_appended_documents_the_same_votes(
    datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = appended(datastore, tmp_path, 20)
    blocks = shutil.copytree(config.datastore, tmp_path / "blocks")
    monkeypatch.setattr(votes_build, "RANGE_TOKENS", 700)
    monkeypatch.setattr(votes_build, "_DRAWN_GROUPS", 100)
    build_local(config, only="votes")
    monkeypatch.setattr(votes_build, "FAN_OUT", 1)
    monkeypatch.setattr(votes_build, "_LEAST_TASKS", 3)
    monkeypatch.setattr(votes_build, "_DRAWN_GROUPS", 1 << 17)
    build_local(replace(config, datastore=blocks), only="votes")
    assert votes_of(config.datastore) == votes_of(blocks)
    check_appended(Datastore.open(config.datastore), len(datastore.train.chunk_rows))
