"""Settings of text generation."""

import math
from dataclasses import dataclass

from indexing.store.errors import InputError


@dataclass(frozen=True)
class GenerationSettings:
    """Sampling of the next token, and the end of a text."""

    max_tokens: int = 128
    """Largest number of tokens to generate; the end of the document also ends a text."""
    temperature: float = 0.8
    """Sampling temperature; 0 = always the likeliest token."""
    top_k: int = 50
    """Sample from the k likeliest tokens; 0 = all."""
    top_p: float = 0.95
    """Sample from the smallest set of likeliest tokens with this total probability."""
    seed: int = 0
    """Seed of the random numbers; every prompt of a batch uses the same seed."""
    stop: tuple[str, ...] = ()
    """Texts that end the continuation; the continuation does not include them."""
    logprobs: int = 0
    """Number of likeliest tokens to return with each token."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max_tokens = {self.max_tokens}: must be at least 1.")
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise InputError(
                f"temperature = {self.temperature} and top_k = {self.top_k} must be 0 or more, "
                f"top_p = {self.top_p} must be above 0 and at most 1."
            )
        if self.logprobs < 0 or not 0 <= self.seed < 2**63:
            raise InputError(
                f"logprobs = {self.logprobs} and seed = {self.seed}: both must be 0 or more, and the seed below 2^63."
            )
        if "" in self.stop:
            raise InputError("stop has an empty text, which would end every continuation at once. Remove it.")
