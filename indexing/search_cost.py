"""What searching the neighbors of all chunks costs, by method: the model behind `neighbors.search = "auto"`.

Seconds of one core for one query, from what a query touches and at which rate. The rates are of one machine; only their
ratios decide, so another of the same kind decides alike. docs/indexing.md compares them with `benchmarks/indexing.py`.
"""

from dataclasses import dataclass
from typing import Literal

from indexing.faiss_files import ivf_of, read_index
from indexing.store.datastore import Split
from indexing.store.files import read_json
from indexing.store.remote import present

Method = Literal["index", "big-batch", "exact"]
Hardware = Literal["bfloat16", "float32", "cuda"]
"""What multiplies: a CPU in the faster of the two, or a GPU."""

# Operations a second of one CPU core, or of a GPU, in the products of exhaustive search, reduction to candidates included.
_PRODUCTS = {"bfloat16": 2.4e11, "float32": 5e10, "cuda": 1.5e14}
_COARSE = 7e10  # operations a second when a query is compared with all centroids
_SCAN = {"fast-scan": 1.1e-10, "codes": 1.2e-9}  # seconds for a byte of a scanned list
_QUERY = 3e-5  # seconds for the tables of a query
_RERANK = 1.4e-9  # seconds for a number of a re-ranked candidate


@dataclass(frozen=True)
class Searched:
    """What the cost depends on.

    Attributes:
        num_vectors: chunks in the index.
        dimension: d.
        nlist, nprobe: inverted lists, and how many of them are visited; both 1 for an index without.
        code_bytes: of a chunk in the index.
        fast_scan: whether lists are scanned with tables in registers.
        candidates: re-ranked for each query.
    """

    num_vectors: int
    dimension: int
    nlist: int
    nprobe: int
    code_bytes: float
    fast_scan: bool
    candidates: int


def describe(train: Split, candidates: int) -> Searched:
    """What searching the index over the chunks of `train` depends on; read from its trained form, which is empty."""
    import faiss

    folder = train.folder / "index"
    index = read_index(folder / "trained" / "trained.faiss")
    ivf = ivf_of(index)
    dimension = train.embeddings.row_shape[0]
    if ivf is None:
        return Searched(train.num_chunks, dimension, 1, 1, 4 * dimension, False, candidates)
    fast_scan = (isinstance(ivf, faiss.IndexIVFPQ) and ivf.pq.nbits == 4) or isinstance(ivf, faiss.IndexIVFFastScan)
    nprobe = read_json(present(folder / "tuned" / "tuned.json"))["nprobe"]
    return Searched(train.num_chunks, dimension, ivf.nlist, nprobe, ivf.code_size, fast_scan, candidates)


def seconds_with_index(searched: Searched) -> float:
    """Of one query through the index, re-ranking included."""
    coarse = 2 * searched.nlist * searched.dimension / _COARSE
    scanned = searched.nprobe / searched.nlist * searched.num_vectors * searched.code_bytes
    scan = scanned * _SCAN["fast-scan" if searched.fast_scan else "codes"]
    return _QUERY + coarse + scan + searched.candidates * searched.dimension * _RERANK


def seconds_exact(searched: Searched, hardware: Hardware) -> float:
    """Of one query against all chunks."""
    products = 2 * searched.num_vectors * searched.dimension / _PRODUCTS[hardware]
    return products + searched.candidates * searched.dimension * _RERANK


def cheaper(searched: Searched, hardware: Hardware) -> Method:
    """`exact` where it costs no more than the index does, else `index`."""
    return "exact" if seconds_exact(searched, hardware) <= seconds_with_index(searched) else "index"
