"""Sorted prefixes find what a search through the whole text finds: matches, their places, what follows, and runs of a text."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.store.datastore import Datastore, delete_documents
from indexing.store.errors import InputError
from indexing.suffixes import mapped_files, order, order_build, search
from indexing.suffixes.mapped_files import MappedFiles
from indexing.suffixes.order import (
    FOLDER,
    LONGEST,
)
from indexing.suffixes.search import Run, SuffixIndex, Tracer, trace
from indexing.suffixes.votes import KEPT, SAMPLED, SHARES
from tests.conftest import build_local, tiny_config, write_corpus
from tests.indexing.store.test_sharded_array import map_entries
from tests.indexing.suffixes.whole_search import (
    appended,
    assert_equal_to_a_search_through_the_text,
    documents_of,
    expected,
)


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


def test_matches_at_the_borders_of_parts_are_all_rows_of_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "PART_TOKENS", 300)
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 60))
    build_local(config, only="chunk")
    split = build_local(config, only="suffixes").train
    index, documents = SuffixIndex(split), documents_of(split)
    (prefixes,) = index._files.orders
    borders = prefixes.rows[1:-1]
    assert len(borders) > 20
    for row in sorted({row + step for row in borders for step in (-1, 0)})[::3]:
        (text,) = index._texts.windows(prefixes.positions(row, row + 1), 12).astype(np.int64) - 1
        ending = text[text >= 0][::-1].tolist()
        for size in {1, 2, 3, 4, 5, 12} & {*range(1 + len(ending))}:
            _, count, following = expected(documents, ending[-size:])
            match = index.match(ending[-size:])
            assert match is not None
            assert match.count == count
            assert len(index.occurrences(match)) == count
            tokens, counts = index.next_tokens(match)
            assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == following


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
            assert index.next_tokens(index.longest_match([token]))[0][0] == best[0][0]
            compared += 1
    assert compared >= 5


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


@pytest.mark.usefixtures("not_compared")
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


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not show its advice for maps")
def test_an_order_and_its_texts_are_read_without_their_surroundings(datastore: Datastore) -> None:
    index = SuffixIndex(datastore.train)
    tokens = datastore.train.tokens.read(0, 1)[0, :20].tolist()
    assert index.longest_match(tokens).length == len(tokens)
    folder = next((datastore.folder / FOLDER).glob("*-*"))
    for file in (folder / "rows.npy", folder / "positions.npy", datastore.train.tokens.paths[0]):
        flags = [each.partition("VmFlags:")[2].split("\n")[0].split() for each in map_entries(file)]
        assert any("rr" in each for each in flags), file  # MADV_RANDOM


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
