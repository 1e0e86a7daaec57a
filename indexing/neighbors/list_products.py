"""Multiply many queries with the chunks of the lists they visit, and select the best chunks.

    (query, list) pairs, sorted by list → a list's chunks × its queries → maxima of groups, sorted by query → best groups → candidates

Everything runs in torch, on the device of the loaded lists and on one thread. The caller gives each thread its own queries.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

ENTRY = 8  # groups per entry. Lists differ in length; a list has as many entries as its length needs
FAN = 8  # products per group, at most; the greatest decides whether the group is searched
TABLE = 2**22  # (query, list) pairs compared at a time
CHOSEN = 1024  # queries whose candidates are chosen at a time
_EXCLUDED = 2**20  # chunks excluded at a time, unless one document is longer


@dataclass(frozen=True)
class LoadedLists:
    """Some of the lists, in the precision of the products, on the device. Lists that are not loaded are empty here.

    Attributes:
        columns: [c, d], list by list, each padded with zeros to whole groups.
        ids: [c] int64, ascending within each list, counted from the first searched chunk; -1 = padding.
        starts: [lists + 1] int64, first row of each list in `columns` and `ids`.
        sizes: [lists] int64, chunks without padding.
        entries: [lists] int64, entries of `ENTRY` groups. Group g of a list has the members g, g + groups, g + 2 groups …
        lists: [n] int32, list of every searched chunk, loaded or not.
        ranks: [n] int32, position of the chunk in its list.
    """

    columns: "Tensor"
    ids: "Tensor"
    starts: "Tensor"
    sizes: "Tensor"
    entries: "Tensor"
    lists: "Tensor"
    ranks: "Tensor"


def rounded(counts: "Tensor") -> "Tensor":
    """Round counts up to four values per doubling: on a CPU each new shape compiles its products, which takes 0.4 ms."""
    import torch

    steps = 2 ** ((counts - 1).clamp(min=1).double().log2().floor() - 2).clamp(min=0).to(torch.int64)
    return -(-counts // steps) * steps


def padded(counts: "Tensor") -> "Tensor":
    """Queries that a list is multiplied with, [n] rounded up."""
    return rounded(-(-counts // 8)) * 8


def greatest(values: "Tensor", k: int) -> "Tensor":
    """Positions of the k greatest values in each row: [n, k], unordered."""
    import torch

    width = values.shape[1]
    if width % FAN or width < 2 * FAN * k:
        return values.topk(k, dim=1, sorted=False).indices
    heads = values.unflatten(1, (FAN, -1)).amax(1).topk(k, dim=1, sorted=False).indices
    members = (heads[:, :, None] + width // FAN * torch.arange(FAN, device=values.device)).flatten(1)
    return members.gather(1, values.gather(1, members).topk(k, dim=1, sorted=False).indices)


@dataclass(frozen=True)
class _Visits:
    """Products of the loaded lists with the queries that visit them.

    Attributes:
        columns: [visits], position of the query among the queries that visit the list.
        wide: [lists], number of those queries, rounded up.
        products: [.], for each list its products [columns, wide], concatenated; -inf at the end.
        maxima: [., `ENTRY`], for each list the maxima of its groups [wide · entries], concatenated.
        at, tops: [lists + 1], first element of each list in `products` and `maxima`.
    """

    columns: "Tensor"
    wide: "Tensor"
    products: "Tensor"
    maxima: "Tensor"
    at: "Tensor"
    tops: "Tensor"


def _multiply(points: "Tensor", lists: "Tensor", part: LoadedLists, own: "Tensor | None") -> _Visits:
    """Multiply queries [q, d] with the lists they visit [q · p]; products with chunks in a query's own range [2, q] are -inf."""
    import torch

    order = sorted_places(lists)
    counts = torch.bincount(lists, minlength=len(part.sizes))
    columns = torch.empty_like(order).scatter_(0, order, _ranks(counts))
    wide = torch.where(part.sizes > 0, padded(counts), 0)
    heights = part.starts.diff()
    at, tops, first = starts_of(heights * wide), starts_of(part.entries * wide), starts_of(wide)
    # The rounded width repeats the first query. Nothing reads these products.
    asking = order.new_zeros(int(first[-1]) + 1)
    slots = torch.where(part.sizes.take(lists) > 0, first.take(lists) + columns, first[-1])
    asking[slots] = torch.arange(len(lists), device=lists.device) // (len(lists) // len(points))
    products, maxima = points.new_empty(int(at[-1]) + 1), points.new_empty((int(tops[-1]) + 1, ENTRY))
    products[-1] = maxima[-1] = -torch.inf
    visited = wide.nonzero()[:, 0]
    numbers = torch.stack(
        [each.take(visited) for each in (part.starts, heights, part.sizes, part.entries, wide, first, at, tops)]
    )
    bounds = numbers.T.tolist()
    for start, height, size, _, width, row, product, _ in bounds:
        some = asking[row : row + width]
        scores = products[product : product + height * width].view(height, width)
        torch.mm(part.columns[start : start + height], points.index_select(0, some).T, out=scores)
        if size < height:
            scores[size:] = -torch.inf
    visits = _Visits(columns, wide, products, maxima, at, tops)
    if own is not None:
        _exclude(own, lists.view(len(points), -1), part, visits)
    for _, height, _, entries, width, _, product, top in bounds:
        scores = products[product : product + height * width]
        # Transposed, so that the values of one query in a list are adjacent.
        maxima[top : top + entries * width].view(width, -1).copy_(scores.view(-1, entries * ENTRY, width).amax(0).T)
    return visits


def _exclude(own: "Tensor", probes: "Tensor", part: LoadedLists, visits: _Visits) -> None:
    """Set the products of queries with the chunks in their own ranges [2, q] to -inf; `probes` [q, p] are their lists."""
    import torch

    lengths = own[1] - own[0]
    ends, num_lists = lengths.cumsum(0), len(part.sizes)
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        last = int(torch.searchsorted(ends, before + _EXCLUDED, right=True))
        some = slice(first, max(first + 1, min(last, first + max(16, TABLE // num_lists), len(lengths))))
        queries = torch.arange(len(lengths[some]), device=own.device).repeat_interleave(lengths[some])
        chunks = _ranks(lengths[some]) + own[0, some].take(queries)
        table = probes.new_full((len(lengths[some]), num_lists), -1, dtype=torch.int32)
        numbers = torch.arange(
            first * probes.shape[1], some.stop * probes.shape[1], dtype=torch.int32, device=own.device
        )
        table.scatter_(1, probes[some], numbers.view(-1, probes.shape[1]))
        lists = part.lists.take(chunks).long()
        visit = table.take(queries * num_lists + lists)
        hit = ((visit >= 0) & (part.sizes.take(lists) > 0)).nonzero()[:, 0]
        lists, column = lists.take(hit), visits.columns.take(visit.take(hit).long())
        rank = part.ranks.take(chunks.take(hit))
        visits.products.index_fill_(0, visits.at.take(lists) + rank * visits.wide.take(lists) + column, -torch.inf)
        first = some.stop


def sorted_places(numbers: "Tensor") -> "Tensor":
    """The places of numbers [n] in ascending order of the number, and of the place: [n] int64."""
    import torch

    if numbers.is_cpu and (not len(numbers) or int(numbers.max()) < 2**16):
        return torch.from_numpy(numbers.numpy().astype(np.uint16).argsort(kind="stable"))  # radix sort
    return numbers.argsort(stable=True)


def starts_of(counts: "Tensor") -> "Tensor":
    """Start of each block when blocks of these sizes are concatenated, and the end of the last: [n + 1]."""
    import torch

    return torch.cat((counts.new_zeros(1), counts.cumsum(0)))


def _ranks(counts: "Tensor") -> "Tensor":
    """0, 1 … within each block, for blocks of these sizes: [sum of the counts]."""
    import torch

    total = torch.arange(int(counts.sum()), device=counts.device)
    return total - starts_of(counts)[:-1].repeat_interleave(counts)


@dataclass(frozen=True)
class _Entries:
    """Entries (`ENTRY` groups of a list) as one query sees them. The last entry is a placeholder for none.

    Attributes:
        by_query: [q, most], entries of each query, padded with the last entry.
        tops: [entries + 1], row of their maxima.
        at: position of the product with the first member of their first group.
        strides: distance from one group's product to the next.
        groups: groups of the list, which is the distance between the members of a group.
        members: members per group.
        starts: column of the first member of their first group.
    """

    by_query: "Tensor"
    tops: "Tensor"
    at: "Tensor"
    strides: "Tensor"
    groups: "Tensor"
    members: "Tensor"
    starts: "Tensor"


def _entries(probes: "Tensor", part: LoadedLists, visits: _Visits) -> _Entries:
    import torch

    visited = probes.flatten()
    entries = part.entries.take(visited)  # of each visit
    visit = torch.arange(len(visited), device=probes.device).repeat_interleave(entries)
    lists, columns, rank = visited.take(visit), visits.columns.take(visit), _ranks(entries)
    wide, of_list = visits.wide.take(lists), part.entries.take(lists)
    held = entries.view(probes.shape).sum(1)  # entries of each query
    most = max(1, int(held.max()))
    by_query = held.new_full((len(probes) * most,), len(visit))
    query = torch.arange(len(probes), device=probes.device).repeat_interleave(held)
    by_query[query * most + _ranks(held)] = torch.arange(len(visit), device=probes.device)

    def with_none(values: "Tensor", none: int) -> "Tensor":
        return torch.cat((values, values.new_full((1,), none)))

    return _Entries(
        by_query=by_query.view(len(probes), most),
        tops=with_none(visits.tops.take(lists) + columns * of_list + rank, len(visits.maxima) - 1),
        at=with_none(visits.at.take(lists) + rank * ENTRY * wide + columns, len(visits.products) - 1),
        strides=with_none(wide, 0),
        groups=with_none(of_list * ENTRY, 0),
        members=with_none(part.starts.diff().take(lists) // (of_list * ENTRY), 0),
        starts=with_none(part.starts.take(lists) + rank * ENTRY, 0),
    )


def best_of(
    points: "Tensor", probes: "Tensor", part: LoadedLists, k: int, own: "Tensor | None"
) -> tuple["Tensor", "Tensor"]:
    """Select the best chunks in the loaded lists that queries visit.

    The best k chunks of a query are in the k groups with the greatest maxima, so only these groups are searched.

    Args:
        points: [q, d] in the precision of the lists.
        probes: [q, p], the lists that each query visits.
        part: the chunks.
        k: chunks to select per query.
        own: first and stop [2, q] of a range of ids that a query must not find.

    Returns:
        scores [q, c] float32 and ids [q, c] int64 counted from the first searched chunk, c <= k; -inf where there are fewer.
    """
    import torch

    visits = _multiply(points, probes.flatten(), part, own)
    entries = _entries(probes, part, visits)
    member = torch.arange(FAN, device=points.device)
    scores, known = [], []
    for some in entries.by_query.split(CHOSEN):
        maxima = visits.maxima.index_select(0, entries.tops.take(some).flatten()).view(len(some), -1)
        best = greatest(maxima, min(k, maxima.shape[1]))  # groups: [q, k]
        chosen, group = some.gather(1, best // ENTRY), best % ENTRY
        apart, stride = entries.groups.take(chosen)[:, :, None] * member, entries.strides.take(chosen)
        places = (entries.at.take(chosen) + group * stride)[:, :, None] + apart * stride[:, :, None]  # [q, k, members]
        places.masked_fill_(member >= entries.members.take(chosen)[:, :, None], len(visits.products) - 1)
        values, order = visits.products.take(places.flatten(1)).topk(min(k, places[0].numel()), dim=1)
        columns = ((entries.starts.take(chosen) + group)[:, :, None] + apart).flatten(1).gather(1, order)
        scores.append(values.float().cpu())
        known.append(part.ids.take(columns.clamp_(max=len(part.ids) - 1)).cpu())
    return torch.cat(scores), torch.cat(known)
