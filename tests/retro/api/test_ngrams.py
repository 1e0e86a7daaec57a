"""`retro.NGrams` counts what a loop over all documents counts."""

import pickle
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import retro
from indexing.store.datastore import Datastore, delete_documents
from indexing.store.errors import InputError, NotFound, OutOfRange
from indexing.suffixes.votes import COLUMNS, as_columns, read_votes
from tests.indexing.suffixes.whole_search import appended, documents_of, expected, texts

ALL = 10**9


def count_in(documents: list[list[int]], text: list[int]) -> int:
    """How often a text is in the documents; an empty one is at every token."""
    if not text:
        return sum(map(len, documents))
    size = len(text)
    return sum(document[at : at + size] == text for document in documents for at in range(len(document) - size + 1))


def assert_counts_of(ngrams: retro.NGrams, stored: Datastore, every: int = 1) -> None:
    documents = documents_of(stored.train)
    for text in texts(stored.train, documents)[::every]:
        count = count_in(documents, text)
        assert ngrams.count(text) == {"count": count, "approx": False}
        length, occurrences, following = expected(documents, text)
        if not length:  # of no tokens
            occurrences, following = count_in(documents, []), Counter(token for one in documents for token in one)
        found = ngrams.longest_match(text)
        assert (found["suffix_len"], found["cnt"]) == (length, occurrences)
        ntd = ngrams.infgram_ntd(text, max_support=ALL)
        assert {token: one["cont_cnt"] for token, one in ntd["result_by_token_id"].items()} == following
        assert all(one["prob"] == one["cont_cnt"] / occurrences for one in ntd["result_by_token_id"].values())
        assert (ntd["prompt_cnt"], ntd["suffix_len"], ntd["approx"]) == (occurrences, length, False)
        next_tokens = ngrams.next_tokens(text, max_support=ALL)
        assert next_tokens["prompt_cnt"] == count
        assert next_tokens["result_by_token_id"] == (ntd["result_by_token_id"] if count else {})
        if text:
            token, before = text[-1], count_in(documents, text[:-1])
            expected_prob = {"prompt_cnt": before, "cont_cnt": count, "prob": count / before if before else -1.0}
            assert ngrams.prob(text[:-1], token) == expected_prob
            back_off = ngrams.infgram_prob(text[:-1], token)
            end = text[len(text) - 1 - back_off["suffix_len"] :]
            assert back_off["suffix_len"] == expected(documents, text[:-1])[0]
            assert back_off["cont_cnt"] == count_in(documents, end)
            assert back_off["prompt_cnt"] == count_in(documents, end[:-1])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    return appended(tmp_path_factory.mktemp("ngrams"), 40)


@pytest.fixture(scope="module")
def ngrams(stored: Datastore) -> retro.NGrams:
    return retro.NGrams(stored.folder)


def test_counts_are_those_of_a_loop_over_the_documents(ngrams: retro.NGrams, stored: Datastore) -> None:
    assert_counts_of(ngrams, stored)


def test_counts_of_a_datastore_that_grew_and_lost_documents(tmp_path: Path) -> None:
    for documents in (30, 5):
        stored = appended(tmp_path, documents)
    opened_before = retro.NGrams(stored.folder)
    assert len(opened_before.find([])["segment_by_shard"]) == 2
    assert_counts_of(opened_before, stored, 3)
    names = [row["id"] for row in stored.train.metadata(range(0, stored.train.num_documents, 4))]
    delete_documents(stored.folder, names)
    assert_counts_of(opened_before, Datastore.open(stored.folder), 3)
    assert_counts_of(retro.NGrams(stored.folder), Datastore.open(stored.folder), 3)


def test_ranks_lead_to_every_occurrence(ngrams: retro.NGrams, stored: Datastore) -> None:
    documents = documents_of(stored.train)
    text = documents[5][10:14]
    found = ngrams.find(text)
    segments = list(enumerate(found["segment_by_shard"]))
    parts = [ngrams.get_doc_by_rank(s, rank) for s, (first, stop) in segments for rank in range(first, stop)]
    assert len(parts) == found["cnt"] == count_in(documents, text)
    for part in parts:
        assert part["token_ids"] == documents[part["doc_ix"]]
        assert part["doc_len"] == part["disp_len"] == part["metadata"]["tokens"]
    numbers = Counter(part["doc_ix"] for part in parts)
    assert numbers == {number: count for number, one in enumerate(documents) if (count := count_in([one], text))}


@pytest.mark.parametrize("most", [1, 6, 20])
def test_the_part_of_a_document_holds_the_occurrence(most: int, ngrams: retro.NGrams) -> None:
    for number in range(0, ngrams.get_total_doc_cnt(), 9):
        document = ngrams.get_doc_by_ix(number)["token_ids"]
        assert ngrams.get_doc_by_ix(number, max_disp_len=most)["token_ids"] == document[:most]
        for text in (document[:1], document[30:31], document[-1:]):
            found = ngrams.search_docs(text, maxnum=3, max_disp_len=most)
            assert len({part["doc_ix"] for part in found["documents"]}) == len(found["documents"])
            for part in found["documents"]:
                assert text[0] in part["token_ids"]
                assert len(part["token_ids"]) == min(most, part["doc_len"])


def test_search_docs_finds_each_document_once(ngrams: retro.NGrams, stored: Datastore) -> None:
    documents = documents_of(stored.train)
    text = documents[7][20:26]
    found = ngrams.search_docs(text, maxnum=1000)
    having = [number for number, document in enumerate(documents) if count_in([document], text)]
    assert sorted(part["doc_ix"] for part in found["documents"]) == having
    assert found["cnt"] == count_in(documents, text)
    assert ngrams.search_docs([0, 0, 0, 0]) == {"cnt": 0, "approx": False, "documents": []}


def test_few_read_occurrences_give_estimates_that_add_up(ngrams: retro.NGrams) -> None:
    token = int(ngrams.tokenizer.encode(" the")[0])
    exact, few = ngrams.ntd([token], max_support=ALL), ngrams.ntd([token], max_support=64)
    assert exact["prompt_cnt"] == few["prompt_cnt"] > 64
    assert (exact["approx"], few["approx"]) == (False, True)
    assert sum(one["prob"] for one in few["result_by_token_id"].values()) == pytest.approx(1, abs=0.05)
    (best, probability), *_ = exact["result_by_token_id"].items()
    assert few["result_by_token_id"][best]["prob"] == pytest.approx(probability["prob"], abs=0.15)
    assert few["result_by_token_id"][best]["cont_cnt"] > 64 * probability["prob"] / 2


def test_texts_longer_than_the_sorted_ones_are_counted_and_have_no_ranks(
    ngrams: retro.NGrams, stored: Datastore
) -> None:
    documents = documents_of(stored.train)
    text = max(documents, key=len)[3:80]
    assert len(text) > 64
    assert ngrams.count(text)["count"] == count_in(documents, text) > 0
    assert ngrams.search_docs(text)["cnt"] == count_in(documents, text)
    with pytest.raises(InputError, match=f"{len(text)} tokens: ranks are sorted by 64 tokens"):
        ngrams.find(text)


def test_errors_name_the_token_the_rank_and_the_deleted_document(
    ngrams: retro.NGrams, stored: Datastore, tmp_path: Path
) -> None:
    size = int(stored.manifest["vocab_size"])
    for act in (lambda: ngrams.count([3, size]), lambda: ngrams.prob([3], size), lambda: ngrams.ntd(np.array([-1]))):
        with pytest.raises(InputError, match=rf"token id (-1|{size}): the datastore's are 0 to {size - 1}"):
            act()
    with pytest.raises(InputError, match=r"is a text, but token ids are needed: `tokenizer.encode\(text\)`"):
        ngrams.count("text")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="token ids must be a list of integers"):
        ngrams.count([0.5])  # type: ignore[list-item]
    with pytest.raises(InputError, match="max_support = 0: must be at least 1"):
        ngrams.ntd([3], max_support=0)
    with pytest.raises(OutOfRange, match=r"s = 1: .* has the orders 0 to 0"):
        ngrams.get_doc_by_rank(1, 0)
    with pytest.raises(OutOfRange, match=rf"rank = {ALL}: order 0 has the ranks 0 to"):
        ngrams.get_doc_by_rank(0, ALL)
    with pytest.raises(OutOfRange, match=f"document {ALL}"):
        ngrams.get_doc_by_ix(ALL)
    shutil.copytree(stored.folder, tmp_path / "datastore")
    delete_documents(tmp_path / "datastore", [str(ngrams.get_doc_by_ix(2)["metadata"]["id"])])
    with pytest.raises(NotFound, match="has been deleted"):
        retro.NGrams(tmp_path / "datastore").get_doc_by_ix(2)


def test_votes_are_those_that_training_reads(voting_datastore: Datastore) -> None:
    """Of a held-out document, which votes for no text itself."""
    held_out = retro.Datastore(voting_datastore.folder, "valid").documents[0]
    stored = as_columns(read_votes(voting_datastore.valid, np.array(held_out.chunks)))
    votes = retro.NGrams(voting_datastore.folder).votes(held_out.tokens)
    assert np.array_equal(votes, stored.reshape(-1, COLUMNS)[: len(votes)])


def test_another_process_opens_the_files_itself(ngrams: retro.NGrams) -> None:
    assert pickle.loads(pickle.dumps(ngrams)).count([5]) == ngrams.count([5])
