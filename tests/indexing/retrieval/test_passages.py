"""Passages are whole chunks around the best hits, never twice, never of two documents, and within their budget."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexing.retrieval.passages import LEAST_MATCH, find_passages
from indexing.retrieval.results import Passage
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore, delete_documents
from indexing.store.errors import InputError
from tests.conftest import without_stages

QUESTIONS = ["which index has the chunk?", "title 42", "检索 模型", "the memory of a layer"]


def chunks_of(passage: Passage) -> range:
    return range(passage.chunk_id, passage.chunk_id + passage.num_chunks)


@pytest.mark.parametrize("tokens", [16, 40, 100, 400, 5000])
@pytest.mark.parametrize("question", QUESTIONS)
def test_passages_are_different_chunks_of_one_document_each_within_the_budget(
    retriever: Retriever, question: str, tokens: int
) -> None:
    found = retriever.passages(question, 4, tokens=tokens)
    split = retriever.retrieval.own
    assert 1 <= len(found) <= 4
    assert sum(passage.tokens for passage in found) <= tokens
    assert len({chunk for passage in found for chunk in chunks_of(passage)}) == sum(p.num_chunks for p in found)
    for passage in found:
        ids = np.array(chunks_of(passage))
        (document,) = set(split.documents_of(ids)[0].tolist())
        assert split.metadata([document])[0]["id"] == passage.document_id
        assert passage.first_chunk == passage.chunk_id - split.chunk_range(document)[0]
        lengths = split.lengths.gather(ids)
        assert passage.tokens == lengths.sum()
        rows = [row[:length] for row, length in zip(split.tokens.gather(ids), lengths, strict=True)]
        assert passage.text == retriever.tokenizer.decode(np.concatenate(rows)).strip("\ufffd \n")


def test_the_best_chunk_is_in_the_first_passage_and_a_large_budget_gives_whole_documents(retriever: Retriever) -> None:
    for question in QUESTIONS:
        best = retriever.search([question], 1, retrieval="hybrid").hits[0][0]
        first, *_ = found = retriever.passages(question, 2, tokens=100_000)
        assert best.chunk_id in chunks_of(first)
        assert first.score == pytest.approx(best.score)
        for passage in found:
            document = retriever.lookup.document(passage.document_id, 0, 1024)
            assert passage.num_chunks == document.num_chunks
            assert passage.text.split() == "".join(chunk.text for chunk in document.chunks).split()


def test_several_queries_take_turns(retriever: Retriever) -> None:
    one, other = (retriever.passages(title, 1, tokens=32)[0] for title in ("title 42", "title 7"))
    both = retriever.passages(["title 42", "title 7"], 2, tokens=64)
    assert [passage.document_id for passage in both] == [one.document_id, other.document_id]


def test_sparse_is_used_without_vectors_and_may_find_nothing(tiny_datastore: Datastore, tmp_path: Path) -> None:
    bare = Retriever.open(
        without_stages(tiny_datastore, tmp_path / "bare", "embed", "train-index", "add", "neighbors").folder
    )
    assert bare.chunks.ways == ("sparse",)
    assert bare.passages("title 42")[0].title == "Title 42"
    assert bare.passages("zzz unheard") == []


UNKNOWN = "when did quxzot meet plorfin near title 42?"


def test_a_question_of_which_the_datastore_knows_little_has_no_passages(retriever: Retriever) -> None:
    (match,) = retriever.chunks.match([UNKNOWN])
    assert 0 < match < LEAST_MATCH["en"] < retriever.chunks.match(["title 42"])[0] <= 1
    assert retriever.passages(UNKNOWN) == []
    assert retriever.passages(UNKNOWN, least_match=0)[0].title == "Title 42"
    assert retriever.passages(UNKNOWN, least_match=match)[0].title == "Title 42"
    assert retriever.passages(UNKNOWN, retrieval="dense") == []  # terms decide, whatever finds the passages
    assert retriever.passages([UNKNOWN, "title 7"], 4) == retriever.passages(["title 7"], 4)  # each query for itself


def test_terms_do_not_decide_on_long_questions_and_with_embeddings_that_know_meanings(
    retriever: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = " ".join(f"quxzot{number}" for number in range(60)) + " title 42"
    assert np.isnan(retriever.chunks.match([long, "title 42"])).tolist() == [True, False]
    assert retriever.passages(long)[0].title == "Title 42"
    mean = np.zeros(2, np.float32)  # only a transformer's embeddings have one
    monkeypatch.setitem(vars(retriever.chunks), "_term_search", replace(retriever.chunks._term_search, mean=mean))
    assert np.isnan(retriever.chunks.match([UNKNOWN])).all()


def test_the_match_is_among_the_documents_that_filters_leave(retriever: Retriever) -> None:
    (everywhere,) = retriever.chunks.match(["title 42"])
    (elsewhere,) = retriever.chunks.match(["title 42"], filters={"title": "Title 7"})
    assert elsewhere < everywhere


def test_named_documents_come_first_from_their_beginning(retriever: Retriever) -> None:
    found = find_passages(retriever.chunks, "title 42", 2, 200, documents_first=[5])
    assert found[0].title == retriever.retrieval.own.metadata([5])[0]["title"]
    assert found[0].first_chunk == 0
    assert found[1].title == "Title 42"


def test_deleted_documents_are_no_passages_of_an_open_retriever(tiny_datastore: Datastore, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_datastore.folder, tmp_path / "datastore"))
    retriever = Retriever.open(folder)
    (before, *_) = retriever.passages("title 42", 1)
    delete_documents(folder, [before.document_id])
    assert before.document_id not in [passage.document_id for passage in retriever.passages("title 42", 4)]


@pytest.mark.parametrize(
    ("question", "options", "words"),
    [
        ("why?", {"k": 0}, "k = 0: must be at least 1"),
        ("why?", {"tokens": 0}, "tokens = 0: must be at least 1"),
        ("why?", {"least_match": 1.5}, "least_match = 1.5: accepted are 0 to 1"),
        (" ", {}, "the text to search for is empty"),
        ("why?", {"filters": {"nope": 1}}, "nope"),
        ("why?", {"retrieval": "other"}, "retrieval = 'other'"),
    ],
)
def test_invalid_arguments_are_refused(retriever: Retriever, question: str, options: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        retriever.passages(question, **options)
