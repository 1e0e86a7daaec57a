"""Trust in retrieval, summed up for readers."""

import pytest

from retro.copying.switch import START
from retro.inference.trust import SHORT, Trust


@pytest.mark.parametrize(
    ("trust", "tokens", "share", "reason"),
    [
        (START, 3, 0.125, "short prompt"),
        (START, SHORT, 0.125, "other text"),
        ((0.3, 0.2, 0.1, 0.4), 3, 0.6, None),
        ((0.3, 0.2, 0.1, 0.4), 900, 0.6, None),
    ],
)
def test_a_low_trust_has_a_reason(trust: tuple[float, ...], tokens: int, share: float, reason: str | None) -> None:
    summed = Trust.of(trust, tokens)
    assert (summed.share, summed.prompt_tokens, summed.low_because) == (pytest.approx(share), tokens, reason)
    assert f"{share:.2f}" in summed.sentence()
    assert ("since" in summed.sentence()) == (reason is not None)
