"""OpenAI's own client works unchanged and receives the language model's own numbers."""

import base64
import itertools
import json
from itertools import pairwise

import httpx
import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from retro.inference.language_model import LanguageModel
from tests.conftest import PATIENCE
from tests.retro.server.conftest import TEXT, Make, listening

GREEDY = {"temperature": 0.0, "max_tokens": 6}


@pytest.fixture(scope="module")
def api(url: str):
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as opened:
        yield opened


def with_bos(language_model: LanguageModel, tokens) -> np.ndarray:
    return np.concatenate([[language_model.tokenizer.bos_id], tokens]).astype(np.int64)


def test_models_are_listed_and_unknown_ones_are_not_found(api: openai.OpenAI) -> None:
    names = [each.id for each in api.models.list()]
    assert names == ["tiny", "tiny:off", "tiny:embedder"]
    assert all(api.models.retrieve(name).id == name for name in names)
    with pytest.raises(openai.NotFoundError, match="tiny:off") as refused:
        api.models.retrieve("other")
    error = refused.value
    assert (error.type, error.code, error.param) == ("invalid_request_error", "model_not_found", "model")


def test_models_and_tokenize_report_the_context_length(
    api: openai.OpenAI, client: TestClient, language_model: LanguageModel
) -> None:
    lengths = {each.id: each.max_model_len for each in api.models.list()}
    assert lengths == {"tiny": language_model.context, "tiny:off": language_model.context, "tiny:embedder": None}
    assert client.post("/tokenize", json={"prompt": "a"}).json()["max_model_len"] == language_model.context


# --- completions -----------------------------------------------------------------------------------------------------


def test_the_four_prompt_formats_are_equivalent(api: openai.OpenAI, language_model: LanguageModel) -> None:
    ids = [language_model.tokenizer.encode(text).tolist() for text in (TEXT, "index")]
    texts = [
        [choice.text for choice in api.completions.create(model="tiny", prompt=prompt, **GREEDY).choices]
        for prompt in (TEXT, [TEXT], ids[0], [ids[0]], [TEXT, "index"], ids)
    ]
    one, several = texts[0], texts[4]
    assert texts == [one] * 4 + [several] * 2
    assert several[:1] == one


def test_the_model_name_switches_retrieval(api: openai.OpenAI, language_model: LanguageModel) -> None:
    ids = with_bos(language_model, language_model.tokenizer.encode(TEXT * 2))
    for name, k in (("tiny", 2), ("tiny:off", 0)):
        answer = api.completions.create(model=name, prompt=TEXT * 2, echo=True, logprobs=0, max_tokens=0)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        np.testing.assert_allclose(logprobs.token_logprobs, language_model.score([ids], k)[0], rtol=1e-5)
    on, three = (
        api.completions.create(model="tiny", prompt=TEXT * 2, echo=True, logprobs=0, max_tokens=0, extra_body={"k": k})
        for k in (2, 3)
    )
    assert on.choices[0].logprobs != three.choices[0].logprobs


def test_prompt_scores_match_lm_eval_requests(api: openai.OpenAI, language_model: LanguageModel) -> None:
    """lm_eval sends token ids with echo and drops the one generated token; greedy: the token is the likeliest."""
    ids = language_model.tokenizer.encode(TEXT).tolist()
    rows = [ids, ids[:5]]
    answer = api.completions.create(
        model="tiny:off", prompt=rows, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    )
    scores = language_model.score_with_likeliest([with_bos(language_model, row) for row in rows], 0, 1)
    for row, choice, expected in zip(rows, answer.choices, scores, strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None
        assert len(logprobs.tokens or []) == len(row) + 1
        # Computed in batches of other shapes, which round differently.
        np.testing.assert_allclose(logprobs.token_logprobs[:-1], expected.log_probabilities, rtol=2e-3)
        greedy = [
            own == max(top.values()) for own, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
        ]
        assert greedy == [*(expected.likeliest[:, 0] == row).tolist(), True]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids) + 5, 2)


def test_the_first_token_has_no_score_only_if_the_prompt_starts_with_bos(
    api: openai.OpenAI, language_model: LanguageModel
) -> None:
    ids = with_bos(language_model, language_model.tokenizer.encode(TEXT)).tolist()
    with_it, without = (
        api.completions.create(model="tiny:off", prompt=each, echo=True, logprobs=2, max_tokens=0).choices[0].logprobs
        for each in (ids, ids[1:])
    )
    assert with_it.token_logprobs[0] is with_it.top_logprobs[0] is None
    assert with_it.token_logprobs[1:] == without.token_logprobs
    assert with_it.tokens == ["", *without.tokens]


@pytest.mark.parametrize("text", [TEXT, "龘🙂 ok 龘"])
def test_tokens_and_their_offsets_reproduce_the_text(api: openai.OpenAI, text: str) -> None:
    choice = api.completions.create(
        model="tiny", prompt=text, echo=True, logprobs=2, seed=3, **{"max_tokens": 9}
    ).choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith(text)
    assert "".join(logprobs.tokens) == choice.text
    for token, (start, stop) in zip(logprobs.tokens, pairwise([*logprobs.text_offset, len(choice.text)]), strict=True):
        assert choice.text[start:stop] == token
    for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert value in top.values()
        assert 2 <= len(top) <= 3


def test_a_stream_equals_the_complete_answer(api: openai.OpenAI) -> None:
    body = {"model": "tiny", "prompt": [TEXT, "index"], "seed": 5, "max_tokens": 12, "echo": True, "logprobs": 1}
    whole = api.completions.create(**body)
    events = list(api.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    *parts, last = events
    assert last.usage == whole.usage
    assert last.choices == []
    for choice in whole.choices:
        mine = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert [each for part in mine for each in part.logprobs.tokens] == choice.logprobs.tokens
        assert [each for part in mine for each in part.logprobs.text_offset] == choice.logprobs.text_offset
        assert mine[-1].finish_reason == choice.finish_reason
        assert all(part.finish_reason is None for part in mine[:-1])


def test_seed_reproduces_a_text_and_stop_ends_it(api: openai.OpenAI) -> None:
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 40, "temperature": 1.0}
    found = ((seed, api.completions.create(**body, seed=seed).choices[0].text) for seed in itertools.count())
    seed, text = next((seed, text) for seed, text in found if len(text) > 10)  # some seeds stop early
    assert api.completions.create(**body, seed=seed).choices[0].text == text
    assert len({api.completions.create(**body).choices[0].text for _ in range(3)}) > 1
    for stop in (text[8:11], [text[8:11], "never there"]):
        choice = api.completions.create(**body, seed=seed, stop=stop).choices[0]
        assert choice.finish_reason == "stop"
        assert choice.text == text[: text.index(text[8:11])]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 300}, "n"),
        ({"n": 0}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"extra_body": {"stop_token_ids": [10**6]}}, "stop_token_ids"),
        ({"extra_body": {"min_p": 1.5}}, "min_p"),
        ({"logprobs": 6}, "logprobs"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[10**6]]}, "prompt"),
        ({"prompt": [5] * 20_000}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
    ],
)
def test_unsupported_options_are_rejected_with_their_name(api: openai.OpenAI, changes: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        api.completions.create(**{"model": "tiny", "prompt": "a", **changes})
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_options_at_their_neutral_values_are_accepted(api: openai.OpenAI) -> None:
    neutral = {"n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "me"}
    assert api.completions.create(model="tiny", prompt="", **neutral, max_tokens=2).choices[0].text is not None


def test_unknown_fields_are_ignored_with_a_warning_or_refused_by_a_strict_server(
    client: TestClient, app_with: Make
) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "temperature": 0}
    odd = {"store": True, 'x"\r\ny': 1, "stream_options": {"query": True}}
    plain, ignoring = client.post("/v1/completions", json=body), client.post("/v1/completions", json=body | odd)
    assert "Warning" not in plain.headers
    assert ignoring.headers["Warning"].startswith('299 retro "ignored unknown fields: ')
    named = ignoring.headers["Warning"].rpartition(": ")[2].removesuffix('"').split(", ")
    assert sorted(named) == ["store", "stream_options.query", "x???y"]
    assert ignoring.json()["choices"] == plain.json()["choices"]
    many = client.post("/v1/completions", json=body | {f"field{number}": 1 for number in range(1000)})
    assert many.headers["Warning"].endswith(', 984 more"')
    with TestClient(app_with(strict_fields=True)) as strict:
        assert strict.post("/v1/completions", json=body).status_code == 200
        for extra, param, accepted in (
            ({"store": True}, "store", "prompt, max_tokens, echo"),
            ({"stream_options": {"query": True}}, "stream_options.query", "accepted are include_usage."),
        ):
            refused = strict.post("/v1/completions", json=body | extra)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["code"]) == (400, param, "unknown_parameter")
            assert accepted in error["message"]


def test_n_continuations_have_consecutive_seeds(api: openai.OpenAI) -> None:
    body = {"model": "tiny", "prompt": [TEXT, "index"], "max_tokens": 8, "seed": 3}
    together = api.completions.create(**body, n=2)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    texts = [[choice.text for choice in api.completions.create(**body | {"seed": seed}).choices] for seed in (3, 4)]
    assert [choice.text for choice in together.choices] == [texts[0][0], texts[1][0], texts[0][1], texts[1][1]]
    assert together.usage.completion_tokens > 8
    echoed = api.completions.create(**body, n=2, echo=True)
    assert [choice.text for choice in echoed.choices] == [
        prompt + choice.text for prompt, choice in zip([TEXT, TEXT, "index", "index"], together.choices, strict=True)
    ]


def test_bias_penalties_and_stop_tokens_reach_the_model(api: openai.OpenAI, language_model: LanguageModel) -> None:
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 8, "temperature": 0.0}
    (token,) = language_model.tokenizer.encode("index").tolist()[-1:]
    text = language_model.tokenizer.decode([token])
    biased = api.completions.create(**body, logit_bias={str(token): 100}, logprobs=0).choices[0]
    assert biased.logprobs.tokens == [text] * 8
    varied = api.completions.create(
        **body, logit_bias={str(token): 1.9}, frequency_penalty=2, presence_penalty=2, logprobs=0
    ).choices[0]
    assert varied.logprobs.tokens.count(text) <= 1
    stopped = api.completions.create(
        **body, logit_bias={str(token): 100}, extra_body={"stop_token_ids": [token]}
    ).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("", "stop")
    eos = {str(language_model.tokenizer.eos_id): 100}
    ended = api.completions.create(**body, logit_bias=eos)
    assert (ended.usage.completion_tokens, ended.choices[0].finish_reason) == (1, "stop")
    ignoring = api.completions.create(**body, logit_bias=eos, extra_body={"ignore_eos": True})
    assert (ignoring.usage.completion_tokens, ignoring.choices[0].finish_reason) == (8, "length")
    one = [
        api.completions.create(**body | {"temperature": 1.0, "seed": seed}, extra_body={"min_p": 1}).choices[0].text
        for seed in range(3)
    ]
    assert one == [api.completions.create(**body).choices[0].text] * 3


def test_the_api_key_is_the_token(app_with: Make) -> None:
    with listening(app_with(token="right")) as url:
        for key in ("right", "wrong"):
            with openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0) as api:
                if key == "right":
                    assert api.completions.create(model="tiny", prompt="a", max_tokens=1).choices
                else:
                    with pytest.raises(openai.AuthenticationError) as refused:
                        api.models.list()
                    assert refused.value.code == "invalid_api_key"


# --- embeddings ------------------------------------------------------------------------------------------------------


def test_embeddings_equal_the_datastores(api: openai.OpenAI, retriever: Retriever) -> None:
    texts = [TEXT, "检索模型"]
    expected = retriever.embed(texts)
    ids = [row.tolist() for row in retriever.tokenizer.encode_batch(texts)]
    for given in (texts, ids):
        for kind in ({}, {"encoding_format": "float"}):  # without it, the client requests base64 and decodes it
            answer = api.embeddings.create(model="tiny:embedder", input=given, **kind)
            np.testing.assert_allclose([each.embedding for each in answer.data], expected, rtol=1e-6)
            assert [each.index for each in answer.data] == [0, 1]
            assert answer.usage.total_tokens == sum(map(len, ids))
    raw = api.embeddings.create(model="tiny:embedder", input=TEXT, encoding_format="base64").data[0].embedding
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(raw), "<f4"), expected[0])


@pytest.mark.parametrize("changes", [{"dimensions": 16}, {"input": []}, {"input": ""}, {"input": [[]]}])
def test_invalid_embedding_requests_are_rejected(api: openai.OpenAI, changes: dict) -> None:
    with pytest.raises(openai.BadRequestError):
        api.embeddings.create(**{"model": "tiny:embedder", "input": "a", **changes})


def test_models_are_rejected_at_the_wrong_endpoint(api: openai.OpenAI) -> None:
    for call in (
        lambda: api.embeddings.create(model="tiny", input="a"),
        lambda: api.completions.create(model="tiny:embedder", prompt="a"),
    ):
        with pytest.raises(openai.NotFoundError, match="accepted are"):
            call()


# --- tokenizer -------------------------------------------------------------------------------------------------------


def test_lm_eval_uses_the_servers_tokenizer(url: str, retriever: Retriever) -> None:
    from lm_eval.utils import RemoteTokenizer, check_remote_tokenizer_support

    base = url + "/v1/completions"
    assert check_remote_tokenizer_support(base)
    remote = RemoteTokenizer(base)
    assert remote.encode(TEXT) == retriever.tokenizer.encode(TEXT).tolist()
    assert remote.decode(remote.encode(TEXT)) == TEXT
    assert remote.eos_token_id == retriever.tokenizer.eos_id
    assert remote.bos_token_id == retriever.tokenizer.bos_id
    remote.session.close()


def test_tokenize_adds_bos_on_request(client: TestClient, retriever: Retriever) -> None:
    answer = client.post("/tokenize", json={"prompt": "index", "add_special_tokens": True}).json()
    assert answer["tokens"][0] == retriever.tokenizer.bos_id
    assert answer["count"] == len(answer["tokens"])


def test_the_raw_stream_consists_of_server_sent_events(url: str) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2, "stream": True}
    response = httpx.post(url + "/v1/completions", json=body, timeout=PATIENCE)
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["object"] == "text_completion"
