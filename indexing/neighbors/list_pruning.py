"""Search further lists for chunks that are better than the candidates that a query has.

    (query, list) pairs, sorted by list → a list's chunks × its queries → groups with a maximum above the query's worst score
            → their members → candidates

Few chunks of the lists that are not the nearest are better than the candidates from the nearest. Only these are kept, so the
products of a list are read once, in the cache, and any number of queries visit it together.
"""

from typing import TYPE_CHECKING

from indexing.neighbors.list_products import FAN, LoadedLists, padded, sorted_places, starts_of

if TYPE_CHECKING:
    from torch import Tensor

_PRODUCTS = 2**20  # products of a list with its queries at a time: 2 MB of bfloat16
_FOUND = 2**22  # better chunks that are collected before they are merged
_WINDOW = 256  # better chunks of a query that are merged at a time


def improve(
    points: "Tensor", probes: "Tensor", part: LoadedLists, scores: "Tensor", ids: "Tensor", own: "Tensor | None"
) -> None:
    """Replace candidates by better chunks of the loaded lists, in place.

    Args:
        points: [q, d] in the precision of the lists.
        probes: [q, p], the lists that each query visits, none that it has visited.
        part: the chunks.
        scores: [q, k] float32, scores of the candidates, greatest first; -inf where there are fewer.
        ids: [q, k] int64, the candidates, counted from the first searched chunk.
        own: first and stop [2, q] of a range of ids that a query must not find.
    """
    import torch

    lists = probes.flatten()
    counts = torch.bincount(lists, minlength=len(part.sizes))
    asking = sorted_places(lists) // probes.shape[1]  # queries, list by list
    visited = ((counts > 0) & (part.sizes > 0)).nonzero()[:, 0]
    numbers = [each.take(visited) for each in (part.starts, part.starts.diff(), part.sizes, counts, starts_of(counts))]
    tiles = [
        (start, height, size, first, min(first + max(8, _PRODUCTS // height), row + count))
        for start, height, size, count, row in torch.stack(numbers).T.tolist()
        for first in range(row, row + count, max(8, _PRODUCTS // height))
    ]
    widths = padded(torch.tensor([stop - first for *_, first, stop in tiles], dtype=torch.int64)).tolist()
    block = points.new_zeros((max(widths, default=0), points.shape[1]))
    heights = (height for _, height, *_ in tiles)
    buffer = points.new_empty(max((height * width for height, width in zip(heights, widths, strict=True)), default=0))
    worst = scores[:, -1].to(points).take(asking)
    hits: list[tuple[Tensor, Tensor, Tensor]] = []
    held = 0
    for (start, height, size, first, stop), width in zip(tiles, widths, strict=True):
        some, limit = asking[first:stop], worst[first:stop]
        torch.index_select(points, 0, some, out=block[: stop - first])
        products = buffer[: height * width].view(height, width)
        torch.mm(part.columns[start : start + height], block[:width].T, out=products)
        if size < height:
            products[size:] = -torch.inf
        folded = products.view(FAN, -1, width)[:, :, : stop - first]
        groups, columns = (folded.amax(0) > limit).nonzero(as_tuple=True)
        values = folded[:, groups, columns]  # [members, n]
        member, hit = (values > limit[columns]).nonzero(as_tuple=True)
        hits.append((some[columns[hit]], part.ids[start + groups[hit] + height // FAN * member], values[member, hit]))
        held += len(hit)
        if held > _FOUND:
            _merge(hits, scores, ids, own)
            worst, held = scores[:, -1].to(points).take(asking), 0
    _merge(hits, scores, ids, own)


def _merge(
    found: list[tuple["Tensor", "Tensor", "Tensor"]], scores: "Tensor", ids: "Tensor", own: "Tensor | None"
) -> None:
    """Merge chunks into the candidates, in place, and clear the list: queries [n], ids [n] and scores [n] of each entry."""
    import torch

    if not found:
        return
    queries, chunks, values = (torch.cat(each) for each in zip(*found, strict=True))
    found.clear()
    if own is not None:
        allowed = (chunks < own[0].take(queries)) | (chunks >= own[1].take(queries))
        queries, chunks, values = queries[allowed], chunks[allowed], values[allowed]
    order = sorted_places(queries)
    chunks, values = chunks.take(order).to(ids.device), values.take(order).float().to(scores.device)
    counts = torch.bincount(queries, minlength=len(scores)).to(scores.device)
    first, k = starts_of(counts)[:-1], scores.shape[1]
    for start in range(0, int(counts.max()), _WINDOW):
        rows = (counts > start).nonzero()[:, 0]
        places = start + torch.arange(min(_WINDOW, int(counts.max()) - start), device=scores.device)
        at = (first[rows, None] + places).clamp_(max=len(values) - 1)
        more = values.take(at).masked_fill_(places >= counts[rows, None], -torch.inf)
        best, order = torch.cat((scores[rows], more), dim=1).topk(k, dim=1)
        scores[rows], ids[rows] = best, torch.cat((ids[rows], chunks.take(at)), dim=1).gather(1, order)
