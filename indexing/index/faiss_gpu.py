"""Move Faiss indexes to all visible GPUs if `faiss-gpu` is installed; a line of the log names the device."""

import logging
from functools import cache, lru_cache
from typing import Any

from indexing.progress import status

log = logging.getLogger("retro")


@lru_cache(maxsize=1)
def num_gpus() -> int:
    """Number of GPUs that Faiss can use; 0 with `faiss-cpu`."""
    import faiss

    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


def on_gpus(index: Any, purpose: str) -> Any:
    """Move an index to all visible GPUs. Without a GPU, or if Faiss has no GPU form of it, return the index itself.

    Args:
        index: a Faiss index on the CPU.
        purpose: `k-means`, `adding` or `searching`, for the log line.
    """
    import faiss

    if not num_gpus():
        status("Faiss, %s: on the CPU", purpose)
        return index
    try:
        options = faiss.GpuMultipleClonerOptions()
        options.shard = index.ntotal > 0  # divide a filled index among the GPUs, copy an empty one to each
        moved = faiss.index_cpu_to_all_gpus(index, options)
    except RuntimeError as error:
        _say(f"Faiss, {purpose}: on the CPU, because this index has no GPU form ({_reason(error)})")
        return index
    _say(f"Faiss, {purpose}: on {num_gpus()} GPUs")
    return moved


def on_cpu(index: Any) -> Any:
    """Move an index back to the CPU, where it can be written."""
    import faiss

    return faiss.index_gpu_to_cpu(index) if num_gpus() else index


def _reason(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[-1]


@cache
def _say(line: str) -> None:
    log.info(line)
