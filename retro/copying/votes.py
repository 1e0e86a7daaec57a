"""Votes of positions in a text: those of the own context, or of neighbors.

Every source gives the same evidence, for each of `MATCH_LENGTHS`: how many positions vote for the next token after a
match at least as long, which share of them agrees, and which share votes for the label. Numbers of votes and their
shares are not learned. Letters of the shape comments as in `head.py`.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retro.copying.matches import Matches, Windows, counts_by_length, levels


class LengthVotes(NamedTuple):
    """What a source says about the next token, for each length: float32 [..., L] each. 0 where no position has such a
    match.

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
    """What the queries of a batch can copy from positions of a text.

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

    def evidence(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """See `source.Votes`."""
        counts = counts_by_length(self.matches, self.split(labels))
        total = counts.all.clamp(min=1)
        has = (counts.all > 0).float()
        votes = LengthVotes((1 + total.log2()) * has, counts.agree / total, counts.right / total, has)
        return self.join(votes.stacked(), labels.shape[1]), self.join(counts.best, labels.shape[1])

    def candidates(self, shares: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """See `source.Votes`."""
        num_tokens = shares.shape[1]
        # A position has a part of the share of every length that its match reaches.
        of_position = self.split(shares * (1 - sizes).exp2())  # share / number of votes
        weights = F.pad(of_position.cumsum(-1), (1, 0)).gather(2, levels(self.matches).long())  # [N, Q, S]
        following = self.matches.following[:, None].expand_as(weights)
        return self.join(following, num_tokens), self.join(weights, num_tokens)


class RowMatches(NamedTuple):
    """What the next tokens of N rows can copy from positions of a text.

    Attributes:
        matches: of one query a row: Q = 1.
    """

    matches: Matches

    def evidence(self) -> tuple[np.ndarray, np.ndarray]:
        """See `source.VotesOfRows`."""
        any_label = self.matches.lengths.new_zeros((len(self.matches.lengths), 1), dtype=torch.int64)
        votes, best = SourceMatches(self.matches).evidence(any_label)
        return votes[:, 0].cpu().numpy(), best[:, 0].cpu().numpy()

    def candidates(self, shares: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `source.VotesOfRows`."""
        device = self.matches.lengths.device
        tables = (torch.from_numpy(table.astype(np.float32))[:, None].to(device) for table in (shares, sizes))
        following, weights = SourceMatches(self.matches).candidates(*tables)
        return following[:, 0].cpu().numpy(), weights[:, 0].cpu().numpy()

    def of_rows(self, indices: list[int]) -> SourceMatches:
        """See `source.VotesOfRows`."""
        return SourceMatches(Matches(*(part[indices] for part in self.matches)))
