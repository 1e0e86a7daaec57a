"""Flash attention over sequences of variable length as loops on the CPU, which has no such kernel.

`varlen_on_cpu` registers them under PyTorch's operations. So everything else of the path (bounds, layouts, autograd, compilation) is
the code that runs on a GPU.
"""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from retro.model import kernels
from retro.model.kernels import Bounds, fits_bounds


def scores_of(q: Tensor, k: Tensor, window: list[int], scale: float | None) -> Tensor:
    """Scores [H, Q, S] of one document: -inf for keys outside the window (left, right), which FlashAttention counts without the query."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhc,khc->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    back = torch.arange(len(q))[:, None] - torch.arange(len(k))
    left = math.inf if window[0] < 0 else window[0]
    return scores.masked_fill((back < -window[1]) | (back > left), -math.inf)


def each_document(ends: Tensor) -> list[slice]:
    assert ends.dtype == torch.int32
    return [slice(a, b) for a, b in pairwise(ends.tolist()) if b > a]


def forward(q, k, v, ends, ends_k, max_q, max_k, is_causal, scale, window, enable_gqa=False, *rest):
    assert is_causal == (window == [-1, 0])
    assert enable_gqa == (k.shape[1] < q.shape[1])
    assert enable_gqa <= kernels._VARLEN_SHARES_KEYS
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
    for at in each_document(ends):
        assert at.stop - at.start <= max_q
        scores = scores_of(q[at], k[at], window, scale)
        values = v[at].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[at] = torch.einsum("hqk,khc->qhc", scores.softmax(-1), values)
        lse[:, at] = scores.logsumexp(-1)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def backward(grad, q, k, v, out, lse, ends, ends_k, max_q, max_k, is_causal, state, scale, window):
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    shared = q.shape[1] // k.shape[1]
    for at in each_document(ends):
        weights = (scores_of(q[at], k[at], window, scale) - lse[:, at, None]).exp()
        keys, values = (x[at].repeat_interleave(shared, dim=1) for x in (k, v))
        by_weight = torch.einsum("qhc,khc->hqk", grad[at], values)
        by_score = weights * (by_weight - (grad[at] * out[at]).sum(-1).T[..., None]) * (scale or q.shape[-1] ** -0.5)
        dq[at] = torch.einsum("hqk,khc->qhc", by_score, keys)
        dk[at] = torch.einsum("hqk,qhc->khc", by_score, q[at]).unflatten(1, (-1, shared)).sum(2)
        dv[at] = torch.einsum("hqk,qhc->khc", weights, grad[at]).unflatten(1, (-1, shared)).sum(2)
    return dq, dk, dv


@pytest.fixture
def varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Bounds]:
    """Let CPUs take bounds, in float32 too. Returns the bounds that were made."""
    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
    made: list[Bounds] = []
    bounds = kernels.document_bounds
    monkeypatch.setattr(kernels, "_has_flash_for_bounds", lambda _: True)
    monkeypatch.setattr(kernels, "fits_bounds", lambda settings, _: fits_bounds(settings, torch.bfloat16))
    monkeypatch.setattr(kernels, "document_bounds", lambda *given: (made.append(bounds(*given)), made[-1])[1])
    return made
