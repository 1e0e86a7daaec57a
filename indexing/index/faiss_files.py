"""Read, write and inspect Faiss indexes."""

from pathlib import Path
from typing import Any

import numpy as np

from indexing.index.faiss_gpu import num_gpus
from indexing.machine import for_each
from indexing.store.artifact import reading
from indexing.store.first_use import first_use
from indexing.store.remote import present

_BLAS = 20  # queries from which Faiss multiplies matrices; it divides queries among threads before
_BLOCK = 64
"""Queries that a thread searches at a time. Without such blocks, distances would be rounded differently for another
number of threads, and so would be the last candidates."""


def write_index(path: Path, index: Any) -> None:
    """Write an index through a Python file: `faiss.write_index` itself reports success if the last block finds a full
    disk."""
    import faiss

    with open(path, "wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # type: ignore[attr-defined]


def write_shard(path: Path, index: Any) -> None:
    """Write a filled copy of the trained index, without the coarse quantizer if `read_shard` can take that of the
    trained index.

    The quantizer of 32,768 lists takes 42 MB, a shard of 312,000 vectors with four-bit codes 23 MB.
    """
    import faiss

    if not shares_quantizer(index):
        write_index(path, index)
        return
    ivf: Any = ivf_of(index)
    quantizer, empty = ivf.quantizer, faiss.IndexFlatL2(ivf.d)
    ivf.quantizer = empty
    try:
        write_index(path, index)
    finally:  # the index frees its quantizer
        ivf.quantizer = quantizer


def read_shard(path: Path, trained: Any) -> Any:
    """Read an index that `write_shard` has written, with the trained index's quantizer if it shares it.

    Raises:
        InputError: the file is missing or damaged.
    """
    index = read_index(path)
    ivf: Any = ivf_of(index)
    if ivf is not None and ivf.quantizer.ntotal == 0:
        whole: Any = ivf_of(trained)
        ivf.quantizer, ivf.own_fields = whole.quantizer, False
        index.referenced_objects = [trained]  # keeps the quantizer alive
    return index


def shares_quantizer(index: Any) -> bool:
    """True for inverted lists that are the same without the quantizer: `write_shard` leaves it out.

    Lists of other kinds may not be merged (Faiss 1.15.1), and 8-bit product quantizers compute tables from it when they
    are read.
    """
    import faiss

    ivf: Any = ivf_of(index)
    if type(ivf) is faiss.IndexIVFPQ:
        return ivf.pq.nbits == 4  # their codes are not those of residuals; see `build.train`
    return type(ivf) in (faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer)


def read_index(path: Path) -> Any:
    """Read an index; a file at a URL is fetched first.

    Raises:
        InputError: the file is missing or damaged.
    """
    import faiss

    path = first_use(present(path))
    with reading(path):
        return faiss.read_index(str(path))


def ivf_of(index: Any) -> Any | None:
    """The IVF part of an index, with its own type (`IndexIVFPQ`, …; Faiss returns `IndexIVF`), or None if it has
    none."""
    import faiss

    ivf = faiss.try_extract_index_ivf(index)
    return None if ivf is None else faiss.downcast_index(ivf)


def num_lists(index: Any) -> int:
    """Number of inverted lists of an index on the CPU, on a GPU or divided among several; 1 if it has none."""
    import faiss

    ivf = ivf_of(index)
    if ivf is not None:
        return int(ivf.nlist)
    real: Any = faiss.downcast_index(index)
    if isinstance(real, faiss.IndexShards):  # an index divided among GPUs
        return num_lists(real.at(0))  # type: ignore[attr-defined]
    if isinstance(real, (faiss.IndexPreTransform, faiss.IndexIDMap)):
        return num_lists(real.index)
    return int(getattr(real, "nlist", 1))


def search_index(index: Any, queries: np.ndarray, k: int, nprobe: int) -> tuple[np.ndarray, np.ndarray]:
    """Search an index without changing it, so that threads can share it.

    Args:
        index: a Faiss index on the CPU, on a GPU or divided among several.
        queries: [n, d] float32.
        k: candidates per query.
        nprobe: inverted lists to visit; ignored by an index without lists.

    Returns:
        distances [n, k] float32 and ids [n, k] int64, -1 where there are fewer than k.
    """
    import faiss

    params = faiss.SearchParametersIVF(nprobe=nprobe) if num_lists(index) > 1 else None  # type: ignore[call-arg]
    if len(queries) < _BLAS or num_gpus():
        return index.search(queries, k, params=params)
    distances, ids = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)

    def search(start: int) -> None:
        threads, block = faiss.omp_get_max_threads(), slice(start, start + _BLOCK)
        faiss.omp_set_num_threads(1)  # of this thread
        try:
            distances[block], ids[block] = index.search(queries[block], k, params=params)
        finally:
            faiss.omp_set_num_threads(threads)

    for_each(search, range(0, len(queries), _BLOCK))
    return distances, ids
