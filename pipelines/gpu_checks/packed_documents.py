"""Self-attention of packed documents in three ways: forward and backward time, memory, and distance from the mask's results.

    mask      scaled_dot_product_attention with the dense mask of `document_mask`, which training uses
    varlen    flash attention over documents of variable length: no mask, nothing is computed across documents
    flex      compiled FlexAttention with a block mask

The figures decide whether training should change on GPUs.
"""

import inspect
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipelines.gpu_checks.part import Finding, Job, Skipped, distance
from retro.model.masks import document_mask, document_starts

HEADS, KV_HEADS = 16, 4
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [B, H, T, C], keys and values [B, G, T, C] → [B, H, T, C]."""


def run(job: Job) -> list[Finding]:
    """Measure every way on the same batch."""
    batch_size, num_tokens, m, width = (2, 64, 8, 16) if job.tiny else (8, 2048, 64, 64)
    documents = (torch.arange(num_tokens // m, device=job.device) // 5).expand(batch_size, -1)
    torch.manual_seed(0)
    shapes = [(batch_size, heads, num_tokens, width) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, device=job.device, dtype=job.placement.dtype) for shape in shapes]
    expected, found = _results(by_mask(documents, m, num_tokens), inputs), []
    ways = {"mask": by_mask, "varlen": by_length, "flex": by_blocks}
    for name, make in ways.items():
        try:
            attend = make(documents, m, num_tokens)
        except Skipped as skipped:
            found.append(Finding(name, str(skipped)))
            continue
        learns = not (name == "flex" and job.device == "cpu")  # FlexAttention has no backward pass on a CPU
        work = partial(_results, attend, inputs, learns=learns)
        apart = max(distance(*pair) for pair in zip(work(), expected, strict=learns))
        seconds = statistics.median(job.seconds(work) for _ in range(5))
        value = f"{1000 * seconds:.2f} ms, {_peak(job, work)}distance {apart:.1e}"
        found.append(Finding(name, value, apart < 2e-2))
    return found


def _results(attend: Attend, inputs: list[Tensor], *, learns: bool = True) -> list[Tensor]:
    """Output and gradients of the inputs."""
    leaves = [each.detach().requires_grad_(learns) for each in inputs]
    y = attend(*leaves)
    if learns:
        y.backward(inputs[0])
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _peak(job: Job, work: Callable[[], object]) -> str:
    if job.device == "cpu":
        return ""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB, "


def by_mask(documents: Tensor, chunk_length: int, num_tokens: int) -> Attend:
    """As `dot_product_attention`: kernels with a mask need keys for every head."""
    mask = document_mask(documents, chunk_length, num_tokens)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, mask)

    return attend


def by_length(documents: Tensor, chunk_length: int, num_tokens: int) -> Attend:
    """Flash attention over documents of variable length.

    Raises:
        Skipped: there is no such kernel.
    """
    from torch.nn.attention.varlen import varlen_attn

    if documents.device.type == "cpu":
        raise Skipped("the kernel needs CUDA")
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        raise Skipped(f"torch {torch.__version__} has no varlen_attn for grouped queries")
    ends = document_ends(documents, chunk_length, num_tokens)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        of_rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # [B·T, heads, C]
        settings: Any = {"window_size": (-1, 0), "enable_gqa": True}
        y: Any = varlen_attn(of_rows[0], of_rows[1], of_rows[2], ends, ends, num_tokens, num_tokens, **settings)
        found: Tensor = y.unflatten(0, (len(q), -1)).transpose(1, 2)
        return found

    return attend


def document_ends(documents: Tensor, chunk_length: int, num_tokens: int) -> Tensor:
    """Bounds of the documents of all rows, one after another, int32 [B·U + 1], from 0 to B·T.

    The size does not depend on the number of documents, so the host reads nothing: bounds that are left over are B·T.
    """
    rows, chunks = (torch.arange(size, device=documents.device) for size in documents.shape)
    firsts = rows[:, None] * num_tokens + chunks * chunk_length  # [B, U]
    starts = document_starts(documents, chunk_length, num_tokens)[:, ::chunk_length]  # documents begin with chunks
    total = len(documents) * num_tokens
    ends = torch.where(starts, firsts, total).flatten().sort().values
    return F.pad(ends, (0, 1), value=total).int()


def by_blocks(documents: Tensor, chunk_length: int, num_tokens: int) -> Attend:
    """FlexAttention; compiled on CUDA, where it is slow otherwise."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    document = documents.repeat_interleave(chunk_length, dim=1)

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[b, query] == document[b, key])

    device = documents.device.type
    mask = create_block_mask(visible, len(documents), None, num_tokens, num_tokens, device=device)
    flex = flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: flex(q, k, v, block_mask=mask, enable_gqa=True)
