"""Chat through OpenAI's own client equals generation from the template's prompt."""

import itertools
import json

import openai
import pytest
from starlette.testclient import TestClient

from retro.finetuning.chat_template import ChatTemplate
from retro.finetuning.conversations import Message
from retro.inference.generation import Batch, Continuation, GeneratedToken
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings
from tests.retro.server.conftest import CHAT_TEMPLATE, Make

MESSAGES = [
    {"role": "system", "content": "index and chunk"},
    {"role": "user", "content": "the memory"},
    {"role": "assistant", "content": "the vector"},
    {"role": "user", "content": "检索 the store"},
]
BODY = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 8}
GREEDY = BODY | {"temperature": 0.0}


@pytest.fixture(scope="module")
def api(url: str):
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as opened:
        yield opened


def expected(language_model: LanguageModel, k: int = 2, **settings) -> tuple[int, str, str | None]:
    """Tokens of the prompt, text and finish reason by `LanguageModel.generate`."""
    template = ChatTemplate(language_model.tokenizer, CHAT_TEMPLATE)
    prompt = template.prompt([Message(**message) for message in MESSAGES])
    sampling = GenerationSettings(**{"max_tokens": 8, "top_k": 0, "top_p": 1, **settings})
    tokens = [step[0] for step in language_model.generate([prompt], sampling, k)]
    return len(prompt), "".join(token.text for token in tokens), tokens[-1].finish_reason


def test_an_answer_continues_the_templates_prompt(api: openai.OpenAI, language_model: LanguageModel) -> None:
    for name, k in (("tiny", 2), ("tiny:off", 0)):
        answer = api.chat.completions.create(**GREEDY | {"model": name})
        choice, (prompt, text, finish) = answer.choices[0], expected(language_model, k, temperature=0)
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", text, finish)
        assert answer.usage.prompt_tokens == prompt
        assert answer.usage.total_tokens == prompt + answer.usage.completion_tokens
        assert answer.object == "chat.completion"


def test_content_may_be_a_list_of_texts_and_developer_means_system(api: openai.OpenAI) -> None:
    (system, *others), whole = MESSAGES, api.chat.completions.create(**GREEDY)
    parts = [{"type": "text", "text": "index "}, {"type": "text", "text": "and chunk"}]
    for first in (system | {"content": parts}, system | {"role": "developer"}):
        answer = api.chat.completions.create(**GREEDY | {"messages": [first, *others]})
        assert answer.choices[0].message == whole.choices[0].message


def test_a_stream_equals_the_complete_answers(api: openai.OpenAI) -> None:
    body = BODY | {"seed": 5, "n": 3, "logprobs": True, "top_logprobs": 2}
    whole = api.chat.completions.create(**body)
    events = list(api.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    *parts, last = events
    assert last.usage == whole.usage
    assert last.choices == []
    assert {event.object for event in events} == {"chat.completion.chunk"}
    assert len({event.id for event in events}) == 1
    for choice in whole.choices:
        mine = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
        assert [part.delta.role for part in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(part.delta.content for part in mine) == choice.message.content
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
        streamed = [entry for part in mine if part.logprobs for entry in part.logprobs.content]
        assert streamed == choice.logprobs.content
    assert len({choice.message.content for choice in whole.choices}) > 1
    plain = list(api.chat.completions.create(**BODY, stream=True))
    assert all(part.choices and part.usage is None for part in plain)


def test_log_probabilities_are_those_of_the_model(api: openai.OpenAI, language_model: LanguageModel) -> None:
    choice = api.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3).choices[0]
    template = ChatTemplate(language_model.tokenizer, CHAT_TEMPLATE)
    prompt = template.prompt([Message(**message) for message in MESSAGES])
    settings = GenerationSettings(max_tokens=8, temperature=0, logprobs=3)
    tokens = [step[0] for step in language_model.generate([prompt], settings, 2)]
    for entry, token in zip(choice.logprobs.content, tokens, strict=True):
        assert entry.logprob == pytest.approx(token.log_probability)
        assert [each.logprob for each in entry.top_logprobs] == pytest.approx([value for _, value in token.top])
        assert entry.token == entry.top_logprobs[0].token  # greedy
        assert entry.bytes is None or bytes(entry.bytes).decode() == language_model.tokenizer.decode([token.token])
    assert api.chat.completions.create(**GREEDY).choices[0].logprobs is None


def test_seed_repeats_an_answer_and_stop_ends_it(api: openai.OpenAI) -> None:
    body = BODY | {"max_completion_tokens": 30}
    found = (
        (seed, api.chat.completions.create(**body, seed=seed).choices[0].message.content) for seed in itertools.count()
    )
    seed, text = next((seed, text) for seed, text in found if len(text) > 10)
    assert api.chat.completions.create(**body, seed=seed).choices[0].message.content == text
    stopped = api.chat.completions.create(**body, seed=seed, stop=[text[5:8]]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (text[: text.index(text[5:8])], "stop")


def test_the_end_of_a_turn_ends_an_answer_unless_it_is_ignored(
    api: openai.OpenAI, language_model: LanguageModel
) -> None:
    body = GREEDY | {"logit_bias": {str(language_model.tokenizer.eos_id): 100}}
    ended = api.chat.completions.create(**body)
    assert (ended.choices[0].message.content, ended.choices[0].finish_reason) == ("", "stop")
    ignoring = api.chat.completions.create(**body, extra_body={"ignore_eos": True})
    assert (ignoring.usage.completion_tokens, ignoring.choices[0].finish_reason) == (8, "length")


def test_an_answer_without_a_length_fills_the_context(api: openai.OpenAI, language_model: LanguageModel) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "extra_body": {"ignore_eos": True}}
    assert api.chat.completions.create(**body).usage.total_tokens == language_model.context
    assert api.chat.completions.create(**body, max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "b"}]}, "messages.0.role", "'assistant'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "messages", "'image_url'"),
        ({"messages": [{"role": "user", "content": "a " * 1000}]}, "messages", "maximum context length is 64 tokens"),
        ({"messages": [{"role": "user", "content": "龘" * 10_000}]}, "messages", "max_input_tokens"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens", "at most 1,024"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools", "at most 0 items"),
        ({"response_format": {"type": "json_object"}}, "response_format", "accepted is 'text'"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"n": 300}, "n", "at most 256"),
    ],
)  # fmt: skip
def test_invalid_requests_are_rejected_with_their_field(
    api: openai.OpenAI, changes: dict, param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        api.chat.completions.create(**GREEDY | changes)
    assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")


def test_fields_without_an_effect_are_accepted(client: TestClient) -> None:
    extra = {"user": "me", "store": False, "response_format": {"type": "text"}, "tools": [], "tool_choice": "none"}
    named = [message | {"name": "Ada"} for message in MESSAGES]
    answer = client.post("/v1/chat/completions", json=GREEDY | extra | {"messages": named})
    assert answer.status_code == 200
    assert answer.headers["Warning"].endswith('messages.0.name, messages.1.name, messages.2.name, messages.3.name"')


def test_a_conversation_that_the_template_rejects_is_an_invalid_request(app_with: Make, tmp_path) -> None:
    (tmp_path / "strict.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{{ m.role + m.content }}{% endfor %}"
    )
    with TestClient(app_with(chat_template=str(tmp_path / "strict.jinja"))) as client:
        refused = client.post("/v1/chat/completions", json=GREEDY)
        assert refused.status_code == 400
        assert "no system message" in refused.json()["error"]["message"]
        assert client.post("/v1/chat/completions", json=GREEDY | {"messages": MESSAGES[1:]}).status_code == 200


def test_the_checkpoints_template_is_used_and_a_model_without_one_cannot_chat(
    app_with: Make, language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TestClient(app_with(chat_template="")) as client:
        refused = client.post("/v1/chat/completions", json=GREEDY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_chat_template")
    sections = {
        "finetune": {"format": "instructions", "template": CHAT_TEMPLATE, "language": "auto"},
        "imported": {"chat_template": CHAT_TEMPLATE},
    }
    _, text, _ = expected(language_model, temperature=0)
    for name, section in sections.items():
        with monkeypatch.context() as patched:
            patched.setitem(language_model.checkpoint.settings, name, section)
            app = app_with(chat_template="")
        with TestClient(app) as client:
            answer = client.post("/v1/chat/completions", json=GREEDY).json()
            assert answer["choices"][0]["message"]["content"] == text, name


def test_an_error_of_a_stream_is_an_event(app_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, step = list[tuple[Continuation, GeneratedToken]](), Batch.step

    def broken(batch: Batch) -> list[tuple[Continuation, GeneratedToken]]:
        """The first token arrives."""
        if tokens:
            raise RuntimeError("no memory")
        tokens.extend(new := step(batch))
        return new

    monkeypatch.setattr(Batch, "step", broken)
    with TestClient(app_with()) as client:
        response = client.post("/v1/chat/completions", json=GREEDY | {"stream": True})
    *_, error, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert (json.loads(error)["error"]["type"], done) == ("server_error", "[DONE]")
