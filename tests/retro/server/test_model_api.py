"""Scores and continuations over HTTP are those of the language model."""

import json

import numpy as np
import pytest
from starlette.testclient import TestClient

from retro.generation_settings import GenerationSettings
from retro.language_model import LanguageModel
from tests.retro.server.conftest import TEXT, Make


def sequence(language_model: LanguageModel, text: str) -> np.ndarray:
    return np.concatenate([[language_model.tokenizer.bos_id], language_model.tokenizer.encode(text)]).astype(np.int64)


@pytest.mark.parametrize("text", [TEXT * 3, "a", "龘🙂 and 龘 again"])
def test_scores_join_to_the_text_and_sum_to_its_bits(
    client: TestClient, language_model: LanguageModel, text: str
) -> None:
    answer = client.post("/score", json={"text": text, "k": 2}).json()
    assert "".join(token["text"] for token in answer["tokens"]) == text
    assert all(token["text"] and "\ufffd" not in token["text"] for token in answer["tokens"])
    for key, k in (("on", 2), ("off", 0)):
        expected = language_model.score([sequence(language_model, text)], k)[0]
        assert sum(token[key] for token in answer["tokens"]) == pytest.approx(expected.sum())
        bits = -expected.sum() / np.log(2) / len(text.encode())
        assert answer[f"bits_per_byte_{key}"] == pytest.approx(bits)
    for token in answer["tokens"]:
        assert token["difference"] == pytest.approx(token["on"] - token["off"])


def test_generation_is_the_models_own_streamed_or_not(client: TestClient, language_model: LanguageModel) -> None:
    body = {"prompt": TEXT, "max_tokens": 20, "temperature": 1, "top_k": 0, "top_p": 1, "seed": 7, "k": 2}
    settings = GenerationSettings(max_tokens=20, temperature=1, top_k=0, top_p=1, seed=7)
    pieces = [step[0] for step in language_model.generate([sequence(language_model, TEXT)], settings, 2)]
    whole = client.post("/generate", json=body).json()
    assert whole["text"] == "".join(piece.text for piece in pieces)
    assert (whole["tokens"], whole["finish_reason"]) == (len(pieces), pieces[-1].finish_reason)
    streamed = client.post("/generate", json=body | {"stream": True})
    assert streamed.headers["Content-Type"].startswith("text/event-stream")
    *events, done = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert done == "[DONE]"
    told = [json.loads(event) for event in events]
    assert "".join(event["text"] for event in told) == whole["text"]
    assert [event["finish_reason"] for event in told] == [None] * (len(told) - 1) + [whole["finish_reason"]]


def test_off_is_k_0(client: TestClient, language_model: LanguageModel) -> None:
    body = {"prompt": TEXT * 2, "max_tokens": 10, "temperature": 0}
    settings = GenerationSettings(max_tokens=10, temperature=0)
    for retrieval, k in ((True, 2), (False, 0)):
        steps = language_model.generate([sequence(language_model, TEXT * 2)], settings, k)
        text = "".join(step[0].text for step in steps)
        assert client.post("/generate", json=body | {"retrieval": retrieval}).json()["text"] == text


def test_a_stop_string_is_never_shown(client: TestClient) -> None:
    body = {"prompt": TEXT, "max_tokens": 40, "temperature": 1, "top_k": 0, "top_p": 1, "seed": 1}
    text = client.post("/generate", json=body).json()["text"]
    stop = text[8:11]
    answer = client.post("/generate", json=body | {"stop": [stop]}).json()
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == text[: text.index(stop)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"prompt": "a", "max_tokens": 1025}, "max_tokens"),
        ("/generate", {"prompt": "a", "k": 101}, "k"),
        ("/generate", {"prompt": "龘" * 10_000}, "prompt"),
        ("/generate", {"prompt": "a", "seed": -1}, "seed"),
        ("/generate", {"prompt": "a", "stop": [""]}, "stop.0"),
        ("/generate", {"prompt": "a", "top_p": 0}, "top_p"),
        ("/score", {"text": ""}, "text"),
        ("/score", {"text": "a", "k": 101}, "k"),
        ("/score", {"text": "龘" * 10_000}, "text"),
    ],
)
def test_limits_are_told_with_their_field(client: TestClient, path: str, body: dict, param: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 422
    assert response.json()["error"]["param"] == param


def test_a_temperature_next_to_0_is_0(client: TestClient) -> None:
    body = {"prompt": TEXT, "max_tokens": 5}
    texts = [client.post("/generate", json=body | {"temperature": value}).json()["text"] for value in (0, 1e-300)]
    assert texts[0] == texts[1]


def test_without_a_model_its_endpoints_say_so_and_search_works(app_with: Make) -> None:
    with TestClient(app_with(model=False)) as client:
        asked = [
            ("/score", {"text": "a"}),
            ("/generate", {"prompt": "a"}),
            ("/v1/completions", {"model": "tiny", "prompt": "a"}),
        ]
        for path, body in asked:
            response = client.post(path, json=body)
            assert (response.status_code, response.json()["error"]["type"]) == (404, "no_model")
        assert client.post("/search", json={"texts": ["a"]}).status_code == 200
        assert client.get("/datastore").json()["model"] is None
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["tiny:embedder"]


def test_what_is_served_is_told(client: TestClient, language_model: LanguageModel) -> None:
    facts = client.get("/datastore").json()
    assert facts["model"]["fingerprint"] == language_model.checkpoint.fingerprint
    assert facts["model"]["retrieval"] is True
    assert facts["chunk_length"] == 16
    assert facts["limits"]["max_k"] == 100
    assert facts["datastores"][0]["documents"] > 100
