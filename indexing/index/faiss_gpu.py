"""Faiss on all visible GPUs, where `faiss-gpu` is installed and there are any; on the CPU otherwise, which is said once."""

import logging
from functools import cache, lru_cache
from typing import Any

log = logging.getLogger("retro")


@lru_cache(maxsize=1)
def num_gpus() -> int:
    """GPUs that Faiss can use; 0 with `faiss-cpu`."""
    import faiss

    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


def on_gpus(index: Any, purpose: str) -> Any:
    """The index spread over all visible GPUs, or itself: without a GPU, or where Faiss has no GPU form of it.

    Args:
        index: a Faiss index on the CPU.
        purpose: of it, for the log line: `k-means`, `adding`, `searching`.
    """
    import faiss

    if not num_gpus():
        _say(f"Faiss, {purpose}: on the CPU")
        return index
    try:
        options = faiss.GpuMultipleClonerOptions()
        options.shard = index.ntotal > 0  # a filled index is divided among the GPUs, an empty one copied
        moved = faiss.index_cpu_to_all_gpus(index, options)
    except RuntimeError as error:
        _say(f"Faiss, {purpose}: on the CPU, as there is no GPU form of this index ({_reason(error)})")
        return index
    _say(f"Faiss, {purpose}: on {num_gpus()} GPUs")
    return moved


def on_cpu(index: Any) -> Any:
    """An index that may be on GPUs, back on the CPU, where it can be written."""
    import faiss

    return faiss.index_gpu_to_cpu(index) if num_gpus() else index


def _reason(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[-1]


@cache
def _say(line: str) -> None:
    log.info(line)
