"""Chat completions with `retrieval` answer from passages: the same as by hand, streamed or not, and limits name the field."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore, delete_documents
from retro.inference.chat_template import ChatTemplate, Message
from retro.inference.language_model import LanguageModel
from retro.inference.passage_prompts import passages_as_neighbors, room_for_prompt, write_prompt
from retro.inference.quotes import find_quotes
from retro.inference.settings import GenerationSettings
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.retro.server.conftest import CHAT_TEMPLATE, Make, events_of
from tests.retro.server.generation_requests import CHAT, refusal

QUESTION = "title 42"
RETRIEVAL = {"passages": 2, "tokens": 48}
M = 16


@pytest.fixture(scope="module")
def roomy(language_model: LanguageModel) -> LanguageModel:
    """The model with room for passages."""
    from dataclasses import replace

    return replace(language_model, context=512)


@pytest.fixture(scope="module")
def client(retriever: Retriever, roomy: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    settings = ServeSettings(name="tiny", allowed_hosts=("testserver",), chat_template=str(template))
    with TestClient(make_app(retriever, roomy, settings)) as opened:
        yield opened


def body(retrieval: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
    return asked | {"retrieval": RETRIEVAL | (retrieval or {})} | changes


def answer(client: TestClient, **changes: Any) -> dict[str, Any]:
    response = client.post(CHAT, json=body(**changes))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


@pytest.mark.parametrize("copies", [True, False])
def test_an_answer_is_that_of_the_prompt_with_passages(client: TestClient, roomy: LanguageModel, copies: bool) -> None:
    assert roomy.retriever is not None
    choice = answer(client, retrieval={"copy": copies}, return_sources=True)
    template, messages = ChatTemplate(roomy.tokenizer, CHAT_TEMPLATE), [Message("user", QUESTION)]
    passages = roomy.retriever.passages(QUESTION, 2, tokens=48)
    written = write_prompt(template, messages, template.prompt(messages), passages, room_for_prompt(512, 12))
    assert written.passages == passages
    given = [passages_as_neighbors(roomy.retriever.retrieval, passages)] if copies else None
    settings = GenerationSettings(max_tokens=12, temperature=0, top_k=0, top_p=1)
    steps = roomy.generate([written.tokens], settings, given=given, inserted=[written.inserted])
    assert choice["message"]["content"] == "".join(token.text for step in steps for token in step)
    found = choice["retrieval"]
    assert [row["number"] for row in found["passages"]] == [1, 2]
    assert [row["text"] for row in found["passages"]] == [passage.text for passage in passages]
    assert found["passages"][0]["document_id"] == passages[0].document_id
    quotes = find_quotes(choice["message"]["content"], [passage.text for passage in passages])
    assert [(tuple(each["text"]), each["passage"]) for each in found["quotes"]] == [(q.text, q.passage) for q in quotes]
    if copies:
        assert 0 <= found["copied"] <= 1
        earned = len(written.tokens) - (written.inserted[1] - written.inserted[0])
        assert found["trust"]["prompt_tokens"] == earned
        read = {hit["document_id"] for chunk in choice["sources"]["chunks"] for hit in chunk["neighbors"]}
        assert read == {passage.document_id for passage in passages}
        assert all(hit["distance"] is None for chunk in choice["sources"]["chunks"] for hit in chunk["neighbors"])
    else:
        assert (found["copied"], found["trust"]) == (None, None)
        assert choice["sources"]["chunks"] == []


@pytest.mark.parametrize("copies", [True, False])
def test_a_stream_begins_with_the_passages_and_ends_with_what_is_from_them(client: TestClient, copies: bool) -> None:
    whole = answer(client, retrieval={"copy": copies})
    response = client.post(CHAT, json=body({"copy": copies}, stream=True))
    choices = [choice for event in events_of(response) for choice in event["choices"]]
    assert "".join(choice["delta"]["content"] for choice in choices) == whole["message"]["content"]
    first, last = choices[0]["retrieval"], choices[-1]["retrieval"]
    assert first["passages"] == whole["retrieval"]["passages"]
    assert last | {"passages": first["passages"]} == whole["retrieval"]
    assert all("retrieval" not in choice for choice in choices[1:-1])


def test_answers_without_the_field_have_none_of_it(client: TestClient) -> None:
    plain = client.post(CHAT, json=body() | {"retrieval": None}).json()["choices"][0]
    assert "retrieval" not in plain


def test_the_question_before_a_follow_up_is_searched_too(client: TestClient, retriever: Retriever) -> None:
    turns = [("user", QUESTION), ("assistant", "the index"), ("user", "zzz unheard?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    found = answer(client, messages=messages)["retrieval"]["passages"]
    assert "Title 42" in [row["title"] for row in found]
    system = [{"role": "system", "content": QUESTION}]
    assert refusal(client.post(CHAT, json=body(messages=system)))[:2] == (400, "messages")


def test_without_room_or_matches_the_model_answers_alone(
    client: TestClient, app_with: Make, copying_datastore: Datastore, copying_run: Path
) -> None:
    with TestClient(app_with()) as small:  # a context of four chunks
        found = small.post(CHAT, json=body(messages=[{"role": "user", "content": "index " * 12}])).json()
        assert found["choices"][0]["retrieval"]["passages"] == []
    retriever = Retriever.open(copying_datastore.folder)  # without vectors
    model = LanguageModel.open(copying_run, retriever, "cpu")
    model.checkpoint.settings["imported"] = {"chat_template": CHAT_TEMPLATE}
    settings = ServeSettings(name="tiny", allowed_hosts=("testserver",))
    with TestClient(make_app(retriever, model, settings)) as sparse:
        choice = answer(sparse, messages=[{"role": "user", "content": "zzz unheard"}])
        assert (choice["retrieval"]["passages"], choice["retrieval"]["quotes"]) == ([], [])
        assert choice["retrieval"]["trust"]["prompt_tokens"] > 0  # it still copies from the datastore


def test_deleted_documents_are_gone_from_the_next_answer(
    tiny_datastore: Datastore, roomy: LanguageModel, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_datastore.folder, tmp_path / "datastore"))
    retriever = Retriever.open(folder)
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE)
    settings = ServeSettings(name="tiny", allowed_hosts=("testserver",), chat_template=str(tmp_path / "chat.jinja"))
    with TestClient(make_app(retriever, roomy, settings)) as client:
        before = answer(client)["retrieval"]["passages"][0]["document_id"]
        delete_documents(folder, [before])
        after = answer(client)["retrieval"]["passages"]
        assert before not in [row["document_id"] for row in after]


@pytest.mark.parametrize(
    ("changes", "status", "param", "words"),
    [
        ({"retrieval": {"passages": 0}}, 400, "retrieval.passages", "greater than or equal to 1"),
        ({"retrieval": {"passages": 101}}, 400, "retrieval.passages", "retrieval.passages = 101: at most 100"),
        ({"retrieval": {"copy": "yes"}}, 400, "retrieval.copy", "boolean"),
        ({"retrieval": True}, 400, "retrieval", ""),
        ({"model": "tiny:off"}, 400, "retrieval", "has retrieval OFF. Use 'tiny'; with copy = false"),
        (
            {"messages": [{"role": "user", "content": "why " * 4_000}]},
            400,
            "messages",
            "maximum context length is 512",
        ),
        (
            {"messages": [{"role": "user", "content": "why " * 10_000}]},
            400,
            "messages",
            "at most 16,384 (max_input_tokens",
        ),
        ({"messages": [{"role": "user", "content": " "}]}, 400, "messages", "no message of the user has text"),
    ],
)
def test_invalid_requests_are_refused(client: TestClient, changes: dict, status: int, param: str, words: str) -> None:
    response = client.post(CHAT, json=body() | changes)
    assert refusal(response)[:2] == (status, param), response.text
    assert words in response.json()["error"]["message"]


def test_unknown_fields_are_named(client: TestClient) -> None:
    response = client.post(CHAT, json=body({"copies": False}))
    assert response.headers["Warning"].endswith('"ignored unknown fields: retrieval.copies"')


def test_passages_do_not_earn_trust(roomy: LanguageModel, retriever: Retriever) -> None:
    """A prompt of stored text earns trust; marked as inserted, the same tokens earn none."""
    (passage,) = retriever.passages(QUESTION, 1, tokens=160)
    text = np.append(retriever.tokenizer.bos_id, retriever.tokenizer.encode(passage.text)).astype(np.int64)
    settings = GenerationSettings(max_tokens=1, temperature=0)

    def trust(inserted: tuple[int, int]) -> tuple[float, int]:
        (token,) = next(roomy.generate([text], settings, 2, sources=True, inserted=[inserted]))
        assert token.trust is not None
        return token.trust.share, token.trust.prompt_tokens

    earned, length = trust((0, 0))
    assert length == len(text)
    alone, rest = trust((1, len(text)))
    assert rest == 1
    assert alone == pytest.approx(0.125, abs=1e-3)
    assert earned != pytest.approx(alone, abs=1e-3)
