"""How far a text trusts retrieval, and why it does so little, in words: for answers of the server, the command line and
the page.

`retro/copying/switch.py` computes the trust. Here it is summed up for a reader.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from retro.copying.switch import ALL_SOURCES, PRIOR, trust_in_retrieval

Reason = Literal["short prompt", "other text"]
"""Why a trust is low."""
LOW = 0.5
"""Trust below which OFF predicts most of a token."""
SHORT = 32
"""Tokens of a prompt below which a low trust says little about it."""


@dataclass(frozen=True)
class Trust:
    """How far copying from neighbors and datastore is trusted after a prompt. Generated tokens earn no trust."""

    share: Annotated[
        float,
        Field(
            description="0 to 1: trust in any strength of copying from them, the rest is OFF. It begins with "
            f"{PRIOR}, or {trust_in_retrieval(ALL_SOURCES.start):.3f} if the own context must earn trust too."
        ),
    ]
    prompt_tokens: Annotated[int, Field(description="Tokens of the prompt that it was earned in.")]
    low_because: Annotated[
        Reason | None,
        Field(
            description=f"Set if the share is below {LOW}: `short prompt` for fewer than {SHORT} tokens, else `other text`: copying would have "
            "gained little in the prompt."
        ),
    ]

    @classmethod
    def of(cls, trust: Sequence[float], prompt_tokens: int) -> "Trust":
        """Sum up the trust in each expert after a prompt."""
        share = trust_in_retrieval(trust)
        reason: Reason = "short prompt" if prompt_tokens < SHORT else "other text"
        return cls(share, prompt_tokens, reason if share < LOW else None)

    def sentence(self) -> str:
        """A sentence for people."""
        begin = f"Trust in retrieval is {self.share:.2f} after a prompt of {self.prompt_tokens:,} tokens"
        if self.low_because == "short prompt":
            return f"{begin}, since it is short: trust begins low, and text that occurs in the datastore raises it."
        if self.low_because:
            return f"{begin}, since copying would have gained little in it."
        return f"{begin}."
