"""Examples are beginnings of held-out documents, ranked by the bits that retrieval saves, with a prompt that shows it."""

import time
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from indexing.retrieval.passage_choice import mostly_letters, words_of
from indexing.retrieval.retriever import Retriever
from retro.inference.language_model import LanguageModel, Scores
from retro.server import examples
from retro.server.examples import differing_prompt, held_out_passages
from tests.conftest import PATIENCE, wait_until
from tests.retro.server.conftest import Make


def measured(client: TestClient) -> list[dict]:
    """Return the examples of two chunks once all are measured."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        found = client.get("/examples", params={"count": 16, "chunks": 2}).json()["examples"]
        if all(each["gain"] is not None for each in found):
            return found
    raise AssertionError("examples are not measured")


def test_examples_are_beginnings_of_held_out_documents(client: TestClient, retriever: Retriever) -> None:
    answer = client.get("/examples", params={"count": 3, "chunks": 2}).json()
    assert answer["held_out"]
    stored = retriever.datastore.valid
    ids = {row["id"] for row in stored.metadata(range(stored.num_documents))}
    assert len(answer["examples"]) == 3
    for example in answer["examples"]:
        assert example["document_id"] in ids
        document = next(iter(stored.find_documents([example["document_id"]])))
        first = stored.chunk_range(document)[0]
        assert example["text"].startswith(retriever.tokenizer.decode(stored.tokens.read(first, first + 1)[0])[:20])
        assert len(retriever.tokenizer.encode(example["text"])) <= 2 * retriever.datastore.chunk_length + 1


def test_the_example_that_retrieval_helps_most_is_the_first(client: TestClient) -> None:
    found = measured(client)
    gains = [each["gain"] for each in found]
    assert len(set(gains)) > 1
    assert gains == sorted(gains, reverse=True)
    for example in (found[0], found[-1]):
        scored = client.post("/score", json={"text": example["text"]}).json()
        assert example["gain"] == pytest.approx(1 - scored["bits_per_byte_on"] / scored["bits_per_byte_off"], abs=1e-4)


def test_after_the_prompt_only_the_model_with_retrieval_writes_what_the_document_says(client: TestClient) -> None:
    shown = 0
    for example in measured(client):
        assert example["text"].startswith(example["prompt"])
        rest = example["text"].removeprefix(example["prompt"])
        body = {"prompt": example["prompt"], "max_tokens": 1, "temperature": 0}
        on, off = [client.post("/generate", json=body | {"retrieval": each}).json()["text"] for each in (True, False)]
        shown += rest.startswith(on) and not rest.startswith(off)
    assert shown


def test_a_prompt_ends_where_retrieval_saves_most_from_there_on(retriever: Retriever) -> None:
    tokenizer = retriever.tokenizer
    tokens = np.concatenate([[tokenizer.bos_id], tokenizer.encode("the index of a chunk and the neighbor in memory")])
    words = [
        len(tokenizer.encode(text)) for text in ("the index", "the index of a chunk", "the index of a chunk and the")
    ]
    right, wrong = tokens[1:, None], (tokens[1:, None] + 1) % tokenizer.vocab_size
    off = Scores(np.full(len(right), -5.0), wrong, np.zeros(right.shape, np.float32))
    log_probabilities, likeliest = off.log_probabilities.copy(), wrong.copy()
    for end, log_probability in zip(words, (-4.0, -1.0, -2.0), strict=True):
        log_probabilities[end], likeliest[end] = log_probability, right[end]
    on = Scores(log_probabilities, likeliest, off.likeliest_log_probabilities)
    # "of" saves least itself, but the gains of the later words follow it within a few tokens.
    assert differing_prompt(tokenizer, tokens, on, off) == "the index"
    likeliest[words[0]] = wrong[words[0]]
    assert differing_prompt(tokenizer, tokens, on, off) == "the index of a chunk"
    assert differing_prompt(tokenizer, tokens, off, off) == ""


def test_the_answer_does_not_wait_for_all_scores(app_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "_WAIT_SECONDS", 0.0)
    with TestClient(app_with()) as client:
        first = client.get("/examples", params={"count": 16, "chunks": 2}).json()["examples"]
        assert first[-1]["gain"] is None
        assert all(each["prompt"] and each["text"].startswith(each["prompt"]) for each in first)
        assert len(measured(client)) == len(first)


def test_examples_of_several_lengths_are_measured_one_after_the_other(
    app_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "_WAIT_SECONDS", 0.0)
    app, waiting, score_windows = app_with(), list[int](), LanguageModel.score_windows
    service = app.state.service

    def noted(*args: Any, **options: Any) -> None:
        waiting.append(len(service.score))
        score_windows(*args, **options)

    monkeypatch.setattr(LanguageModel, "score_windows", noted)
    with TestClient(app) as client:
        for chunks in range(1, 9):
            client.get("/examples", params={"chunks": chunks})
        wait_until(lambda: all(task.done() for _, task in service.examples.values()))
    assert len(waiting) > 10
    assert max(waiting) <= 1


def test_a_server_that_stops_finishes_the_passage_it_scores_and_no_other(
    app_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "_WAIT_SECONDS", 0.0)
    app = app_with()
    with TestClient(app) as client:
        client.get("/examples", params={"chunks": 8})
        app.state.service.admission.draining = True
    passages, task = app.state.service.examples[8]
    assert task.done()
    assert not task.cancelled()
    assert passages.examples[-1].gain is None


def test_a_failed_measurement_is_reported_and_repeated(app_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise ValueError("out of memory")

    with TestClient(app_with(), raise_server_exceptions=False) as client:
        with monkeypatch.context() as patched:
            patched.setattr(examples, "_measure", fail)
            assert client.get("/examples").status_code == 500
        assert client.get("/examples").status_code == 200


def test_without_a_model_no_gain_is_measured(app_with: Make) -> None:
    with TestClient(app_with(model=False)) as client:
        gains = [example["gain"] for example in client.get("/examples").json()["examples"]]
    assert gains
    assert set(gains) == {None}


def test_without_held_out_documents_examples_are_from_the_datastore(two: Retriever) -> None:
    answer = held_out_passages(two, 2, 100)  # no document has 100 chunks
    assert not answer.held_out
    assert all(example.document_id.startswith("ship/") for example in answer.examples)
    assert len(answer.examples) == 2


def test_examples_are_mostly_letters_of_different_documents_and_share_words_with_their_neighbors(
    retriever: Retriever,
) -> None:
    found = held_out_passages(retriever, 4, 2).examples
    assert len({example.document_id for example in found}) == len(found) > 1
    for example in found:
        assert mostly_letters(example.text)
        hits = retriever.search([example.text], 2).hits[0]
        assert words_of(example.text) & words_of(" ".join(hit.text + hit.continuation for hit in hits))
