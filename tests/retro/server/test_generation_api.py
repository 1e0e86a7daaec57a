"""Continuations, chat answers and their sources over HTTP equal those of the language model; mistakes are refused by field."""

import asyncio
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from retro.inference import scoring
from retro.inference.cached_layers import CachedLayers
from retro.inference.language_model import LanguageModel
from retro.inference.scoring import Window
from retro.inference.source_texts import joined
from retro.server import search_api
from retro.server.service import ScoreKey, Service
from tests.retro.server.conftest import CHAT_TEMPLATE, TEXT, Gate, Make, events_of
from tests.retro.server.generation_requests import (
    BODIES,
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    GENERATE,
    MESSAGES,
    SOURCES,
    choices_of,
    generated,
    post,
    refusal,
)

# --- continuations ---------------------------------------------------------------------------------------------------

OFF: dict[str, Any] = {"retrieval": False}  # under /v1 a name of the model

FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (OFF, {"k": 0}),
    ({"k": 4, "temperature": 1, "seed": 8, "max_tokens": 40, "stop": ["e", "a"]}, {"k": 4, "temperature": 1, "seed": 8, "max_tokens": 40, "stop": ("e", "a")}),
    ({"temperature": 0.7, "seed": 9, "top_k": 3, "top_p": 0.8}, {"temperature": 0.7, "seed": 9, "top_k": 3, "top_p": 0.8}),
    ({"copy_strength": 0.5, "temperature": 1, "seed": 2}, {"copy_strength": 0.5, "temperature": 1, "seed": 2}),
]  # fmt: skip
"""Fields of every endpoint, and the settings of the model."""
FIELDS_OF_V1: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"logit_bias": {"60": 1.9}, "frequency_penalty": 2, "presence_penalty": 1}, {"logit_bias": ((60, 1.9),), "frequency_penalty": 2, "presence_penalty": 1}),
    ({"logit_bias": {"60": 100}, "stop_token_ids": [60]}, {"logit_bias": ((60, 100),), "stop_token_ids": (60,)}),
    ({"logit_bias": {"2": 100}, "ignore_eos": True}, {"logit_bias": ((2, 100),), "ignore_eos": True}),
    ({"repetition_penalty": 1.5, "temperature": 1, "seed": 3, "min_p": 0.1}, {"repetition_penalty": 1.5, "temperature": 1, "seed": 3, "min_p": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields", "settings"),
    [(path, *case) for path in ENDPOINTS for case in FIELDS + (FIELDS_OF_V1 if path != GENERATE else [])],
)
def test_a_continuation_is_that_of_the_model_with_the_fields_as_settings(
    client: TestClient, language_model: LanguageModel, path: str, fields: dict[str, Any], settings: dict[str, Any]
) -> None:
    tokens = generated(language_model, path, **settings)
    if fields is OFF:
        assert path == CHAT or tokens != generated(language_model, path)  # the neighbors change no token of the chat
    answer = post(client, path, **({"model": "tiny:off"} if fields is OFF and path != GENERATE else fields)).json()
    assert choices_of(path, answer) == [("".join(token.text for token in tokens), tokens[-1].finish_reason)]
    assert len(tokens) == (answer["tokens"] if path == GENERATE else answer["usage"]["completion_tokens"])


def test_retrieval_is_on_also_if_the_servers_own_name_ends_like_that_of_a_model_without_it(
    app_with: Make, client: TestClient
) -> None:
    with TestClient(app_with(name="tiny:off")) as other:
        assert post(other, GENERATE).json() == post(client, GENERATE).json() != post(client, GENERATE, **OFF).json()


def test_texts_without_a_seed_differ(client: TestClient) -> None:
    sampled = [choices_of(COMPLETIONS, post(client, COMPLETIONS, temperature=1).json()) for _ in range(3)]
    assert sampled[0] != sampled[1] or sampled[1] != sampled[2]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_events_of_a_stream_join_to_the_answer(client: TestClient, path: str) -> None:
    """Sampled, with sources; under /v1 three continuations with log-probabilities and the usage."""
    changes: dict[str, Any] = {"temperature": 1, "seed": 5, "return_sources": True}
    if path != GENERATE:
        changes |= (
            {"n": 3, "logprobs": True, "top_logprobs": 2} if path == CHAT else {"n": 3, "echo": True, "logprobs": 1}
        )
    whole = post(client, path, **changes).json()
    options = {} if path == GENERATE else {"stream_options": {"include_usage": True}}
    response = post(client, path, **changes, stream=True, **options)
    assert response.headers["Content-Type"].startswith("text/event-stream")
    events = events_of(response)
    if path != GENERATE:
        assert len({event["id"] for event in events}) == 1
        last = events.pop()
        assert (last["usage"], last["choices"]) == (whole["usage"], [])
        assert len({text for text, _ in choices_of(path, whole)}) > 1
    for index, (text, finish) in enumerate(choices_of(path, whole)):
        parts = [event if path == GENERATE else event["choices"][0] for event in events]
        parts = [part for part in parts if part.get("index", 0) == index]
        assert "".join(part["delta"]["content"] if path == CHAT else part["text"] for part in parts) == text
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [finish]
        sources = joined([SOURCES.validate_python(part["sources"]) for part in parts if part.get("sources")])
        expected = whole if path == GENERATE else whole["choices"][index]
        assert sources is not None
        assert SOURCES.dump_python(sources, mode="json") == expected["sources"]
        if path == CHAT:
            assert [part["delta"]["role"] for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
            streamed = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
            assert streamed == expected["logprobs"]["content"]
        elif path == COMPLETIONS:
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [each for part in parts for each in part["logprobs"][name]] == expected["logprobs"][name]
    assert not any("sources" in str(event) for event in events_of(post(client, path, stream=True)))


@pytest.mark.parametrize("path", ENDPOINTS)
def test_an_answer_says_how_far_retrieval_was_trusted_and_how_much_was_copied(client: TestClient, path: str) -> None:
    def sources_of(**changes: Any) -> dict[str, Any]:
        answer = post(client, path, return_sources=True, **changes).json()
        sources: dict[str, Any] = answer["sources"] if path == GENERATE else answer["choices"][0]["sources"]
        return sources

    sources = sources_of()
    assert 0 <= sources["copied_tokens"] <= 12
    assert 0 < sources["trust"]["share"] < 1
    if path != CHAT:
        short = sources_of(prompt="a")
        assert short["trust"] == {"share": pytest.approx(0.125), "prompt_tokens": 2, "low_because": "short prompt"}
    off = sources_of(retrieval=False) if path == GENERATE else sources_of(model="tiny:off")
    assert "trust" not in off
    assert off["copied_tokens"] == 0


def test_n_continuations_have_consecutive_seeds(client: TestClient) -> None:
    body = {"prompt": [TEXT, "index"], "max_tokens": 8, "temperature": 1, "seed": 3}
    together = post(client, COMPLETIONS, **body, n=2).json()
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    first, second = (
        choices_of(COMPLETIONS, post(client, COMPLETIONS, **body | {"seed": seed}).json()) for seed in (3, 4)
    )
    assert choices_of(COMPLETIONS, together) == [first[0], second[0], first[1], second[1]]
    echoed = choices_of(COMPLETIONS, post(client, COMPLETIONS, **body, n=2, echo=True).json())
    prompts = [TEXT, TEXT, "index", "index"]
    assert [text for text, _ in echoed] == [
        prompt + text for prompt, (text, _) in zip(prompts, choices_of(COMPLETIONS, together), strict=True)
    ]


def test_the_formats_of_prompts_and_messages_are_equivalent(client: TestClient, language_model: LanguageModel) -> None:
    ids = [language_model.tokenizer.encode(text).tolist() for text in (TEXT, "index")]
    texts = [
        choices_of(COMPLETIONS, post(client, COMPLETIONS, prompt=prompt).json())
        for prompt in (TEXT, [TEXT], ids[0], [ids[0]], [TEXT, "index"], ids)
    ]
    assert texts == [texts[0]] * 4 + [texts[4]] * 2
    assert texts[4][:1] == texts[0]
    (system, *others), whole = MESSAGES, choices_of(CHAT, post(client, CHAT).json())
    parts = [{"type": "text", "text": "index "}, {"type": "text", "text": "and chunk"}]
    for first in (system | {"content": parts}, system | {"role": "developer"}):
        assert choices_of(CHAT, post(client, CHAT, messages=[first, *others]).json()) == whole


def test_a_prompt_must_fit_the_context_but_generation_may_exceed_it(
    client: TestClient, language_model: LanguageModel
) -> None:
    tokenizer, context = language_model.tokenizer, language_model.context
    ids = tokenizer.encode(TEXT * 9).tolist()
    fits = post(client, COMPLETIONS, prompt=ids[: context - 1], max_tokens=4).json()
    assert fits["usage"].items() >= {"prompt_tokens": 63, "completion_tokens": 4, "total_tokens": 67}.items()
    for path, more, param in (
        (COMPLETIONS, {"prompt": [[5], ids[:context]]}, "prompt"),
        (GENERATE, {"prompt": tokenizer.decode(ids[: context + 8])}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a " * 1000}]}, "messages"),
    ):
        answer = client.post(path, json=BODIES[path] | more)
        assert refusal(answer) == (422 if path == GENERATE else 400, param, "context_length_exceeded")
        assert (
            f"maximum context length is {context} tokens" in answer.json()["error"]["message"]
        )  # clients search for it
    assert post(client, COMPLETIONS, prompt=ids, echo=True, logprobs=0, max_tokens=0)  # scored in windows
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
    assert client.post(CHAT, json=chat).json()["usage"]["total_tokens"] == context  # the default fills the context


def test_chat_log_probabilities_are_those_of_the_model(client: TestClient, language_model: LanguageModel) -> None:
    content = post(client, CHAT, logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"]["content"]
    for entry, token in zip(content, generated(language_model, CHAT, logprobs=3), strict=True):
        assert entry["logprob"] == pytest.approx(token.log_probability)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx([value for _, value in token.top])
        assert entry["token"] == entry["top_logprobs"][0]["token"]  # greedy
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode() == language_model.tokenizer.decode(
            [token.token]
        )
    assert post(client, CHAT).json()["choices"][0]["logprobs"] is None


def test_the_chat_template_is_the_checkpoints_or_the_given_one_or_missing(
    app_with: Make, language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    with TestClient(app_with(chat_template="")) as client:
        assert refusal(client.post(CHAT, json=BODIES[CHAT])) == (400, None, "no_chat_template")
    text = "".join(token.text for token in generated(language_model, CHAT))
    sections = {
        "finetune": {"format": "instructions", "template": CHAT_TEMPLATE, "language": "auto"},
        "imported": {"chat_template": CHAT_TEMPLATE},
    }
    for name, section in sections.items():
        with monkeypatch.context() as patched:
            patched.setitem(language_model.checkpoint.settings, name, section)
            app = app_with(chat_template="")
        with TestClient(app) as client:
            assert choices_of(CHAT, post(client, CHAT).json())[0][0] == text, name
    path = tmp_path / "strict.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{{ m.role + m.content }}{% endfor %}"
    )
    with TestClient(app_with(chat_template=str(path))) as client:
        refused = client.post(CHAT, json=BODIES[CHAT])
        assert refusal(refused)[:2] == (400, "messages")
        assert "no system message" in refused.json()["error"]["message"]
        assert post(client, CHAT, messages=MESSAGES[1:])


# --- sources ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def copying_client(language_model: LanguageModel, trusted: None, app_with: Make) -> Iterator[TestClient]:
    """A client of a model that copies from neighbors with most of its probability."""
    import torch

    assert language_model.model.copy_head is not None
    network: Any = language_model.model.copy_head.neighbors
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with torch.no_grad():
        network.outer_bias.fill_(10.0)
    with TestClient(app_with()) as opened:  # a decoder reads the weights of the copy head when it is made
        yield opened
    network.load_state_dict(before)


@pytest.mark.parametrize("path", [*ENDPOINTS, "echo", "/score"])
def test_sources_are_the_neighbors_that_were_read_and_the_runs_that_were_copied(
    copying_client: TestClient, retriever: Retriever, path: str
) -> None:
    wanted: dict[str, Any] = {"k": 3, "return_sources": True}
    if path == "/score":
        text = TEXT * 3
        plain, answer = (copying_client.post(path, json={"text": text} | body).json() for body in ({"k": 3}, wanted))
        sources, read = answer.pop("sources"), len(retriever.tokenizer.encode(text))
    else:
        echo, name = (path == "echo"), COMPLETIONS if path == "echo" else path
        body = {"max_tokens": 24} | ({"echo": True} if echo else {})
        plain, answer = (post(copying_client, name, **body | each).json() for each in ({"k": 3}, wanted))
        text, _ = choices_of(name, answer)[0]
        sources = (answer if name == GENERATE else answer["choices"][0]).pop("sources")
        used = answer.get("usage", {"total_tokens": len(retriever.tokenizer.encode(TEXT)) + answer.get("tokens", 0)})
        read = used["total_tokens"] - (name == CHAT)  # the prompt of a chat has the beginning-of-document token
        answer, plain = ({**each, "id": "", "created": 0} for each in (answer, plain))
        assert all(copy["text"][0] >= echo * len(TEXT) for copy in sources["copies"])
    assert answer == plain
    assert [chunk["chunk"] for chunk in sources["chunks"]] == list(range(read // 16))
    for chunk in sources["chunks"]:
        distances = [hit["distance"] for hit in chunk["neighbors"]]
        assert len(distances) == 3
        assert distances == sorted(distances)
        for hit in chunk["neighbors"]:
            stored = retriever.lookup.chunk(hit["chunk_id"])
            for field in ("text", "continuation", "document_id", "title"):
                assert hit[field] == getattr(stored, field)
            assert hit["score"] == pytest.approx(1 - hit["distance"] / 2)
    end = 0
    for copy in sources["copies"]:
        neighbor = sources["chunks"][copy["chunk"]]["neighbors"][copy["neighbor"]]
        (start, stop), (first, last) = copy["text"], copy["neighbor_text"]
        assert end <= start <= stop <= len(text)
        if "\ufffd" not in text[start:stop]:
            assert text[start:stop] == (neighbor["text"] + neighbor["continuation"])[first:last]
        assert 0.5 <= copy["share"] <= 1
        end = stop
    assert sum(copy["tokens"] for copy in sources["copies"]) >= (1 if path == CHAT else 5)


def test_sources_are_empty_without_retrieval_and_refused_without_generation(client: TestClient) -> None:
    empty = {"chunks": [], "copies": [], "runs": [], "copied_tokens": 0.0}
    assert post(client, GENERATE, retrieval=False, return_sources=True).json()["sources"] == empty
    off = post(client, COMPLETIONS, model="tiny:off", return_sources=True).json()
    assert off["choices"][0]["sources"] == empty
    refused = client.post(
        COMPLETIONS, json=BODIES[COMPLETIONS] | {"max_tokens": 0, "echo": True, "return_sources": True}
    )
    assert refusal(refused)[:2] == (400, "return_sources")


# --- refusals --------------------------------------------------------------------------------------------------------

IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        (GENERATE, {"max_tokens": 1025}, "max_tokens"),
        (GENERATE, {"k": 17}, "k"),
        (GENERATE, {"stop": ["x" * 1025]}, "stop.0"),
        (COMPLETIONS, {"stop": "x" * 1025}, "stop"),
        (CHAT, {"stop": ["x", "x" * 200_000]}, "stop"),
        (CHAT, {"stop": ["x"] * 17}, "stop"),
        (GENERATE, {"prompt": "龘" * 10_000}, "prompt"),
        ("/score", {"text": "a", "k": 17}, "k"),
        ("/score", {"text": "龘" * 10_000}, "text"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"suffix": "end"}, "suffix"),
        (COMPLETIONS, {"logit_bias": {"100000": 1}}, "logit_bias"),
        (COMPLETIONS, {"stop_token_ids": [10**6]}, "stop_token_ids"),
        (COMPLETIONS, {"max_tokens": 100_000}, "max_tokens"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[10**6]]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt"),
        (CHAT, {"messages": [{"role": "tool", "content": "a", "tool_call_id": "b"}]}, "messages.0.role"),
        (CHAT, {"messages": [IMAGE]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "龘" * 10_000}]}, "messages"),
        (CHAT, {"max_completion_tokens": 5000}, "max_completion_tokens"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"n": 300}, "n"),
        *((path, {"copy_strength": value}, "copy_strength") for path in ENDPOINTS for value in (2, -1)),
    ],
)
def test_invalid_values_are_rejected_with_their_field(client: TestClient, path: str, changes: dict, param: str) -> None:
    """`test_openapi.py` sends values that the description excludes."""
    response = client.post(path, json=BODIES.get(path, {}) | changes)
    assert refusal(response)[:2] == (400 if path.startswith("/v1") else 422, param)
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"messages": [{"role": "tool", "content": "a", "tool_call_id": "b"}]},
            "the role 'tool' is not supported; accepted",
        ),
        ({"messages": [IMAGE]}, "content of the type 'image_url', which is not supported; accepted is 'text'"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools: not supported"),
        ({"functions": [{"name": "a"}]}, "functions: not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format of the type 'json_schema' is not supported"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0] has no content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0] has no content"),
        ({"stop": ["x", "x" * 200_000]}, "stop: a text of 200,000 characters; at most 1,024."),
        ({"stop": ["x"] * 17}, "stop: 17 texts; at most 16."),
        ({"max_tokens": 1025}, "max_tokens = 1,025: at most 1,024 (max_tokens, set with `retro serve --max-tokens`)"),
    ],
)
def test_what_chat_does_not_support_is_named_as_such(client: TestClient, changes: dict, words: str) -> None:
    response = client.post(CHAT, json=BODIES[CHAT] | changes)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_history_may_have_tool_calls_without_content(client: TestClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    user = {"role": "user", "content": "what is an index?"}
    histories = [
        [user, {"role": "assistant", "content": content, "tool_calls": [call]}, user] for content in (None, "", "text")
    ]
    bodies = [BODIES[CHAT] | {"messages": messages, "max_tokens": 4, "temperature": 0} for messages in histories]
    null, empty, text = (client.post(CHAT, json=body).json() for body in bodies)
    assert null["choices"] == empty["choices"]
    assert null["usage"]["prompt_tokens"] == empty["usage"]["prompt_tokens"] < text["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("bos", "eos"), [(0, 1), (1, 0), (0, 0), (1, 2)])
def test_a_document_begins_once_also_if_lm_evals_client_begins_it(bos: int, eos: int) -> None:
    service: Any = SimpleNamespace(retriever=SimpleNamespace(tokenizer=SimpleNamespace(bos_id=bos, eos_id=eos)))
    prefix = bos or eos  # the rule of lm-eval's client, which takes 0 for a missing token
    for tokens in ([], [7, 8], [bos, 7], [prefix, 7, eos]):
        row = Service.as_document(service, np.array(tokens, np.int64))
        assert row.tolist() == [bos, *(token for token in tokens[:1] if token not in (bos, prefix)), *tokens[1:]]
        assert row.dtype == np.int64


def test_the_total_neighbors_of_a_request_are_limited(app_with: Make) -> None:
    """Each chunk of 16 tokens reads k neighbors of 32 tokens."""
    with TestClient(app_with(max_neighbor_tokens=4 * 32)) as client:
        two_chunks = client.app.state.service.retriever.tokenizer.decode(np.arange(40, 72))
        bodies = {
            "/score": {"text": two_chunks},
            "/neighbors": {"text": TEXT[:20]},
            GENERATE: {"prompt": "a", "max_tokens": 31},
            COMPLETIONS: {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 16},
        }
        for path, body in bodies.items():
            assert client.post(path, json=body | {"k": 2}).status_code == 200, path
            refused = client.post(path, json=body | {"k": 5})
            assert refused.status_code in (400, 422), path
            assert "max_neighbor_tokens" in refused.json()["error"]["message"]
        assert client.post(GENERATE, json=bodies[GENERATE] | {"k": 5, "retrieval": False}).status_code == 200


def test_without_a_model_its_endpoints_return_404_and_search_works(app_with: Make) -> None:
    with TestClient(app_with(model=False)) as client:
        for path, body in {**BODIES, "/score": {"text": "a"}}.items():
            response = client.post(path, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert client.post("/search", json={"texts": ["a"]}).status_code == 200
        assert client.get("/datastore").json()["model"] is None
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["tiny:embedder"]


# --- fairness, isolation and the end of work -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "long", "short", "calls_of_the_next"),
    [
        ("/score", {"text": TEXT * 9}, {"text": "a"}, 2),  # a window, read with retrieval OFF and ON
        ("/neighbors", {"text": TEXT * 9}, {"text": "a"}, 1),  # a chunk
        (COMPLETIONS, {"model": "tiny", "max_tokens": 1, "prompt": [5] * 60}, {"model": "tiny", "max_tokens": 1, "prompt": [5]}, 1),
    ],
)  # fmt: skip
def test_work_stops_after_a_timeout(
    app_with: Make, monkeypatch: pytest.MonkeyPatch, path: str, long: dict, short: dict, calls_of_the_next: int
) -> None:
    owner: Any
    owner, name = {"/score": (scoring, "_batch"), "/neighbors": (search_api, "_chunk")}.get(path, (CachedLayers, "run"))
    gate = Gate(getattr(owner, name))
    with TestClient(app_with(request_seconds=2, max_score_tokens=1)) as client:  # one window at a time
        monkeypatch.setattr(owner, name, lambda *args: gate(*args))
        assert client.post(path, json=long).status_code == 504
        assert gate.calls == 1
        gate.let_go.set()
        # The next request is processed after any work left from the first.
        assert client.post(path, json=short).status_code == 200
    assert gate.calls == 1 + calls_of_the_next


def test_usage_and_metrics_count_the_tokens_of_drafts(client: TestClient, language_model: LanguageModel) -> None:
    path = COMPLETIONS

    def counts() -> list[float]:
        text = client.get("/metrics").text
        names = (f'retro_draft_tokens_total{{result="{result}"}}' for result in ("accepted", "rejected"))
        return [float(re.findall(rf"^{re.escape(name)} ([\d.e+]+)$", text, re.MULTILINE)[0]) for name in names]

    post(client, path)  # creates the counters
    before = counts()
    answer = post(client, path, max_tokens=48, ignore_eos=True).json()
    tokens = generated(language_model, path, max_tokens=48, ignore_eos=True)
    expected = sum(token.accepted for token in tokens), sum(token.rejected for token in tokens)
    assert sum(expected) > 0
    assert answer["usage"]["completion_tokens"] == 48
    assert tuple(answer["usage"]["completion_tokens_details"].values()) == expected
    assert tuple(after - one for after, one in zip(counts(), before, strict=True)) == expected
    other = post(client, path, max_tokens=48, ignore_eos=True, stream=True, stream_options={"include_usage": True})
    assert events_of(other)[-1]["usage"] == answer["usage"]


def test_token_latency_and_process_memory_are_measured(client: TestClient) -> None:
    def count(name: str) -> float:
        return float(re.findall(rf"^{name} ([\d.e+]+)$", client.get("/metrics").text, re.MULTILINE)[0])

    names = ("retro_first_token_seconds_count", "retro_next_token_seconds_count")
    before = [count(name) for name in names]
    post(client, COMPLETIONS, prompt=["a", "b"], max_tokens=5, ignore_eos=True)
    first, following = (count(name) - earlier for name, earlier in zip(names, before, strict=True))
    assert first == 1
    assert 1 <= following <= 4  # steps; drafts save some of them
    assert count("process_resident_memory_bytes") > 1e6


def test_a_short_score_waits_for_a_few_windows_of_long_ones(
    app_with: Make, language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six long texts arrive first. The short one arrives while their first windows are scored."""
    k, context, scored, score_windows = 2, language_model.context, list[int](), LanguageModel.score_windows

    def noted(model: LanguageModel, windows: list[Window], *args: Any) -> None:
        scored.extend(len(window.sequence.tokens) for window in windows)
        score_windows(model, windows, *args)

    gate = Gate(noted)
    monkeypatch.setattr(LanguageModel, "score_windows", lambda *args: gate(*args))
    service = app_with(max_score_tokens=4 * context * (1 + 2 * k)).state.service  # four windows at a time
    long, short = np.arange(8 * context) % 50 + 3, np.arange(9) + 3

    async def scores() -> list[Any]:
        requests = [asyncio.ensure_future(service.scores([long], ScoreKey(k))) for _ in range(6)]
        while not gate.calls:
            await asyncio.sleep(0.01)
        requests.append(asyncio.ensure_future(service.scores([short], ScoreKey(k))))
        await asyncio.sleep(0)
        gate.let_go.set()
        return await asyncio.gather(*requests)

    *of_long, of_short = asyncio.run(scores())
    assert len(scored) > 80
    assert scored.index(len(short)) <= 12
    for tokens, (scores_of_request,) in zip([long] * 6 + [short], [*of_long, of_short], strict=True):
        (expected,) = language_model.score([tokens], k)
        assert scores_of_request.log_probabilities == pytest.approx(expected, abs=0.1)  # in bfloat16
