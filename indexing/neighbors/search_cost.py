"""Estimate the cost of each neighbor search: the model behind `neighbors.search = "auto"`.

The unit is seconds of one core for one query: what a query reads and computes, divided by measured rates. The rates are from
one machine. Only their ratios decide, so similar machines decide alike. docs/results/indexing-speed.md compares the estimates
with `benchmarks/speed/index_stages.py`.
"""

from dataclasses import dataclass
from typing import Literal

from indexing.index.faiss_files import ivf_of, read_index
from indexing.index.sharded import MEMORY
from indexing.neighbors.list_search import rows_at_a_time, waves
from indexing.neighbors.search import Method, NeighborSettings
from indexing.store.artifact import stored_json
from indexing.store.datastore import Split

Hardware = Literal["bfloat16", "float32", "cuda"]
"""What computes matrix products: a CPU in the faster of two precisions, or a GPU."""

# Operations per second of one CPU core or of a GPU in large products, and seconds to reduce one product to candidates.
_PRODUCTS = {"bfloat16": 4e11, "float32": 5.5e10, "cuda": 2e14}
_REDUCED = {"bfloat16": 7e-10, "float32": 7e-10, "cuda": 1e-12}
_COARSE = 7e10  # operations per second for comparing a query with all centroids
_SCAN = {"fast-scan": 1.1e-10, "codes": 1.2e-9}  # seconds per byte of a scanned list
_QUERY = 3e-5  # seconds per query for its distance tables
_RERANK = 1.2e-9  # seconds per component of a re-ranked candidate
_LISTED = {"bfloat16": 2e11, "float32": 5e10, "cuda": 5e13}  # operations per second in products with lists
_LIST = 5.5e-5  # seconds per list and block of queries, even for few queries
_VISIT = 4e-7  # seconds per query for each list after the first wave
_ENTRY = {"bfloat16": 1.2e-7, "float32": 1.2e-7, "cuda": 5e-9}  # seconds per query for 40 chunks of a list
_CHOICE = {"bfloat16": 2.2e-5, "float32": 2.2e-5, "cuda": 1e-6}  # seconds per query for choosing lists and candidates
_READ = 5e8  # bytes per second of one core, if embeddings exceed memory and each block of queries reads them again
_BLOCK = 65_536  # queries per block
_GRAPH = 2048  # centroids compared with a query in a graph search


@dataclass(frozen=True)
class SearchSize:
    """The quantities that determine the cost of a search.

    Attributes:
        num_vectors: chunks in the index.
        dimension: d.
        nlist: inverted lists; 1 for an index without lists.
        nprobe: lists that a search by codes visits; 1 for an index without lists.
        centroids: centroids compared with a query to choose lists by codes: all, or those on the way through a graph.
        code_bytes: bytes of a chunk in the index.
        fast_scan: whether lists are scanned with tables in registers.
        list_nprobe: lists that a search by embeddings visits.
        candidates: candidates of the index that are re-ranked for each query.
        precise_candidates: the same for a search by embeddings.
    """

    num_vectors: int
    dimension: int
    nlist: int
    nprobe: int
    centroids: int
    code_bytes: float
    fast_scan: bool
    list_nprobe: int
    candidates: int
    precise_candidates: int


def describe(train: Split, settings: NeighborSettings) -> SearchSize:
    """Describe the index over the chunks of `train`, read from its empty trained form."""
    import faiss

    folder = train.folder / "index"
    index = read_index(folder / "trained" / "trained.faiss")
    ivf = ivf_of(index)
    dimension = train.embeddings.row_shape[0]
    candidates = (settings.candidates, settings.precise_candidates)
    if ivf is None:
        return SearchSize(train.num_chunks, dimension, 1, 1, 1, 4 * dimension, False, 1, *candidates)
    fast_scan = (isinstance(ivf, faiss.IndexIVFPQ) and ivf.pq.nbits == 4) or isinstance(ivf, faiss.IndexIVFFastScan)
    tuned = stored_json(folder / "tuned" / "tuned.json")
    return SearchSize(
        num_vectors=train.num_chunks,
        dimension=dimension,
        nlist=ivf.nlist,
        nprobe=tuned["nprobe"],
        centroids=compared_centroids(ivf.nlist, isinstance(faiss.downcast_index(ivf.quantizer), faiss.IndexHNSW)),
        code_bytes=ivf.code_size,
        fast_scan=fast_scan,
        list_nprobe=tuned["lists"]["nprobe"],
        candidates=settings.candidates,
        precise_candidates=settings.precise_candidates,
    )


def compared_centroids(nlist: int, graph: bool) -> int:
    """Centroids compared with a query, in an index with `nlist` lists whose centroids form a graph or not."""
    return min(nlist, _GRAPH) if graph else nlist


def seconds_with_index(searched: SearchSize) -> float:
    """Seconds for one query by the index's codes, including re-ranking."""
    coarse = 2 * searched.centroids * searched.dimension / _COARSE
    scanned = searched.nprobe / searched.nlist * searched.num_vectors * searched.code_bytes
    scan = scanned * _SCAN["fast-scan" if searched.fast_scan else "codes"]
    reading = _reading(searched.num_vectors * searched.code_bytes)
    return _QUERY + coarse + scan + reading + searched.candidates * searched.dimension * _RERANK


def seconds_exact(searched: SearchSize, hardware: Hardware) -> float:
    """Seconds for one query against all chunks."""
    products = searched.num_vectors * (2 * searched.dimension / _PRODUCTS[hardware] + _REDUCED[hardware])
    reading = _reading(2 * searched.num_vectors * searched.dimension)
    return products + reading + searched.precise_candidates * searched.dimension * _RERANK


def seconds_by_lists(searched: SearchSize, hardware: Hardware) -> float:
    """Seconds for one query against the chunks of the lists it visits."""
    centroids = 2 * searched.nlist * searched.dimension / _PRODUCTS[hardware]
    compared = searched.list_nprobe / searched.nlist * searched.num_vectors
    products = 2 * compared * searched.dimension / _LISTED[hardware]
    kind = "cuda" if hardware == "cuda" else "cpu"
    nearest = waves(searched.list_nprobe, kind)[0]
    first = nearest / searched.nlist * searched.num_vectors
    entries = max(nearest, first / 40)
    together = rows_at_a_time(max(1.0, first), entries, kind)
    visits = searched.nlist / together * _LIST + entries * _ENTRY[hardware] + _CHOICE[hardware]
    visits += (searched.list_nprobe - nearest) * _VISIT
    reading = _reading(2 * searched.num_vectors * searched.dimension)
    return centroids + products + visits + reading + searched.precise_candidates * searched.dimension * _RERANK


def _reading(size: float) -> float:
    """Seconds for one query to read `size` bytes of embeddings, shared among the queries of a block."""
    return size / _READ / _BLOCK if size > MEMORY else 0.0


def cheapest(searched: SearchSize, hardware: Hardware) -> Method:
    """The cheapest method; at equal cost `exact` before `lists` before `index`."""
    seconds: dict[Method, float] = {"exact": seconds_exact(searched, hardware)}
    if searched.nlist > 1:
        seconds["lists"] = seconds_by_lists(searched, hardware)
    seconds["index"] = seconds_with_index(searched)
    return min(seconds, key=lambda method: seconds[method])
