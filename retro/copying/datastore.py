"""The source `datastore`: what follows the last tokens of the text in the whole datastore.

The search runs for every token instead of every chunk, and is exact (infini-gram: Liu et al. 2024, arXiv 2401.17377).
Training reads stored votes (`indexing/suffixes/votes.py`), generation finds them. A generated token needs few numbers
of the votes, so compiled loops read them there: operations of torch would take several microseconds each.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from indexing.machine import compiled
from indexing.suffixes.votes import COLUMNS, KEPT, LENGTHS, SHARES
from retro.batch.inputs import Inputs
from retro.copying.matches import MATCH_LENGTHS
from retro.copying.source import CopySource, StepTexts, put
from retro.copying.votes import LengthVotes


class DatastoreVotes(NamedTuple):
    """Votes of the whole datastore for the token after each one.

    Attributes:
        tokens: int64 [B, T, S].
        sizes: as in `LengthVotes` for each of `LENGTHS`, rounded down, float32 [B, T, L - 1].
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

    def evidence(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """See `Votes`."""
        right = (self.shares * (self.tokens == labels[..., None])[..., None, :]).sum(-1)
        votes = LengthVotes(self.sizes, self.shares.amax(-1), right, self.shares.sum(-1)).stacked()
        longest = ((self.sizes > 0).sum(-1) - 1).clamp(min=0)  # votes at a length are among those of all shorter ones
        of_longest = self.shares.gather(2, longest[..., None, None].expand(*longest.shape, 1, KEPT))[:, :, 0]
        best = self.tokens.gather(2, of_longest.argmax(-1, keepdim=True))[..., 0]
        return F.pad(votes, (0, 0, 1, 0)), best  # nothing votes at length 0

    def candidates(self, shares: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """See `Votes`."""
        return self.tokens, (self.shares * shares[..., 1:, None]).sum(-2)


class RowVotes(NamedTuple):
    """Votes for the next tokens of N rows.

    Attributes:
        columns: int64 [N, 32], as in `Inputs.votes`; zeros without votes.
        device: of the model.
    """

    columns: np.ndarray
    device: torch.device

    def evidence(self) -> tuple[np.ndarray, np.ndarray]:
        """See `VotesOfRows`."""
        return evidence_of(self.columns)

    def candidates(self, shares: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `VotesOfRows`."""
        weights = np.zeros((len(self.columns), KEPT))
        compiled(_weigh)(self.columns, SHARES, shares, weights)
        return self.columns[:, 1 : 1 + KEPT], weights.astype(np.float32)

    def of_rows(self, indices: list[int]) -> DatastoreVotes:
        """See `VotesOfRows`."""
        return DatastoreVotes.of(put(self.columns[indices][:, None], self.device))


def evidence_of(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Evidence float32 [N, L, 4] and best candidates int64 [N] from votes of N rows, int64 [N, 32] as in
    `Inputs.votes`."""
    votes = np.zeros((len(columns), len(MATCH_LENGTHS), 4), np.float32)
    best = np.zeros(len(columns), np.int64)
    compiled(_read_votes)(columns, SHARES, votes, best)
    return votes, best


def _read_votes(votes: np.ndarray, whole: int, evidence: np.ndarray, best: np.ndarray) -> None:
    """Write the evidence [N, L, 4] and the best candidates [N]. `whole` is the sum of the shares of votes at a length."""
    num_lengths, num_kept = evidence.shape[1], votes.shape[1] // (evidence.shape[1] - 1) - 1
    for row in range(len(votes)):
        for length in range(1, num_lengths):  # nothing votes at length 0
            first, most, known = 1 + num_kept + (length - 1) * (1 + num_kept), 0, 0
            for place in range(first + 1, first + 1 + num_kept):
                if votes[row, place] > most:  # of the longest length that has votes: it comes last
                    best[row] = votes[row, place - first]
                    most = votes[row, place]
                known += votes[row, place]
            evidence[row, length, 0] = votes[row, first]
            evidence[row, length, 1] = most / whole
            evidence[row, length, 3] = known / whole


def _weigh(votes: np.ndarray, whole: int, shares: np.ndarray, weights: np.ndarray) -> None:
    """Add up the probabilities [N, KEPT] of the tokens that votes are for, from shares [N, L]."""
    num_kept = weights.shape[1]
    for row in range(len(votes)):
        for length in range(1, shares.shape[1]):
            first = 2 + num_kept + (length - 1) * (1 + num_kept)
            for place in range(num_kept):
                weights[row, place] += shares[row, length] * votes[row, first + place] / whole


def _of_batch(inputs: Inputs, chunk_length: int) -> DatastoreVotes:
    return DatastoreVotes.of(inputs.votes)


def _of_step(texts: StepTexts) -> RowVotes | None:
    """The votes for rows with retrieval ON; None without such rows. One search serves all of them.

    A text without tokens, as after a prompt that is given as embeddings, has none.
    """
    searching = [index for index, row in enumerate(texts.rows) if row.retrieve and len(texts.histories[index])]
    if texts.datastore is None or not searching:
        return None
    votes = np.zeros((len(texts.rows), COLUMNS), np.int64)
    votes[searching] = texts.datastore.last_votes([texts.histories[index] for index in searching])
    return RowVotes(votes, texts.device)


DATASTORE = CopySource(
    "datastore",
    reads=3,
    of_retrieval=True,
    switched=True,
    is_present=lambda inputs: inputs.votes is not None,
    of_batch=_of_batch,
    of_step=_of_step,
)
