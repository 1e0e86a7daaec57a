"""Answers name the neighbors that the model read and the runs that it copied, on request only."""

import json
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from retro.inference.language_model import LanguageModel
from retro.server import schemas
from retro.server.sources import joined
from tests.conftest import PATIENCE
from tests.retro.server.conftest import TEXT

M = 16
GENERATE = {"prompt": TEXT, "max_tokens": 24, "temperature": 0, "k": 3, "return_sources": True}
COMPLETE = GENERATE | {"model": "tiny"}
CHAT = {
    "model": "tiny", "messages": [{"role": "user", "content": "the index and the memory of a chunk in the store"}],
    "max_tokens": 30, "temperature": 0, "k": 3, "return_sources": True,
}  # fmt: skip


def check_chunks(retriever: Retriever, chunks: list[dict[str, Any]], k: int = 3) -> None:
    """Each chunk has the neighbors that a search for its tokens finds, with their documents."""
    assert [chunk["chunk"] for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        hits = chunk["neighbors"]
        assert len(hits) == k
        assert [hit["distance"] for hit in hits] == sorted(hit["distance"] for hit in hits)
        for hit in hits:
            stored = retriever.chunk(hit["chunk_id"])
            for name in ("text", "continuation", "document_id", "title"):
                assert hit[name] == getattr(stored, name)
            assert hit["score"] == pytest.approx(1 - hit["distance"] / 2)


def check_copies(text: str, sources: dict[str, Any], least: int = 1) -> None:
    """Copied runs are the same text in the answer and in the neighbor."""
    chunks = {chunk["chunk"]: chunk["neighbors"] for chunk in sources["chunks"]}
    end = 0
    for copy in sources["copies"]:
        neighbor = chunks[copy["chunk"]][copy["neighbor"]]
        (start, stop), (first, last) = copy["text"], copy["neighbor_text"]
        assert end <= start <= stop <= len(text)
        if "\ufffd" not in text[start:stop]:
            assert text[start:stop] == (neighbor["text"] + neighbor["continuation"])[first:last]
        assert 0.5 <= copy["share"] <= 1
        end = stop
    assert sum(copy["tokens"] for copy in sources["copies"]) >= least


def events_of(response) -> list[dict[str, Any]]:
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.fixture(scope="module")
def copying(language_model: LanguageModel) -> Any:
    """Let the model copy from neighbors with most of its probability."""
    import torch

    table = language_model.model.copy_head.neighbors
    before = {name: each.clone() for name, each in table.state_dict().items()}
    with torch.no_grad():
        table.agreed.fill_(1.0)
        table.disagreed.fill_(1.0)
    yield
    table.load_state_dict(before)


pytestmark = pytest.mark.usefixtures("copying")


def test_generate_returns_every_chunk_it_read_and_what_it_copied(client: TestClient, retriever: Retriever) -> None:
    plain = client.post("/generate", json=GENERATE | {"return_sources": False}).json()
    answer = client.post("/generate", json=GENERATE).json()
    sources = answer.pop("sources")
    assert answer == plain
    read = [retriever.tokenizer.bos_id, *retriever.tokenizer.encode(TEXT)]
    assert len(sources["chunks"]) == (len(read) + answer["tokens"] - 1) // M
    assert sources["chunks"][0]["text"] == retriever.tokenizer.decode(read[:M])
    check_chunks(retriever, sources["chunks"])
    check_copies(answer["text"], sources, least=10)
    assert max(copy["tokens"] for copy in sources["copies"]) > 1
    assert "sources" not in plain


def test_the_events_of_a_stream_join_to_the_answer(client: TestClient) -> None:
    whole = client.post("/generate", json=GENERATE).json()["sources"]
    events = events_of(client.post("/generate", json=GENERATE | {"stream": True}))
    assert joined([schemas.Sources(**event["sources"]) for event in events]).model_dump(mode="json") == whole
    first, *others = (event["sources"]["chunks"] for event in events)
    assert len(first) == 2  # those of the prompt
    assert all(len(chunks) <= 1 for chunks in others)
    assert any(others)
    silent = events_of(client.post("/generate", json=GENERATE | {"stream": True, "return_sources": False}))
    assert not any("sources" in event for event in silent)


@pytest.mark.parametrize("text", [TEXT * 3, "龘🙂 and 龘 the index of a chunk in memory", "a"])
def test_score_returns_the_sources_of_a_given_text(client: TestClient, retriever: Retriever, text: str) -> None:
    body = {"text": text, "k": 3}
    plain, answer = (client.post("/score", json=body | {"return_sources": wanted}).json() for wanted in (False, True))
    sources = answer.pop("sources")
    assert answer == plain
    assert len(sources["chunks"]) == len(retriever.tokenizer.encode(text)) // M
    check_chunks(retriever, sources["chunks"])
    check_copies(text, sources, least=5 if text.startswith(TEXT) else 0)


def test_completions_return_sources_in_each_choice(url: str, retriever: Retriever) -> None:
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=PATIENCE) as api:
        names = ("k", "return_sources")
        body = {name: value for name, value in COMPLETE.items() if name not in names} | {"n": 2, "seed": 1}
        extra = {name: COMPLETE[name] for name in names}
        for echo in (False, True):
            answer = api.completions.create(**body, extra_body=extra, echo=echo)
            for choice in answer.choices:
                check_chunks(retriever, choice.sources["chunks"])
                check_copies(choice.text, choice.sources, least=10)
                assert all(copy["text"][0] >= echo * len(TEXT) for copy in choice.sources["copies"])
        streamed = list(api.completions.create(**body, extra_body=extra, stream=True))
        for choice in api.completions.create(**body, extra_body=extra).choices:
            mine = [part.choices[0].sources for part in streamed if part.choices[0].index == choice.index]
            whole = joined([schemas.Sources(**sources) for sources in mine])
            assert whole.model_dump(mode="json") == choice.sources


def test_chat_returns_sources_in_each_choice(client: TestClient, retriever: Retriever) -> None:
    choice = client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]
    check_chunks(retriever, choice["sources"]["chunks"])
    check_copies(choice["message"]["content"], choice["sources"])
    events = events_of(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    parts = [event["choices"][0].get("sources") for event in events]
    assert parts[0] is None  # the event with the role
    assert joined([part and schemas.Sources(**part) for part in parts]).model_dump(mode="json") == choice["sources"]


def test_retrieval_off_has_no_sources(client: TestClient) -> None:
    empty = {"chunks": [], "copies": []}
    assert client.post("/generate", json=GENERATE | {"retrieval": False}).json()["sources"] == empty
    answer = client.post("/v1/completions", json=COMPLETE | {"model": "tiny:off"}).json()
    assert answer["choices"][0]["sources"] == empty


def test_a_completion_that_generates_nothing_refuses_sources(client: TestClient) -> None:
    refused = client.post("/v1/completions", json=COMPLETE | {"max_tokens": 0, "echo": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_sources")


def test_only_adjacent_copies_of_one_neighbor_are_joined() -> None:
    def copy(text: tuple[int, int], neighbor_text: tuple[int, int], neighbor: int = 0, share: float = 0.5) -> Any:
        one = schemas.Copy(text=text, chunk=1, neighbor=neighbor, neighbor_text=neighbor_text, tokens=1, share=share)
        return schemas.Sources(chunks=[], copies=[one])

    parts = [
        copy((0, 2), (5, 7)), copy((2, 3), (7, 8), share=0.9),
        copy((3, 5), (8, 10), neighbor=1), copy((6, 7), (10, 11), neighbor=1), copy((7, 8), (13, 14), neighbor=1),
    ]  # fmt: skip
    runs = joined([None, *parts]).copies
    assert [run.text for run in runs] == [(0, 3), (3, 5), (6, 7), (7, 8)]
    assert runs[0].neighbor_text == (5, 8)
    assert (runs[0].tokens, runs[0].share) == (2, pytest.approx(0.7))
    assert joined([None, None]) is None
