"""Self-attention of packed documents in two ways: forward and backward time, memory, and distance of the results.

mask      kernels with a mask, which training uses in 32 bits and with biased scores
bounds    flash attention over sequences of variable length, which training uses otherwise (`retro/model/kernels.py`)
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pipelines.gpu_checks.part import Finding, Job, distance
from retro.model.kernels import Bounds, dot_product_attention, self_attention_mask
from retro.model.masks import document_mask
from retro.model.settings import AttentionSettings

HEADS, KV_HEADS = 16, 4


def run(job: Job) -> list[Finding]:
    """Measure both ways on the same batch."""
    batch_size, num_tokens, m, width = (2, 64, 8, 16) if job.tiny else (8, 2048, 64, 64)
    documents = (torch.arange(num_tokens // m, device=job.device) // 5).expand(batch_size, -1)
    torch.manual_seed(0)
    shapes = [(batch_size, heads, num_tokens, width) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, device=job.device, dtype=job.placement.dtype) for shape in shapes]
    chosen = self_attention_mask(inputs[0].flatten(0, 1), documents, m, AttentionSettings(head_dim=width))
    by_mask, found = document_mask(documents, m, num_tokens), []
    expected = results(by_mask, inputs)
    for name, bias in (("mask", by_mask), ("bounds", chosen)):
        if name == "bounds" and not isinstance(bias, Bounds):
            found.append(Finding(name, f"not used: {job.device} in {job.placement.dtype} takes a mask"))
            continue
        work = partial(results, bias, inputs)
        apart = max(distance(*pair) for pair in zip(work(), expected, strict=True))
        seconds = statistics.median(job.seconds(work) for _ in range(5))
        value = f"{1000 * seconds:.2f} ms, {_peak(job, work)}distance {apart:.1e}"
        found.append(Finding(name, value, apart < 2e-2))
    return found


def results(bias: Tensor | Bounds | None, inputs: list[Tensor]) -> list[Tensor]:
    """Output, and gradients of queries, keys and values."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    y = dot_product_attention(leaves[0], leaves[1], leaves[2], bias, True)
    return [y.detach(), *torch.autograd.grad(y, leaves, inputs[0])]


def _peak(job: Job, work: Callable[[], object]) -> str:
    if job.device == "cpu":
        return ""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB, "
