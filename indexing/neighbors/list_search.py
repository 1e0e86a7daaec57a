"""Search an inverted file for many queries at once by matrix products, list by list.

    queries → the nprobe nearest lists of each → the chunks of a list × all queries that visit it → maxima of groups
            → for each query the best groups of all its lists → candidates

The lists are those of the Faiss index; the chunks are the stored embeddings. A search query by query reads each list once per
query and compares vector with vector. This search reads each list once for thousands of queries and multiplies it with all.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from indexing import machine
from indexing.index.exact_search import IdRanges
from indexing.index.faiss_files import ivf_of, lists_of, read_index, transformed
from indexing.index.sharded import MEMORY
from indexing.machine import one_thread_each
from indexing.neighbors.list_products import CHOSEN, ENTRY, FAN, TABLE, LoadedLists, best_of, greatest, rounded
from indexing.neighbors.list_pruning import improve
from indexing.store.artifact import reading, stored_json
from indexing.store.datastore import shard_name
from indexing.store.sharded_array import ShardedArray

if TYPE_CHECKING:
    from torch import Tensor

_PRODUCTS = {"cpu": 2**26, "cuda": 2**30}  # products per thread at a time
_ROWS = 16_384  # queries at a time, at most
_ENTRIES = 2**20  # entries per thread at a time, about 100 bytes each
_NEAREST = 8  # lists whose products are all kept, for the first candidates
_PAIRS = 2**23  # (query, list) pairs per thread at a time


def waves(nprobe: int, kind: str = "cpu") -> list[int]:
    """Lists that a query visits at a time on a kind of device: the nearest first, then seven times as many as it has visited.

    A GPU visits all at a time, because it would wait for the number of better chunks in every list.
    """
    counts = [nprobe if nprobe <= 4 * _NEAREST or kind != "cpu" else _NEAREST]
    while (visited := sum(counts)) < nprobe:
        counts.append(min(7 * visited, nprobe - visited))
    return counts


def rows_at_a_time(products: float, entries: float, kind: str) -> float:
    """Most queries that a thread processes together, given the products and entries per query and the device kind."""
    return max(16.0, min(_ROWS, _PRODUCTS[kind] / products, _ENTRIES / entries))


def read_lists(folder: Path, embeddings: ShardedArray, shards: Sequence[int]) -> np.ndarray:
    """The inverted list of each chunk in consecutive shards of `datastore/index`: [n] int32."""
    first, stop = int(embeddings.starts[shards[0]]), int(embeddings.starts[shards[-1] + 1])
    lists = np.full(stop - first, -1, dtype=np.int32)
    for shard in shards:
        path = folder / shard_name(shard) / "vectors.faiss"
        with reading(path):
            for number, ids in lists_of(read_index(path)):
                lists[ids - first] = number
            if (lists[slice(*embeddings.starts[shard : shard + 2] - first)] < 0).any():
                raise ValueError("chunks are in none of the lists")
    return lists


class ListIndex:
    """An inverted file over stored embeddings of unit length, with the same `search` as `ShardedIndex`.

    Args:
        trained: the trained Faiss index, an IVF.
        nprobe: lists that a search visits, unless the search sets its own.
        embeddings: [chunks, d] float16, of unit length, so the nearest have the greatest products.
        lists: [n] int32, the list of each chunk from `first` on.
        first: id of the first searched chunk.
        device: `auto`, `cpu`, `cuda` …
    """

    by_codes = False

    def __init__(
        self,
        trained: Any,
        nprobe: int,
        embeddings: ShardedArray,
        lists: np.ndarray,
        first: int = 0,
        device: str = "auto",
    ) -> None:
        import torch

        ivf: Any = ivf_of(trained)
        self._trained, self.embeddings, self.first = trained, embeddings, first
        self.num_vectors, self.max_nprobe = len(lists), int(ivf.nlist)
        self.device = machine.resolve(device)
        self.dtype = torch.bfloat16 if machine.has_bfloat16(self.device) else torch.float32
        centroids = torch.from_numpy(ivf.quantizer.reconstruct_n(0, self.max_nprobe))
        # The nearest centroid has the greatest (product − half its squared norm).
        self._offsets = (-centroids.square().sum(1) / 2).to(self.device, self.dtype)
        self._centroids = centroids.to(self.device, self.dtype)
        self._order = np.argsort(lists, kind="stable")  # all chunks, list by list
        self._bounds = np.searchsorted(lists[self._order], np.arange(self.max_nprobe + 1))  # where each list begins
        ranks = np.empty_like(lists)
        ranks[self._order] = np.arange(len(lists)) - np.repeat(self._bounds[:-1], np.diff(self._bounds))
        self._places = torch.from_numpy(lists).to(self.device), torch.from_numpy(ranks).to(self.device)
        self._kept: LoadedLists | None = None
        self.nprobe = min(nprobe, self.max_nprobe)

    @classmethod
    def open(
        cls, folder: Path, embeddings: ShardedArray, shards: Sequence[int], device: str = "auto"
    ) -> "ListIndex | None":
        """Open consecutive shards of `datastore/index` with the tuned `nprobe`; None if the index has no lists."""
        tuned = stored_json(folder / "tuned" / "tuned.json")
        if "lists" not in tuned:
            return None
        trained = read_index(folder / "trained" / "trained.faiss")
        lists, first = read_lists(folder, embeddings, shards), int(embeddings.starts[shards[0]])
        return cls(trained, tuned["lists"]["nprobe"], embeddings, lists, first, device)

    def search(
        self, queries: np.ndarray, k: int, excluded: IdRanges | None = None, nprobe: int | None = None
    ) -> np.ndarray:
        """Find the k candidates of each query.

        Args:
            queries: [n, d] float32, of unit length. Pass many at once: a list is multiplied with all queries of a block
                that visit it.
            k: candidates per query.
            excluded: ids that a query must not find.
            nprobe: inverted lists to visit, at most `max_nprobe`; None = the index's `nprobe`.

        Returns:
            ids [n, k] int64, -1 where there are fewer.
        """
        import torch

        nprobe = self.nprobe if nprobe is None else min(nprobe, self.max_nprobe)
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        points = torch.from_numpy(queries).to(self.device, self.dtype)
        rotated = transformed(self._trained, queries)
        probing = points if rotated is queries else torch.from_numpy(rotated).to(self.device, self.dtype)
        own = None if excluded is None else self._ranges(excluded)
        scores = torch.full((len(queries), k), -torch.inf)
        ids = torch.full((len(queries), k), -1, dtype=torch.int64)
        with one_thread_each(None if self.device == "cpu" else 1) as run:
            for part in self._parts():
                step = self._rows(part, len(queries), nprobe)

                def search_block(start: int, part: LoadedLists = part, step: int = step) -> None:
                    probes = self._probe(probing[start : start + step], nprobe)
                    nearest, *further = probes.split(self._waves(nprobe), dim=1)
                    for first, stop in self._fitting(nearest, part):
                        block = slice(start + first, start + stop)
                        own_block = None if own is None else own[:, block]
                        hits, hit_ids = best_of(points[block], nearest[first:stop], part, k, own_block)
                        joined, order = torch.cat((scores[block], hits), dim=1).topk(k, dim=1)
                        scores[block], ids[block] = joined, torch.cat((ids[block], hit_ids), dim=1).gather(1, order)
                    block = slice(start, start + len(probes))
                    own_block = None if own is None else own[:, block]
                    for wave in further:
                        improve(points[block], wave, part, scores[block], ids[block], own_block)

                run(search_block, range(0, len(queries), step))
        return (ids + self.first).masked_fill_(scores == -torch.inf, -1).numpy()

    def _ranges(self, excluded: IdRanges) -> "Tensor":
        """Exclusion ranges relative to the first searched chunk: first and stop [2, n] int64."""
        import torch

        bounds = np.clip(np.stack(excluded) - self.first, 0, self.num_vectors)
        return torch.from_numpy(bounds).to(self.device)

    def _rows(self, part: LoadedLists, queries: int, nprobe: int) -> int:
        """Queries per block. The number of blocks is even and does not depend on the number of threads."""
        nearest = self._waves(nprobe)[0]
        share = nearest / self.max_nprobe
        products, entries = share * len(part.ids), max(nearest, share * int(part.entries.sum()))
        most = min(rows_at_a_time(products, entries, self.device.partition(":")[0]), max(16, _PAIRS / nprobe))
        return max(1, math.ceil(queries / (2 * math.ceil(queries / most / 2))))

    def _waves(self, nprobe: int) -> list[int]:
        return waves(nprobe, self.device.partition(":")[0])

    def _fitting(self, probes: "Tensor", part: LoadedLists) -> Iterator[tuple[int, int]]:
        """Split queries, which visit `probes` [q, p], so that their products fit: lists trained on other text can be long."""
        import torch

        products, entries = part.starts.diff().take(probes).sum(1), part.entries.take(probes).sum(1)
        filled = products / _PRODUCTS[self.device.partition(":")[0]] + entries / _ENTRIES
        # A block has a fill of about 1 if lists have similar lengths. Blocks above 2 are divided.
        counts = torch.unique_consecutive((filled.cumsum(0) / 2).long(), return_counts=True)[1]
        stops = counts.cumsum(0).tolist()
        yield from zip([0, *stops[:-1]], stops, strict=True)

    def _probe(self, points: "Tensor", nprobe: int) -> "Tensor":
        """Choose the lists that queries [q, d] visit: [q, nprobe] int64, the nearest wave first."""
        import torch

        rows, nearest = min(CHOSEN, max(16, TABLE // self.max_nprobe)), []
        for some in points.split(rows):
            products = torch.addmm(self._offsets, some, self._centroids.T)
            near = greatest(products, nprobe)
            if nprobe > self._waves(nprobe)[0]:
                near = near.gather(1, products.gather(1, near).argsort(dim=1, descending=True))
            nearest.append(near)
        return torch.cat(nearest)

    def _parts(self) -> Iterator[LoadedLists]:
        """Yield all lists, as many at a time as memory holds. If all fit, they stay loaded."""
        if self._kept is not None:
            yield self._kept
            return
        most = max(1, MEMORY // (self.embeddings.row_shape[0] * self.dtype.itemsize))
        first = 0
        while first < self.max_nprobe:
            fitting = int(np.searchsorted(self._bounds, self._bounds[first] + most, side="right")) - 1
            last = min(self.max_nprobe, max(first + 1, fitting))
            part = self._part(first, last)
            if (first, last) == (0, self.max_nprobe):
                self._kept = part
            if len(part.ids):
                yield part
            first = last

    def _part(self, first: int, last: int) -> LoadedLists:
        """Load the lists [first, last)."""
        import torch

        sizes = np.diff(self._bounds)
        sizes[:first] = sizes[last:] = 0
        members = rounded(torch.from_numpy(-(-sizes // ENTRY))).numpy()  # members of all groups, in units of ENTRY
        entries = 2 ** np.ceil(np.log2(np.maximum(1, members / FAN))).astype(np.int64)  # divides the members
        starts = np.concatenate([[0], np.cumsum(members * ENTRY)])
        before = np.cumsum(sizes) - sizes
        places = np.arange(sizes.sum()) - np.repeat(before - starts[:-1], sizes)  # rows that are not padding
        ids = np.full(starts[-1], -1, dtype=np.int64)
        ids[places] = self._order[self._bounds[first] : self._bounds[last]]
        columns = torch.zeros((len(ids), self.embeddings.row_shape[0]), dtype=self.dtype)
        for start in range(0, len(places), 65_536):
            some = places[start : start + 65_536]
            vectors = self.embeddings.gather(ids[some] + self.first)
            columns[some] = torch.from_numpy(vectors).to(self.dtype)

        def moved(values: np.ndarray) -> "Tensor":
            return torch.from_numpy(values).to(self.device)

        entries = np.where(sizes > 0, entries, 0)
        return LoadedLists(
            columns.to(self.device), moved(ids), moved(starts), moved(sizes), moved(entries), *self._places
        )
