"""Scores and continuations over HTTP equal those of the language model."""

import asyncio
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from retro.inference import scoring
from retro.inference.decoder import Decoder
from retro.inference.language_model import LanguageModel
from retro.inference.scoring import Window
from retro.inference.settings import GenerationSettings
from retro.server import search_api
from retro.server.service import ScoreKey
from tests.conftest import PATIENCE
from tests.retro.server.conftest import TEXT, Make


def sequence(language_model: LanguageModel, text: str) -> np.ndarray:
    return np.concatenate([[language_model.tokenizer.bos_id], language_model.tokenizer.encode(text)]).astype(np.int64)


@pytest.mark.parametrize("text", [TEXT * 3, "a", "龘🙂 and 龘 again"])
def test_token_scores_join_to_the_text_and_sum_to_its_bits(
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


def test_generation_over_http_equals_the_models_with_and_without_streaming(
    client: TestClient, language_model: LanguageModel
) -> None:
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


def test_retrieval_off_equals_k_0(client: TestClient, language_model: LanguageModel) -> None:
    body = {"prompt": TEXT, "max_tokens": 10, "temperature": 0}
    settings = GenerationSettings(max_tokens=10, temperature=0)
    assert len(sequence(language_model, TEXT)) > 16  # includes a whole chunk, which has neighbors
    for retrieval, k in ((True, 2), (False, 0)):
        steps = language_model.generate([sequence(language_model, TEXT)], settings, k)
        text = "".join(step[0].text for step in steps)
        assert client.post("/generate", json=body | {"retrieval": retrieval}).json()["text"] == text


def test_a_stop_string_is_not_returned(client: TestClient) -> None:
    body = {"prompt": TEXT, "max_tokens": 40, "temperature": 1, "top_k": 0, "top_p": 1}
    text = ""
    while len(text) < 11:  # some seeds stop early
        body["seed"] = body.get("seed", 0) + 1
        text = client.post("/generate", json=body).json()["text"]
    stop = text[8:11]
    answer = client.post("/generate", json=body | {"stop": [stop]}).json()
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == text[: text.index(stop)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"prompt": "a", "max_tokens": 1025}, "max_tokens"),
        ("/generate", {"prompt": "a", "k": 17}, "k"),
        ("/generate", {"prompt": "龘" * 10_000}, "prompt"),
        ("/generate", {"prompt": "a", "seed": -1}, "seed"),
        ("/generate", {"prompt": "a", "stop": [""]}, "stop.0"),
        ("/generate", {"prompt": "a", "top_p": 0}, "top_p"),
        ("/score", {"text": ""}, "text"),
        ("/score", {"text": "a", "k": 17}, "k"),
        ("/score", {"text": "龘" * 10_000}, "text"),
    ],
)
def test_invalid_values_are_rejected_with_their_field(client: TestClient, path: str, body: dict, param: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 422
    assert response.json()["error"]["param"] == param


def test_the_total_neighbors_of_a_request_are_limited(app_with: Make) -> None:
    """Each chunk of 16 tokens reads k neighbors of 32 tokens."""
    with TestClient(app_with(max_neighbor_tokens=4 * 32)) as client:
        two_chunks = client.app.state.service.retriever.tokenizer.decode(np.arange(40, 72))
        asked = {
            "/score": {"text": two_chunks},
            "/neighbors": {"text": TEXT[:20]},
            "/generate": {"prompt": "a", "max_tokens": 31},
            "/v1/completions": {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 16},
        }
        for path, body in asked.items():
            assert client.post(path, json=body | {"k": 2}).status_code == 200, path
            refused = client.post(path, json=body | {"k": 5})
            assert refused.status_code in (400, 422), path
            assert "at most 128 (max_neighbor_tokens)" in refused.json()["error"]["message"]
        assert client.post("/generate", json=asked["/generate"] | {"k": 5, "retrieval": False}).status_code == 200


def test_a_prompt_must_fit_the_context_but_generation_may_exceed_it(client: TestClient) -> None:
    tokenizer, context = client.app.state.service.retriever.tokenizer, 64
    ids = tokenizer.encode(TEXT * 9)
    body = {"max_tokens": 4, "temperature": 0}
    fits = client.post("/v1/completions", json={"model": "tiny", "prompt": ids[: context - 1].tolist(), **body})
    assert fits.json()["usage"] == {"prompt_tokens": 63, "completion_tokens": 4, "total_tokens": 67}
    for path, more in (
        ("/v1/completions", {"model": "tiny", "prompt": [[5], ids[:context].tolist()]}),
        ("/generate", {"prompt": tokenizer.decode(ids[: context + 8])}),
    ):
        answer = client.post(path, json=body | more)
        error = answer.json()["error"]
        assert answer.status_code == (400 if path.startswith("/v1") else 422)
        assert "maximum context length is 64 tokens" in error["message"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    scored = {"model": "tiny", "prompt": ids.tolist(), "echo": True, "logprobs": 0, "max_tokens": 0}
    assert client.post("/v1/completions", json=scored).status_code == 200  # scored in windows


class Gate:
    """Wraps a function: counts the calls and blocks the first until `let_go` is set."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0
        self.begun, self.let_go = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.begun.set()
        assert self.let_go.wait(20)
        return self.function(*args, **kwargs)


@pytest.mark.parametrize(("path", "calls_of_a_chunk"), [("/score", 2), ("/neighbors", 1)])
def test_work_stops_after_a_timeout(
    app_with: Make, monkeypatch: pytest.MonkeyPatch, path: str, calls_of_a_chunk: int
) -> None:
    """`/score` stops between windows, each read with retrieval OFF and ON; `/neighbors` between chunks."""
    with TestClient(app_with(request_seconds=2, max_score_tokens=1)) as client:  # one window at a time
        module, name = (scoring, "_batch") if path == "/score" else (search_api, "_chunk")
        stopped = Gate(getattr(module, name))
        monkeypatch.setattr(module, name, stopped)
        assert client.post(path, json={"text": TEXT * 9, "k": 2}).status_code == 504
        assert stopped.calls == 1
        stopped.let_go.set()
        # The next request is processed after any work left from the first.
        assert client.post(path, json={"text": "a"}).status_code == 200
    assert stopped.calls == 1 + calls_of_a_chunk


def test_prompt_reading_stops_when_the_client_is_gone(
    app_with: Make, language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is read in windows; the first blocks until the client has received 504."""
    stopped = Gate(Decoder._run)
    monkeypatch.setattr(Decoder, "_run", lambda decoder, span: stopped(decoder, span))
    prompt = language_model.tokenizer.encode(TEXT * 9)[:60].tolist()
    body = {"model": "tiny", "max_tokens": 1}
    with TestClient(app_with(request_seconds=2)) as client:
        assert client.post("/v1/completions", json=body | {"prompt": prompt}).status_code == 504
        assert stopped.calls == 1
        stopped.let_go.set()
        assert client.post("/v1/completions", json=body | {"prompt": [5]}).status_code == 200
    assert stopped.calls == 2


def test_token_latency_and_process_memory_are_measured(client: TestClient) -> None:
    def count(name: str) -> float:
        found = re.search(rf"^{name} ([\d.e+]+)$", client.get("/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    names = ("retro_first_token_seconds_count", "retro_next_token_seconds_count")
    before = [count(name) for name in names]
    client.post("/v1/completions", json={"model": "tiny", "prompt": ["a", "b"], "max_tokens": 5, "temperature": 0})
    assert [count(name) for name in names] == [before[0] + 1, before[1] + 4]
    assert count("process_resident_memory_bytes") > 1e6


def test_a_temperature_close_to_0_equals_0(client: TestClient) -> None:
    body = {"prompt": TEXT, "max_tokens": 5}
    texts = [client.post("/generate", json=body | {"temperature": value}).json()["text"] for value in (0, 1e-300)]
    assert texts[0] == texts[1]


def test_without_a_model_its_endpoints_return_404_and_search_works(app_with: Make) -> None:
    with TestClient(app_with(model=False)) as client:
        asked = [
            ("/score", {"text": "a"}),
            ("/generate", {"prompt": "a"}),
            ("/v1/completions", {"model": "tiny", "prompt": "a"}),
        ]
        for path, body in asked:
            response = client.post(path, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert client.post("/search", json={"texts": ["a"]}).status_code == 200
        assert client.get("/datastore").json()["model"] is None
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["tiny:embedder"]


def test_datastore_endpoint_describes_the_model_and_limits(client: TestClient, language_model: LanguageModel) -> None:
    facts = client.get("/datastore").json()
    assert facts["model"]["fingerprint"] == language_model.checkpoint.fingerprint
    assert facts["model"]["retrieval"] is True
    assert facts["chunk_length"] == 16
    assert facts["limits"]["max_k"] == 100
    assert facts["datastores"][0]["documents"] > 100


@pytest.mark.parametrize("k", [0, 2])
def test_a_short_score_waits_for_a_few_windows_of_long_ones(
    app_with: Make, language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """Six long texts arrive first. The short one arrives while their first windows are scored."""
    context, let_go, begun, scored = language_model.context, threading.Event(), threading.Event(), list[int]()
    score_windows = LanguageModel.score_windows

    def held(model: LanguageModel, windows: list[Window], *args: Any) -> None:
        begun.set()
        assert let_go.wait(PATIENCE)
        scored.extend(len(window.sequence.tokens) for window in windows)
        score_windows(model, windows, *args)

    monkeypatch.setattr(LanguageModel, "score_windows", held)
    service = app_with(max_score_tokens=4 * context * (1 + 2 * k)).state.service  # four windows at a time
    long, short = np.arange(8 * context) % 50 + 3, np.arange(9) + 3

    async def scores() -> list[Any]:
        requests = [asyncio.ensure_future(service.scores([long], ScoreKey(k))) for _ in range(6)]
        await asyncio.to_thread(begun.wait, PATIENCE)
        requests.append(asyncio.ensure_future(service.scores([short], ScoreKey(k))))
        await asyncio.sleep(0)
        let_go.set()
        return await asyncio.gather(*requests)

    *of_long, of_short = asyncio.run(scores())
    assert len(scored) > 80
    assert scored.index(len(short)) <= 12
    for tokens, (scores_of_request,) in zip([long] * 6 + [short], [*of_long, of_short], strict=True):
        (expected,) = language_model.score([tokens], k)
        assert scores_of_request.log_probabilities == pytest.approx(expected, abs=0.1)  # in bfloat16
