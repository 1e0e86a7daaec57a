"""OpenAI's own client and lm-eval's talk to the server; fields that it does not know are named."""

import base64
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from retro.inference.language_model import LanguageModel
from tests.retro.server.conftest import TEXT, Make, listening
from tests.retro.server.generation_requests import BODIES, CHAT, COMPLETIONS, MESSAGES, choices_of, post, refusal


@pytest.fixture(scope="module")
def openai() -> Any:
    """The package. Every process that collects tests would import it at the top of this file, for a second."""
    return importlib.import_module("openai")


@pytest.fixture(scope="module")
def api(openai: Any, url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as opened:
        yield opened


def test_the_api_key_is_the_token(openai: Any, app_with: Make) -> None:
    with listening(app_with(token="right")) as url:
        with openai.OpenAI(base_url=url + "/v1", api_key="right", max_retries=0) as api:
            assert api.completions.create(model="tiny", prompt="a", max_tokens=1).choices
        with (
            openai.OpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0) as api,
            pytest.raises(openai.AuthenticationError) as refused,
        ):
            api.models.list()
        assert refused.value.code == "invalid_api_key"


def test_embeddings_equal_the_datastores(api: Any, retriever: Retriever) -> None:
    texts = [TEXT, "检索模型"]
    expected = retriever.embed(texts)
    ids = [row.tolist() for row in retriever.tokenizer.encode_batch(texts)]
    for given in (texts, ids):
        for kind in ({}, {"encoding_format": "float"}):  # without it, the client requests base64 and decodes it
            answer = api.embeddings.create(model="tiny:embedder", input=given, **kind)
            np.testing.assert_allclose([row.embedding for row in answer.data], expected, rtol=1e-6)
            assert [row.index for row in answer.data] == [0, 1]
            assert answer.usage.total_tokens == sum(map(len, ids))
    raw = api.embeddings.create(model="tiny:embedder", input=TEXT, encoding_format="base64").data[0].embedding
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(raw), "<f4"), expected[0])


@pytest.mark.parametrize("changes", [{"dimensions": 16}, {"input": []}, {"input": ""}, {"input": [[]]}])
def test_invalid_embedding_requests_are_rejected(client: TestClient, changes: dict) -> None:
    body = {"model": "tiny:embedder", "input": "a"} | changes
    assert client.post("/v1/embeddings", json=body).status_code == 400


def test_tokenize_adds_bos_on_request(client: TestClient, retriever: Retriever) -> None:
    answer = client.post("/tokenize", json={"prompt": "index", "add_special_tokens": True}).json()
    assert answer["tokens"][0] == retriever.tokenizer.bos_id
    assert answer["count"] == len(answer["tokens"])


def test_openais_client_generates_streams_and_lists_models(
    api: Any, client: TestClient, language_model: LanguageModel
) -> None:
    lengths = {model.id: model.max_model_len for model in api.models.list()}  # type: ignore[attr-defined]
    assert lengths == {"tiny": language_model.context, "tiny:off": language_model.context, "tiny:embedder": None}
    assert all(api.models.retrieve(name).id == name for name in lengths)
    assert client.post("/tokenize", json={"prompt": "a"}).json()["max_model_len"] == language_model.context
    body: Any = {"max_tokens": 12, "temperature": 0}
    text = choices_of(COMPLETIONS, post(client, COMPLETIONS).json())[0][0]
    assert api.completions.create(**BODIES[COMPLETIONS], **body).choices[0].text == text
    assert (
        "".join(e.choices[0].text for e in api.completions.create(**BODIES[COMPLETIONS], **body, stream=True)) == text
    )
    answer = choices_of(CHAT, post(client, CHAT).json())[0][0]
    assert api.chat.completions.create(**BODIES[CHAT], **body).choices[0].message.content == answer
    parts = api.chat.completions.create(**BODIES[CHAT], **body, stream=True)
    assert "".join(event.choices[0].delta.content for event in parts) == answer


def test_unknown_models_are_not_found(openai: Any, api: Any) -> None:
    calls: tuple[Callable[[], Any], ...] = (
        lambda: api.models.retrieve("other"),
        lambda: api.embeddings.create(model="tiny", input="a"),
        lambda: api.completions.create(model="tiny:embedder", prompt="a"),
    )
    for call in calls:
        with pytest.raises(openai.NotFoundError, match="tiny:") as refused:
            call()
        assert (refused.value.type, refused.value.code, refused.value.param) == (
            "invalid_request_error", "model_not_found", "model",
        )  # fmt: skip


def test_neutral_and_unknown_fields_are_accepted_with_a_warning_or_refused_by_a_strict_server(
    client: TestClient, app_with: Make
) -> None:
    neutral = {"n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "me"}
    odd = {"store": True, 'x"\r\ny': 1, "stream_options": {"query": True}}
    plain, ignoring = post(client, COMPLETIONS, **neutral), post(client, COMPLETIONS, **odd)
    assert "Warning" not in plain.headers
    names = ignoring.headers["Warning"].rpartition(": ")[2].removesuffix('"').split(", ")
    assert sorted(names) == ["store", "stream_options.query", "x???y"]
    assert ignoring.json()["choices"] == plain.json()["choices"]
    assert "store" in post(client, COMPLETIONS, store=True, stream=True).headers["Warning"]
    many = post(client, COMPLETIONS, **{f"field{number}": 1 for number in range(1000)})
    assert many.headers["Warning"].endswith(', 984 more"')
    accepted = {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"}
    named = post(client, CHAT, **accepted, messages=[message | {"name": "Ada"} for message in MESSAGES])
    assert named.headers["Warning"].endswith('messages.0.name, messages.1.name, messages.2.name, messages.3.name"')
    with TestClient(app_with(strict_fields=True)) as strict:
        assert post(strict, COMPLETIONS, **neutral)
        for extra, param, fields in (
            ({"store": True}, "store", "prompt, max_tokens, echo"),
            ({"stream_options": {"query": True}}, "stream_options.query", "include_usage"),
        ):
            refused = strict.post(COMPLETIONS, json=BODIES[COMPLETIONS] | extra)
            assert refusal(refused) == (400, param, "unknown_parameter")
            assert fields in refused.json()["error"]["message"]
