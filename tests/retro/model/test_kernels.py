"""Kernels of GPUs compute what masks and repeated keys compute, and are chosen where they can."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from retro.batch.masks import document_mask, some_key
from retro.device import choose_placement
from retro.model import kernels
from retro.model.kernels import Bounds, document_bounds, dot_product_attention, self_attention_mask
from retro.model_settings import AttentionSettings
from tests.retro.fake_cuda import CUDA, fake_cuda
from tests.retro.small_model import SETTINGS, M, T, batch, build, loss_of
from tests.retro.varlen_loops import varlen_on_cpu as varlen_on_cpu  # a fixture

DOCUMENTS = torch.tensor([[3, 3, 4, 4], [5, 6, 6, 6], [7, 8, 9, 10], [1, 1, 1, 1]])


# --- packed documents ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [T, T - 1, T - M + 1])
def test_bounds_are_where_documents_begin_and_end(num_tokens: int) -> None:
    ends = document_bounds(DOCUMENTS, M, num_tokens).ends
    assert ends.dtype == torch.int32
    row = [[0, 2 * M], [0, M], [0, M, 2 * M, 3 * M], [0]]
    starts = [number * num_tokens + start for number, starts in enumerate(row) for start in starts]
    assert ends.tolist() == starts + [4 * num_tokens] * (DOCUMENTS.numel() + 1 - len(starts))


@pytest.mark.parametrize("window", [0, 1, 3, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("shares", [True, False])  # PyTorch 2.11 cannot share keys
def test_attention_within_bounds_equals_attention_with_a_mask(
    window: int, kv_heads: int, shares: bool, varlen_on_cpu: list[Bounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "_VARLEN_SHARES_KEYS", shares)
    inputs = [torch.randn(4, heads, T, 8, requires_grad=True) for heads in (4, kv_heads, kv_heads)]
    mask = document_mask(DOCUMENTS, M, T)
    if window:
        mask = mask & torch.ones(T, T, dtype=torch.bool).triu(1 - window)
    found = []
    for bias in (mask, document_bounds(DOCUMENTS, M, T, window)):
        y = dot_product_attention(*inputs, bias, True, 0.3)
        found.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    for by_mask, by_bounds in zip(*found, strict=True):
        torch.testing.assert_close(by_bounds, by_mask, rtol=1e-5, atol=1e-5)


MODELS: dict[str, dict[str, Any]] = {
    "rope": {},
    "learned": {"attention.positions": "learned", "attention.qk_norm": True, "init": "mup", "mup_base_width": 16},
    "grouped": {"attention.num_kv_heads": 1, "attention.smeared_tokens": 1},
    "window": {
        "attention.num_kv_heads": 1,
        "attention.sliding_window": 5,
        "num_layers": 2,
        "retrieval.cca_layers": (2,),
    },
    "copying": {"copy_head.context": True, "copy_head.neighbors": True},
}
RUNS = [(name, False) for name in MODELS] + [pytest.param("window", True, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "compiled"), RUNS)
def test_a_model_within_bounds_equals_one_with_masks(
    name: str, compiled: bool, varlen_on_cpu: list[Bounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = build(**MODELS[name]), []
    whole = model.hidden
    tokens, neighbors, lengths = batch()
    documents = DOCUMENTS[:2]
    for takes in (False, True):
        torch.compiler.reset()
        monkeypatch.setattr(
            kernels, "_has_flash_for_bounds", torch.compiler.assume_constant_result(lambda _, t=takes: t)
        )
        if compiled:
            monkeypatch.setattr(model, "hidden", torch.compile(whole, fullgraph=True, backend="aot_eager"))
        model.zero_grad()
        value = loss_of(model, tokens.roll(-1, 1), tokens, documents, neighbors, lengths)
        value.backward()
        found.append([value.detach(), *(parameter.grad for parameter in model.parameters())])
        assert bool(varlen_on_cpu) == takes
    for by_mask, by_bounds in zip(*found, strict=True):
        torch.testing.assert_close(by_bounds, by_mask, rtol=1e-5, atol=1e-5)


def test_a_window_needs_bounds_only_where_a_sequence_is_longer(varlen_on_cpu: list[Bounds]) -> None:
    settings = AttentionSettings(sliding_window=T)
    h = torch.zeros(2, T, 8)
    assert self_attention_mask(h, None, M, settings) is None
    longer = self_attention_mask(torch.zeros(2, T + 2, 8), None, M, settings)
    assert isinstance(longer, Bounds)
    assert longer.window == T
    assert longer.ends.tolist()[:3] == [0, T + 2, 2 * T + 4]


@pytest.mark.parametrize(
    ("changes", "precision", "takes"),
    [
        ({}, "bfloat16", True),
        ({}, "float16", True),
        ({}, "float32", False),
        ({"positions": "learned"}, "bfloat16", True),
        ({"positions": "alibi"}, "bfloat16", False),
        ({"positions": "transformer-xl"}, "bfloat16", False),
        ({"head_dim": 12}, "bfloat16", False),
        ({"head_dim": 512}, "bfloat16", False),
    ],
)
def test_a_gpu_takes_bounds_in_16_bits_without_a_bias(changes: dict[str, Any], precision: Any, takes: bool) -> None:
    settings = AttentionSettings(**changes)
    with fake_cuda():
        placement = choose_placement(str(CUDA), precision)
        h = torch.zeros(2, T, 8, device=CUDA)
        with placement.autocast():
            seen = self_attention_mask(h, DOCUMENTS[:2].to(CUDA), M, settings)
    assert isinstance(seen, Bounds) == takes


def test_a_cpu_takes_a_mask() -> None:
    with choose_placement("cpu", "bfloat16").autocast():
        seen = self_attention_mask(torch.zeros(2, T, 8), DOCUMENTS[:2], M, SETTINGS.attention)
    assert torch.equal(seen, document_mask(DOCUMENTS[:2], M, T))


# --- grouped queries -------------------------------------------------------------------------------------------------


def biases() -> dict[str, Tensor]:
    """Every bias of attention for 3 rows, 6 heads, 5 queries and 5 keys."""
    torch.manual_seed(1)
    lengths = torch.tensor([5, 2, 0])
    return {
        "padding": some_key(torch.arange(5) < lengths[:, None])[:, None, None],
        "each head's": torch.randn(1, 6, 5, 5),
        "each row's and head's": torch.randn(3, 6, 5, 5),
        "each query's": torch.ones(3, 1, 5, 5, dtype=torch.bool).tril(),
        "of all rows": torch.ones(5, 5, dtype=torch.bool).tril(),
    }


def attend_with(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> list[Tensor]:
    y = dot_product_attention(q, k, v, bias, False)
    return [y, *torch.autograd.grad(y.float().square().sum(), [q, k, v])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", biases())
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_shared_keys_equal_repeated_keys(name: str, kv_heads: int, dtype: torch.dtype) -> None:
    """By `_heads_as_queries`, which GPUs use, and as CPUs do."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, 5, 8).to(dtype).requires_grad_() for heads in (6, kv_heads, kv_heads))
    bias = biases()[name]
    bias = bias if bias.dtype == torch.bool else bias.to(dtype)

    def repeated() -> Tensor:
        return dot_product_attention(q, *(x.repeat_interleave(6 // kv_heads, dim=1) for x in (k, v)), bias, False)

    expected = [repeated(), *torch.autograd.grad(repeated().float().square().sum(), [q, k, v])]
    ways = [attend_with(q, k, v, bias)]
    if name not in ("each query's", "of all rows"):
        y = kernels._heads_as_queries(q, k, v, bias, None)
        ways.append([y, *torch.autograd.grad(y.float().square().sum(), [q, k, v])])
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    for way in ways:
        for one, other in zip(way, expected, strict=True):
            torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize(
    ("name", "num_groups", "num_queries"),
    [("padding", 2, 15), ("each head's", 2, 15), ("each row's and head's", 2, 15), ("each query's", 6, 5)],
)
def test_on_a_gpu_keys_are_repeated_only_for_a_mask_of_each_query(
    name: str, num_groups: int, num_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, kernel = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *given, **rest: (recorded.append(given), kernel(*given, **rest))[1]
    )
    with fake_cuda():
        q, k, v = (torch.randn(3, heads, 5, 8, device=CUDA) for heads in (6, 2, 2))
        y = dot_product_attention(q, k, v, biases()[name].to(CUDA), False)
        assert y.shape == q.shape
    (read,) = recorded
    assert [tuple(x.shape) for x in read[:2]] == [(3, num_groups, num_queries, 8), (3, num_groups, 5, 8)]


blocks = pytest.mark.parametrize("block", [32, 64, 0])


@blocks
@pytest.mark.parametrize("name", biases())
def test_attention_in_bfloat16_on_a_cpu_takes_every_bias(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "block_of_queries", lambda _: block)
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, 5, 8).bfloat16() for heads in (6, 2, 2))
    bias = biases()[name]
    narrow = bias if bias.dtype == torch.bool else bias.bfloat16()
    y = dot_product_attention(q, k, v, narrow, False)
    expected = dot_product_attention(q.float(), k.float(), v.float(), bias, False)
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.02)


# --- blocks of queries -----------------------------------------------------------------------------------------------


@blocks
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
def test_causal_attention_in_bfloat16_on_a_cpu_is_that_in_float32(
    num_tokens: int, masked: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the log of the sum. A log may be off by a rounding of scores and weights."""
    monkeypatch.setattr(kernels, "block_of_queries", lambda _: block)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, num_tokens, 8).bfloat16() for heads in (6, 2, 2))
    at = torch.arange(num_tokens)
    mask = ((at[:, None] // 50 == at // 50) & (at <= at[:, None]))[None, None] if masked else None
    y = dot_product_attention(q, k, v, mask, True)
    whole = (x.float() for x in (q, k, v))
    expected, log = kernels.dot_product_attention_with_lse(*whole, mask, True)
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.02)
    same, narrow_log = kernels.dot_product_attention_with_lse(q, k, v, mask, True)
    torch.testing.assert_close(same, y, rtol=0.02, atol=0.02)
    torch.testing.assert_close(narrow_log, log, rtol=0.01, atol=0.02)


@pytest.mark.parametrize(("fast", "expected"), [("blocks of 128", 128), ("fused", 0), ("blocks of 64", 64)])
def test_the_block_of_queries_follows_the_table_where_bfloat16_is_multiplied(
    fast: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "fastest", lambda question: fast)
    for has_bfloat16, found in ((True, expected), (False, 64)):
        monkeypatch.setattr(kernels, "onednn_has_bfloat16", lambda has=has_bfloat16: has)
        kernels._measured_block.cache_clear()
        assert kernels.block_of_queries(trains=False) == found
        assert kernels.block_of_queries(trains=True) == 64
    kernels._measured_block.cache_clear()


def test_every_way_of_attention_in_bfloat16_is_the_same_attention() -> None:
    expected, *others = (way() for way in kernels.BFLOAT16_ATTENTION.prepare().values())
    for other in others:
        torch.testing.assert_close(other, expected, rtol=0.02, atol=0.02)
