"""Match lengths: how many tokens up to a position of a source equal the last tokens that were read.

They are integers, exact, and need no gradient. A position votes for the token that follows it. Letters of the shape
comments as in `head.py`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from indexing.suffixes.votes import LENGTHS

MATCH_LENGTHS = (0, *LENGTHS)
"""Match lengths at which positions vote. At 0 all positions vote that can be read: what is in the text at all. The
whole datastore has no votes at 0."""

LONGEST = LENGTHS[-1]
"""Longer matches count as this long. A power of two, see `match_lengths`."""


class Matches(NamedTuple):
    """Where the last tokens of each query occur in its source.

    Attributes:
        lengths: match length of each position, int8 [N, Q, S]; -1 = the query cannot read the position.
        following: the token that each position votes for, int64 [N, S].
    """

    lengths: Tensor
    following: Tensor


# Opaque to torch.compile: fused code would compute each length again for every position that reads it, 10 times slower.
# `torch.library.custom_op` would define it in fewer lines, but imports torch._dynamo at the first call, also where
# nothing is compiled.
torch.library.define("retro::match_lengths", "(Tensor read, Tensor source, int longest) -> Tensor")


def match_lengths(read: Tensor, source: Tensor, longest: int = LONGEST) -> Tensor:
    """Number of tokens before and including each query that equal those before and including each position.

    Doubles the length: a full match of n tokens continues with the match n tokens earlier. It has no gradient.

    Args:
        read: int64 [..., Q + longest - 1], the queries after `longest` - 1 earlier tokens; -1 = none.
        source: int64 [..., S].
        longest: a power of two; longer matches count as this long.

    Returns:
        int8 [..., Q, S].
    """
    return torch.ops.retro.match_lengths(read, source, longest)


@torch.library.impl("retro::match_lengths", "default")
def _(read: Tensor, source: Tensor, longest: int) -> Tensor:
    lengths, n = (read[..., :, None] == source[..., None, :]).to(torch.int8), 1
    while n < longest:  # log2(longest) passes over [Q, S] instead of `longest`
        before = F.pad(lengths, (n, 0, n, 0))[..., :-n, :-n]  # n tokens earlier in the text and in the source
        lengths = lengths + (lengths == n) * before
        n *= 2
    return lengths[..., longest - 1 :, :].contiguous()


@torch.library.register_fake("retro::match_lengths")
def _(read: Tensor, source: Tensor, longest: int) -> Tensor:
    """The shape of the result, which torch.compile needs."""
    shape = torch.broadcast_shapes(read.shape[:-1], source.shape[:-1])
    return read.new_empty((*shape, read.shape[-1] - longest + 1, source.shape[-1]), dtype=torch.int8)


class Windows(NamedTuple):
    """The queries of chunked cross-attention, and of `neighbor_matches`: [B, T, ...] to windows [B'·U, m, ...] and
    back."""

    chunk_length: int
    num_readers: int
    num_chunks: int
    num_rows: int

    def split(self, x: Tensor) -> Tensor:
        """Values of tokens [B, T, ...] to those of queries [B'·U, m, ...]; zeros after the last token."""
        m, x = self.chunk_length, x[: self.num_readers]
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, (self.num_chunks + 1) * m - 1 - x.shape[1]))
        return x[:, m - 1 :].unflatten(1, (self.num_chunks, m)).flatten(0, 1)

    def join(self, x: Tensor, num_tokens: int, fill: float = 0.0) -> Tensor:
        """Values of queries [B'·U, m, ...] to those of tokens [B, T, ...]; `fill` for tokens without a query."""
        x = x.unflatten(0, (-1, self.num_chunks)).flatten(1, 2)
        before, after = self.chunk_length - 1, self.num_rows - self.num_readers
        return F.pad(x, (0, 0) * (x.ndim - 2) + (before, 0, 0, after), value=fill)[:, :num_tokens]


class Counts(NamedTuple):
    """Positions that vote, for each of `MATCH_LENGTHS`: those with a match at least as long. float32 [N, Q, L] each.

    Attributes:
        all: all of them.
        right: those that vote for the label.
        agree: those that vote for the best candidate.
        best: the token that follows the longest match; of several such tokens that with the largest id: int64
            [N, Q]. Any token where no position can be read.
    """

    all: Tensor
    right: Tensor
    agree: Tensor
    best: Tensor


def levels(matches: Matches) -> Tensor:
    """Number of `MATCH_LENGTHS` that each match reaches, int8 [N, Q, S]: 0 to L."""
    reached = torch.zeros_like(matches.lengths)
    for length in MATCH_LENGTHS:
        reached = reached + (matches.lengths >= length)
    return reached


_COLUMNS = 4 * (1 + len(MATCH_LENGTHS))
"""Columns of counts of `_counted`: four for each number of reached lengths, 0 to L."""
_BLOCK = 1 << 24
"""Positions that are counted at a time on a GPU, in 0.5 GB."""


def counts_by_length(matches: Matches, labels: Tensor) -> Counts:
    """Count the positions that vote, for labels [N, Q]. Counts need no gradient, and little memory."""
    counted = torch.ops.retro.count_votes if labels.device.type == "cuda" else _counted
    found = counted(*matches, labels)
    counts = found[..., 4:_COLUMNS].unflatten(2, (-1, 4)).float()  # [N, Q, L, 4]; not those that reach no length
    # A position that reaches a length reaches all shorter ones: add up from the longest.
    neither, agrees, right, both = counts.flip(2).cumsum(2).flip(2).unbind(3)
    return Counts(neither + agrees + right + both, right + both, agrees + both, found[..., _COLUMNS].long())


def _counted(lengths: Tensor, following: Tensor, labels: Tensor) -> Tensor:
    """Positions of each query by column, int32 [N, Q, 4 + 4 L + 1]: 4 reached lengths + 2 votes for the label + 1
    agrees. The last column is `Counts.best`."""
    following = following[:, None]
    # One maximum finds the longest match and, among equal ones, the largest token: length and token are the upper and
    # lower 32 bits of a key. So the result does not depend on the order of neighbors.
    longest = ((lengths.long() << 32) + following).amax(2, keepdim=True)
    best = longest & (1 << 32) - 1
    agree = following == best
    column = (4 * levels(Matches(lengths, following)) + 2 * (following == labels[..., None]) + agree).long()
    one = torch.ones((), dtype=torch.int32, device=column.device)
    counts = torch.zeros(*column.shape[:2], _COLUMNS, dtype=torch.int32, device=column.device)
    return torch.cat((counts.scatter_add(2, column, one.expand_as(column)), best.int()), 2)


# Opaque to torch.compile: Inductor puts it into one kernel, which writes the columns in a first loop and reads them in
# a second one without a barrier. Triton may give the loops other threads, which then read what is not yet written
# (pytorch/pytorch#190519): on an H100, with 128 positions, indices were out of bounds.
torch.library.define("retro::count_votes", "(Tensor lengths, Tensor following, Tensor labels) -> Tensor")


@torch.library.impl("retro::count_votes", "default")
def _(lengths: Tensor, following: Tensor, labels: Tensor) -> Tensor:
    """`_counted`, for some rows at a time."""
    rows = max(1, _BLOCK // lengths[0].numel())
    parts = zip(*(each.split(rows) for each in (lengths, following, labels)), strict=True)
    return torch.cat([_counted(*part) for part in parts])


@torch.library.register_fake("retro::count_votes")
def _(lengths: Tensor, following: Tensor, labels: Tensor) -> Tensor:
    """The shape of the result, which torch.compile needs."""
    return labels.new_empty((*labels.shape, _COLUMNS + 1), dtype=torch.int32)
