"""Texts that join and leave a batch at any step continue as alone."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retro.copying.rows import RetrieveNeighbors
from retro.device import choose_placement
from retro.inference import decoder as decoding
from retro.inference.decoder import Decoder
from retro.inference.generation import Batch, Continuation, GeneratedToken, generate
from retro.inference.settings import BOUNDS, GenerationSettings
from retro.model.retro import Retro
from tests.retro.inference.test_decoder import retriever
from tests.retro.small_model import READERS, SCHEMES, M, T, V, build, cached_model

CONTEXT = 4 * M
SEARCHES = [None, retriever(1), retriever(3)]
SETTINGS = (
    {"temperature": 0},
    {"temperature": 0.7, "top_k": 5, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.01, "stop_token_ids": (3, 4)},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 4},
    {"temperature": 1.5, "frequency_penalty": 0.7, "logit_bias": ((5, 2.0), (6, -100.0))},
    {"temperature": 0.9, "stop": ("AB", "C"), "copy_strength": 0.1},
    {"temperature": 0, "copy_strength": 0, "logprobs": 1},
)


def decode(tokens) -> str:
    """One letter per token."""
    return "".join(chr(ord("A") + token) for token in tokens)


def batch_of(model: Retro) -> Batch:
    return Batch(Decoder(model, choose_placement("cpu", "float32"), CONTEXT), decode, eos_id=0)


@dataclass
class Text:
    """A text, the step at which it joins, and the number of steps after which it leaves unless it is finished."""

    prompt: np.ndarray
    settings: GenerationSettings
    retrieve: RetrieveNeighbors | None
    joins: int
    stays: int
    new: list[GeneratedToken] = field(default_factory=list)

    def join(self, batch: Batch) -> Continuation:
        return batch.add(self.prompt, self.settings, self.retrieve, sources=True)[0]


@st.composite
def texts(draw: st.DrawFn) -> list[Text]:
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))

    def text() -> Text:
        own = {**SETTINGS[numbers.integers(len(SETTINGS))], "seed": int(numbers.integers(100))}
        return Text(
            prompt=numbers.integers(0, V, numbers.integers(1, CONTEXT + 3)),
            settings=GenerationSettings(max_tokens=int(numbers.integers(1, 2 * M + 2)), **own),
            retrieve=SEARCHES[numbers.integers(len(SEARCHES))],
            joins=int(numbers.integers(2 * M)),
            stays=int(numbers.choice([3, M, 1000])),
        )

    return [text() for _ in range(6)]


def alone(model: Retro, text: Text) -> list[GeneratedToken]:
    batch = batch_of(model)
    text.join(batch)
    new = list[GeneratedToken]()
    while len(batch):
        new += [token for _, token in batch.step()]
    return new


def together(model: Retro, all_texts: list[Text]) -> None:
    batch, running, step = batch_of(model), dict[Continuation, Text](), 0
    while step == 0 or running or any(text.joins >= step for text in all_texts):
        running |= {text.join(batch): text for text in all_texts if text.joins == step}
        leaving = [key for key, text in running.items() if text.joins + text.stays == step]
        batch.remove(leaving)
        for key in leaving:
            del running[key]
        assert len(batch) == len(running)
        for key, token in batch.step():
            running[key].new.append(token)
            if token.finish_reason is not None:
                del running[key]
        step += 1


def check_equal(found: GeneratedToken, expected: GeneratedToken) -> None:
    for name in ("token", "text", "finish_reason"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.log_probability == pytest.approx(expected.log_probability, abs=1e-4)
    assert [token for token, _ in found.top] == [token for token, _ in expected.top]
    assert [value for _, value in found.top] == pytest.approx([value for _, value in expected.top], abs=1e-4)
    assert (found.copied is None) == (expected.copied is None)
    if found.copied is not None and expected.copied is not None:
        assert found.copied == pytest.approx(expected.copied, abs=1e-4)
    for one, other in zip(found.read, expected.read, strict=True):
        assert one.number == other.number
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.neighbors.tokens, other.neighbors.tokens)


@pytest.mark.parametrize("scheme", [*SCHEMES, *READERS, "experts"])
@settings(max_examples=3, deadline=None, derandomize=True)
@given(texts=texts())
def test_a_text_continues_as_alone_whatever_joins_and_leaves(scheme: str, texts: list[Text]) -> None:
    experts = {"experts.num_experts": 4, "experts.every": 2, "experts.capacity_factor": 0.5}
    model = build("smeared", **experts) if scheme == "experts" else cached_model(scheme)
    together(model, texts)
    for text in texts:
        expected = alone(model, text)
        assert len(text.new) == len(expected) if text.stays == 1000 else len(text.new) <= len(expected)
        for found, wanted in zip(text.new, expected, strict=False):
            check_equal(found, wanted)


def prompts_of(*lengths: int) -> list[np.ndarray]:
    return [np.random.default_rng(length).integers(1, V, length) for length in lengths]


GREEDY = GenerationSettings(max_tokens=6 * M, temperature=0, ignore_eos=True, drafts=False)  # a token in each step


@pytest.fixture
def passes() -> tuple[Retro, list[tuple[int, int]]]:
    """A model, and the rows and tokens of each of its passes."""
    model, seen = build("rope"), list[tuple[int, int]]()
    model.feed_forward["0"].register_forward_pre_hook(lambda block, inputs: seen.append(tuple(inputs[0].shape[:2])))
    return model, seen


@pytest.mark.parametrize(
    ("retrieve", "limit", "parts"),
    [
        (retriever(2), 10 * M, [M - 1, M, M, 1]),  # activations depend on neighbors: windows
        (None, M, [M, M, M]),
        (None, 10 * M, [3 * M]),
    ],
)
def test_a_long_prompt_delays_other_texts_by_a_part_of_it_a_step(
    passes: tuple[Retro, list[tuple[int, int]]],
    monkeypatch: pytest.MonkeyPatch,
    retrieve: RetrieveNeighbors | None,
    limit: int,
    parts: list[int],
) -> None:
    monkeypatch.setattr(decoding, "INTERLEAVED_TOKENS", limit)
    model, seen = passes
    batch = batch_of(model)
    for prompt in prompts_of(1, 2):
        batch.add(prompt, GREEDY)
    batch.step()
    batch.step()
    batch.add(prompts_of(3 * M)[0], GREEDY, retrieve)
    seen.clear()
    texts = [len(batch.step()) for _ in range(5)]
    assert texts == [2] * (len(parts) - 1) + [3] * (6 - len(parts))
    windows = [part for part in parts if part > 1]  # a single token is read with those of the other texts
    expected = [shape for part in windows for shape in ((2, 1), (1, part))]
    assert seen == expected + [(3, 1)] * (5 - len(windows))


def test_prompts_are_read_in_the_order_of_arrival_and_none_starves(
    passes: tuple[Retro, list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "WINDOW_TOKENS", 1)  # one window a step
    batch, begun = batch_of(passes[0]), list[Continuation]()
    order = batch.add(prompts_of(3 * M)[0], GREEDY)
    for length in (2 * M, M, M + 1, 2):
        begun += [text for text, _ in batch.step() if text not in begun]
        order += batch.add(prompts_of(length)[0], GREEDY)
    while len(begun) < len(order):
        begun += [text for text, _ in batch.step() if text not in begun]
    assert begun == order


def test_texts_at_a_chunk_boundary_share_a_search() -> None:
    asked: list[int] = []

    def counting(find: RetrieveNeighbors) -> RetrieveNeighbors:
        return lambda chunks: (asked.append(len(chunks)), find(chunks))[1]

    first, second = counting(retriever(2)), counting(retriever(3))  # type: ignore[arg-type]
    batch = batch_of(cached_model("rope"))
    for prompt, retrieve in zip(prompts_of(M, 1, 2, 1), (first, first, first, second), strict=True):
        batch.add(prompt, GREEDY, retrieve)
    found = list[list[int]]()
    for _ in range(M):
        batch.step()
        found.append([*asked])
        asked.clear()
    # After the prompts, lengths are (M, 1, 2, 1), and each step appends a token.
    assert found == [[1], *[[]] * (M - 3), [1], [1, 1]]


def test_removed_texts_leave_no_memory_behind() -> None:
    batch = batch_of(cached_model("rope"))
    decoder = batch._decoder
    for _ in range(20):
        first, second, third = (batch.add(prompt, GREEDY)[0] for prompt in prompts_of(M + 1, 2 * M, 3))
        batch.step()
        batch.remove([second])
        batch.step()
        batch.remove([first, third])
    assert len(decoder.cache.keys) == 1
    assert decoder.cache.keys.numel() == 0
    batch.add(prompts_of(T)[0], GREEDY)
    for _ in range(20):  # a text always remains
        (joined,) = batch.add(prompts_of(3)[0], GREEDY)
        batch.step()
        batch.remove([joined])
    assert len(decoder.cache.keys) == 2


def test_several_continuations_of_a_prompt_leave_before_and_after_it_is_read() -> None:
    model, (prompt,) = cached_model("copying"), prompts_of(3 * M)
    sampling = GenerationSettings(max_tokens=M, temperature=1.0, seed=5, ignore_eos=True, drafts=False)

    def run(leave_at: Callable[[int], list[int]]) -> dict[int, list[int]]:
        batch, tokens = batch_of(model), dict[int, list[int]]()
        texts = batch.add(prompt, sampling, retriever(2), copies=[(copy, copy) for copy in range(4)])
        step = 0
        while len(batch):
            batch.remove([texts[copy] for copy in leave_at(step)])
            for text, token in batch.step() if len(batch) else ():
                tokens.setdefault(text.number, []).append(token.token)
            step += 1
        return tokens

    whole = run(lambda step: [])
    assert len({tuple(tokens) for tokens in whole.values()}) == 4
    assert run(lambda step: [0] if step == 1 else []) == {copy: whole[copy] for copy in (1, 2, 3)}
    part = run(lambda step: [1, 3] if step == 4 else [])  # after a token each
    assert part == {copy: tokens[: 1 if copy in (1, 3) else None] for copy, tokens in whole.items()}
    assert run(lambda step: [0, 1, 2, 3] if step == 2 else []) == {}


@pytest.mark.parametrize("penalty", [0.5, 1.5])
def test_a_penalty_changes_a_text_as_alone_next_to_one_with_neighbors(penalty: float) -> None:
    """A copy head that reads neighbors only has nothing to copy from in a text without them."""
    model, own = build("rope", **{"copy_head.neighbors": True}), replace(GREEDY, repetition_penalty=penalty)
    searches = (retriever(2), None, None)
    mixed = [
        Text(*each, joins=0, stays=1000) for each in zip(prompts_of(M + 1, 2 * M, 3), [own] * 3, searches, strict=True)
    ]
    together(model, mixed)
    for text in mixed:
        assert [token.token for token in text.new] == [token.token for token in alone(model, text)]


# --- failures ---------------------------------------------------------------------------------------------------------

BROKEN = V - 1  # a token of the failing text only
SAMPLING = GenerationSettings(
    max_tokens=3 * M, temperature=1.0, seed=3, logit_bias=((BROKEN, -100.0),), ignore_eos=True
)


def failing_embedding(model: Retro) -> None:
    """Make every pass fail that reads the token `BROKEN`."""

    def fail(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if (inputs[0] == BROKEN).any():
            raise MemoryError("no memory for this text")

    model.embedding.register_forward_pre_hook(fail)


def search_without_broken(chunks: np.ndarray) -> list[np.ndarray]:
    tokens, *others = retriever(2)(chunks)  # type: ignore[misc]
    return [np.minimum(tokens, BROKEN - 1), *others]


def failing_search(chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    raise OSError("the index does not answer")


def failing_decode(tokens) -> str:
    if len(tokens) and tokens[0] == BROKEN and len(tokens) > M + 2:
        raise ValueError("not a text")
    return decode(tokens)


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("kind", ["forward", "search", "text"])
def test_a_text_that_fails_fails_alone(kind: str, place: int) -> None:
    """With greedy and sampled texts in all states: unread, generating, several of one prompt, beyond the context."""
    model = build("copying")
    prompts = [np.minimum(prompt, BROKEN - 1) for prompt in prompts_of(2 * M + 1, CONTEXT - 1, M - 1)]
    failing = np.full(M, BROKEN) if kind == "text" else prompts_of(M)[0]
    search = failing_search if kind == "search" else search_without_broken
    # Generates the token, and fails when it is read; or does not end before it fails.
    bias = ((BROKEN, 100.0),) if kind == "forward" else ((0, -100.0),)

    def tokens(with_failing: bool) -> tuple[dict[int, list[GeneratedToken]], list[Exception]]:
        batch = Batch(Decoder(model, choose_placement("cpu", "float32"), CONTEXT), failing_decode, eos_id=0)
        new, errors = dict[int, list[GeneratedToken]](), list[Exception]()
        for number, prompt in enumerate(prompts):
            if with_failing and number == place % 3:
                broken = batch.add(failing, GenerationSettings(max_tokens=6 * M, logit_bias=bias), search)[0]
            own = (
                SAMPLING
                if number
                else GenerationSettings(max_tokens=3 * M, temperature=0, logit_bias=SAMPLING.logit_bias)
            )
            copies = [(2 * number + copy, copy) for copy in range(2)]
            batch.add(prompt, own, search_without_broken, copies=copies, sources=True)
            for _ in range(place):
                for text, token in batch.step():
                    collect(text, token, new, errors, broken if with_failing else None)
        while len(batch):
            for text, token in batch.step():
                collect(text, token, new, errors, broken if with_failing else None)
        return new, errors

    def collect(text, token, new, errors, broken) -> None:
        if isinstance(token, Exception):
            assert text is broken
            errors.append(token)
        elif text is not broken:
            new.setdefault(token.row, []).append(token)

    expected, none = tokens(with_failing=False)
    assert none == []
    if kind == "forward":
        failing_embedding(model)
    found, errors = tokens(with_failing=True)
    assert [type(error) for error in errors] == [{"forward": MemoryError, "search": OSError, "text": ValueError}[kind]]
    assert found.keys() == expected.keys() == set(range(6))
    for row, row_tokens in found.items():
        assert len(row_tokens) == len(expected[row])
        for one, other in zip(row_tokens, expected[row], strict=True):
            check_equal(one, other)


def test_generate_raises_the_error_of_a_text() -> None:
    with pytest.raises(OSError, match="does not answer"):
        list(generate(batch_of(cached_model("rope")), prompts_of(M, 2), GREEDY, [failing_search, None]))


def extreme_settings() -> st.SearchStrategy[GenerationSettings]:
    """Settings at and near the bounds."""

    def at_bounds(least: float, largest: float) -> st.SearchStrategy[float]:
        return st.sampled_from([least, largest]) | st.floats(least, largest)

    names = [name for name in BOUNDS if name != "logit_bias"]
    bias = st.tuples(st.integers(0, V - 1), at_bounds(*BOUNDS["logit_bias"]))
    return st.builds(
        GenerationSettings,
        **{name: at_bounds(*BOUNDS[name]) for name in names},
        logit_bias=st.lists(bias, max_size=V).map(tuple),
        top_k=st.sampled_from([0, 1, V, 2**31 - 1]),
        top_p=st.just(1.0) | st.floats(0, 1, exclude_min=True),
        seed=st.integers(0, 2**63 - 1),
        max_tokens=st.just(2 * M),
        ignore_eos=st.booleans(),
        logprobs=st.integers(0, 20),
    )


@pytest.fixture(scope="module")
def confident() -> Retro:
    """A model with logits as large as a trained model's."""
    model = build("rope")
    model.norm.weight.data *= 100
    return model


@settings(max_examples=10, deadline=None, derandomize=True)
@given(extremes=st.lists(extreme_settings(), min_size=2, max_size=4))
def test_no_accepted_settings_affect_another_text(confident: Retro, extremes: list[GenerationSettings]) -> None:
    prompt = prompts_of(M + 1)[0]
    greedy, *others = (
        Text(prompt, each, retriever(2), joins=0, stays=1000) for each in (replace(GREEDY, max_tokens=2 * M), *extremes)
    )
    together(confident, [*others, greedy])
    for found, expected in zip(greedy.new, alone(confident, greedy), strict=True):
        check_equal(found, expected)
    assert all(0 <= token.token < V for text in others for token in text.new)
