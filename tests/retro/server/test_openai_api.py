"""OpenAI's embeddings, its access by key, and the tokenizer endpoints that lm-eval uses."""

import base64

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from tests.retro.server.conftest import TEXT, Make, listening


@pytest.fixture(scope="module")
def api(url: str):
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as opened:
        yield opened


def test_the_api_key_is_the_token(app_with: Make) -> None:
    with listening(app_with(token="right")) as url:
        with openai.OpenAI(base_url=url + "/v1", api_key="right", max_retries=0) as api:
            assert api.completions.create(model="tiny", prompt="a", max_tokens=1).choices
        with (
            openai.OpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0) as api,
            pytest.raises(openai.AuthenticationError) as refused,
        ):
            api.models.list()
        assert refused.value.code == "invalid_api_key"


def test_embeddings_equal_the_datastores(api: openai.OpenAI, retriever: Retriever) -> None:
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
