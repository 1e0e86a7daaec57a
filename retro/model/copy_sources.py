"""What a token can copy from: positions of its own context or of neighbors, or the votes of the whole datastore.

Every source says the same about itself, for each of `MATCH_LENGTHS`: how many positions vote for the next token after a match
at least as long, which share of them agrees, and which share votes for the label. Numbers of votes and their shares are not learned.
The search in the whole datastore runs for every token instead of every chunk, and is exact (infini-gram: Liu et al. 2024,
arXiv 2401.17377). Its votes are stored (`indexing/suffixes/votes.py`), or found while a text is generated.

Letters of the shape comments as in `copy_head.py`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from indexing.suffixes.votes import KEPT, LENGTHS, SHARES
from retro.model.copy_matches import Matches, Windows, counts_by_length, levels


class Evidence(NamedTuple):
    """What a source says about the next token, for each length: float32 [..., L] each. 0 where no position has such a match.

    Attributes:
        size: 1 + log2 of the number of votes.
        agree: largest share of the votes for one token.
        right: share of the votes for the label.
        known: share of the votes whose tokens are known. The rest goes to the vocabulary.
    """

    size: Tensor
    agree: Tensor
    right: Tensor
    known: Tensor

    def stacked(self) -> Tensor:
        """As one tensor [..., L, 4]."""
        return torch.stack(self, -1)


class SourceMatches(NamedTuple):
    """What the queries of a batch can copy from context or neighbors.

    Attributes:
        matches: its matches.
        windows: of its queries; None = one query per token.
    """

    matches: Matches
    windows: Windows | None = None

    def split(self, x: Tensor) -> Tensor:
        """Values of tokens to those of queries."""
        return x if self.windows is None else self.windows.split(x)

    def join(self, x: Tensor, num_tokens: int, fill: float = 0.0) -> Tensor:
        """Values of queries to those of tokens."""
        return x if self.windows is None else self.windows.join(x, num_tokens, fill)

    def evidence(self, labels: Tensor) -> Tensor:
        """`Evidence` about labels [B, T], stacked: [B, T, L, 4]."""
        counts = counts_by_length(self.matches, self.split(labels))
        total = counts.all.clamp(min=1)
        has = (counts.all > 0).float()
        evidence = Evidence((1 + total.log2()) * has, counts.agree / total, counts.right / total, has)
        return self.join(evidence.stacked(), labels.shape[1])

    def candidates(self, shares: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """What can follow each token [B, T, S], and its probability, float32 [B, T, S].

        Args:
            shares: of the lengths, float32 [B, T, L].
            sizes: from the evidence, float32 [B, T, L].
        """
        num_tokens = shares.shape[1]
        # A position has a part of the share of every length that its match reaches.
        of_position = self.split(shares * (1 - sizes).exp2())  # share / number of votes
        weights = F.pad(of_position.cumsum(-1), (1, 0)).gather(2, levels(self.matches).long())  # [N, Q, S]
        following = self.matches.following[:, None].expand_as(weights)
        return self.join(following, num_tokens), self.join(weights, num_tokens)


class DatastoreVotes(NamedTuple):
    """Votes of the whole datastore for the token after each one.

    Attributes:
        tokens: int64 [B, T, S].
        sizes: as in `Evidence` for each of `LENGTHS`, rounded down, float32 [B, T, L - 1].
        shares: of the votes for these tokens, float32 [B, T, L - 1, S].
    """

    tokens: Tensor
    sizes: Tensor
    shares: Tensor

    @classmethod
    def of(cls, votes: Tensor) -> "DatastoreVotes":
        """Votes from those of `Inputs`, int64 [B, T, 32]."""
        of_lengths = votes[..., 1 + KEPT :].unflatten(-1, (len(LENGTHS), 1 + KEPT)).float()
        return cls(votes[..., 1 : 1 + KEPT].contiguous(), of_lengths[..., 0], of_lengths[..., 1:] / SHARES)

    def evidence(self, labels: Tensor) -> Tensor:
        """As `SourceMatches.evidence`."""
        right = (self.shares * (self.tokens == labels[..., None])[..., None, :]).sum(-1)
        found = Evidence(self.sizes, self.shares.amax(-1), right, self.shares.sum(-1)).stacked()
        return F.pad(found, (0, 0, 1, 0))  # nothing votes at length 0

    def candidates(self, shares: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        """As `SourceMatches.candidates`."""
        return self.tokens, (self.shares * shares[..., 1:, None]).sum(-2)


Source = SourceMatches | DatastoreVotes
