"""The compiled loops mix the next tokens of rows as `CopyHead.mix` mixes those of whole texts."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from indexing.suffixes.search import Match
from indexing.suffixes.votes import COLUMNS, KEPT, LENGTHS, SHARES
from retro.copying.context import context_matches
from retro.copying.datastore import DatastoreVotes
from retro.copying.head import CopyHead
from retro.copying.rows import Row
from retro.copying.source import Votes as Source
from retro.copying.sources import sources_of
from retro.copying.step_votes import StepVotes
from retro.copying.votes import SourceMatches
from retro.model_settings import CopyHeadSettings

ROWS, TOKENS, IDS = 6, 40, 48
TRUSTS = [(0.1, 0.2, 0.3, 0.4), (0.97, 0.01, 0.01, 0.01), (0.0, 0.0, 0.0, 1.0)]
TRUSTS_IN_ALL = [
    (0.1, 0.2, 0.1, 0.1, 0.1, 0.4),
    (0.95, 0.01, 0.01, 0.01, 0.01, 0.01),
    (0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
]
HEADS = {
    "datastore": (CopyHeadSettings(datastore=True), TRUSTS),
    "a trained context too": (CopyHeadSettings(context=True, datastore=True), TRUSTS),
    "an added context too": (CopyHeadSettings(context=True, datastore=True, context_added=True), TRUSTS_IN_ALL),
}


def random_votes() -> np.ndarray:
    """Votes [rows, 32]; the last rows have none."""
    random, votes = np.random.default_rng(0), np.zeros((ROWS, COLUMNS), np.int64)
    votes[:, 0] = LENGTHS[-1]
    for row in votes[:4]:
        row[1 : 1 + KEPT] = random.permutation(9)[:KEPT]
        of_lengths = row[1 + KEPT :].reshape(len(LENGTHS), 1 + KEPT)
        of_lengths[:, 0], of_lengths[:, 1:] = random.integers(1, 9), random.integers(0, 1 + SHARES // KEPT, KEPT)
    votes[0, -KEPT:] = SHARES, 0, 0  # all agree
    return votes


class Votes:
    """Finds random votes."""

    def votes(self, text: np.ndarray, first: int = 0) -> np.ndarray:
        raise AssertionError("one search for all rows")

    def last_votes(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        return random_votes()[: len(texts)]

    def longest_match(self, text: np.ndarray) -> Match:
        raise AssertionError("no text is generated")


@pytest.mark.parametrize(("settings", "trusts"), HEADS.values(), ids=HEADS)
@torch.no_grad()
def test_rows_are_mixed_as_whole_texts(settings: CopyHeadSettings, trusts: list[tuple[float, ...]]) -> None:
    torch.manual_seed(0)
    head, context = CopyHead(settings.names, 8, sources_of(settings)), bool(settings.context)
    for parameter in head.parameters():
        parameter.normal_(std=0.1)
    tokens, logits = torch.randint(0, 9, (ROWS, TOKENS)), 4 * torch.randn(ROWS, IDS)
    logits[:, 5] = -torch.inf
    strengths = [1.0, 0.25, 0.0] * 2
    rows = [
        Row(text, lambda chunks: (chunks,), 0, trust=trust, copy_strength=strength)
        for text, trust, strength in zip(tokens.numpy(), [*trusts, *trusts], strengths, strict=True)
    ]
    mixed = StepVotes(head, torch.device("cpu"), Votes()).mixed(rows, logits)

    votes = torch.zeros(ROWS, TOKENS, COLUMNS, dtype=torch.int64)
    votes[:, -1] = torch.from_numpy(random_votes())
    sources: dict[str, Source] = {"datastore": DatastoreVotes.of(votes)}
    if context:
        sources["context"] = SourceMatches(context_matches(tokens, None, 8))
    evidence, last = head.evidence(sources, tokens), slice(TOKENS - 1, TOKENS)
    trust, strength = torch.tensor([[row.trust] for row in rows]).expand(-1, TOKENS, -1), torch.tensor(strengths)
    wanted = head.mix(logits[:, None], sources, evidence, last, trust, strength[:, None])[:, 0]
    torch.testing.assert_close(mixed, wanted)
    assert mixed[:, 5].isneginf().all()
    plain = logits.log_softmax(-1)
    without = context and not settings.context_added  # the last expert copies from a trained context
    differs = [True, True, without, True, context, without]
    assert ((mixed - plain).abs() > 0.01).any(1).tolist() == differs
