"""The cached decoder gives the logits of a full forward pass, after dropping context, removing rows and batching."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from indexing.store.errors import InputError
from retro.batch.inputs import Inputs
from retro.copying.rows import RetrieveNeighbors
from retro.device import Placement, choose_placement
from retro.inference import cache
from retro.inference.cache import KEY_STEP
from retro.inference.decoder import Decoder
from retro.model import attention
from retro.model.retro import Retro
from tests.retro.small_model import (
    READERS,
    SCHEMES,
    M,
    R,
    T,
    Together,
    V,
    build,
    cached_model,
    every_scheme_and_reader,
)

FLOAT32 = choose_placement("cpu", "float32")
FLOAT16 = Placement(torch.device("cpu"), torch.float16)
BFLOAT16 = Placement(torch.device("cpu"), torch.bfloat16)
LENGTHS = (1, M - 1, M, M + 1, 2 * M, 3 * M - 1, 5 * M)  # shorter and longer than a chunk, and at chunk boundaries


def retriever(k: int, asked: list[list[int]] | None = None) -> RetrieveNeighbors | None:
    """Retrieve random neighbors of any length, possibly 0, that depend only on the chunk."""

    def retrieve(chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if asked is not None:
            asked.extend(chunks.tolist())
        drawn = [np.random.default_rng(chunk) for chunk in chunks]
        lengths = np.stack([rng.integers(0, R + 1, k) * rng.integers(0, 2) for rng in drawn])
        return np.stack([rng.integers(0, V, (k, R)) for rng in drawn]), lengths

    return retrieve if k else None


def rows(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, V, length) for length in lengths]


@torch.no_grad()
def uncached(
    model: Retro,
    tokens: np.ndarray,
    retrieve: RetrieveNeighbors | None,
    generated: int = 0,
    context: int = T * 4,
    votes: Callable[[np.ndarray, int], np.ndarray] | None = None,
) -> Tensor:
    """Logits after some tokens, the last of them generated, from one forward pass over the context without a cache."""
    block = max(M, context // 4 // M * M)

    def read(tokens: np.ndarray) -> tuple[Tensor, Inputs]:
        tokens = tokens[max(0, -(-(len(tokens) - context) // block) * block) :]
        full, found = len(tokens) // M, {}
        if full and retrieve is not None:
            neighbors, lengths = retrieve(tokens[: full * M].reshape(-1, M))
            found = {
                "neighbors": torch.from_numpy(neighbors[None]),
                "neighbor_lengths": torch.from_numpy(lengths[None]),
            }
        if votes is not None:
            found["votes"] = torch.from_numpy(votes(tokens, 0)[None])
        inputs = Inputs(torch.from_numpy(tokens[None]), **found)
        return model.hidden(inputs)[0], inputs

    (hidden, inputs), head = read(tokens), model.copy_head
    if head is None or not head.learns_trust(inputs):
        return model.mix(model.logits(hidden), inputs)[0, -1]
    of_prompt, prompt = read(tokens[: len(tokens) - generated])
    trust = torch.tensor(head.switch.start).expand(*inputs.tokens.shape, -1)
    if head.learns_trust(prompt):  # otherwise it has nothing to copy from
        trust = model.scored(prompt._replace(labels=prompt.following()), of_prompt)[1][:, -1:].expand_as(trust)
    sources = model.copy_sources(inputs)
    return head.mix(model.logits(hidden), sources, head.evidence(sources, inputs.tokens), trust=trust)[0, -1]


def check_steps(
    decoder: Together,
    expected: Callable[[np.ndarray, int], Tensor],
    prompts: list[np.ndarray],
    steps: int,
    keep_at: int = -1,
) -> None:
    """Assert the logits of the prompts and of each following step; after step `keep_at` every other row is removed.

    `expected` is given the tokens of a row, and how many of them were generated.
    """
    rng, rows = np.random.default_rng(1), prompts
    logits = decoder.read(prompts)
    for step in range(steps):
        torch.testing.assert_close(logits, torch.stack([expected(row, step) for row in rows]), rtol=1e-4, atol=1e-4)
        if step == keep_at:
            decoder.keep(range(0, len(rows), 2))
            rows = rows[::2]
        new = [rng.integers(0, V, 1) for _ in rows]
        rows = [np.concatenate(row) for row in zip(rows, new, strict=True)]
        logits = decoder.read(new)


@pytest.mark.parametrize("k", [0, 3])
@every_scheme_and_reader
def test_every_step_gives_the_logits_of_a_full_forward_pass(
    scheme: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "KEY_STEP", 3 * M)  # some steps read a longer run of keys than the previous ones
    model, retrieve = cached_model(scheme), retriever(k)
    decoder = Together(model, FLOAT32, 4 * T, retrieve)
    check_steps(
        decoder, lambda row, generated: uncached(model, row, retrieve, generated), rows(*LENGTHS), 2 * M + 2, keep_at=M
    )


@pytest.mark.gpu
def test_on_a_gpu_every_step_gives_the_logits_of_a_full_forward_pass_on_a_cpu() -> None:
    model, retrieve = cached_model("rope"), retriever(2)
    decoder = Together(build().to("cuda"), choose_placement("cuda", "float32"), 4 * T, retrieve)
    check_steps(
        decoder,
        lambda row, generated: uncached(model, row, retrieve, generated).to("cuda"),
        rows(*LENGTHS),
        2 * M + 2,
        keep_at=M,
    )


@every_scheme_and_reader
def test_given_neighbors_are_read_by_every_chunk_and_stay_with_their_rows(scheme: str) -> None:
    model, prompts = cached_model(scheme), rows(1, M, M + 1, 3 * M)
    rng = np.random.default_rng(2)
    given = [(rng.integers(0, V, (5, R)), rng.integers(0, R + 1, 5)) for _ in prompts]

    def own_neighbors(own: tuple[np.ndarray, np.ndarray]) -> RetrieveNeighbors:
        return lambda chunks: tuple(np.stack([part] * len(chunks)) for part in own)

    def expected(row: np.ndarray, generated: int) -> Tensor:
        own = next(each for each, prompt in zip(given, prompts, strict=True) if prompt[0] == row[0])
        return uncached(model, row, own_neighbors(own), generated)

    for number, prompt in enumerate(prompts):
        prompt[0] = number
    decoder = Together(model, FLOAT32, 4 * T, *map(own_neighbors, given))
    check_steps(decoder, expected, prompts, 2 * M + 2, keep_at=M)


@every_scheme_and_reader
def test_rows_may_read_fewer_neighbors_than_others_before_them(scheme: str) -> None:
    model, (first, second) = cached_model(scheme), rows(M + 1, M + 2)
    many, few = retriever(3), retriever(2)
    decoder = Decoder(model, FLOAT32, 4 * T)
    for prompt, retrieve in ((first, many), (second, few)):
        logits = decoder.read([decoder.add(prompt, retrieve)])[0]
        torch.testing.assert_close(logits, uncached(model, prompt, retrieve), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"retrieval.cca_layers": ()},
        {"experts.num_experts": 4, "experts.every": 2, "experts.capacity_factor": 0.5},
        {"retrieval.cca_layers": (1,), "encoder.cca_layers": (), "tied_embeddings": False},
        {"retrieval.cca_layers": (3,), "shared_embeddings": True, "encoder.cca_layers": (1, 2)},
        {"attention.sliding_window": M + 1, "attention.bias": "qkv", "attention.qk_norm": True, "norm_eps": 0.1},
        {
            "attention.sliding_window": 3,
            "attention.positions": "transformer-xl",
            "retrieval.positions": "alibi",
            "parallel_residual": True,
        },
        {
            "attention.positions": "learned",
            "attention.max_positions": 4 * T,
            "retrieval.positions": "rope",
            "attention.sliding_window": 1,
        },
        {"attention.prefix_tokens": 3, "attention.positions": "transformer-xl", "attention.sliding_window": 3},
        {"attention.prefix_tokens": 2, "attention.positions": "alibi", "retrieval.cca_layers": ()},
        {"attention.prefix_tokens": 3, "scheme": "reading"},
    ],
)
def test_other_architectures_are_cached(changes: dict) -> None:
    model, retrieve = build(**{"scheme": "smeared", **changes}), retriever(2)
    decoder = Together(model, FLOAT32, 4 * T, retrieve)
    check_steps(decoder, lambda row, generated: uncached(model, row, retrieve, generated), rows(2, M, 2 * M + 1), M + 1)


@pytest.mark.parametrize(("scheme", "context"), [("rope", M), *((scheme, 2 * M) for scheme in [*SCHEMES, *READERS])])
def test_a_full_context_is_recomputed_from_its_remaining_tokens(scheme: str, context: int) -> None:
    model, retrieve = cached_model(scheme), retriever(2)
    decoder = Together(model, FLOAT32, context, retrieve)
    prompts = rows(3, context - 1, context, context + 1, 3 * context + 2)
    check_steps(decoder, lambda row, generated: uncached(model, row, retrieve, generated, context), prompts, 3 * M)


def test_a_context_longer_than_the_position_table_is_rejected() -> None:
    with pytest.raises(InputError, match=r"model\.attention\.max_positions = 64: should be 68"):
        Decoder(cached_model("learned"), FLOAT32, 4 * T + M)


def test_a_full_context_drops_a_quarter_but_at_least_a_chunk() -> None:
    def remaining_length(context: int, length: int) -> int:
        decoder = Decoder(cached_model("rope"), FLOAT32, context)
        return len(decoder.add(*rows(length)).tokens)

    assert [remaining_length(16 * M, length) for length in (16 * M, 16 * M + 1, 20 * M, 20 * M + 1)] == [
        16 * M,
        12 * M + 1,
        16 * M,
        12 * M + 1,
    ]
    assert remaining_length(2 * M, 2 * M + 1) == M + 1


@pytest.mark.parametrize("scheme", [*SCHEMES, *READERS, "copying from neighbors only"])
def test_rows_are_independent_with_and_without_neighbors(scheme: str) -> None:
    only = {"copy_head.neighbors": True}  # nothing to copy from without neighbors
    model, prompts = cached_model(scheme) if scheme in SCHEMES | READERS else build(**only), rows(*LENGTHS)
    searches = [retriever(2 * (row % 2)) for row in range(len(prompts))]
    together = Together(model, FLOAT32, 4 * M, *searches)
    alone = [Together(model, FLOAT32, 4 * M, retrieve) for retrieve in searches]
    new = prompts
    for step in range(M + 1):
        expected = torch.cat([decoder.read([tokens]) for decoder, tokens in zip(alone, new, strict=True)])
        torch.testing.assert_close(together.read(new), expected, rtol=1e-4, atol=1e-5)
        if step == 1:
            together.keep(range(1, len(prompts)))
            alone = alone[1:]
        new = rows(*[1] * len(alone))


def test_a_step_computes_one_token_per_row() -> None:
    model, seen = build("rope"), []
    model.feed_forward["0"].register_forward_pre_hook(lambda block, inputs: seen.append(tuple(inputs[0].shape[:2])))
    decoder = Together(model, FLOAT32, 4 * T, retriever(2))
    decoder.read(rows(2 * M, M + 1))
    assert seen == [(2, M - 1), (2, M), (1, 1)]  # windows; the last one has a token of the longer row only
    seen.clear()
    for _ in range(2 * M):
        decoder.read(rows(1, 1))
    assert seen == [(2, 1)] * 2 * M


def test_attention_reads_few_different_numbers_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, attend = set(), attention.dot_product_attention
    monkeypatch.setattr(
        attention, "dot_product_attention", lambda q, k, *rest: (lengths.add(k.shape[2]), attend(q, k, *rest))[1]
    )
    decoder = Together(cached_model("rope"), FLOAT32, 2 * KEY_STEP + 3 * M)
    for prompts in (rows(1, 3), *[rows(1, 1)] * (2 * KEY_STEP)):
        decoder.read(prompts)
    assert lengths == {KEY_STEP, 2 * KEY_STEP, 2 * KEY_STEP + 3 * M}


def test_every_complete_chunk_in_the_context_is_searched_once() -> None:
    asked: list[list[int]] = []
    decoder = Together(cached_model("rope"), FLOAT32, 4 * M, retriever(2, asked))
    first, second = rows(2 * M + 1, 6 * M)
    decoder.read([first, second])
    assert asked == [*first[: 2 * M].reshape(-1, M).tolist(), *second[2 * M :].reshape(-1, M).tolist()]
    asked.clear()
    text = [first, second]
    for step in range(M - 1):
        text = [np.concatenate(row) for row in zip(text, rows(1, 1), strict=True)]
        decoder.read(rows(1, 1))
        assert len(asked) == (step == M - 2)
    assert asked == [text[0][2 * M :].tolist()]


@pytest.mark.parametrize(
    ("scheme", "reduced", "rounding"),
    [("rope", BFLOAT16, 0.2), ("alibi", BFLOAT16, 0.2), ("learned", BFLOAT16, 0.2), ("rope", FLOAT16, 0.025)],
)
def test_reduced_precision_differs_only_by_rounding(scheme: str, reduced: Placement, rounding: float) -> None:
    model, retrieve = cached_model(scheme), retriever(2)
    decoder, plain = Together(model, reduced, 4 * T, retrieve), Together(model, FLOAT32, 4 * T, retrieve)
    new, difference = rows(M, 3), 0.0
    for _ in range(M):
        difference = max(difference, float((decoder.read(new) - plain.read(new)).abs().max()))
        new = rows(1, 1)
    assert 0 < difference < rounding


@every_scheme_and_reader
def test_cast_weights_equal_autocast(scheme: str) -> None:
    model = build(scheme, tied_embeddings=False, shared_embeddings=True)
    tokens, neighbors = torch.from_numpy(np.stack(rows(T, T))), torch.arange(2 * 4 * 2 * R).view(2, 4, 2, R) % V

    def logits() -> Tensor:
        with torch.no_grad(), BFLOAT16.autocast():
            return model(Inputs(tokens, neighbors=neighbors))

    expected = logits()
    FLOAT32.cast(model)
    assert model.head.weight.dtype == torch.float32
    BFLOAT16.cast(model)
    assert model.head.weight.dtype == torch.bfloat16
    assert torch.equal(logits(), expected)
