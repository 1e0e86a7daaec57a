"""Settings of text generation."""

from dataclasses import dataclass

from indexing.store.errors import InputError

# Least and largest values of `GenerationSettings`: OpenAI's, and elsewhere so wide that logits remain finite.
BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "logit_bias": (-100, 100),
}


@dataclass(frozen=True)
class GenerationSettings:
    """Sampling of the next token, and the end of a text."""

    max_tokens: int = 128
    """Largest number of tokens to generate; the end of the document also ends a text."""
    temperature: float = 0.8
    """Sampling temperature, at most 100; 0 = always the likeliest token."""
    top_k: int = 50
    """Sample from the k likeliest tokens; 0 = all."""
    top_p: float = 0.95
    """Sample from the smallest set of likeliest tokens with this total probability."""
    min_p: float = 0.0
    """Sample only from tokens with at least this fraction of the likeliest token's probability."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the continuation contains, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that the continuation contains it, -2 to 2."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the continuation are divided by it if above 0, and multiplied by it if below.
    0.01 to 100."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and the numbers that are added to their logits, -100 to 100."""
    seed: int = 0
    """Seed of the random numbers; every prompt of a batch uses the same seed."""
    stop: tuple[str, ...] = ()
    """Texts that end the continuation; the continuation does not include them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the continuation, in addition to the end of the document."""
    ignore_eos: bool = False
    """Continue after the end of the document."""
    logprobs: int = 0
    """Number of likeliest tokens to return with each token."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max_tokens = {self.max_tokens}: must be at least 1.")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise InputError(f"top_k = {self.top_k} must be 0 or more, and top_p = {self.top_p} above 0 and at most 1.")
        for name, (least, largest) in BOUNDS.items():
            values = dict(self.logit_bias).values() if name == "logit_bias" else [getattr(self, name)]
            if outside := [value for value in values if not least <= value <= largest]:
                raise InputError(f"{name} = {outside[0]}: must be {least} to {largest}.")
        if self.logprobs < 0 or not 0 <= self.seed < 2**63:
            raise InputError(
                f"logprobs = {self.logprobs} and seed = {self.seed}: both must be 0 or more, and the seed below 2^63."
            )
        if "" in self.stop:
            raise InputError("stop has an empty text, which would end every continuation at once. Remove it.")

    @property
    def changes_logits(self) -> bool:
        """Whether logits depend on tokens that were generated before, or have a bias."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1 or self.logit_bias)

    def check_ids(self, size: int) -> None:
        """Raise InputError if `logit_bias` or `stop_token_ids` has an id outside a vocabulary of this size."""
        for name, ids in (("logit_bias", list(dict(self.logit_bias))), ("stop_token_ids", self.stop_token_ids)):
            if outside := [token for token in ids if not 0 <= token < size]:
                raise InputError(f"{name} has the token id {outside[0]}; accepted are 0 to {size - 1}.")
