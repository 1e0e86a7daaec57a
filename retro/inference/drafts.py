"""Drafts: tokens that may come next, because they followed the same tokens before. One pass of the decoder verifies them.

    last tokens ─ their longest match in the text itself, its neighbors and the datastore ─ up to 8 tokens after it ─► draft
                                            share of right tokens after such matches ─ how many of them are worth it ──┘

This is speculative decoding (Leviathan et al. 2023, arXiv 2211.17192) without a draft model, as in prompt lookup decoding
(Saxena 2023) and REST (He et al. 2024, arXiv 2311.08252). A pass over nine tokens takes less than twice as long as one over one,
since both read all weights. The generated tokens are those without drafts, see `generation.Batch`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from retro.inference.rows import WholeDatastore

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
    """Find the longest match of the last tokens earlier in the same text [t]. A text that repeats its end is continued so."""
    match = match_in(tokens, tokens)
    return Match(match.length, np.resize(match.following, LONGEST_DRAFT)) if match.length else match


TOKEN_COST = 0.1
"""What one more token adds to the time of a pass over one text on a CPU. A pass over n texts takes less than n times as long as over
one, but the draft of each saves only its own part: its tokens cost n times as much of it."""


@dataclass
class Acceptance:
    """How often proposed tokens of a text were right. Proposals that are not read count too, so drafts end and begin again by themselves.

    Attributes:
        rates: share of right tokens after matches of 1, 2 to 3, 4 to 7, and more tokens. The last ones count most.
    """

    rates: list[float] = field(default_factory=lambda: [0.05, 0.15, 0.3, 0.6])

    def worth_reading(self, match: Match, cost: float) -> int:
        """Number of proposed tokens whose probability of being right is larger than their cost, in passes."""
        rate = self.rates[_kind(match)]
        probabilities = rate ** np.arange(1, 1 + len(match.following))
        return int((probabilities > cost).sum())

    def update(self, match: Match, tokens: Sequence[int]) -> None:
        """Compare the next tokens of the text with those that were proposed, up to the first wrong one."""
        kind = _kind(match)
        for proposed, token in zip(match.following.tolist(), tokens, strict=False):
            self.rates[kind] += ((proposed == token) - self.rates[kind]) / 8
            if proposed != token:
                return


def _kind(match: Match) -> int:
    """Index of `Acceptance.rates`."""
    return min(3, max(1, match.length).bit_length() - 1)
