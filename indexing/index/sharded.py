"""Search the shards of an index as one: merged in memory if they fit, else group by group.

index/00000/vectors.faiss ┐
index/00001/vectors.faiss ┼─ groups that fit into memory ─► merged ─► in the form that searches fastest ─► candidates
…                         ┘
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from indexing.index.exact_search import IdRanges, in_ranges
from indexing.index.faiss_files import ivf_of, num_lists, read_index, read_shard, search_index, shares_quantizer
from indexing.index.faiss_gpu import on_gpus
from indexing.index.merged import is_merged, open_merged
from indexing.store.artifact import parse_manifest, reading, recorded, stored_json
from indexing.store.datastore import shard_name
from indexing.store.errors import DoesNotFit
from indexing.store.remote import fetch_manifest, is_away, present
from indexing.store.schemas import Rows

MEMORY = 4_000_000_000


class Tuned(TypedDict):
    """`tuned.json`."""

    nprobe: Annotated[int, Field(ge=1, lt=1 << 31)]
    recall_at_10: float
    curve: list[list[float]]
    queries: Rows


class Trained(TypedDict):
    """`index.json`."""

    key: str
    dimension: Annotated[int, Field(ge=1, lt=1 << 20)]
    trained_on: Rows


class _Settings(TypedDict):
    first_id: NotRequired[Rows]


class _Counts(TypedDict):
    vectors: Rows


class ShardedIndex:
    """All shards of an index, searched as one.

    Args:
        shards: Faiss indexes with disjoint ids, or groups of files that every search opens in turn.
        nprobe: inverted lists that a search visits in each, unless the search sets its own.
        folders: artifacts of the shards, to detect damage.
        trained: the trained index, whose quantizer the files share.
    """

    by_codes = True

    def __init__(
        self, shards: Sequence[Any], nprobe: int = 1, *, folders: Sequence[Path] = (), trained: Any = None
    ) -> None:
        self._shards, self.folders, self._trained = list(shards), folders, trained
        self.num_vectors = self.max_nprobe = 0
        for shard in self.indexes():
            self.num_vectors += int(shard.ntotal)
            self.max_nprobe = max(self.max_nprobe, num_lists(shard))
            del shard  # free a group before the next is read
        self.nprobe = min(nprobe, self.max_nprobe)

    @classmethod
    def open(
        cls, folder: Path, shards: Iterable[int], memory: int = MEMORY, *, only_fitting: bool = False
    ) -> "ShardedIndex":
        """Open the shards of `datastore/index` with the tuned `nprobe`.

        Args:
            folder: the datastore's `index`.
            shards: shard numbers.
            memory: bytes. If the shards need more, the merged index on disk (`--stage merge`) is searched. Without one,
                every search reads the shards group by group, which costs little for many queries at once.
            only_fitting: search only the first of the shards, as many as fit into memory.
        """
        folders = [folder / shard_name(shard) for shard in shards]
        tuned = folder / "tuned" / "tuned.json"
        is_tuned_away = is_away(tuned) and fetch_manifest(tuned.parent)
        nprobe = stored_json(tuned, Tuned)["nprobe"] if tuned.exists() or is_tuned_away else 1
        trained = read_index(folder / "trained" / "trained.faiss")
        groups = _groups(folders, memory, trained)[: 1 if only_fitting else None]
        if len(groups) > 1 and is_merged(folder / "merged", folders):
            return cls([open_merged(folder / "merged")], nprobe, folders=[folder / "merged"])
        files = [[present(shard / "vectors.faiss") for shard in group] for group in groups]
        opened = _opened(files[0], trained) if len(files) == 1 else files
        return cls(opened, nprobe, folders=folders, trained=trained)

    @cached_property
    def _stop(self) -> int:
        """One more than the largest id; only manifests tell it."""
        finished = [folder for folder in self.folders if fetch_manifest(folder)]
        stops = (
            recorded(folder, "settings", _Settings).get("first_id", 0) + recorded(folder, "counts", _Counts)["vectors"]
            for folder in finished
        )
        return max(stops, default=np.iinfo(np.int64).max)

    def indexes(self) -> Iterator[Any]:
        """Yield the Faiss indexes to search, with one group of shards in memory at a time."""
        for shard in self._shards:
            yield from _opened(shard, self._trained) if isinstance(shard, list) else [shard]

    def search(
        self, queries: np.ndarray, k: int, excluded: IdRanges | None = None, nprobe: int | None = None
    ) -> np.ndarray:
        """Find k candidates for each query over all shards. Threads may share an index.

        Args:
            queries: [n, d] float32.
            k: candidates per query.
            excluded: ids that are removed from the result, which may leave fewer than k.
            nprobe: inverted lists to visit, at most `max_nprobe`; None = the index's `nprobe`.

        Returns:
            ids [n, k] int64, -1 where there are fewer.
        """
        import faiss

        nprobe = self.nprobe if nprobe is None else min(nprobe, self.max_nprobe)
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        hits: list[tuple[np.ndarray, np.ndarray]] = []
        for shard in self.indexes():
            hits.append(search_index(shard, queries, k, nprobe))
            if len(hits) == 2:
                distances, ids = (np.stack(pair) for pair in zip(*hits, strict=True))
                hits = [faiss.merge_knn_results(distances, ids)]
            del shard
        nearest = hits[0][1]
        with reading(*self.folders):
            if nearest.max(initial=-1) >= self._stop:
                raise DoesNotFit(f"the index holds ids from {self._stop} on")
        return nearest if excluded is None else np.where(in_ranges(nearest, excluded), -1, nearest)


def _groups(shards: Sequence[Path], memory: int, trained: Any) -> list[list[Path]]:
    """Consecutive shards that fit into memory together, without the quantizer that they share."""
    ivf: Any = ivf_of(trained)
    row_bytes = ivf.code_size + 8 if shares_quantizer(trained) else None
    groups: list[list[Path]] = []
    filled = 0
    for shard in shards:
        added = _bytes_of(shard, row_bytes)
        if not groups or filled + added > memory:
            groups.append([])
            filled = 0
        groups[-1].append(shard)
        filled += added
    return groups


def _bytes_of(shard: Path, row_bytes: int | None) -> int:
    """Bytes of a shard: of its vectors, or of its file; from the manifest if there is one, so that nothing is fetched
    from a URL."""
    if not fetch_manifest(shard):
        return (shard / "vectors.faiss").stat().st_size
    if row_bytes:
        return recorded(shard, "counts", _Counts)["vectors"] * row_bytes
    return int(parse_manifest(shard)["files"].get("vectors.faiss", {"bytes": 0})["bytes"])


def _opened(files: list[Path], trained: Any) -> list[Any]:
    """Open some shards: merged into one if Faiss can, packed for fast scanning, and on GPUs if there are any.

    Faiss 1.15.1 corrupts memory when it merges fast-scan lists. So shards are stored with plain four-bit codes, which
    can be merged, and packed here. An index whose key asks for fast-scan lists stays divided into shards.
    """

    whole = read_shard(files[0], trained)
    if not _can_merge(whole):
        return [whole, *(read_shard(file, trained) for file in files[1:])]
    with reading(*files):
        for file in files[1:]:
            whole.merge_from(read_shard(file, trained), 0)
    if whole.ntotal == 0:  # an empty index would be replicated to GPUs; Faiss's replicas take no nprobe
        return [whole]
    return [on_gpus(_fast(whole), "searching")]


def _can_merge(index: Any) -> bool:
    import faiss

    ivf = ivf_of(index)
    if ivf is None:
        return isinstance(index, faiss.IndexIDMap2) and isinstance(faiss.downcast_index(index.index), faiss.IndexFlat)
    return type(ivf) in (faiss.IndexIVFFlat, faiss.IndexIVFPQ, faiss.IndexIVFScalarQuantizer)


def _fast(index: Any) -> Any:
    """Pack plain four-bit codes for fast scanning; return any other index unchanged."""
    import faiss

    if type(index) is not faiss.IndexIVFPQ or index.pq.nbits != 4:
        return index
    packed: Any = faiss.IndexIVFPQFastScan(index)
    index.reset()  # the packed index has its own copy of the lists
    packed.referenced_objects = [index]  # keeps the quantizer alive
    return packed
