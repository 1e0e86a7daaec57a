"""Attention in every part of the model equals the formulas, computed with slow loops."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from retro.model.attention import Attention, dot_product_attention, initial_taps, weighted_sums
from retro.model.positions import AlibiPositions, NoPositions, Positions, RopePositions, positions_of, slopes
from retro.model.reads import Reads
from tests.retro.small_model import M, R, batch, build, logits


def rotate(x: Tensor, position: int) -> Tensor:
    """RoPE of one vector: the complex numbers x_c + i x_{c + C/2}, rotated by position * 10000^(-2c/C)."""
    half = len(x) // 2
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half), position * FREQUENCIES[half])
    return torch.cat((turned.real, turned.imag))


def sinusoid(distance: int, width: int) -> Tensor:
    """Transformer-XL's R for one distance: cosines, then sines."""
    angles = distance * FREQUENCIES[width // 2]
    return torch.cat((angles.cos(), angles.sin()))


FREQUENCIES = {n: torch.tensor([10_000 ** (-c / n) for c in range(n)]) for n in (4, 8, 12, 16)}


# Settings of models whose attention uses other formulas.
OPTIONS: dict[str, dict[str, Any]] = {
    "rope": {},
    "transformer-xl": {"attention.positions": "transformer-xl"},
    "alibi": {"attention.positions": "alibi"},
    "normed": {"attention.qk_norm": True},
    "mup": {"attention.positions": "learned", "init": "mup"},
}


def slow_score(attention: Attention, places: Positions, q: Tensor, k: Tensor, distance: int) -> Tensor:
    """Score of one query and one key of a single-headed attention, from their distance alone."""
    if isinstance(places, NoPositions):  # the case with muP
        return q @ k / len(q)
    if isinstance(places, AlibiPositions):
        return q @ k / math.sqrt(len(q)) - abs(distance) / 256
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = (x / x.square().mean().sqrt() for x in (q, k))
        q, k = q * attention.q_norm.weight, k * attention.k_norm.weight
    if isinstance(places, RopePositions):
        return rotate(q, distance) @ k / math.sqrt(len(q))
    u, v = attention.content_bias.weight[0, 0], attention.distance_bias.weight[0, 0]
    r = attention.distance_proj.weight @ sinusoid(distance, attention.q_proj.in_features)
    return ((q + u) @ k + (q + v) @ r) / math.sqrt(len(q))


def slow_attention(
    attention: Attention, places: Positions, x: Tensor, source: Tensor, distance: Callable[[int, int], int | None]
) -> Tensor:
    """Attention in loops: x [Q, D] reads source [S, E]; `distance` returns None where a query may not read a key."""
    out = torch.zeros_like(x)
    for i in range(len(x)):
        scores, values = [], []
        for j in range(len(source)):
            if (apart := distance(i, j)) is not None:
                key, value = attention.k_proj.weight @ source[j], attention.v_proj.weight @ source[j]
                scores.append(slow_score(attention, places, attention.q_proj.weight @ x[i], key, apart))
                values.append(value)
        if scores:
            out[i] = attention.o_proj.weight @ (torch.stack(scores).softmax(0)[:, None] * torch.stack(values)).sum(0)
    return out


@pytest.fixture(params=OPTIONS)
def recorded(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Inputs and outputs of every block of a single-headed model, for a sequence that ends inside a chunk.

    The first of three chunks has one whole and one truncated neighbor, the second has none.
    """
    model = build(
        **OPTIONS[request.param],
        **{"attention.num_heads": 1, "encoder.num_heads": 1},
    )
    record: dict[str, Any] = {"lengths": torch.tensor([[R, 3], [0, 0], [0, 5]])}

    def keep(name: str) -> Any:
        def hook(block: torch.nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            record[name] = (block, inputs, output)

        return hook

    for name, block in model.named_modules():
        if name.endswith(".block"):
            block.register_forward_hook(keep(name.removesuffix(".block")))
    tokens, neighbors, _ = batch()
    logits(model, tokens[:1, : 3 * M + 2], None, neighbors[:1, :3], record["lengths"][None])
    return record


@torch.no_grad()
def test_self_attention_equals_the_papers_formula(recorded):
    attention, (x, reads), output = recorded["attention.1"]
    slow = slow_attention(attention, reads.positions, x[0], x[0], lambda i, j: i - j if j <= i else None)
    torch.testing.assert_close(output[0], slow, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_chunked_cross_attention_equals_the_papers_formula(recorded):
    """Section 2.4: token i of chunk u's window is at distance i - i' + m - 1 from token i' of chunk u's neighbors."""
    cross, (x, (places, encoded, _)), output = recorded["cross.4"]
    assert (output[0, : M - 1] == 0).all()
    for chunk in range(3):
        window = slice((chunk + 1) * M - 1, (chunk + 2) * M - 1)

        def distance(i: int, j: int, lengths: Tensor = recorded["lengths"][chunk]) -> int | None:
            neighbor, token = divmod(j, R)
            return i - token + M - 1 if token < lengths[neighbor] else None

        slow = slow_attention(cross.attention, places, x[0, window], encoded[0, chunk].flatten(0, 1), distance)
        torch.testing.assert_close(output[0, window], slow, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_encoder_is_bidirectional_over_the_real_tokens_of_a_neighbor(recorded):
    attention, (x, reads), output = recorded["encoder.attention.1"]
    for row, length in enumerate(recorded["lengths"].flatten().tolist()):
        if length:

            def distance(i: int, j: int, length: int = length) -> int | None:
                return i - j if j < length else None

            slow = slow_attention(attention, reads.positions, x[row], x[row], distance)
            torch.testing.assert_close(output[row], slow, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_encoded_neighbors_read_the_chunk_that_retrieved_them(recorded):
    """Token i' of a neighbor and token j of the chunk are at distance i' - j, in each of the K neighbors."""
    attention, (x, reads), output = recorded["encoder.cross.1"]
    for chunk in range(3):
        slow = slow_attention(attention, reads.positions, x[chunk], reads.source[chunk], lambda i, j: i % R - j)
        torch.testing.assert_close(output[chunk], slow, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", ["rope", "transformer-xl"])
def test_heads_are_independent(scheme):
    torch.manual_seed(2)
    both = Attention(query_width=12, key_width=10, num_heads=2, head_dim=8, scheme=scheme)
    if scheme == "transformer-xl":
        torch.nn.init.normal_(both.content_bias.weight)
        torch.nn.init.normal_(both.distance_bias.weight)
    x, source = torch.randn(1, 5, 12), torch.randn(1, 6, 10)
    places = positions_of(scheme, 12, 8, range(5), range(6), x.device)
    expected = torch.zeros(1, 5, 12)
    with torch.no_grad():
        for head in range(2):
            one = Attention(12, 10, 1, 8, scheme)
            rows = slice(head * 8, head * 8 + 8)
            one.q_proj.weight.copy_(both.q_proj.weight[rows])
            one.k_proj.weight.copy_(both.k_proj.weight[rows])
            one.v_proj.weight.copy_(both.v_proj.weight[rows])
            one.o_proj.weight.copy_(both.o_proj.weight[:, rows])
            if scheme == "transformer-xl":
                one.distance_proj.weight.copy_(both.distance_proj.weight[rows])
                one.content_bias.weight.copy_(both.content_bias.weight[head : head + 1])
                one.distance_bias.weight.copy_(both.distance_bias.weight[head : head + 1])
            expected += one(x, Reads(places, source))
        torch.testing.assert_close(both(x, Reads(places, source)), expected, rtol=1e-4, atol=1e-5)


def test_alibi_slopes_halve_from_head_to_head_on_every_tensor_parallel_rank():
    """With 8 heads the slopes are 1/2, 1/4 … 1/256, as in the ALiBi paper."""
    torch.manual_seed(2)
    attention = Attention(12, 12, 8, 4, "alibi")
    q = torch.zeros(1, 8, 3, 4)
    assert slopes(q, attention).flatten().tolist() == [2.0**-n for n in range(1, 9)]
    attention.first_head = 6
    assert slopes(q[:, :2], attention).flatten().tolist() == [1 / 128, 1 / 256]


@pytest.mark.parametrize("scheme", ["rope", "transformer-xl"])
def test_grouped_queries_equal_heads_with_repeated_keys_and_values(scheme):
    torch.manual_seed(2)
    grouped = Attention(12, 12, 4, 8, scheme, num_kv_heads=2, smeared_tokens=1)
    for taps in (grouped.key_taps, grouped.query_taps):
        torch.nn.init.normal_(taps.weight)
    full = Attention(12, 12, 4, 8, scheme, smeared_tokens=1)
    repeated = {"k_proj.weight": 8, "v_proj.weight": 8, "key_taps.weight": 1}  # rows per head
    weights = grouped.state_dict()
    for name, rows in repeated.items():
        weights[name] = weights[name].unflatten(0, (2, rows)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    x, places = torch.randn(2, 5, 12), positions_of(scheme, 12, 8, range(5), range(5), torch.device("cpu"))
    reads = Reads(places, causal=True)
    torch.testing.assert_close(grouped(x, reads), full(x, reads))


@pytest.mark.parametrize("causal", [True, False])
def test_grouped_queries_in_bfloat16_training_equal_float32(causal):
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 4, 6, 8, requires_grad=True), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    exact = dot_product_attention(q, k, v, None, causal)
    rounded = dot_product_attention(*(tensor.bfloat16() for tensor in (q, k, v)), None, causal)
    assert rounded.requires_grad
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05)


def test_taps_sum_previous_tokens_up_to_a_document_start_or_from_the_cache():
    x, taps = torch.tensor([1.0, 10, 100, 1000, 10_000]).view(1, 5, 1, 1), torch.tensor([[1.0, 2, 3]])
    assert weighted_sums(x, taps).flatten().tolist() == [1, 12, 123, 1230, 12_300]
    starts = torch.tensor([[True, False, True, False, False]])
    assert weighted_sums(x, taps, starts).flatten().tolist() == [1, 12, 100, 1200, 12_300]
    assert torch.equal(weighted_sums(x[:, 3:], taps, before=x[:, 1:3]), weighted_sums(x, taps)[:, 3:])


def test_initial_taps_of_first_heads_match_keys_to_queries():
    keys, queries = initial_taps(3, 4, of_queries=False), initial_taps(3, 3, of_queries=True)
    torch.testing.assert_close(keys.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(keys[0, 1:] / keys[0, 1], queries[0] / queries[0, 0])  # the key of the next token
    assert keys[0, 0] < 0.1
    assert keys[2].tolist() == [1, 0, 0, 0]
    assert queries[2].tolist() == [1, 0, 0]


@pytest.mark.parametrize("heads_of_bias", [0, 1, 6])
def test_single_queries_read_shared_keys_without_repeating_them(
    heads_of_bias: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = torch.randn(3, 6, 1, 8), torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8)
    bias = torch.randn(3, heads_of_bias, 1, 5) if heads_of_bias else None
    expected = dot_product_attention(q, *(x.repeat_interleave(3, dim=1) for x in (k, v)), bias, False)
    recorded, kernel = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *given, **rest: (recorded.append(given), kernel(*given, **rest))[1]
    )
    torch.testing.assert_close(dot_product_attention(q, k, v, bias, False), expected)
    assert [tuple(x.shape) for x in recorded[0]] == [(3, 2, 3, 8), (3, 2, 5, 8), (3, 2, 5, 8)]
