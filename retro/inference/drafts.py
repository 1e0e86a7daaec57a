"""Drafts: tokens that may come next, because they followed the same tokens before. One pass of the decoder verifies
them.

                ┌────────── token by token ───────────┐
                ▼                                     │
    last tokens ─ what followed them in the text itself, its neighbors and the datastore: of their guesses that of the
                │ source that was right most often
                └─► up to 8 tokens ─ passes that drafts saved and cost ─► as many as are worth it

This is speculative decoding (Leviathan et al. 2023, arXiv 2211.17192) without a draft model, as in prompt lookup
decoding (Saxena 2023) and REST (He et al. 2024, arXiv 2311.08252). A pass over nine tokens takes less than twice as
long as one over one, since both read all weights. The generated tokens are those without drafts, see
`generation.Batch`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from indexing.suffixes.votes import LENGTHS
from retro.copying.datastore import evidence_of
from retro.copying.rows import WholeDatastore

LONGEST_DRAFT = 8
"""Largest number of tokens of a draft."""

LONGEST_MATCH = 16
"""Longer matches count as this long."""

_RATES = [0.05, 0.15, 0.3, 0.6, 0.8]
_DATASTORE_RATES = [0.05, 0.15, 0.4, 0.1, 0.4, 0.6]
_TEXT, _NEIGHBORS, _DATASTORE = 0, len(_RATES), 2 * len(_RATES)
_LEAST_CHANCE = 0.05
"""A place that is reached less often is not searched."""


class Guess(NamedTuple):
    """A token that a source expects.

    Attributes:
        kind: index of `Account.rates`.
        token: its id.
    """

    kind: int
    token: int


class Proposal(NamedTuple):
    """A draft before it is decided how many of its tokens are read.

    Attributes:
        tokens: int64 [d].
        chances: that a draft is right up to each of them, float64 [d].
        guesses: of all sources for each place.
    """

    tokens: np.ndarray
    chances: np.ndarray
    guesses: list[list[Guess]]


NOTHING = Proposal(np.zeros(0, np.int64), np.zeros(0), [])


def propose(
    tokens: np.ndarray,
    rates: Sequence[float],
    neighbors: Sequence[np.ndarray] = (),
    datastore: WholeDatastore | None = None,
    most: int = LONGEST_DRAFT,
) -> Proposal:
    """Guess the tokens after a text, each as if those before it were right.

    Args:
        tokens: the text so far, int64 [t].
        rates: of the text's `Account`.
        neighbors: tokens of each neighbor that the text reads, without padding.
        datastore: searched too; None = it is not.
        most: tokens that there is room for.
    """
    chosen, chances, guesses = list[int](), [1.0], list[list[Guess]]()
    while len(chosen) < most and chances[-1] > _LEAST_CHANCE:
        of_place = [*_guesses(tokens, neighbors, datastore)]
        if not of_place:
            break
        best = max(of_place, key=lambda guess: rates[guess.kind])
        guesses.append(of_place)
        chosen.append(best.token)
        chances.append(chances[-1] * rates[best.kind])
        tokens = np.append(tokens, best.token)
    return Proposal(np.array(chosen, np.int64), np.array(chances[1:]), guesses)


def _guesses(tokens: np.ndarray, neighbors: Sequence[np.ndarray], datastore: WholeDatastore | None) -> Iterator[Guess]:
    length, following = longest_match(tokens, tokens)
    if length:
        yield Guess(_TEXT + _kind(length), following)
    length, following = max((longest_match(neighbor, tokens) for neighbor in neighbors), default=(0, 0))
    if length:
        yield Guess(_NEIGHBORS + _kind(length), following)
    if datastore is not None and len(tokens):
        votes, best = evidence_of(datastore.last_votes([tokens]))
        longest = np.count_nonzero(votes[0, :, 0])  # votes at a length are among those of all shorter ones
        if longest:
            agree = sum(votes[0, longest, 1] >= part for part in (0.5, 0.8))
            yield Guess(_DATASTORE + 3 * (longest == len(LENGTHS)) + int(agree), int(best[0]))


def longest_match(source: np.ndarray, tokens: np.ndarray) -> tuple[int, int]:
    """Length of the longest match of the last tokens [t] in a source [s], 0 = none, and the token after it; after the
    last one of several."""
    ends = np.flatnonzero(source[:-1] == tokens[-1])
    if not len(ends):
        return 0, 0
    length = 1
    while length < min(LONGEST_MATCH, len(tokens)):
        before = ends[ends >= length]
        before = before[source[before - length] == tokens[-1 - length]]
        if not len(before):
            break
        ends, length = before, length + 1
    return length, int(source[ends[-1] + 1])


def _kind(length: int) -> int:
    """Of a match in a text, among 1, 2 to 3, 4 to 7, 8 to 15, and more tokens."""
    return min(len(_RATES) - 1, length.bit_length() - 1)


CREDIT, CREDIT_PER_TOKEN = 0.35, 0.01
"""Passes that the drafts of a text may lose at first, and for each token of the text."""


@dataclass
class Account:
    """Passes that the drafts of a text saved and cost, and how often guesses were right.

    A draft is read if it saves more than it costs on average, and only on credit: if all are wrong, a text of 48 tokens
    loses 0.83 passes, 1.7% of its time. After that one is tried now and then. Guesses that are not read count in the
    rates too, so drafts also begin again when they are right.

    Attributes:
        balance: passes that a draft may cost.
        rates: share of right guesses of the text itself, by length of the match (`_kind`); of the neighbors, the same;
            and of the datastore, with a longest match below 16 tokens, if below a half of its votes agree, below 0.8,
            or more; and the same for longer ones. The last guesses count most.
    """

    balance: float = CREDIT
    rates: list[float] = field(default_factory=lambda: [*_RATES, *_RATES, *_DATASTORE_RATES])

    def worth_reading(self, proposal: Proposal, costs: np.ndarray) -> int:
        """Number of proposed tokens that saves most on average. `costs`: of drafts of 0, 1 … tokens, in passes."""
        costs = costs[: 1 + len(proposal.tokens)]
        saved = np.append(0.0, np.cumsum(proposal.chances))[: len(costs)]
        return int(np.where(costs <= self.balance, saved - costs, 0).argmax())

    def update(self, proposal: Proposal, tokens: Sequence[int], cost: float) -> None:
        """Compare the next tokens of the text with the guesses, up to the first wrong one. `cost`: of the draft that
        was read."""
        self.balance += len(tokens) - 1 - cost + CREDIT_PER_TOKEN * len(tokens)
        for proposed, guesses, token in zip(proposal.tokens.tolist(), proposal.guesses, tokens, strict=False):
            for guess in guesses:
                self.rates[guess.kind] += ((guess.token == token) - self.rates[guess.kind]) / 8
            if proposed != token:
                return
