"""Requests that generate in one batch get the answers that they get alone, and each place is shared fairly."""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from indexing.retrieval.retriever import Retriever
from retro.checkpoints.checkpoint import load_model
from retro.device import choose_placement
from retro.inference.generation import Batch
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings
from retro.server.app import make_app
from retro.server.errors import ApiError
from retro.server.generation_queue import GenerationQueue
from retro.server.metrics import Metrics
from retro.server.settings import ServeSettings
from tests.conftest import PATIENCE, wait_until
from tests.retro.server.conftest import CHAT_TEMPLATE, TEXT, Gate, Make, listening

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the memory"}]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"prompt": TEXT, "max_tokens": 20, "temperature": 0, "k": 2, "return_sources": True}),
    ("/generate", {"prompt": TEXT[:9], "max_tokens": 20, "temperature": 0, "retrieval": False}),
    ("/generate", {"prompt": TEXT + TEXT[:30], "max_tokens": 30, "seed": 3, "k": 4, "stream": True, "return_sources": True}),
    ("/v1/completions", {"model": "tiny", "prompt": [TEXT[:30], "a", TEXT], "max_tokens": 9, "temperature": 0, "logprobs": 3}),
    ("/v1/completions", {"model": "tiny:off", "prompt": TEXT, "max_tokens": 12, "seed": 2, "n": 3, "frequency_penalty": 1.0}),
    ("/v1/completions", {"model": "tiny", "prompt": "of", "max_tokens": 25, "seed": 4, "min_p": 0.02, "k": 1, "stream": True}),
    ("/v1/completions", {"model": "tiny", "prompt": TEXT[9:], "max_tokens": 40, "temperature": 0, "stop": ["the", "a"], "logit_bias": {"60": 3}}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 16, "temperature": 0, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 16, "seed": 6, "n": 2, "stream": True, "repetition_penalty": 1.2}),
]  # fmt: skip


def answer_of(url: str, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream or the one answer, without what differs between two equal requests."""
    response = httpx.post(url + path, json=body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    texts = [response.text]
    if body.get("stream"):
        texts = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line][:-1]
    answers = [json.loads(text) for text in texts]
    assert not any("error" in answer for answer in answers)
    for answer in answers:
        for name in ("id", "created"):
            answer.pop(name, None)
        (answer.get("usage") or {}).pop("completion_tokens_details", None)  # drafts are shorter in a larger batch
    # The events of several texts of a request may alternate in another order.
    return sorted(answers, key=lambda answer: [choice["index"] for choice in answer.get("choices", ())])


def rounded(value: Any) -> Any:
    """An answer with rounded numbers: products of a batch may sum in another order."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


def test_concurrent_answers_equal_sequential_ones(
    retriever: Retriever, language_model: LanguageModel, tmp_path: Path
) -> None:
    """In float32: in bfloat16, rounding could choose the other one of two almost equally likely tokens."""
    placement = choose_placement("cpu", "float32")
    model = load_model(language_model.checkpoint, placement.device)
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    settings = ServeSettings(name="tiny", chat_template=str(template), max_num_seqs=3)
    app = make_app(retriever, replace(language_model, model=model, placement=placement), settings)
    with listening(app) as url, ThreadPoolExecutor(2 * len(REQUESTS)) as clients:
        expected = [answer_of(url, *each) for each in REQUESTS]
        found = list(clients.map(lambda each: answer_of(url, *each), REQUESTS * 2))
    for alone, first, second in zip(expected, found, found[len(REQUESTS) :], strict=False):
        assert first == rounded(alone)
        assert second == rounded(alone)


# --- the batch -------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Holds every step of a batch until `let_go` is set. A server is ready without a first generation."""

    async def ready(_: object) -> None: ...

    gate = Gate(Batch.step)
    monkeypatch.setattr("retro.server.app.before_ready", ready)
    monkeypatch.setattr(Batch, "step", lambda batch: gate(batch))
    yield gate
    gate.let_go.set()


def gauge(url: str, name: str) -> float:
    families = text_string_to_metric_families(httpx.get(url + "/metrics", timeout=PATIENCE).text)
    values = {(each.name, each.labels.get("work")): each.value for family in families for each in family.samples}
    return values[name, "generate"]


def test_a_full_batch_queues_and_a_full_queue_refuses(app_with: Make, held: Gate) -> None:
    body = {"prompt": "a", "max_tokens": 3, "temperature": 0}
    app = app_with(max_num_seqs=1, max_requests=2)
    with listening(app) as url, ThreadPoolExecutor(2) as clients:
        answers = [clients.submit(httpx.post, url + "/generate", json=body, timeout=PATIENCE) for _ in range(2)]
        wait_until(lambda: gauge(url, "retro_running") == 1 and gauge(url, "retro_waiting") == 1)
        refused = httpx.post(url + "/generate", json=body, timeout=PATIENCE)
        assert refused.status_code == 429
        assert refused.headers["Retry-After"] == "1"
        held.let_go.set()
        first, second = (answer.result() for answer in answers)
        assert first.status_code == second.status_code == 200
        assert first.json() == second.json()
        wait_until(lambda: gauge(url, "retro_running") == 0)
        assert gauge(url, "retro_waiting") == 0


GREEDY = GenerationSettings(max_tokens=5, temperature=0, ignore_eos=True)
PROMPTS = [np.array([1, number], np.int64) for number in range(40, 50)]


async def tokens_of(
    queue: GenerationQueue, prompts: list[np.ndarray], on_end: Callable[[], Any] = int
) -> list[list[int]]:
    """The tokens of each prompt."""
    rows: list[list[int]] = [[] for _ in prompts]
    async for step in queue.generate(prompts, GREEDY, 0, PATIENCE):
        for token in step:
            rows[token.row].append(token.token)
    on_end()
    return rows


def test_a_request_with_many_prompts_does_not_delay_a_later_one(language_model: LanguageModel, held: Gate) -> None:
    queue, ended = GenerationQueue(language_model, 2, Metrics()), list[str]()

    async def work() -> None:
        large = asyncio.create_task(tokens_of(queue, PROMPTS, lambda: ended.append("large")))
        while queue.num_running < 2:
            await asyncio.sleep(0.01)
        small = asyncio.create_task(tokens_of(queue, PROMPTS[:1], lambda: ended.append("small")))
        while len(queue) < 9:
            await asyncio.sleep(0.01)
        held.let_go.set()
        assert (await large)[:1] == await small

    asyncio.run(work())
    assert ended == ["small", "large"]


def test_a_client_that_leaves_frees_its_places(language_model: LanguageModel, held: Gate) -> None:
    queue = GenerationQueue(language_model, 2, Metrics())

    async def work() -> None:
        leaving = asyncio.create_task(tokens_of(queue, PROMPTS))
        while queue.num_running < 2:
            await asyncio.sleep(0.01)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        held.let_go.set()
        assert len(await tokens_of(queue, PROMPTS[:1])) == 1
        while queue.num_running:
            await asyncio.sleep(0.01)
        assert len(queue) == 0

    asyncio.run(work())


def fails_at(language_model: LanguageModel, text: str) -> LanguageModel:
    """A model in float32 whose passes fail if they read the last token of a text."""
    placement, token = choose_placement("cpu", "float32"), language_model.tokenizer.encode(text)[-1]
    model = load_model(language_model.checkpoint, placement.device)

    def fail(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if (inputs[0] == token).any():
            raise MemoryError("this text needs too much memory")

    model.embedding.register_forward_pre_hook(fail)
    return replace(language_model, model=model, placement=placement)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_is_answered_500_and_its_neighbors_in_the_batch_as_alone(
    retriever: Retriever, language_model: LanguageModel, held: Gate, stream: bool
) -> None:
    """The failing request generates for some steps, then a token that the model fails to read."""
    failing_model = fails_at(language_model, "检索")
    (token,) = language_model.tokenizer.encode("检索")[-1:]
    bad = {
        "model": "tiny:off",
        "prompt": [[5, 6], [7, 8]],
        "max_tokens": 9,
        "logit_bias": {str(token): 100},
        "stream": stream,
    }
    good = {"model": "tiny:off", "max_tokens": 12, "temperature": 0, "logit_bias": {str(token): -100}}
    app = make_app(retriever, failing_model, ServeSettings(name="tiny"))
    with listening(app) as url, ThreadPoolExecutor(4) as clients:

        def post(body: dict[str, Any]) -> httpx.Response:
            return httpx.post(url + "/v1/completions", json=body, timeout=PATIENCE)

        bodies = [good | {"prompt": prompt, "seed": 3} for prompt in ("of", "a chunk", TEXT)]
        answers = [clients.submit(post, body) for body in [bodies[0], bad, *bodies[1:]]]
        wait_until(lambda: gauge(url, "retro_running") + gauge(url, "retro_waiting") == 5)
        held.let_go.set()
        first, failed, *others = (answer.result() for answer in answers)
        if stream:
            assert '"internal_error"' in failed.text
            assert failed.text.endswith("data: [DONE]\n\n")
        else:
            assert failed.status_code == 500
            assert failed.json()["error"]["code"] == "internal_error"
        for body, answer in zip(bodies, [first, *others], strict=True):
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"] == post(body).json()["choices"]


def test_a_prompt_that_cannot_join_the_batch_fails_alone(
    language_model: LanguageModel, held: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, (marked, *others) = language_model.tokenizer, PROMPTS[:3]

    def decode(tokens: Any) -> str:
        if np.array_equal(tokens, marked):
            raise ValueError("this prompt has no text")
        return tokenizer.decode(tokens)

    batch = LanguageModel.batch
    monkeypatch.setattr(LanguageModel, "batch", lambda model: Batch(batch(model)._decoder, decode, tokenizer.eos_id))
    queue = GenerationQueue(language_model, 4, Metrics())

    async def work() -> None:
        tasks = [asyncio.create_task(tokens_of(queue, prompts)) for prompts in (others[:1], others)]
        while not queue.num_running:
            await asyncio.sleep(0.01)
        failing = asyncio.create_task(tokens_of(queue, [marked, others[0]]))
        await asyncio.sleep(0)
        held.let_go.set()
        first, both, failed = await asyncio.gather(*tasks, failing, return_exceptions=True)
        assert isinstance(failed, ValueError)
        assert first == both[:1]
        assert both == await tokens_of(queue, others)

    asyncio.run(work())


def test_a_stopping_server_ends_running_and_waiting_requests(language_model: LanguageModel, held: Gate) -> None:
    queue = GenerationQueue(language_model, 1, Metrics())

    async def work() -> None:
        tasks = [asyncio.create_task(tokens_of(queue, [prompt])) for prompt in PROMPTS[:3]]
        while len(queue) < 2:
            await asyncio.sleep(0.01)
        queue.cut_off()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, ApiError)
            assert error.status == 503

    asyncio.run(work())
