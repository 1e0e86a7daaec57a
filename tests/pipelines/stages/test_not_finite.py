"""Embeddings that are not finite: they are never indexed or returned, and the message names the document or the text."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from indexing.embedding.settings import EmbedderSettings, NotFinite, unit
from indexing.retrieval.retriever import Retriever
from indexing.store.errors import InputError
from pipelines.config import Config
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.conftest import build_local, tiny_config

WORDS = [first + vowel + last for first in "bdfgklm" for vowel in "aeiou" for last in "nrst"]
POISON = "poison"


def save_encoder(folder: Path, value: float) -> Path:
    """An encoder with a vector of `value` for one word."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", POISON, *WORDS]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizers.Whitespace(), normalizers.Lowercase()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=len(names), **sizes))
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[vocabulary[POISON]] = value
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def config_of(folder: Path, encoder: Path, poisoned: int | None) -> Config:
    """Settings for 60 documents of random words; the one with the number `poisoned` has the word."""
    rng = np.random.default_rng(0)
    with open(folder / "corpus.jsonl", "w") as file:
        for number in range(60):
            words = rng.choice(WORDS, 40).tolist()
            if number == poisoned:
                words[30] = POISON
            file.write(json.dumps({"id": f"doc-{number}", "text": " ".join(words)}) + "\n")
    embedder = EmbedderSettings(kind="transformer", path=str(encoder), device="cpu", precision="float32")
    return replace(tiny_config(folder, folder / "corpus.jsonl"), embedder=embedder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_document_without_a_finite_embedding_is_named_and_nothing_is_indexed(tmp_path: Path, value: float) -> None:
    config = config_of(tmp_path, save_encoder(tmp_path / "encoder", value), poisoned=41)
    with pytest.raises(InputError, match=r"document 'doc-41' of corpus.jsonl, chunk \d+: .*not finite.*poison"):
        build_local(config)
    assert all(np.isfinite(np.load(file)).all() for file in config.datastore.glob("embeddings/*/*.npy"))
    assert not (config.datastore / "index").exists()


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    folder = tmp_path_factory.mktemp("finite")
    config = config_of(folder, save_encoder(folder / "encoder", float("nan")), poisoned=None)
    return Retriever.open(build_local(config).folder)


@pytest.fixture(scope="module")
def client(retriever: Retriever) -> Iterator[TestClient]:
    settings = ServeSettings(name="tiny", allowed_hosts=("testserver",))
    with TestClient(make_app(retriever, None, settings, token="")) as opened:
        yield opened


@pytest.mark.parametrize("retrieval", ["dense", "sparse", "hybrid"])
def test_a_query_without_a_finite_embedding_is_refused_with_its_text(retriever: Retriever, retrieval: str) -> None:
    with pytest.raises(InputError, match="not finite for a text that begins 'ban poison'"):
        retriever.search(["ban bar", "ban poison"], retrieval=retrieval)


@pytest.mark.parametrize(
    ("path", "field", "status"), [("/search", "texts", 422), ("/embed", "texts", 422), ("/v1/embeddings", "input", 400)]
)
def test_the_server_refuses_a_text_without_a_finite_embedding(
    client: TestClient, path: str, field: str, status: int
) -> None:
    body = {"model": "tiny:embedder"} if path == "/v1/embeddings" else {}
    answer = client.post(path, json=body | {field: ["ban poison"]})
    assert (answer.status_code, "poison" in answer.json()["error"]["message"]) == (status, True)
    assert client.post(path, json=body | {field: ["ban bar"]}).status_code == 200


def test_a_chunk_without_a_finite_embedding_gets_no_neighbors_and_others_keep_theirs(retriever: Retriever) -> None:
    own = retriever.retrieval.own.tokens.read(0, 4).astype(np.int64)
    ids = retriever.neighbors.find(own, 3)[2]
    word = retriever.tokenizer.encode(f" {POISON} ")
    poisoned = np.insert(own, 2, np.resize(word, own.shape[1]), axis=0)
    found = retriever.neighbors.find(poisoned, 3)[2]
    assert (found[2] == -1).all()
    assert np.array_equal(np.delete(found, 2, axis=0), ids)
    assert (retriever.neighbors.find(poisoned[2:3], 3)[2] == -1).all()


def test_every_embedder_refuses_rows_that_have_no_finite_length() -> None:
    vectors = np.ones((5, 8), dtype=np.float32)
    vectors[1, 3], vectors[4] = np.nan, 1e30  # the length of the last overflows
    with pytest.raises(NotFinite, match="not finite") as refused:
        unit(vectors)
    assert refused.value.rows == [1, 4]
