"""What searching the neighbors of all chunks costs, by method: the model behind `neighbors.search = "auto"`.

Seconds of one core for one query, from what a query touches and at which rate. The rates are of one machine; only their
ratios decide, so another of the same kind decides alike. docs/results/indexing-speed.md compares them with `benchmarks/speed/index_stages.py`.
"""

from dataclasses import dataclass
from typing import Literal

from indexing.index.faiss_files import ivf_of, read_index
from indexing.index.sharded import MEMORY
from indexing.neighbors.list_search import rows_at_a_time
from indexing.neighbors.search import NeighborSettings
from indexing.store.datastore import Split
from indexing.store.files import read_json
from indexing.store.remote import present

Method = Literal["index", "big-batch", "exact", "lists"]
Hardware = Literal["bfloat16", "float32", "cuda"]
"""What multiplies: a CPU in the faster of the two, or a GPU."""

# Operations a second of one CPU core, or of a GPU, in large products; and seconds to reduce one product towards the candidates.
_PRODUCTS = {"bfloat16": 4e11, "float32": 5.5e10, "cuda": 2e14}
_REDUCED = {"bfloat16": 7e-10, "float32": 7e-10, "cuda": 1e-12}
_COARSE = 7e10  # operations a second when a query is compared with all centroids
_SCAN = {"fast-scan": 1.1e-10, "codes": 1.2e-9}  # seconds for a byte of a scanned list
_QUERY = 3e-5  # seconds for the tables of a query
_RERANK = 1.2e-9  # seconds for a number of a re-ranked candidate
_LISTED = {"bfloat16": 2e11, "float32": 5e10, "cuda": 5e13}  # operations a second in products with lists
_LIST = 5.5e-5  # seconds for a list that is multiplied with the queries of a block, however few
_ENTRY = {"bfloat16": 1.2e-7, "float32": 1.2e-7, "cuda": 5e-9}  # seconds of a query for 40 chunks of a list
_CHOICE = {"bfloat16": 2.2e-5, "float32": 2.2e-5, "cuda": 1e-6}  # seconds of a query for choosing lists and candidates
_READ = 5e8  # bytes a second of one core when more than memory holds is read again for each block of queries
_BLOCK = 65_536  # of queries
_GRAPH = 2048  # centroids that a query is compared with on its way down a graph of them


@dataclass(frozen=True)
class SearchSize:
    """What the cost depends on.

    Attributes:
        num_vectors: chunks in the index.
        dimension: d.
        nlist, nprobe: inverted lists, and how many of them are visited; both 1 for an index without.
        centroids: compared with a query to find the lists, when they are searched by codes: all, or those on the way down a graph.
        code_bytes: of a chunk in the index.
        fast_scan: whether lists are scanned with tables in registers.
        list_nprobe: lists visited when they are searched by the embeddings.
        candidates: of the index, re-ranked for each query.
        precise_candidates: those of a search by the embeddings themselves.
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
    """What searching the index over the chunks of `train` depends on; read from its trained form, which is empty."""
    import faiss

    folder = train.folder / "index"
    index = read_index(folder / "trained" / "trained.faiss")
    ivf = ivf_of(index)
    dimension = train.embeddings.row_shape[0]
    candidates = (settings.candidates, settings.precise_candidates)
    if ivf is None:
        return SearchSize(train.num_chunks, dimension, 1, 1, 1, 4 * dimension, False, 1, *candidates)
    fast_scan = (isinstance(ivf, faiss.IndexIVFPQ) and ivf.pq.nbits == 4) or isinstance(ivf, faiss.IndexIVFFastScan)
    tuned = read_json(present(folder / "tuned" / "tuned.json"))
    return SearchSize(
        num_vectors=train.num_chunks,
        dimension=dimension,
        nlist=ivf.nlist,
        nprobe=tuned["nprobe"],
        centroids=compared_centroids(ivf.nlist, isinstance(faiss.downcast_index(ivf.quantizer), faiss.IndexHNSW)),
        code_bytes=ivf.code_size,
        fast_scan=fast_scan,
        list_nprobe=tuned.get("lists", {"nprobe": ivf.nlist})["nprobe"],  # of before there was such a search: all
        candidates=settings.candidates,
        precise_candidates=settings.precise_candidates,
    )


def compared_centroids(nlist: int, graph: bool) -> int:
    """Of an index with so many lists, whose centroids form a graph or not."""
    return min(nlist, _GRAPH) if graph else nlist


def seconds_with_index(searched: SearchSize) -> float:
    """Of one query through the index, re-ranking included."""
    coarse = 2 * searched.centroids * searched.dimension / _COARSE
    scanned = searched.nprobe / searched.nlist * searched.num_vectors * searched.code_bytes
    scan = scanned * _SCAN["fast-scan" if searched.fast_scan else "codes"]
    reading = _reading(searched.num_vectors * searched.code_bytes)
    return _QUERY + coarse + scan + reading + searched.candidates * searched.dimension * _RERANK


def seconds_exact(searched: SearchSize, hardware: Hardware) -> float:
    """Of one query against all chunks."""
    products = searched.num_vectors * (2 * searched.dimension / _PRODUCTS[hardware] + _REDUCED[hardware])
    reading = _reading(2 * searched.num_vectors * searched.dimension)
    return products + reading + searched.precise_candidates * searched.dimension * _RERANK


def seconds_by_lists(searched: SearchSize, hardware: Hardware) -> float:
    """Of one query against the chunks of the lists that it visits."""
    centroids = 2 * searched.nlist * searched.dimension / _PRODUCTS[hardware]
    compared = searched.list_nprobe / searched.nlist * searched.num_vectors
    products = 2 * compared * searched.dimension / _LISTED[hardware]
    entries = max(searched.list_nprobe, compared / 40)
    together = rows_at_a_time(max(1.0, compared), entries, "cuda" if hardware == "cuda" else "cpu")
    visits = searched.nlist / together * _LIST + entries * _ENTRY[hardware] + _CHOICE[hardware]
    reading = _reading(2 * searched.num_vectors * searched.dimension)
    return centroids + products + visits + reading + searched.precise_candidates * searched.dimension * _RERANK


def _reading(size: float) -> float:
    """Of a query, for its share in reading so many bytes again and again."""
    return size / _READ / _BLOCK if size > MEMORY else 0.0


def cheapest(searched: SearchSize, hardware: Hardware) -> Method:
    """`exact`, `lists` or `index`, in this order where they cost the same."""
    seconds: dict[Method, float] = {"exact": seconds_exact(searched, hardware)}
    if searched.nlist > 1:
        seconds["lists"] = seconds_by_lists(searched, hardware)
    seconds["index"] = seconds_with_index(searched)
    return min(seconds, key=lambda method: seconds[method])
