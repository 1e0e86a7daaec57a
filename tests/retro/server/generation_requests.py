"""Requests of the endpoints that generate, what they answer, and what the language model gives for them."""

from typing import Any

import numpy as np
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from retro.inference.chat_template import ChatTemplate, Message
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings
from retro.inference.source_texts import Sources
from tests.retro.server.conftest import CHAT_TEMPLATE, TEXT

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
SOURCES = TypeAdapter(Sources)
ENDPOINTS = [GENERATE, COMPLETIONS, CHAT]
MESSAGES = [
    {"role": "system", "content": "index and chunk"},
    {"role": "user", "content": "the memory"},
    {"role": "assistant", "content": "the vector"},
    {"role": "user", "content": "检索 the store"},
]
BODIES: dict[str, dict[str, Any]] = {
    GENERATE: {"prompt": TEXT, "top_k": 0, "top_p": 1},
    COMPLETIONS: {"model": "tiny", "prompt": TEXT},
    CHAT: {"model": "tiny", "messages": MESSAGES},
}
"""For each endpoint, a request that samples from the whole distribution."""


def with_bos(language_model: LanguageModel, text: str) -> np.ndarray:
    return np.concatenate([[language_model.tokenizer.bos_id], language_model.tokenizer.encode(text)]).astype(np.int64)


def generated(language_model: LanguageModel, path: str, k: int = 2, **settings) -> list[GeneratedToken]:
    """The tokens that the model generates for the request in `BODIES`."""
    prompt = with_bos(language_model, TEXT)
    if path == CHAT:
        prompt = ChatTemplate(language_model.tokenizer, CHAT_TEMPLATE).prompt([Message(**each) for each in MESSAGES])
    sampling = GenerationSettings(**{"max_tokens": 12, "temperature": 0, "top_k": 0, "top_p": 1, **settings})
    return [token for step in language_model.generate([prompt], sampling, k) for token in step]


def post(client: TestClient, path: str, **changes) -> Any:
    response = client.post(path, json={"max_tokens": 12, "temperature": 0} | BODIES[path] | changes)
    assert response.status_code == 200, response.text
    return response


def choices_of(path: str, answer: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Text and finish reason of each continuation in an answer."""
    if path == GENERATE:
        return [(answer["text"], answer["finish_reason"])]
    texts = [each["message"]["content"] if path == CHAT else each["text"] for each in answer["choices"]]
    return [(text, each["finish_reason"]) for text, each in zip(texts, answer["choices"], strict=True)]


def refusal(response: Any) -> tuple[int, str | None, str | None]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]
