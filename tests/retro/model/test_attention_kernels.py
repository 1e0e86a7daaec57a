"""Every attention of the model equals the math kernel in float32, outputs and gradients: the test of a GPU's kernels."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from retro.batch.masks import some_key
from retro.device import choose_placement
from retro.model.attention import Attention
from retro.model.kernels import Bounds, self_attention_mask
from retro.model.positions import positions_of
from retro.model.reads import Reads
from retro.model_settings import AttentionSettings, PositionScheme

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest relative distance by dtype: rounding adds up over projections, scores and sums."""
SIZES = {"cpu": (64, 2, 8, 16), "cuda": (2048, 4, 64, 64)}
"""Tokens, rows, tokens of a chunk and of a head, by device."""
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@dataclass(frozen=True)
class Case:
    """An attention as the model calls it.

    Attributes:
        scheme: of positions.
        num_rows: N.
        num_queries: Q.
        num_keys: S; 0 = self-attention.
        mask: `none`, `documents` (packed sequences: a mask or bounds, as in training), or `padding` (short neighbors; the
            mask has stride 0 along queries).
        kv_heads: G.
        window: of self-attention; 0 = none.
    """

    scheme: PositionScheme
    num_rows: int
    num_queries: int
    num_keys: int = 0
    mask: str = "none"
    kv_heads: int = 0
    window: int = 0


def cases(device: str) -> Iterator[Case]:
    """Every attention of the model, in each scheme of positions."""
    tokens, rows, m, _ = SIZES[device]
    schemes: tuple[PositionScheme, ...] = ("rope", "alibi", "transformer-xl")
    for scheme in schemes:
        yield Case(scheme, rows, tokens)
        yield Case(scheme, rows, tokens, mask="documents")
        yield Case(scheme, 8 * rows, 2 * m, mask="padding")  # encoder
        yield Case(scheme, 8 * rows, 4 * m, m)  # encoder, reads chunks
        yield Case(scheme, 8 * rows, m, 4 * m, mask="padding")  # cross-attention
        # cuDNN's gradients were NaN here (pytorch/pytorch#196678).
        yield Case(scheme, 8 * rows, m, 192, mask="padding")
    yield Case("rope", rows, tokens, kv_heads=2)
    yield Case("rope", rows, tokens, mask="documents", kv_heads=2)
    yield Case("alibi", rows, tokens, mask="documents", kv_heads=2)
    yield Case("rope", rows, tokens, mask="documents", window=tokens // 8)
    yield Case("rope", 8 * rows, m, 4 * m, mask="padding", kv_heads=2)
    yield Case("rope", 8 * rows, 1, tokens, mask="padding", kv_heads=2)  # decoding


@devices
@pytest.mark.parametrize("number", range(len(list(cases("cpu")))))
def test_every_attention_equals_the_math_kernel_in_float32(device: str, number: int) -> None:
    case, head_dim = list(cases(device))[number], SIZES[device][3]
    torch.manual_seed(0)
    heads, placement = 4, choose_placement(device, "auto" if device == "cuda" else "float32")
    width = heads * head_dim
    attention = Attention(width, width, heads, head_dim, case.scheme, num_kv_heads=case.kv_heads).to(device)
    torch.nn.init.normal_(attention.q_proj.weight, std=width**-0.5)
    inputs = [torch.randn(case.num_rows, case.num_queries, width, device=device)]
    if case.num_keys:
        inputs.append(torch.randn(case.num_rows, case.num_keys, width, device=device))
    upstream = torch.randn_like(inputs[0])
    reference = copy.deepcopy(attention)
    with sdpa_kernel(SDPBackend.MATH):
        expected = gradients(reference, case, inputs, upstream)
    with placement.autocast():
        found = gradients(attention, case, inputs, upstream)
    for name, value in expected.items():
        assert found[name].isfinite().all(), name
        distance = (found[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-30)
        assert distance < LIMITS[placement.dtype], name


def gradients(attention: Attention, case: Case, inputs: list[Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """Output of an attention, and gradients of inputs and parameters, by name, without those of unused biases."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    x, source = leaves[0], leaves[1] if case.num_keys else None
    num_keys = case.num_keys or case.num_queries
    last = num_keys if case.num_queries == 1 else case.num_queries  # decoding: the query follows all keys
    queries, keys = range(last - case.num_queries, last), range(num_keys)
    positions = positions_of(case.scheme, x.shape[-1], attention.head_dim, queries, keys, x.device)
    causal = not case.num_keys and case.mask != "padding"
    mask = mask_of(case, x, num_keys, attention.head_dim)
    y = attention(x, Reads(positions, source, mask, causal))
    y.backward(upstream.to(y.dtype))
    named = {"output": y.detach(), **{f"input {index}": leaf.grad for index, leaf in enumerate(leaves)}}
    named |= {name: parameter.grad for name, parameter in attention.named_parameters()}
    return {name: value for name, value in named.items() if value is not None}


def mask_of(case: Case, x: Tensor, num_keys: int, head_dim: int) -> Tensor | Bounds | None:
    if case.mask == "documents":
        chunk = max(1, case.num_queries // 16)
        documents = torch.arange(-(-case.num_queries // chunk), device=x.device).expand(case.num_rows, -1) // 3
        settings = AttentionSettings(positions=case.scheme, head_dim=head_dim, sliding_window=case.window)
        return self_attention_mask(x, documents, chunk, settings)
    if case.mask == "padding":
        lengths = torch.arange(case.num_rows, device=x.device) * num_keys // case.num_rows  # the first row has no key
        return some_key(torch.arange(num_keys, device=x.device) < lengths[:, None])[:, None, None]
    return None
