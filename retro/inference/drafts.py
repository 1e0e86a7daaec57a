"""Drafts: tokens that may come next, because they followed the same tokens before. One pass of the decoder verifies
them.

    last tokens ─ their longest match in the text itself, its neighbors and the datastore ─ up to 8 tokens after it ─► draft
                                            passes that drafts saved and cost ─ how many of them are worth it ─────────┘

This is speculative decoding (Leviathan et al. 2023, arXiv 2211.17192) without a draft model, as in prompt lookup
decoding (Saxena 2023) and REST (He et al. 2024, arXiv 2311.08252). A pass over nine tokens takes less than twice as
long as one over one, since both read all weights. The generated tokens are those without drafts, see
`generation.Batch`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from retro.copying.rows import WholeDatastore

LONGEST_DRAFT = 8
"""Largest number of tokens of a draft."""

LONGEST_MATCH = 16
"""Longer matches count as this long."""


class Match(NamedTuple):
    """An earlier occurrence of the last tokens of a text.

    Attributes:
        length: number of equal tokens, at most `LONGEST_MATCH`; in the datastore at most 64.
        following: int64, tokens after it, at most `LONGEST_DRAFT`.
    """

    length: int
    following: np.ndarray


def draft(tokens: np.ndarray, neighbors: Iterable[np.ndarray] = (), datastore: WholeDatastore | None = None) -> Match:
    """Find the longest match of the last tokens. The tokens after it may come next.

    Args:
        tokens: the text so far, int64 [t].
        neighbors: tokens of each neighbor that the text reads, without padding.
        datastore: searched too; None = it is not.
    """
    matches = [match_in_text(tokens), *(match_in(neighbor, tokens) for neighbor in neighbors)]
    if datastore is not None:
        matches.append(Match(*datastore.continuation(tokens, LONGEST_DRAFT)))
    return max(matches, key=lambda match: match.length)


def match_in(source: np.ndarray, tokens: np.ndarray) -> Match:
    """Find the longest match of the last tokens [t] in a source [s]; the last one of several."""
    ends = np.flatnonzero(source[:-1] == tokens[-1])
    if not len(ends):
        return Match(0, source[:0])
    length = 1
    while length < min(LONGEST_MATCH, len(tokens)):
        before = ends[ends >= length]
        before = before[source[before - length] == tokens[-1 - length]]
        if not len(before):
            break
        ends, length = before, length + 1
    return Match(length, source[ends[-1] + 1 :][:LONGEST_DRAFT])


def match_in_text(tokens: np.ndarray) -> Match:
    """Find the longest match of the last tokens earlier in the same text [t]. A text that repeats its end is continued
    so."""
    match = match_in(tokens, tokens)
    return Match(match.length, np.resize(match.following, LONGEST_DRAFT)) if match.length else match


CREDIT, CREDIT_PER_TOKEN = 0.35, 0.01
"""Passes that the drafts of a text may lose at first, and for each token of the text."""


@dataclass
class Account:
    """Passes that the drafts of a text saved and cost, and how often its proposed tokens were right.

    A draft is read if it saves more than it costs on average, and only on credit: if all are wrong, a text of 48 tokens
    loses 0.83 passes, 1.7% of its time. After that one is tried now and then. Proposals that are not read count in the
    rates too, so drafts also begin again when they are right.

    Attributes:
        balance: passes that a draft may cost.
        rates: share of right tokens after matches of 1, 2 to 3, 4 to 7, and more tokens. The last ones count most.
    """

    balance: float = CREDIT
    rates: list[float] = field(default_factory=lambda: [0.05, 0.15, 0.3, 0.6])

    def worth_reading(self, match: Match, costs: np.ndarray) -> int:
        """Number of proposed tokens that saves most on average. `costs`: of drafts of 0, 1 … tokens, in passes."""
        costs = costs[: 1 + len(match.following)]
        saved = np.cumsum(self.rates[_kind(match)] ** np.arange(len(costs))) - 1
        return int(np.where(costs <= self.balance, saved - costs, 0).argmax())

    def update(self, match: Match, tokens: Sequence[int], cost: float) -> None:
        """Compare the next tokens of the text with those that were proposed, up to the first wrong one. `cost`: of the
        draft that was read."""
        self.balance += len(tokens) - 1 - cost + CREDIT_PER_TOKEN * len(tokens)
        kind = _kind(match)
        for proposed, token in zip(match.following.tolist(), tokens, strict=False):
            self.rates[kind] += ((proposed == token) - self.rates[kind]) / 8
            if proposed != token:
                return


def _kind(match: Match) -> int:
    """Index of `Account.rates`."""
    return min(3, max(1, match.length).bit_length() - 1)
