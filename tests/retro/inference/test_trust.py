"""Trust in retrieval, summed up for readers."""

import pytest

from retro.copying.switch import ALL_SOURCES, RETRIEVAL
from retro.inference.trust import SHORT, Trust


@pytest.mark.parametrize(
    ("trust", "tokens", "share", "reason"),
    [
        (RETRIEVAL.start, 3, 0.125, "short prompt"),
        (RETRIEVAL.start, SHORT, 0.125, "other text"),
        (ALL_SOURCES.start, SHORT, 1 / 24, "other text"),
        ((0.1, 0.1, 0.1, 0.4, 0.2, 0.1), 900, 0.3, "other text"),  # the context alone is no retrieval
        ((0.3, 0.2, 0.1, 0.4), 3, 0.6, None),
        ((0.3, 0.2, 0.1, 0.4), 900, 0.6, None),
    ],
)
def test_a_low_trust_has_a_reason(trust: tuple[float, ...], tokens: int, share: float, reason: str | None) -> None:
    summed = Trust.of(trust, tokens)
    assert (summed.share, summed.prompt_tokens, summed.low_because) == (pytest.approx(share), tokens, reason)
    assert f"{share:.2f}" in summed.sentence()
    assert ("since" in summed.sentence()) == (reason is not None)
