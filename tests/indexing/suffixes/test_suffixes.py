"""Sorted prefixes find what a search through the whole text finds: matches, their places, what follows, and runs of a text."""

import json
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.store.artifact import Recipe, create
from indexing.store.datastore import Datastore, Split, delete_documents, shard_name
from indexing.store.errors import InputError
from indexing.suffixes import build, search
from indexing.suffixes.build import FOLDER, _heads, _suffix_array, first_positions, head, stored_groups
from indexing.suffixes.search import Run, SuffixIndex, Tracer, trace
from indexing.suffixes.votes import KEPT, LONGEST, SAMPLED, SHARES
from indexing.verification.datastore import DatastoreProblem, verify_datastore
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
    for module in (build, search):
        monkeypatch.setattr(module, "ROWS_OF_HEAD", rows)
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 60))
    build_local(config, only="chunk")
    split = build_local(config, only="suffixes").train
    assert_equal_to_a_search_through_the_text(split)
    heads = [np.load(file) for file in sorted((split.folder / FOLDER).glob("*/heads.npy"))]
    assert any((np.diff(own.astype(np.int64)) == 0).any() for own in heads)
    assert all((own[1:] >= own[:-1]).all() for own in heads)


@pytest.mark.parametrize(("dtype", "width"), [(np.uint16, 4), (np.uint32, 2)])
def test_heads_of_sorted_prefixes_never_fall(dtype: type, width: int) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(0, 3, size).tolist() for size in (1, 2, 3, 50, 200)]
    documents[-1][::7] = [np.iinfo(dtype).max - 1] * len(documents[-1][::7])
    prefixes = sorted(document[:stop][::-1] for document in documents for stop in range(1, len(document) + 1))
    heads = [head(prefix, width) for prefix in prefixes]
    assert heads == sorted(heads)
    assert max(heads) < 2**64
    text = np.concatenate([[0, *(token + 1 for token in document)] for document in documents]).astype(np.uint32)
    backwards = [document[:stop][::-1] for document in documents for stop in range(1, len(document) + 1)]
    ends = np.flatnonzero(text[::-1])[::-1]
    assert _heads(text[::-1], ends, width).tolist() == [head(own, width) for own in backwards]


def test_an_index_of_an_older_version_names_the_stage_to_run(datastore: Datastore, tmp_path: Path) -> None:
    """It has an array for each shard."""
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder)
    shutil.rmtree(folder / FOLDER)
    with create(folder / FOLDER / "00000", Recipe("suffixes", 2)):
        pass
    with pytest.raises(InputError, match=r"suffixes/00000.* --stage suffixes --rebuild"):
        SuffixIndex.open(folder)


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
    monkeypatch.setattr(search, "_LOOKED_AT", looked_at)
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


def test_positions_are_those_of_all_tokens(datastore: Datastore) -> None:
    split = datastore.train
    (group,) = stored_groups(split)
    assert group == range(len(split.chunk_rows))
    positions = np.load(datastore.folder / FOLDER / "00000" / "positions.npy")
    is_text = np.arange(split.chunk_length) < split.lengths.read(0, split.num_chunks)[:, None]
    assert positions.dtype == np.uint32
    assert np.array_equal(np.sort(positions), np.flatnonzero(is_text))


def problems_of(folder: Path) -> tuple[DatastoreProblem, ...]:
    return verify_datastore(folder, lambda name, *, total, unit: nullcontext(lambda units: None)).problems


@pytest.mark.parametrize("most", [1, 7000])
def test_several_groups_find_the_same_and_are_verified(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "GROUP_POSITIONS", most)
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl", 60))
    config = replace(config, corpus=replace(config.corpus, shard_bytes=8000))
    for stage in ("chunk", "suffixes"):
        built = build_local(config, only=stage)
    split, groups = built.train, list(stored_groups(built.train))
    assert len(groups) > 1
    assert [shard for group in groups for shard in group] == list(range(len(split.chunk_rows)))
    assert all(first_positions(split, group)[-1] <= most or len(group) == 1 for group in groups)
    assert most == 1 or any(len(group) > 1 for group in groups)
    assert_equal_to_a_search_through_the_text(split)
    assert not problems_of(built.folder)
    for group in groups:
        shutil.rmtree(built.folder / FOLDER / shard_name(group.start))
        (problem,) = problems_of(built.folder)
        assert problem.artifact == f"{FOLDER}/{shard_name(group.start)}"
        build_local(config, only="suffixes")


def test_two_builds_and_an_append_give_the_same_files(datastore: Datastore, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", 60)
    config = tiny_config(tmp_path, corpus)
    build_local(config, only="chunk")
    build_local(config, only="suffixes")
    suffixes = {name: data for name, data in contents(config.datastore).items() if name.startswith("suffixes/")}
    assert suffixes == {name: data for name, data in contents(datastore.folder).items() if name.startswith("suffixes/")}
    write_corpus(tmp_path / "more.jsonl", 20, seed=1)
    more = tiny_config(tmp_path, tmp_path / "*.jsonl")
    appended = build_local(more, only="chunk", append=True)
    with pytest.raises(InputError, match="--stage suffixes"):
        SuffixIndex.open(appended.folder)
    appended = build_local(more, only="suffixes")
    assert suffixes.items() <= contents(appended.folder).items()
    assert_equal_to_a_search_through_the_text(appended.train)


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


def test_a_trace_of_a_document_is_one_run(datastore: Datastore) -> None:
    document = np.array(documents_of(datastore.train)[2])
    (run,) = trace(SuffixIndex(datastore.train), document, 8)
    assert (run.first, run.stop) == (0, len(document))


@pytest.mark.parametrize("damage", ["", "short"])
def test_a_missing_or_damaged_index_is_refused(datastore: Datastore, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "datastore"
    shutil.copytree(datastore.folder, folder)
    file = folder / "suffixes" / "00000" / "positions.npy"
    file.unlink() if not damage else file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(InputError, match="suffixes/00000"):
        SuffixIndex.open(folder)


@pytest.mark.parametrize("largest", [2, 300, 70_000])
def test_the_suffix_array_is_in_the_order_of_the_suffixes(largest: int) -> None:
    text = np.random.default_rng(0).integers(0, largest, 200).astype(">u2" if largest < 2**16 else ">u4")
    assert _suffix_array(text).tolist() == sorted(range(len(text)), key=lambda start: text[start:].tolist())


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
