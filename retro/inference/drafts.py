"""Drafts: tokens that may come next, because they followed the same tokens before. One pass of the decoder verifies them.

    last tokens ─ their longest match in the text itself, its neighbors and the datastore ─ up to 8 tokens after it ─► draft

This is speculative decoding (Leviathan et al. 2023, arXiv 2211.17192) without a draft model, as in prompt lookup decoding
(Saxena 2023) and REST (He et al. 2024, arXiv 2311.08252). A pass over nine tokens takes little longer than over one, since
both read all weights. The generated tokens are those without drafts, see `generation.Batch`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
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


def draft(
    tokens: np.ndarray,
    neighbors: Iterable[np.ndarray] = (),
    most: int = LONGEST_DRAFT,
    datastore: WholeDatastore | None = None,
) -> np.ndarray:
    """Propose up to `most` next tokens: those after the longest match of the last tokens; int64, often empty.

    Args:
        tokens: the text so far, int64 [t].
        neighbors: tokens of each neighbor that the text reads, without padding.
        most: 0 to `LONGEST_DRAFT`.
        datastore: searched for the longest match too; None = it is not.
    """
    if most <= 0:
        return tokens[:0]
    matches = [match_in_text(tokens), *(match_in(neighbor, tokens) for neighbor in neighbors)]
    if datastore is not None:
        matches.append(Match(*datastore.continuation(tokens, most)))
    return max(matches, key=lambda match: match.length).following[:most]


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


@dataclass
class DraftLength:
    """The number of draft tokens that are worth verifying in a text, from the fate of its last drafts.

    Attributes:
        most: tokens of the next draft.
    """

    most: int = LONGEST_DRAFT // 2

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Adapt to a draft: twice the length after a draft that was right, else one more token than was right."""
        if num_drafted:
            right = num_accepted == num_drafted
            self.most = min(LONGEST_DRAFT, max(self.most, 2 * num_drafted) if right else num_accepted + 1)
