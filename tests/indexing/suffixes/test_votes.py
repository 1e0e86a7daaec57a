"""Stored votes are those of a search through the whole text, without the own document and without what comes later."""

import shutil
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from indexing.store.artifact import Recipe, create
from indexing.store.datastore import SPLITS, Datastore, Split, delete_documents
from indexing.store.files import read_json, write_checked
from indexing.suffixes import votes
from indexing.suffixes.search import SuffixIndex
from indexing.suffixes.votes import (
    KEPT,
    LONGEST,
    SAMPLED,
    as_columns,
    cuts,
    groups_of,
    order_of,
    vote_dtype,
    votes_for,
    window_dtype,
    within_limit,
)
from tests.conftest import build_local, contents, tiny_config, write_corpus
from tests.indexing.suffixes.test_suffixes import documents_of


@pytest.fixture(scope="module")
def datastore(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    folder = tmp_path_factory.mktemp("votes")
    config = tiny_config(folder, write_corpus(folder / "corpus.jsonl", 60))
    for stage in ("chunk", "suffixes"):
        build_local(config, only=stage)
    return build_local(config, only="votes")


def votes_by_document(split: Split) -> list[np.ndarray]:
    """The votes of all tokens of every document that is not deleted."""
    lengths, kept = (
        split.lengths.read(0, split.num_chunks),
        np.setdiff1d(np.arange(split.num_documents), split.deleted_documents),
    )
    return [
        np.concatenate([split.votes.gather(np.array([chunk]))[0, : lengths[chunk]] for chunk in range(first, stop)])
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


def assert_votes(vote: np.void, length: int, following: Counter[int]) -> None:
    counts, tokens = vote["counts"].tolist(), vote["tokens"].tolist()
    assert vote["length"] == (length if following else 0)
    kept = {token: count for token, count in zip(tokens, counts, strict=True) if count}
    if following.total() <= SAMPLED // 2:  # all occurrences vote
        best = sorted(following.items(), key=lambda item: (-item[1], item[0]))[:KEPT]
        assert list(kept.items()) == best
    else:
        assert kept.keys() <= following.keys()
        assert all(count <= following[token] for token, count in kept.items())


def test_votes_are_those_of_a_search_through_all_documents(datastore: Datastore) -> None:
    assert len(datastore.train.chunk_rows) > 1
    documents, random = documents_of(datastore.train), np.random.default_rng(0)
    for split in map(datastore.split, SPLITS):
        stored = votes_by_document(split)
        for number, text in enumerate(documents_of(split)):
            own = number if split.name == "train" else -1
            for end in random.integers(1, len(text) + 1, 2).tolist():
                assert_votes(stored[number][end - 1], *expected(documents, own, text[:end]))


def test_deleted_documents_do_not_vote(datastore: Datastore, tmp_path: Path) -> None:
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder)
    config = tiny_config(tmp_path, datastore.folder.parent / "corpus.jsonl")
    names = [str(row["id"]) for row in datastore.train.metadata(range(0, datastore.train.num_documents, 3))]
    delete_documents(folder, names)
    changed = build_local(config, only="votes")
    documents, stored = documents_of(changed.train), votes_by_document(changed.train)
    for number, text in enumerate(documents):
        assert_votes(stored[number][-3], *expected(documents, number, text[:-2]))


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
        stored = as_columns(split.votes.read(first, stop)).reshape(-1, 7)[: len(text)]
        assert (stored[:, 0] == LONGEST).any()
        read = within_limit(stored.copy(), split)
        kept = stored[:, 0] <= (4 if limit < 1 else LONGEST)
        assert np.array_equal(read, stored * kept[:, None])
        assert np.array_equal(index.votes(text)[:, 0], read[:, 0])


@pytest.mark.parametrize(("chunk_length", "longest"), [(16, 12), (64, 48), (128, 63)])
def test_a_stored_length_that_stands_for_longer_matches_is_over_every_limit(
    planted_datastore: Datastore, chunk_length: int, longest: int
) -> None:
    votes = np.arange(LONGEST + 1)[:, None].repeat(7, axis=1)
    split = replace(planted_datastore.train, chunk_length=chunk_length)
    assert np.array_equal(within_limit(votes.copy(), split), votes)
    assert within_limit(votes.copy(), split, 0.75).any(axis=1).sum() == longest


def test_later_tokens_and_the_own_document_change_nothing() -> None:
    random = np.random.default_rng(0)
    window = random.integers(0, 5, (300, LONGEST)).astype(np.uint16)
    window = window[order_of(votes._keys(window))]
    own, voting, following = random.integers(0, 6, 300), random.random(300) < 0.7, random.integers(-1, 5, 300)
    before = votes.votes_in_range(window, following, own, voting, np.dtype(np.uint16))
    changed = np.where(own == 2, 4, following)
    after = votes.votes_in_range(window, changed, own, voting, np.dtype(np.uint16))
    assert np.array_equal(before[own == 2], after[own == 2])
    assert not np.array_equal(before[own != 2], after[own != 2])


def test_ranges_hold_every_prefix_once_in_order(datastore: Datastore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(votes, "_RANGE_TOKENS", 700)
    monkeypatch.setattr(votes, "_PIVOT_STEP", 16)
    groups, dtype = groups_of(datastore), window_dtype(datastore)
    borders = [0, *cuts(groups, dtype), 2**64]
    assert len(borders) > 4
    assert max(len(group.sources) for group in groups) > 1
    for group in groups:
        ranges = [votes.positions_between(group, *pair, dtype) for pair in pairwise(borders)]
        for source, first, parts in zip(group.sources, group.firsts, zip(*ranges, strict=True), strict=True):
            positions = np.concatenate(parts)
            assert np.array_equal(np.sort(positions), source.text_positions())
            if group.sorted_positions is not None:
                ordered = group.sorted_positions
                own = ordered[(ordered >= first) & (ordered < first + len(source.tokens))]
                assert np.array_equal(positions, own - first)


def test_several_ranges_give_nearly_the_same_votes(
    datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(votes, "_RANGE_TOKENS", 1500)
    monkeypatch.setattr(votes, "_PIVOT_STEP", 16)
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder, ignore=shutil.ignore_patterns("votes"))
    cut = build_local(tiny_config(tmp_path, datastore.folder.parent / "corpus.jsonl"), only="votes")
    one, other = (split.votes.gather(np.arange(split.num_chunks))["length"] for split in (datastore.train, cut.train))
    assert (one == other).mean() > 0.95


def test_order_is_that_of_the_rows() -> None:
    keys = np.random.default_rng(0).integers(0, 3, (500, 6)).astype(np.uint64)
    assert order_of(keys).tolist() == sorted(range(500), key=lambda row: keys[row].tolist())


def test_votes_are_counted_by_frequency_then_by_id() -> None:
    following = np.array([[5, 3, 3, -1, 7, 5], [-1, -1, -1, -1, -1, -1], [9, 8, 7, 6, 6, -1]])
    counted = votes_for(np.array([4, 2, 1]), following, np.dtype(np.uint16))
    assert counted.dtype == vote_dtype(np.dtype(np.uint16))
    assert counted.dtype.itemsize == 10
    assert counted["length"].tolist() == [4, 0, 1]
    assert counted["tokens"].tolist() == [[3, 5, 7], [0, 0, 0], [6, 7, 8]]
    assert counted["counts"].tolist() == [[2, 2, 1], [0, 0, 0], [2, 1, 1]]


def test_two_builds_are_equal_and_an_append_makes_all_votes_again(datastore: Datastore, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 60))
    for stage in ("chunk", "suffixes", "votes"):
        build_local(config, only=stage)
    files = {name: data for name, data in contents(config.datastore).items() if name.startswith("votes/")}
    assert files == {name: data for name, data in contents(datastore.folder).items() if name.startswith("votes/")}
    write_corpus(tmp_path / "more.jsonl", 20, seed=1)
    more = tiny_config(tmp_path, tmp_path / "*.jsonl")
    assert not build_local(more, only="chunk", append=True).has("votes")
    build_local(more, only="suffixes")
    appended = build_local(more, only="votes")
    documents, stored = documents_of(appended.train), votes_by_document(appended.train)
    for number, text in enumerate(documents[::7]):
        assert_votes(stored[7 * number][-2], *expected(documents, 7 * number, text[:-1]))
