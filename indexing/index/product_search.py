"""Exhaustive search for many queries at once by matrix products: 2·d·N operations per query.

    blocks of chunks → products with a block of queries → maxima of groups → the best groups → candidates

The top k values of a row are in its top k groups, for any grouping. So products are reduced to maxima of 4, then of 16,
and again of 16, while they are in the cache. Only the last step reads single chunks. There is no training, and only
rounding can miss a neighbor: products are bfloat16 if the device is faster with it, and the caller re-ranks the candidates.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from indexing import machine, measured
from indexing.index.exact_search import IdRanges
from indexing.machine import one_thread_each
from indexing.store.sharded_array import ShardedArray

if TYPE_CHECKING:
    from torch import Tensor

_COLUMNS = 262_144  # chunks in the precision of the products at a time: 128 MB of bfloat16 for d = 256
_FANS = (4, 16, 16)  # group size on each level
_WIDTH = 4 * 16 * 16
# Queries and chunks multiplied at a time. On a CPU the products take half a megabyte, which stays in a core's cache
# until it is reduced. With four times as much the maxima take twice as long.
_SHAPES = {"cpu": (256, _WIDTH), "cuda": (8192, 16 * _WIDTH)}
_MEMBERS = {"cpu": 2**25, "cuda": 2**30}  # components of single chunks read per block of queries


class ProductIndex:
    """Exhaustive search over stored embeddings of unit length, with the same `search` as `ShardedIndex`.

    Args:
        embeddings: [chunks, d] float16, of unit length, so the nearest have the greatest products.
        device: `auto`, `cpu`, `cuda` …
        rows: first and stop of the chunks to search; all by default.
        ids: [n] int64 of the chunks to search, ascending, instead of `rows`; such a search takes no `excluded`.
        keep: keep all chunks in memory after the first search, for searches of few queries.
    """

    nprobe = max_nprobe = 1
    by_codes = False

    def __init__(
        self,
        embeddings: ShardedArray,
        device: str = "auto",
        rows: tuple[int, int] | None = None,
        ids: np.ndarray | None = None,
        keep: bool = False,
    ) -> None:
        import torch

        self.embeddings, self.ids, self.keep = embeddings, ids, keep
        self._kept: list[tuple[int, Tensor, int]] | None = None
        self.first, self.stop = (0, len(ids)) if ids is not None else rows or (0, len(embeddings))
        self.num_vectors = self.stop - self.first
        self.device = machine.resolve(device)
        self.dtype = getattr(torch, measured.fastest_products("inference", self.device))

    def search(
        self, queries: np.ndarray, k: int, excluded: IdRanges | None = None, nprobe: int | None = None
    ) -> np.ndarray:
        """Find the k candidates of each query.

        Args:
            queries: [n, d] float32, of unit length. Pass many at once: without `keep`, each call reads and converts all
                chunks.
            k: candidates per query.
            excluded: ids that a query must not find.
            nprobe: ignored, since there are no lists.

        Returns:
            ids [n, k] int64, -1 where there are fewer.
        """
        import torch

        assert excluded is None or self.ids is None
        points = torch.from_numpy(np.ascontiguousarray(queries)).to(self.device, self.dtype)
        ranges = None if excluded is None else torch.from_numpy(np.stack(excluded, axis=1))  # [n, 2]
        scores = torch.full((len(queries), k), -torch.inf)
        ids = torch.full((len(queries), k), -1, dtype=torch.int64)
        kind = self.device.partition(":")[0]
        shape = _SHAPES[kind]
        rows = max(1, min(shape[0], _MEMBERS[kind] // (_FANS[0] * k * queries.shape[1])))
        with one_thread_each(None if kind == "cpu" else 1) as run:
            for start, columns, real in self._all_blocks():

                def search_block(first: int, start: int = start, columns: "Tensor" = columns, real: int = real) -> None:
                    block = slice(first, first + rows)
                    excluded_columns = None if ranges is None else ranges[block] - start
                    tile = _tile(len(points[block]), len(columns), shape)
                    maxima, positions = _best_of(points[block], columns, tile, real, scores[block], excluded_columns)
                    joined = torch.cat((scores[block], maxima), dim=1)
                    scores[block], order = joined.topk(k, dim=1)
                    ids[block] = torch.cat((ids[block], positions + start), dim=1).gather(1, order)

                run(search_block, range(0, len(queries), rows))
        positions = ids.masked_fill_(scores == -torch.inf, -1).numpy()
        return positions if self.ids is None else np.where(positions < 0, -1, self.ids[positions])

    def _all_blocks(self) -> Iterable[tuple[int, "Tensor", int]]:
        if not self.keep:
            return self._blocks()
        if self._kept is None:
            self._kept = list(self._blocks())
        return self._kept

    def _blocks(self) -> Iterator[tuple[int, "Tensor", int]]:
        """Yield first id, chunks [c, d] padded with zeros to whole tiles, and the number of chunks without padding."""
        import torch

        for start in range(self.first, self.stop, _COLUMNS):
            stop = min(start + _COLUMNS, self.stop)
            real = stop - start
            tile = min(_SHAPES[self.device.partition(":")[0]][1], -(-real // _WIDTH) * _WIDTH)
            columns = torch.zeros((-(-real // tile) * tile, self.embeddings.row_shape[0]), dtype=self.dtype)
            for first in range(start, stop, 65_536):
                last = min(first + 65_536, stop)
                columns[first - start : last - start] = torch.from_numpy(self._read(first, last))
            yield start, columns.to(self.device), real

    def _read(self, first: int, last: int) -> np.ndarray:
        return (
            self.embeddings.read(first, last).copy()
            if self.ids is None
            else self.embeddings.gather(self.ids[first:last])
        )


def _tile(queries: int, columns: int, shape: tuple[int, int]) -> int:
    """Chunks multiplied at a time: a divisor of all, such that there are at most as many products as in `shape`."""
    count, most = columns // _WIDTH, shape[0] * shape[1] // (queries * _WIDTH)
    return _WIDTH * next(tiles for tiles in range(min(count, max(1, most)), 0, -1) if count % tiles == 0)


def _best_of(
    points: "Tensor", columns: "Tensor", tile: int, real: int, best_scores: "Tensor", excluded: "Tensor | None"
) -> tuple["Tensor", "Tensor"]:
    """The best k of some chunks that are better than the worst score of a query so far.

    Args:
        points: [q, d] queries.
        columns: [c, d] chunks, whole tiles.
        tile: chunks multiplied at a time.
        real: chunks that are not padding.
        best_scores: [q, k] float32, the best scores so far, greatest first.
        excluded: [q, 2] first and stop of chunks that a query must not find.

    Returns:
        scores [q, c] float32 and positions [q, c] in `columns`, c <= k, greatest first; -inf where there are fewer.
    """
    import torch

    fan, k = _FANS[0], best_scores.shape[1]
    shared = [] if excluded is None else _runs(excluded)
    levels = [points.new_empty((len(points), len(columns) // fan))]
    for start in range(0, len(columns), tile):
        products = _products(points, columns[start : start + tile])  # [q, tile]
        if start + tile > real:
            products[:, max(0, real - start) :] = -torch.inf
        for rows, first, stop in shared:
            if stop > start and first < start + tile:
                products[rows, max(0, first - start) : stop - start] = -torch.inf
        # Members of a group are tile / fan apart, so that maxima are taken of whole rows, which is fast.
        while products.shape[1] > tile // fan:
            products = torch.maximum(*products.chunk(2, dim=1))
        levels[0][:, start // fan : (start + tile) // fan] = products
    for wider in _FANS[1:]:
        levels.append(levels[-1].unflatten(1, (wider, -1)).amax(1))
    groups = levels[-1].topk(min(k, levels[-1].shape[1]), dim=1).indices
    for level in reversed(levels[:-1]):
        stride = level.shape[1] // _FANS[1]
        members = (groups[:, :, None] + stride * torch.arange(_FANS[1], device=groups.device)).flatten(1)
        best, order = level.gather(1, members).topk(min(k, members.shape[1]), dim=1)
        groups = members.gather(1, order)
    heads = groups // (tile // fan) * tile + groups % (tile // fan)
    positions = (heads[:, :, None] + tile // fan * torch.arange(fan, device=groups.device)).flatten(1)  # [q, 4 k]
    scores = _scores(points, columns, positions, best > best_scores[:, -1:].to(best))
    scores.masked_fill_(positions >= real, -torch.inf)
    if excluded is not None:
        bounds = excluded.to(positions.device)
        scores.masked_fill_((positions >= bounds[:, :1]) & (positions < bounds[:, 1:]), -torch.inf)
    scores, order = scores.topk(min(k, positions.shape[1]), dim=1)
    return scores.cpu(), positions.gather(1, order).cpu()


def _products(points: "Tensor", columns: "Tensor") -> "Tensor":
    """[q, c]. The product with a vector reads chunks faster than the general one with a single row."""
    return points @ columns.T if len(points) > 1 else (columns @ points[0])[None]


def _scores(points: "Tensor", columns: "Tensor", positions: "Tensor", better: "Tensor") -> "Tensor":
    """Products of queries [q, d] with single chunks, `positions` [q, g · members] in `columns`: [q, g · members]
    float32.

    On a CPU -inf for groups that are not `better` [q, g]: few groups of the later chunks are, and reading single chunks
    is slow. A GPU would wait for shapes that depend on values.
    """
    import torch

    if not positions.is_cpu:
        members = columns.index_select(0, positions.flatten()).view(*positions.shape, -1)
        return torch.bmm(members, points[:, :, None])[:, :, 0].float()
    queries, groups = better.nonzero(as_tuple=True)  # [n]
    grouped = positions.view(*better.shape, -1)
    better_positions = grouped[queries, groups]  # [n, members], n can be 0
    members = columns.index_select(0, better_positions.flatten()).view(*better_positions.shape, columns.shape[1])
    scores = torch.full(grouped.shape, -torch.inf)
    scores[queries, groups] = torch.bmm(members, points.index_select(0, queries)[:, :, None])[:, :, 0].float()
    return scores.flatten(1)


def _runs(ranges: "Tensor") -> list[tuple[slice, int, int]]:
    """Runs of consecutive rows with the same [first, stop), such as the chunks of a document."""
    import torch

    bounds, counts = torch.unique_consecutive(ranges, dim=0, return_counts=True)
    ends = counts.cumsum(0).tolist()
    rows = (slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True))
    return [(block, *bound) for block, bound in zip(rows, bounds.tolist(), strict=True)]
