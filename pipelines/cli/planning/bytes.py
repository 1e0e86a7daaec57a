"""Bytes of every artifact of a datastore, computed from the file formats, and memory of the build
(docs/reference/file-formats.md)."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from indexing.index.build import IndexSettings
from indexing.index.faiss_files import shares_quantizer
from indexing.index.key import choose_key, num_lists
from indexing.index.sharded import MEMORY
from indexing.neighbors.build import BLOCK_ROWS
from indexing.neighbors.index_search import COMPLETING_BYTES
from indexing.neighbors.settings import Method
from indexing.ngrams.search import search_bytes
from indexing.store.errors import InputError
from indexing.suffixes.order_build import RUN_BYTES

NUM_SPLITS = 3
_NPY_HEADER = 128
_INDEX_HEADER = 200  # of a `.faiss` file, approximately
_MANIFEST_BYTES = {
    "chunks": 1860,
    "embeddings": 630,
    "index": 430,
    "sparse": 2800,
    "ngrams": 600,
    "suffixes": 450,
    "votes": 620,
    "neighbors": 1360,
    "materialized": 1360,
}  # of a shard's artifact, approximately
_BLOCK = 32  # vectors of a fast-scan list are stored in blocks
_CANDIDATE_BYTES = 1500  # of a chunk whose neighbors are searched: 64 ids and keys, and a copy


@dataclass(frozen=True)
class Workload:
    """Size of a datastore and of its index.

    Attributes:
        text_bytes: UTF-8 bytes of all documents.
        documents: in all splits.
        tokens: in all splits, including those that begin and end a document.
        chunks: in all splits; all are embedded and have neighbors.
        train_chunks: those in the index.
        shards: of every stage.
        key: Faiss factory string of the index.
        trained_on: vectors that the index is trained on.
        tune_queries: queries that tune `nprobe`.
        search: method that finds the neighbors of all chunks.
    """

    text_bytes: float
    documents: float
    tokens: float
    chunks: float
    train_chunks: float
    shards: int
    key: str
    trained_on: int
    tune_queries: int
    search: Method = "index"

    @property
    def lists(self) -> int:
        """Number of inverted lists; 1 for an index without lists."""
        return num_lists(self.key)


@dataclass(frozen=True)
class Layout:
    """Sizes that determine the bytes of a chunk.

    Attributes:
        chunk_length: m.
        token_bytes: 2 or 4.
        dimension: d of the embeddings.
        stored: neighbors stored for each chunk.
        materialized: stored neighbors with tokens.
        document_bytes: of a document's row in `documents.parquet`.
        measured: bytes of a chunk of `train` in artifacts whose bytes depend on the text.
    """

    chunk_length: int
    token_bytes: int
    dimension: int
    stored: int
    materialized: int
    document_bytes: float
    measured: Mapping[str, float]


# --- index -----------------------------------------------------------------------------------------------------------


def with_lists_for(key: str, chunks: float) -> str:
    """The same kind of index for fewer chunks: 4·√chunks lists, rounded down to a power of two, and at most those of
    `key`."""
    wanted = 2 ** math.floor(math.log2(4 * math.sqrt(max(1.0, chunks))))
    return re.sub(r"IVF\d+", f"IVF{min(wanted, num_lists(key))}", key)


def index_for(chunks: float, dimension: int, settings: IndexSettings) -> IndexSettings:
    """The settings with the index that `retro index` would choose as `factory`, and `memory` raised until one fits."""
    for power in range(60):
        try:
            return replace(settings, factory=choose_key(int(chunks), dimension, settings))
        except InputError:
            settings = replace(settings, memory=f"{2**power}GB")
    raise InputError(f"index: no index of {chunks:,.0f} × {dimension} exists for any index.memory.")


def index_bytes(key: str, dimension: int) -> tuple[int, int, int]:
    """Bytes of a stored vector without its id, of the trained index, and of a shard without vectors.

    Raises:
        InputError: Faiss does not understand the key.
    """
    import faiss

    index: Any
    try:
        index = faiss.index_factory(dimension, key, faiss.METRIC_L2)
    except RuntimeError as error:
        raise InputError(f"index.factory = {key!r} with dimension {dimension}: {error}") from error
    empty, quantizer, inner = _INDEX_HEADER, 0, index  # `index` owns the parts
    if isinstance(index, faiss.IndexPreTransform):
        chain: Any = index.chain
        transforms = [faiss.downcast_VectorTransform(chain.at(position)) for position in range(chain.size())]
        empty += sum(4 * transform.d_in * transform.d_out for transform in transforms)
        inner = faiss.downcast_index(index.index)
    if num_lists(key) > 1:
        empty += (16 if "fs" in key else 8) * inner.nlist
        quantizer = 4 * inner.d * inner.nlist
        if graph := re.search(
            r"HNSW(\d+)", key
        ):  # 2 M neighbors at the bottom, M in each level above, of 1/M of the nodes
            quantizer += inner.nlist * (4 * 2 * int(graph[1]) + 16)
    if hasattr(inner, "pq"):
        empty += 4 * inner.pq.d * inner.pq.ksub
    code = int(getattr(inner, "code_size", 0) or inner.sa_code_size())
    return code, empty + quantizer, empty if shares_quantizer(index) else empty + quantizer


# --- bytes -----------------------------------------------------------------------------------------------------------


def artifact_bytes(size: Workload, layout: Layout) -> dict[str, float]:
    """Bytes of the folders of a datastore."""
    code, trained, empty = index_bytes(size.key, layout.dimension)
    files = size.shards * NUM_SPLITS
    documents = (8 + layout.document_bytes) * size.documents + 8 * files
    # A list's last block of fast-scan codes is half empty on average.
    padding = size.shards * size.lists * (_BLOCK - 1) / 2 * code if "fs" in size.key else 0.0
    arrays = {
        "chunks": (layout.chunk_length * layout.token_bytes + 2) * size.chunks + documents + 3 * files * _NPY_HEADER,
        "embeddings": 2.0 * layout.dimension * size.chunks + files * _NPY_HEADER,
        "index": (code + 8) * size.train_chunks + padding + size.shards * empty + trained,
        **{name: of_chunk * size.train_chunks for name, of_chunk in layout.measured.items()},
        "neighbors": 8.0 * layout.stored * size.chunks + files * _NPY_HEADER,
    }
    if layout.materialized:
        neighbor = 2 * layout.chunk_length * layout.token_bytes + 4  # with its continuation, and its length
        arrays["materialized"] = layout.materialized * neighbor * size.chunks + 2 * files * _NPY_HEADER
    return {name: value + size.shards * _MANIFEST_BYTES[name] for name, value in arrays.items()}


def memory_bytes(size: Workload, layout: Layout, base: float) -> dict[str, float]:
    """Resident memory of one worker in each step: the process with all libraries, plus what grows with the datastore.

    Memory-mapped embeddings are not counted. Reranking reads them at random, so they should fit into the page cache. An
    index larger than `indexing.index.sharded.MEMORY` is searched in groups of shards; a group is in memory as stored
    and in its fastest form.
    """
    code, trained, empty = index_bytes(size.key, layout.dimension)
    whole = (code + 8) * size.train_chunks + size.shards * empty
    shard = whole / size.shards
    group = max(shard, min(whole, MEMORY))
    searched = max(shard, min(whole, COMPLETING_BYTES)) if size.search == "ngrams" else group
    sample = size.trained_on * layout.dimension
    return {
        "scan": base + 16 * size.documents,  # hashes and lines of ids, in the process that starts the build
        "train-index": base + (2 + 4 + 4) * sample + trained,
        "add": base + shard + trained,
        "tune nprobe": base + 2 * group,
        "neighbors": base + _searched_bytes(size, layout, searched),
        "suffixes, runs": base + RUN_BYTES * size.train_chunks * layout.chunk_length / size.shards,
    }


def _searched_bytes(size: Workload, layout: Layout, group: float) -> float:
    if size.search == "exact":
        return 0.0
    if size.search == "ngrams":  # and the index, for chunks that share too little
        block = min(size.train_chunks / size.shards, BLOCK_ROWS)
        return search_bytes(block, layout.chunk_length) + block * _CANDIDATE_BYTES + 2 * group
    return 2 * group
