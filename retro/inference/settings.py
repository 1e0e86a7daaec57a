"""How text is sampled."""

import math
from dataclasses import dataclass

from indexing.store.errors import InputError


@dataclass(frozen=True)
class GenerationSettings:
    """How the next token is drawn, and when a text ends."""

    max_tokens: int = 128
    """Tokens to generate at most; the end of the document ends it too."""
    temperature: float = 0.8
    """0 takes the likeliest token."""
    top_k: int = 50
    """Only the likeliest this many; 0 = all."""
    top_p: float = 0.95
    """Only the likeliest that together hold this probability."""
    seed: int = 0
    """Of the draws; every prompt of a batch begins with it."""
    stop: tuple[str, ...] = ()
    """Texts that end the continuation; they are not shown."""
    logprobs: int = 0
    """Likeliest tokens to tell with each token."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max_tokens = {self.max_tokens}: must be at least 1.")
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise InputError(
                f"temperature = {self.temperature} and top_k = {self.top_k} must be 0 or more, "
                f"top_p = {self.top_p} in (0, 1]."
            )
        if self.logprobs < 0 or not 0 <= self.seed < 2**63:
            raise InputError(f"logprobs = {self.logprobs} and seed = {self.seed}: 0 or more, the seed below 2^63.")
        if "" in self.stop:
            raise InputError("stop holds an empty text: it would end everything before its first character.")
