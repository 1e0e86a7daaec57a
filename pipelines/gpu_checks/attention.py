"""Which kernel computes each attention of the model, and whether its outputs and gradients equal those of the math kernel.

attention in the training precision, kernels as chosen ─┬─ relative distance of outputs and gradients
the same attention in float32, math kernel ─────────────┘
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention.varlen  # defines torch.ops.torch_attn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from pipelines.gpu_checks.part import Finding, Job, distance
from retro.model.attention import Attention
from retro.model.kernels import Bounds, self_attention_mask
from retro.model.masks import some_key
from retro.model.positions import positions_of
from retro.model.settings import AttentionSettings, PositionScheme

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest accepted relative distance by dtype: rounding adds up over projections, scores and sums."""

SCHEMES: tuple[PositionScheme, ...] = ("rope", "alibi", "transformer-xl")


@dataclass(frozen=True)
class Case:
    """An attention as the model calls it.

    Attributes:
        name: for the report.
        scheme: of positions.
        num_rows: N.
        num_queries: Q.
        num_keys: S; 0 = self-attention.
        mask: `none`, `documents` (packed sequences: a mask or bounds, as in training), or `padding` (short neighbors; the mask
            has stride 0 along queries).
        kv_heads: G.
        window: of self-attention; 0 = none.
    """

    name: str
    scheme: PositionScheme
    num_rows: int
    num_queries: int
    num_keys: int = 0
    mask: str = "none"
    kv_heads: int = 0
    window: int = 0


def cases(tiny: bool) -> Iterator[Case]:
    """Every attention of the model, in each scheme of positions."""
    tokens, rows, m = (64, 2, 8) if tiny else (2048, 4, 64)
    for scheme in SCHEMES:
        yield Case(f"self, {scheme}", scheme, rows, tokens)
        yield Case(f"self, packed documents, {scheme}", scheme, rows, tokens, mask="documents")
        yield Case(f"encoder, {scheme}", scheme, 8 * rows, 2 * m, mask="padding")
        yield Case(f"encoder, reads chunks, {scheme}", scheme, 8 * rows, 4 * m, m)
        yield Case(f"cross-attention, {scheme}", scheme, 8 * rows, m, 4 * m, mask="padding")
        # cuDNN's gradients were NaN here (pytorch/pytorch#196678).
        yield Case(f"cross-attention, 192 keys, {scheme}", scheme, 8 * rows, m, 192, mask="padding")
    yield Case("self, grouped queries", "rope", rows, tokens, kv_heads=2)
    yield Case("self, grouped queries, packed documents", "rope", rows, tokens, mask="documents", kv_heads=2)
    yield Case("self, grouped queries, packed documents, ALiBi", "alibi", rows, tokens, mask="documents", kv_heads=2)
    yield Case("self, window, packed documents", "rope", rows, tokens, mask="documents", window=tokens // 8)
    yield Case("cross-attention, grouped queries", "rope", 8 * rows, m, 4 * m, mask="padding", kv_heads=2)
    yield Case("decoding, grouped queries", "rope", 8 * rows, 1, tokens, mask="padding", kv_heads=2)


class _Kernels(TorchFunctionMode):
    """Notes the kernel of every `scaled_dot_product_attention`, and attention within bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            self.names.add(SDPBackend(torch._fused_sdp_choice(*args, **(kwargs or {}))).name)
        elif function is torch.ops.torch_attn._varlen_attn:
            self.names.add("FLASH_ATTENTION by bounds")
        return function(*args, **(kwargs or {}))


def run(job: Job) -> list[Finding]:
    """Check every case."""
    found = []
    for case in cases(job.tiny):
        kernels, apart = compare(case, job)
        limit = LIMITS[job.placement.dtype]
        value = f"{', '.join(sorted(kernels)) or 'own products'}; " + ", ".join(
            f"{n} {d:.1e}" for n, d in apart.items()
        )
        found.append(Finding(case.name, value, max(apart.values()) <= limit))
    return found


def compare(case: Case, job: Job) -> tuple[set[str], dict[str, float]]:
    """Kernels of a case, and relative distances of its outputs and gradients from those of the math kernel in float32."""
    torch.manual_seed(0)
    heads, head_dim = 4, 16 if job.tiny else 64
    width, placement = heads * head_dim, job.placement
    attention = Attention(width, width, heads, head_dim, case.scheme, num_kv_heads=case.kv_heads).to(placement.device)
    torch.nn.init.normal_(attention.q_proj.weight, std=width**-0.5)
    inputs = [torch.randn(case.num_rows, case.num_queries, width, device=placement.device)]
    if case.num_keys:
        inputs.append(torch.randn(case.num_rows, case.num_keys, width, device=placement.device))
    upstream = torch.randn_like(inputs[0])
    reference = copy.deepcopy(attention)
    with sdpa_kernel(SDPBackend.MATH):
        expected = _gradients(reference, case, inputs, upstream)
    with _Kernels() as kernels, placement.autocast():
        found = _gradients(attention, case, inputs, upstream)
    apart = {name: distance(found[name], value) for name, value in expected.items()}
    return kernels.names, {"output": apart.pop("output"), "gradients": max(apart.values())}


def _gradients(attention: Attention, case: Case, inputs: list[Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """Output of an attention, and gradients of its inputs and parameters, by name; those of biases that nothing uses are left out."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    x, source = leaves[0], leaves[1] if case.num_keys else None
    num_keys = case.num_keys or case.num_queries
    last = num_keys if case.num_queries == 1 else case.num_queries  # decoding: the query follows all keys
    positions = positions_of(
        case.scheme,
        x.shape[-1],
        attention.head_dim,
        range(last - case.num_queries, last),
        range(num_keys),
        x.device,
    )
    causal = not case.num_keys and case.mask != "padding"
    y = attention(x, positions, source, _mask(case, x, num_keys, attention.head_dim), causal)
    y.backward(upstream.to(y.dtype))
    named = {"output": y.detach(), **{f"input {number}": leaf.grad for number, leaf in enumerate(leaves)}}
    named |= {name: parameter.grad for name, parameter in attention.named_parameters()}
    return {name: value for name, value in named.items() if value is not None}


def _mask(case: Case, x: Tensor, num_keys: int, head_dim: int) -> Tensor | Bounds | None:
    if case.mask == "documents":
        chunk = max(1, case.num_queries // 16)
        documents = torch.arange(-(-case.num_queries // chunk), device=x.device).expand(case.num_rows, -1) // 3
        settings = AttentionSettings(positions=case.scheme, head_dim=head_dim, sliding_window=case.window)
        return self_attention_mask(x, documents, chunk, settings)
    if case.mask == "padding":
        lengths = torch.arange(case.num_rows, device=x.device) * num_keys // case.num_rows  # the first row has no key
        return some_key(torch.arange(num_keys, device=x.device) < lengths[:, None])[:, None, None]
    return None
