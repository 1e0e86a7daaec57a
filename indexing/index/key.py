"""Choose the Faiss factory string of an index from the number of vectors, their dimension and a memory budget.

autofaiss is asked where it is installed. It requires NumPy 1, so it is a dependency up to Python 3.11 only; elsewhere
`proposal` gives the same key.
"""

import importlib.util
import math
import re

from indexing.index.build import IndexSettings
from indexing.store.errors import InputError

# With fewer lists, a flat coarse quantizer is faster to build than a graph, exact, and as fast to search.
_HNSW_LISTS = 16_384
_UNITS = {unit: 1024**power for power, unit in enumerate(["B", "KB", "MB", "GB", "TB"])}


def choose_key(num_vectors: int, dimension: int, settings: IndexSettings) -> str:
    """Choose the Faiss factory string for this many vectors.

    autofaiss's rules give the number of inverted lists and the product quantizer for the memory budget.

    Raises:
        InputError: no index fits into `index.memory`, or the installed autofaiss does not import.
    """
    if settings.factory:
        return settings.factory
    if num_vectors < max(settings.flat_below, 1):
        return "Flat"
    memory = settings.memory.replace(" ", "")  # autofaiss takes no blank before the unit
    installed = importlib.util.find_spec("autofaiss") is not None
    key = (autofaiss_proposal if installed else proposal)(num_vectors, dimension, memory)
    if key is None:
        raise InputError(
            f"index.memory = {settings.memory}: no index of {num_vectors:,} × {dimension} fits. "
            "Raise it, or name a smaller index.factory yourself."
        )
    # At most 4·√N lists, as Faiss advises: autofaiss proposes 65,536 for ten million vectors.
    nlist = min(num_lists(key), 2 ** math.ceil(math.log2(4 * math.sqrt(num_vectors))))
    quantizer = f"IVF{nlist}_HNSW32" if nlist >= _HNSW_LISTS else f"IVF{nlist}"
    if settings.codes == "pq":
        return re.sub(r"IVF\d+(_HNSW\d+)?", quantizer, key)
    return f"{quantizer},PQ{largest_divisor(dimension, dimension // 2)}x4"


def num_lists(key: str) -> int:
    """Inverted lists of a Faiss factory string; 1 for an index without lists."""
    match = re.search(r"IVF(\d+)", key)
    return int(match[1]) if match else 1


def autofaiss_proposal(num_vectors: int, dimension: int, memory: str) -> str | None:
    """autofaiss's first proposal for a quantized inverted file, None if none fits into `memory` (such as "500MB")."""
    try:
        from autofaiss.external.optimize import get_optimal_index_keys_v2
    except Exception as error:  # of its own dependencies: pandas raises ValueError if it was built for another NumPy
        raise InputError(
            f"autofaiss is installed and does not import ({' '.join(str(error).split())[:200]}). Repair it, or remove it "
            "with `pip uninstall autofaiss`: the same keys are chosen without it."
        ) from error
    keys = get_optimal_index_keys_v2(
        num_vectors,
        dimension,
        memory,
        flat_threshold=0,
        quantization_threshold=0,
        ivf_flat_threshold=0,
        should_be_memory_mappable=True,
    )
    return keys[0] if keys else None


def proposal(num_vectors: int, dimension: int, memory: str) -> str | None:
    """What `autofaiss_proposal` gives, by the rules of autofaiss 2.18 (`external/optimize.py`, Apache 2.0)."""
    if num_vectors < 1_000_000:
        nlist = 2 ** round(math.log2(4 * math.sqrt(num_vectors)))
    else:
        nlist = 16_384 if num_vectors < 10_000_000 else 65_536 if num_vectors < 300_000_000 else 131_072
    size, unit = re.findall(r"([\d.]+)(\w+)", memory)[0]
    compression = 4.0 * num_vectors * dimension / (float(size) * _UNITS[unit])
    for code_bytes in (256, 128, 64, 48, 32, 24, 16, 8, 4):
        if code_bytes < dimension and 4 * dimension / (code_bytes + 8) >= compression:  # 8: bytes of an id
            rotated = (min(dimension // code_bytes, 6) + 1) * code_bytes
            graph = "" if nlist < 1000 else "_HNSW32"
            return f"OPQ{code_bytes}_{rotated},IVF{nlist}{graph},PQ{code_bytes}x8"
    return None


def largest_divisor(value: int, at_most: int) -> int:
    """The largest divisor of `value` that is at most `at_most`."""
    return next(divisor for divisor in range(max(at_most, 1), 0, -1) if value % divisor == 0)
