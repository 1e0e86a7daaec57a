"""Copying: next tokens that followed the same text before, mixed with those that the vocabulary predicts.

    p(w) = (1 - g_context - g_neighbors) softmax(logits)(w) + g_context p_context(w) + g_neighbors p_neighbors(w)

There are two sources: the preceding tokens of the same document (context), and the neighbors of the preceding chunk. Each is
an attention over positions, and a position votes for the token that follows it (pointer networks: Merity et al. 2017,
arXiv 1609.07843; kNN-LM: Khandelwal et al. 2020, arXiv 1911.00172). The score of a position is a learned function of its match
length: how many tokens up to this position, at most 16, equal the last tokens that were read. The gates g depend on the
activations and on what was found. Positions of neighbors may have a score by content in addition (`copy_content.py`). Not in the
paper of RETRO.

    tokens, neighbors ─ match lengths ─┬─ positions counted by match length (34 numbers per token) ─ p(label) ─┐
                                       └─ longest match, agreement of its votes ─ gates ───────────────────────┴─ loss

Match lengths are exact and need no gradient, so training keeps 34 counts per token and source (for and against
the label, for each of 17 lengths) instead of an attention matrix. Scores by content need the matrix.
Retrieval OFF removes the term of the neighbors: the other gates stay in proportion.

Letters of the shape comments as in `retro.py`. In addition, N is a batch of texts with S positions each, Q the queries of a text.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retro.model.copy_content import Content
from retro.model.loss import Copying
from retro.model.masks import neighbor_mask, some_key
from retro.model.settings import CopyHeadSettings

LONGEST = 16
"""Longer matches count as this long. A power of two, see `match_lengths`."""
_STEP = 10.0
"""Tables and gates are multiplied by it: AdamW moves each parameter by about the learning rate, too little for a log-odds."""

_SCORES = (-2.5, 4.0, 6.3, 8.0, 8.7, 9.5, 10.5, 12.5, 15.5, 17.5, 19.5, 22.0, 24.0, 26.0, 28.0, 30.0, 32.0)
_AGREED = (-5.0, -2.4, -1.2, -0.6, -0.1, 0.2, 0.4, 0.5, 0.7, 0.8, 0.9, 1.0)
_DISAGREED = (-5.0, -2.6, -1.8, -1.6, -1.4)
"""Initial tables by match length; the last number is repeated. They are near those of fitted and of trained copy heads, which
were alike for both sources and for bases with and without copying (docs/results/retrofit.md)."""


class Matches(NamedTuple):
    """Where the last tokens of each query occur in its source.

    Attributes:
        lengths: match length of each position, int8 [N, Q, S]; -1 = the query cannot read the position.
        following: the token that each position votes for, int64 [N, S].
    """

    lengths: Tensor
    following: Tensor


# ------------------------------------------------------------------------------------------------------------- matches


# Opaque to torch.compile: fused code would compute each length again for every position that reads it, 10 times slower.
@torch.library.custom_op("retro::match_lengths", mutates_args=())
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
    lengths, n = (read[..., :, None] == source[..., None, :]).to(torch.int8), 1
    while n < longest:
        before = F.pad(lengths, (n, 0, n, 0))[..., :-n, :-n]
        lengths = lengths + (lengths == n) * before
        n *= 2
    return lengths[..., longest - 1 :, :].contiguous()


@match_lengths.register_fake
def _(read: Tensor, source: Tensor, longest: int = LONGEST) -> Tensor:
    """The shape of the result, which torch.compile needs."""
    shape = torch.broadcast_shapes(read.shape[:-1], source.shape[:-1])
    return read.new_empty((*shape, read.shape[-1] - longest + 1, source.shape[-1]), dtype=torch.int8)


def context_matches(tokens: Tensor, documents: Tensor | None, chunk_length: int) -> Matches:
    """Matches in the preceding tokens of the same document: N = B, Q = S = T.

    Args:
        tokens: int64 [B, T].
        documents: int64 [B, ceil(T / m)], or None, as in `Retro.hidden`.
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


def neighbor_matches(
    tokens: Tensor, neighbors: Tensor, neighbor_lengths: Tensor | None, documents: Tensor | None, chunk_length: int
) -> Matches:
    """Matches in the neighbors of complete chunks: N = B·U, Q = m, S = K·R.

    Queries are those of chunked cross-attention: the last token of chunk u and the first m - 1 of the next one. Earlier tokens of
    a match are in chunk u too, since a match has at most m tokens here.

    Args:
        tokens: int64 [B, T].
        neighbors: int64 [B, U, K, R], U = T // m.
        neighbor_lengths: int64 [B, U, K] or None, as in `Retro.hidden`.
        documents: as in `Retro.hidden`.
        chunk_length: m.
    """
    m, num_chunks = chunk_length, neighbors.shape[1]
    longest = _longest_in_chunk(m)
    padded = F.pad(tokens, (0, (num_chunks + 1) * m - 1 - tokens.shape[1]), value=-1)
    windows = padded[:, m - longest :].unfold(1, m + longest - 1, m)  # [B, U, m + longest - 1]
    lengths = match_lengths(windows[:, :, None], neighbors, longest)  # [B, U, K, m, R]
    real = neighbor_mask(neighbors, neighbor_lengths, documents)
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
    """The queries of `neighbor_matches`: [B, T, ...] to windows [B·U, m, ...] and back."""

    chunk_length: int
    num_chunks: int

    def split(self, x: Tensor) -> Tensor:
        """Values of tokens [B, T, ...] to those of queries [B·U, m, ...]; zeros after the last token."""
        m = self.chunk_length
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, (self.num_chunks + 1) * m - 1 - x.shape[1]))
        return x[:, m - 1 :].unflatten(1, (self.num_chunks, m)).flatten(0, 1)

    def join(self, x: Tensor, num_tokens: int, fill: float = 0.0) -> Tensor:
        """Values of queries [B·U, m, ...] to those of tokens [B, T, ...]; `fill` for the m - 1 tokens before the first query."""
        x = x.unflatten(0, (-1, self.num_chunks)).flatten(1, 2)
        return F.pad(x, (0, 0) * (x.ndim - 2) + (self.chunk_length - 1, 0), value=fill)[:, :num_tokens]


# ------------------------------------------------------------------------------------------------------------- mixture


class CopySource(nn.Module):
    """The attention over one source, and its gate."""

    def __init__(self, d_model: int, content_width: int = 0) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(LONGEST + 1))  # by match length
        self.disagreed = nn.Parameter(torch.zeros(LONGEST + 1))  # gate if the longest matches vote for different tokens
        self.agreed = nn.Parameter(torch.zeros(LONGEST + 1))  # gate if they vote for one token
        self.gate = nn.Parameter(torch.zeros(d_model))
        self.content = Content(d_model, content_width) if content_width else None

    @torch.no_grad()
    def initialize(self) -> None:
        """Begin as a suffix matcher: a longer match outweighs shorter ones, and the gate opens with its length."""
        for table, first in ((self.scores, _SCORES), (self.agreed, _AGREED), (self.disagreed, _DISAGREED)):
            filled = torch.tensor(first + first[-1:] * (LONGEST + 1 - len(first)), device=table.device)
            table.copy_(filled / _STEP)
        self.gate.zero_()
        if self.content is not None:
            self.content.initialize()

    @property
    def tables(self) -> Tensor:
        """By match length, float32 [3, 17]: scores, and log-odds of the gate if the longest matches agree, and if they do not."""
        return _STEP * torch.stack((self.scores, self.agreed, self.disagreed))

    def attention(self, matches: Matches, by_content: Tensor | float = 0.0) -> Tensor:
        """Attention of queries to positions, float32 [N, Q, S]; 0 for a query that can read none.

        Args:
            matches: match lengths, of which each has a score.
            by_content: scores added to these, [N, Q, S].
        """
        readable = matches.lengths >= 0
        scores = (_STEP * self.scores)[matches.lengths.long().clamp(min=0)] + by_content
        return scores.masked_fill(~some_key(readable), -torch.inf).softmax(-1) * readable

    def probability(self, wrong: Tensor, right: Tensor) -> Tensor:
        """The attention to positions that vote for the label, summed: float32 [N, Q], from the counts of `count_votes`."""
        scores = _STEP * self.scores
        weights = (scores - scores.detach().max()).exp()
        total = (wrong + right) @ weights
        return (right @ weights) / (total + (total == 0))  # a query that can read no position: 0, and finite gradients

    def log_odds(self, longest: Tensor, agree: Tensor) -> Tensor:
        """Log-odds of the gate against the vocabulary without its activations' part, float32 [N, Q].

        -inf for a query that can read no position. The arguments are those of `longest_match`.
        """
        row = longest.clamp(min=0)
        table = self.agreed[row].where(agree, self.disagreed[row])
        return (_STEP * table).masked_fill(longest < 0, -torch.inf)


def count_votes(matches: Matches, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Count positions by match length: those that vote for another token than the label [N, Q], and those that vote for it.

    Counts need no gradient, and little memory: float32 [N, Q, 17] each.
    """
    right = matches.following[:, None] == labels[..., None]
    column = (2 * matches.lengths + 2 + right).long()  # columns 0 and 1: not readable
    one = torch.ones((), dtype=torch.int32, device=column.device)
    counts = torch.zeros(*column.shape[:2], 2 * LONGEST + 4, dtype=torch.int32, device=column.device)
    wrong, hits = counts.scatter_add(2, column, one.expand_as(column))[..., 2:].unflatten(2, (-1, 2)).float().unbind(3)
    return wrong, hits


def longest_match(matches: Matches) -> tuple[Tensor, Tensor]:
    """The longest match of each query [N, Q]: its length (-1 = none), and whether all matches as long vote for the same token."""
    # Of int8, compiled code for CPUs returns 0 if all are negative (pytorch/pytorch#191499, torch 2.13).
    longest = matches.lengths.int().amax(2).long()
    is_longest, following = matches.lengths == longest[..., None], matches.following[:, None]
    largest = following.masked_fill(~is_longest, -1).amax(2)
    smallest = following.masked_fill(~is_longest, torch.iinfo(torch.int64).max).amin(2)
    return longest, largest == smallest


class Found(NamedTuple):
    """One source of a batch.

    Attributes:
        source: its parameters.
        matches: its matches.
        windows: of its queries; None = one query per token.
        keys: of its positions, float32 [N, S, C]; None = scores by match length only.
    """

    source: CopySource
    matches: Matches
    windows: Windows | None = None
    keys: Tensor | None = None

    def split(self, x: Tensor) -> Tensor:
        """Values of tokens to those of queries."""
        return x if self.windows is None else self.windows.split(x)

    def join(self, x: Tensor, num_tokens: int, fill: float = 0.0) -> Tensor:
        """Values of queries to those of tokens."""
        return x if self.windows is None else self.windows.join(x, num_tokens, fill)

    def read(self, hidden: Tensor) -> "Read":
        """What the queries of activations [B, T, D] find, with an attention matrix if there are scores by content."""
        queries, content = self.split(hidden), self.source.content
        odds = self.source.log_odds(*longest_match(self.matches)) + queries @ self.source.gate
        if content is None or self.keys is None:
            return Read(odds, None)
        attention = self.source.attention(self.matches, content.scores(queries, self.keys))
        return Read(odds + (attention @ self.keys) @ content.gate, attention)

    def probability(self, read: "Read", labels: Tensor) -> Tensor:
        """The attention to positions that vote for the labels [B, T], summed: float32 [N, Q]."""
        if read.attention is None:
            return self.source.probability(*count_votes(self.matches, self.split(labels)))
        return (read.attention * self.votes(labels)).sum(2)

    def votes(self, labels: Tensor) -> Tensor:
        """Which positions vote for the labels [B, T]: bool [N, Q, S]."""
        return self.matches.following[:, None] == self.split(labels)[..., None]


class Read(NamedTuple):
    """What queries find in a source: log-odds of its gate against the vocabulary [N, Q], and with scores by content the attention."""

    log_odds: Tensor
    attention: Tensor | None


class Origins(NamedTuple):
    """Where the probability of labels [B, T] comes from, as far as it is copied from neighbors.

    Attributes:
        share: share of the probability of a label that is copied from the neighbors, float32 [B, T], 0 to 1.
        lengths: longest match in a neighbor among those that vote for the label, int64 [B, T]; -1 = no position votes for it.
            With scores by content, that of the position with the most attention instead.
        neighbors: number of this neighbor, the first one of several, int64 [B, T]; -1 = none.
        positions: the token of this neighbor that equals the label, int64 [B, T]; -1 = none.
    """

    share: Tensor
    lengths: Tensor
    neighbors: Tensor
    positions: Tensor


class CopyHead(nn.Module):
    """The sources of a model, and the mixture. Computed in float32."""

    def __init__(self, settings: CopyHeadSettings, d_model: int, chunk_length: int) -> None:
        super().__init__()
        self.chunk_length = chunk_length
        self.context = CopySource(d_model) if settings.context else None
        self.neighbors = CopySource(d_model, settings.content_width) if settings.neighbors else None

    def find(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        neighbors: Tensor | None = None,
        neighbor_lengths: Tensor | None = None,
        table: Tensor | None = None,
    ) -> list[Found]:
        """Matches in all sources; empty if there is nothing to copy from.

        The arguments are those of `Retro.hidden`. In addition `table`: the decoder's embeddings [V, D], for scores by content.
        """
        found, m = [], self.chunk_length
        if self.context is not None:
            found.append(Found(self.context, context_matches(tokens, documents, m)))
        if self.neighbors is not None and neighbors is not None and neighbors.numel() > 0:
            matches = neighbor_matches(tokens, neighbors, neighbor_lengths, documents, m)
            keys = None
            if self.neighbors.content is not None and table is not None:
                real = neighbor_mask(neighbors, neighbor_lengths, documents).flatten(0, 1)
                chunks = tokens[:, : neighbors.shape[1] * m].unflatten(1, (-1, m)).flatten(0, 1)
                keys = self.neighbors.content.keys(neighbors.flatten(0, 1), real, chunks, table)
            found.append(Found(self.neighbors, matches, Windows(m, neighbors.shape[1]), keys))
        return found

    def mixture_of(self, hidden: Tensor, labels: Tensor, found: list[Found]) -> Copying:
        """The mixture's parameters for labels [B, T], from activations [B, T, D]."""
        with torch.autocast(hidden.device.type, enabled=False):
            reads, shares = _read(hidden.float(), found)
            copied = torch.zeros(labels.shape, device=hidden.device)
            for share, each, read in zip(shares[1:], found, reads, strict=True):
                copied = copied + share.exp() * each.join(each.probability(read, labels), labels.shape[1])
        return Copying(shares[0], copied)

    def mixed(self, logits: Tensor, hidden: Tensor, found: list[Found], kept: Tensor | slice = slice(None)) -> Tensor:
        """Log-probabilities [B, T', V] of the mixture, from the logits [B, T', V] of the tokens `kept`.

        Args:
            logits: of the vocabulary.
            hidden: activations of all tokens [B, T, D].
            found: the sources.
            kept: T' of the T tokens.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            reads, shares = _read(hidden.float(), found)
            log_p = logits.float().log_softmax(-1) + shares[0][:, kept, None]
            copied = torch.zeros_like(log_p)
            for share, each, read in zip(shares[1:], found, reads, strict=True):
                weights = each.source.attention(each.matches) if read.attention is None else read.attention  # [N, Q, S]
                following = each.matches.following[:, None].expand_as(weights)
                weights, following = (each.join(x, hidden.shape[1])[:, kept] for x in (weights, following))
                copied = copied.scatter_add(2, following, weights * share[:, kept, None].exp())
            return torch.logaddexp(log_p, copied.clamp(min=torch.finfo(torch.float32).tiny).log())

    def origins(
        self, hidden: Tensor, labels: Tensor, losses: Tensor, found: list[Found], neighbor_length: int
    ) -> Origins:
        """Find where labels [B, T] were copied from.

        Args:
            hidden: activations [B, T, D].
            labels: int64 [B, T]; nothing votes for `IGNORED_LABEL`.
            losses: of the labels in nats, float32 [B, T].
            found: the sources.
            neighbor_length: R.
        """
        share, none = torch.zeros_like(losses, dtype=torch.float32), torch.full_like(labels, -1)
        number = next((n for n, each in enumerate(found) if each.source is self.neighbors), None)
        if number is None:
            return Origins(share, none, none, none)
        each, num_tokens = found[number], labels.shape[1]
        with torch.autocast(hidden.device.type, enabled=False):
            reads, shares = _read(hidden.float(), found)
            own = each.join(each.probability(reads[number], labels), num_tokens)
            share = (own * (shares[1 + number] + losses.float()).exp()).clamp(max=1.0)
        lengths = each.matches.lengths.masked_fill(~each.votes(labels), -1).long()  # [N, Q, S]
        attention = reads[number].attention
        places = (lengths if attention is None else attention.masked_fill(lengths < 0, -1.0)).argmax(2)
        lengths = lengths.gather(2, places[..., None])[..., 0]
        lengths, places = each.join(lengths, num_tokens, fill=-1), each.join(places, num_tokens, fill=-1)
        places = places.masked_fill(lengths < 0, -1)
        positions = (places % neighbor_length + 1).where(places >= 0, none)
        return Origins(share, lengths, places.div(neighbor_length, rounding_mode="floor"), positions)


def _read(hidden: Tensor, found: list[Found]) -> tuple[list[Read], Tensor]:
    """What activations [B, T, D] find in each source, and logs of the shares of vocabulary and sources, float32 [1 + sources, B, T]."""
    reads = [each.read(hidden) for each in found]
    odds = [each.join(read.log_odds, hidden.shape[1], -torch.inf) for each, read in zip(found, reads, strict=True)]
    return reads, torch.stack([hidden.new_zeros(hidden.shape[:2]), *odds]).log_softmax(0)
