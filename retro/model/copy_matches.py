"""Match lengths: how many tokens up to a position of a source equal the last tokens that were read.

They are integers, exact, and need no gradient. A position votes for the token that follows it. Letters of the shape comments as in
`copy_head.py`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from indexing.suffixes.votes import LENGTHS
from retro.model.inputs import Inputs
from retro.model.masks import neighbor_mask

MATCH_LENGTHS = (0, *LENGTHS)
"""Match lengths at which positions vote. At 0 all positions vote that can be read: what is in the text at all. The whole datastore has no votes
at 0."""

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
# `torch.library.custom_op` would define it in fewer lines, but imports torch._dynamo at the first call, also where nothing is compiled.
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
    while n < longest:
        before = F.pad(lengths, (n, 0, n, 0))[..., :-n, :-n]  # n tokens earlier in the text and in the source
        lengths = lengths + (lengths == n) * before
        n *= 2
    return lengths[..., longest - 1 :, :].contiguous()


@torch.library.register_fake("retro::match_lengths")
def _(read: Tensor, source: Tensor, longest: int) -> Tensor:
    """The shape of the result, which torch.compile needs."""
    shape = torch.broadcast_shapes(read.shape[:-1], source.shape[:-1])
    return read.new_empty((*shape, read.shape[-1] - longest + 1, source.shape[-1]), dtype=torch.int8)


def context_matches(tokens: Tensor, documents: Tensor | None, chunk_length: int) -> Matches:
    """Matches in the preceding tokens of the same document: N = B, Q = S = T.

    Args:
        tokens: int64 [B, T].
        documents: as in `Inputs`.
        chunk_length: m.
    """
    at, keys = torch.arange(tokens.shape[1], device=tokens.device), tokens
    readable = at[:, None] > at  # the last token read has no following token yet
    if documents is not None:
        document = documents.repeat_interleave(chunk_length, dim=1)[:, : tokens.shape[1]]
        readable = readable & (document[:, :, None] == document[:, None])
        keys = tokens + (document << 32)  # matches end where a document begins
    lengths = match_lengths(F.pad(keys, (LONGEST - 1, 0), value=-1), keys)
    return Matches(lengths.masked_fill(~readable, -1), F.pad(tokens[:, 1:], (0, 1)))


def neighbor_matches(inputs: Inputs, chunk_length: int) -> Matches:
    """Matches in the neighbors of complete chunks: N = B'·U, Q = m, S = K·R.

    Queries are those of chunked cross-attention: the last token of chunk u and the first m - 1 of the next one. Earlier tokens of
    a match are in chunk u too, since a match has at most m tokens here.
    """
    m, neighbors = chunk_length, inputs.neighbors
    num_chunks, tokens = neighbors.shape[1], inputs.tokens[: len(neighbors)]
    longest = _longest_in_chunk(m)
    padded = F.pad(tokens, (0, (num_chunks + 1) * m - 1 - tokens.shape[1]), value=-1)
    windows = padded[:, m - longest :].unfold(1, m + longest - 1, m)  # [B', U, m + longest - 1]
    lengths = match_lengths(windows[:, :, None], neighbors, longest)  # [B', U, K, m, R]
    real = neighbor_mask(neighbors, inputs.neighbor_lengths, inputs.documents)
    lengths = lengths.masked_fill(~F.pad(real[..., 1:], (0, 1))[:, :, :, None], -1)  # the last token votes for none
    return Matches(
        lengths.transpose(2, 3).flatten(0, 1).flatten(2), F.pad(neighbors[..., 1:], (0, 1)).flatten(0, 1).flatten(1)
    )


def context_matches_of_last(tokens: Tensor) -> Matches:
    """As `context_matches` for the last token of each row only: Q = 1, S = T.

    Args:
        tokens: int64 [B, T], rows that end in the last column; -1 = no token.
    """
    lengths = match_lengths(F.pad(tokens, (LONGEST - 1, 0), value=-1)[:, -LONGEST:], tokens)  # [B, 1, T]
    readable = (tokens >= 0) & (torch.arange(tokens.shape[1], device=tokens.device) < tokens.shape[1] - 1)
    return Matches(lengths.masked_fill(~readable[:, None], -1), F.pad(tokens[:, 1:], (0, 1)).clamp(min=0))


def neighbor_matches_of_last(tokens: Tensor, neighbors: Tensor, neighbor_lengths: Tensor, chunk_length: int) -> Matches:
    """As `neighbor_matches` for the last token of each row only: Q = 1, S = K·R.

    Args:
        tokens: as in `context_matches_of_last`.
        neighbors: int64 [B, K, R], of the last complete chunk of each row.
        neighbor_lengths: int64 [B, K].
        chunk_length: m.
    """
    longest = _longest_in_chunk(chunk_length)
    lengths = match_lengths(F.pad(tokens, (longest - 1, 0), value=-1)[:, None, -longest:], neighbors, longest)
    votes = torch.arange(1, neighbors.shape[2] + 1, device=tokens.device) < neighbor_lengths[..., None]
    lengths = lengths.masked_fill(~votes[:, :, None], -1)  # [B, K, 1, R]
    return Matches(lengths.transpose(1, 2).flatten(2), F.pad(neighbors[..., 1:], (0, 1)).flatten(1))


def _longest_in_chunk(chunk_length: int) -> int:
    """A match in neighbors has at most m tokens: the ones before may be of another document."""
    return min(LONGEST, 1 << (chunk_length.bit_length() - 1))


class Windows(NamedTuple):
    """The queries of `neighbor_matches`: [B, T, ...] to windows [B'·U, m, ...] and back."""

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
        agree: those that vote for the token that follows the longest match; of several such tokens that with the largest id.
    """

    all: Tensor
    right: Tensor
    agree: Tensor


def levels(matches: Matches) -> Tensor:
    """Number of `MATCH_LENGTHS` that each match reaches, int8 [N, Q, S]: 0 to L."""
    reached = torch.zeros_like(matches.lengths)
    for length in MATCH_LENGTHS:
        reached = reached + (matches.lengths >= length)
    return reached


_COLUMNS = 4 * (1 + len(MATCH_LENGTHS))
"""Columns of `_counted`: four for each number of reached lengths, 0 to L."""
_BLOCK = 1 << 24
"""Positions that are counted at a time on a GPU, in 0.5 GB."""


def counts_by_length(matches: Matches, labels: Tensor) -> Counts:
    """Count the positions that vote, for labels [N, Q]. Counts need no gradient, and little memory."""
    counted = torch.ops.retro.count_votes if labels.device.type == "cuda" else _counted
    counts = counted(*matches, labels)[..., 4:].unflatten(2, (-1, 4)).float()
    neither, agrees, right, both = counts.flip(2).cumsum(2).flip(2).unbind(3)
    return Counts(neither + agrees + right + both, right + both, agrees + both)


def _counted(lengths: Tensor, following: Tensor, labels: Tensor) -> Tensor:
    """Positions of each query by column, int32 [N, Q, 4 + 4 L]: 4 reached lengths + 2 votes for the label + 1 agrees."""
    following = following[:, None]
    # By length, then by id. So it does not depend on the order of neighbors.
    best = ((lengths.long() << 32) + following).amax(2, keepdim=True)
    agree = following == best & (1 << 32) - 1
    column = (4 * levels(Matches(lengths, following)) + 2 * (following == labels[..., None]) + agree).long()
    one = torch.ones((), dtype=torch.int32, device=column.device)
    counts = torch.zeros(*column.shape[:2], _COLUMNS, dtype=torch.int32, device=column.device)
    return counts.scatter_add(2, column, one.expand_as(column))


# Opaque to torch.compile: Inductor puts it into one kernel, which writes the columns in a first loop and reads them in a second one
# without a barrier. Triton may give the loops other threads, which then read what is not yet written (pytorch/pytorch#190519): on an
# H100, with 128 positions, indices were out of bounds.
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
    return labels.new_empty((*labels.shape, _COLUMNS), dtype=torch.int32)
