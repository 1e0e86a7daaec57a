"""Copying from the whole datastore: the tokens after the longest match of the text vote for the next token.

The search runs for every token instead of every chunk, and is exact (infini-gram: Liu et al. 2024, arXiv 2401.17377). The votes are
stored (`indexing/suffixes/votes.py`), or found while a text is generated. There is no attention to learn, only the gate:

    p_datastore(w) = votes for w / all votes        gate: a table by length of the match, number of votes, and whether they agree

Letters of the shape comments as in `copy_head.py`. S tokens of each query have votes.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from retro.model.copy_matches import TABLE_STEP

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
"""Match lengths at which a row of the gate's table begins."""
COUNTS = (1, 2, 4, 8)
"""Numbers of votes at which a column begins."""

_AGREED = (
    (-3.3, -3.7, -3.0, -2.6, -1.7, -1.0, -0.6, 0.4, 0.5, 0.9, 1.3, 2.3),
    (-2.7, -2.4, -1.9, -1.2, -0.5, -0.1, 0.7, 0.9, 0.9, 1.2, 1.6, 2.1),
    (-2.3, -1.4, -0.5, -0.2, 0.2, 0.8, 1.4, 1.6, 2.2, 2.4, 2.4, 2.6),
    (-0.3, -0.3, 0.4, 1.0, 1.1, 1.7, 2.0, 2.3, 2.7, 3.1, 3.2, 3.5),
)
_DISAGREED = (
    (-3.8, -4.0, -3.6, -2.9, -2.8, -2.4, -2.2, -1.5, -1.4, -1.6, -1.2, -0.9),
    (-3.8, -4.0, -3.6, -2.9, -2.8, -2.4, -2.2, -1.5, -1.4, -1.6, -1.2, -0.9),
    (-4.1, -3.8, -3.3, -2.6, -2.6, -2.1, -1.5, -1.3, -1.1, -0.8, -0.8, -0.4),
    (-4.3, -3.5, -2.8, -1.9, -1.4, -1.3, -0.5, -0.5, -0.4, 0.0, 0.0, 0.1),
)
"""Initial tables, a row for each of `COUNTS`: near those fitted to a model of 135M parameters with three corpora, which were alike
(docs/results/retrieval-gain.md). One vote cannot disagree, so that row is not used."""


class DatastoreSource(nn.Module):
    """The gate of copying from the datastore."""

    TABLES = ("agreed", "disagreed")

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.disagreed = nn.Parameter(torch.zeros(len(LENGTHS), len(COUNTS)))
        self.agreed = nn.Parameter(torch.zeros(len(LENGTHS), len(COUNTS)))
        self.gate = nn.Parameter(torch.zeros(d_model))

    @torch.no_grad()
    def initialize(self) -> None:
        """Begin near the tables that were fitted to trained models: the gate opens with length, votes and agreement."""
        self.agreed.copy_(torch.tensor(_AGREED).T / TABLE_STEP)
        self.disagreed.copy_(torch.tensor(_DISAGREED).T / TABLE_STEP)
        self.gate.zero_()

    @property
    def tables(self) -> Tensor:
        """Log-odds of the gate if all votes agree, and if they do not, by length and number of votes: float32 [2, 12, 4]."""
        return TABLE_STEP * torch.stack((self.agreed, self.disagreed))

    def log_odds(self, votes: "DatastoreVotes") -> Tensor:
        """Log-odds of the gate against the vocabulary, before the term from the activations: float32 [B, T]; -inf without votes."""
        lengths, counts = (torch.tensor(bounds, device=votes.length.device) for bounds in (LENGTHS, COUNTS))
        total = votes.counts.sum(-1)
        row = torch.bucketize(votes.length, lengths, right=True) - 1
        column = torch.bucketize(total, counts, right=True) - 1
        agree = (votes.counts > 0).sum(-1) == 1
        cell = (row.clamp(min=0), column.clamp(min=0))
        return (TABLE_STEP * self.agreed[cell].where(agree, self.disagreed[cell])).masked_fill(total == 0, -torch.inf)


class DatastoreVotes(NamedTuple):
    """Votes of the datastore for the token after each one.

    Attributes:
        source: the gate.
        length: of the longest match, int64 [B, T]; 0 = none.
        tokens: int64 [B, T, S].
        counts: votes for these tokens, int64 [B, T, S].
    """

    source: DatastoreSource
    length: Tensor
    tokens: Tensor
    counts: Tensor

    @classmethod
    def of(cls, source: DatastoreSource, votes: Tensor) -> "DatastoreVotes":
        """Votes from those of `Inputs`, int64 [B, T, 1 + 2 S]."""
        tokens, counts = votes[..., 1:].chunk(2, dim=-1)
        return cls(source, votes[..., 0].contiguous(), tokens, counts)

    @property
    def shares(self) -> Tensor:
        """p_datastore of the tokens, float32 [B, T, S]; 0 without votes."""
        return self.counts / self.counts.sum(-1, keepdim=True).clamp(min=1)

    def log_odds(self, hidden: Tensor) -> Tensor:
        """Log-odds of the gate against the vocabulary, from activations [B, T, D]: float32 [B, T]."""
        return self.source.log_odds(self) + hidden @ self.source.gate

    def probability(self, labels: Tensor) -> Tensor:
        """p_datastore of labels [B, T]: float32 [B, T]."""
        return (self.shares * (self.tokens == labels[..., None])).sum(-1)

    def candidates(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """What can follow each token [B, T, S], and its probability, float32 [B, T, S]."""
        assert self.tokens.shape[1] == num_tokens
        return self.tokens, self.shares

    def join(self, x: Tensor, num_tokens: int, fill: float = 0.0) -> Tensor:
        """As `SourceMatches.join`: each token is its own query."""
        return x
