"""Scores of texts and prompts over HTTP are those of the language model."""

from itertools import pairwise

import numpy as np
import pytest
from starlette.testclient import TestClient

from retro.inference.language_model import LanguageModel
from tests.retro.server.conftest import TEXT
from tests.retro.server.generation_requests import COMPLETIONS, post, with_bos


@pytest.mark.parametrize("text", [TEXT * 3, "a", "龘🙂 and 龘 again"])
def test_token_scores_join_to_the_text_and_sum_to_its_bits(
    client: TestClient, language_model: LanguageModel, text: str
) -> None:
    answer = client.post("/score", json={"text": text, "k": 2}).json()
    assert "".join(token["text"] for token in answer["tokens"]) == text
    assert all(token["text"] and "\ufffd" not in token["text"] for token in answer["tokens"])
    for key, k in (("on", 2), ("off", 0)):
        expected = language_model.score([with_bos(language_model, text)], k)[0]
        assert sum(token[key] for token in answer["tokens"]) == pytest.approx(expected.sum())
        bits = -expected.sum() / np.log(2) / len(text.encode())
        assert answer[f"bits_per_byte_{key}"] == pytest.approx(bits)
    for token in answer["tokens"]:
        assert token["difference"] == pytest.approx(token["on"] - token["off"])


def test_scored_prompts_equal_the_models(client: TestClient, language_model: LanguageModel) -> None:
    """lm_eval sends token ids with echo and drops the one generated token; greedy: the token is the likeliest."""
    ids = language_model.tokenizer.encode(TEXT).tolist()
    rows = [ids, ids[:5]]
    for name, k in (("tiny", 2), ("tiny:off", 0)):
        answer = post(client, COMPLETIONS, model=name, prompt=rows, echo=True, logprobs=1, max_tokens=1).json()
        scores = language_model.score_with_likeliest(
            [np.array([language_model.tokenizer.bos_id, *row]) for row in rows], k
        )
        for row, choice, expected in zip(rows, answer["choices"], scores, strict=True):
            logprobs = choice["logprobs"]
            assert len(logprobs["tokens"]) == len(row) + 1
            # Computed in batches of other shapes, which round differently.
            np.testing.assert_allclose(logprobs["token_logprobs"][:-1], expected.log_probabilities, rtol=2e-3)
            values = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
            greedy = [own == max(top.values()) for own, top in values]
            assert greedy == [*(expected.likeliest[:, 0] == row).tolist(), True]
        assert answer["usage"]["prompt_tokens"] == len(ids) + 5
    with_it, without = (
        post(client, COMPLETIONS, prompt=prompt, echo=True, logprobs=2, max_tokens=0).json()["choices"][0]["logprobs"]
        for prompt in ([language_model.tokenizer.bos_id, *ids], ids)
    )
    assert with_it["token_logprobs"] == [None, *without["token_logprobs"]]
    assert with_it["tokens"] == ["", *without["tokens"]]


@pytest.mark.parametrize("text", [TEXT, "龘🙂 ok 龘"])
def test_tokens_and_their_offsets_reproduce_the_text(client: TestClient, text: str) -> None:
    (choice,) = post(client, COMPLETIONS, prompt=text, echo=True, logprobs=2, seed=3, temperature=1).json()["choices"]
    logprobs, whole = choice["logprobs"], choice["text"]
    assert whole.startswith(text)
    assert "".join(logprobs["tokens"]) == whole
    borders = pairwise([*logprobs["text_offset"], len(whole)])
    assert [whole[start:stop] for start, stop in borders] == logprobs["tokens"]
    for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert value in top.values()
        assert 2 <= len(top) <= 3
