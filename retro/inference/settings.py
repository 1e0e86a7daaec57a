"""Settings of text generation."""

from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from indexing.store.errors import InputError
from indexing.store.settings import PositiveFraction, Text, settings

# Least and largest values of `GenerationSettings`: OpenAI's, and elsewhere so wide that logits remain finite.
BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "copy_strength": (0, 1),
    "logit_bias": (-100, 100),
}


def _within(name: str) -> Any:
    least, largest = BOUNDS[name]
    return Field(ge=least, le=largest)


@settings
class GenerationSettings:
    """Sampling of the next token, and the end of a text."""

    max_tokens: PositiveInt = 128
    """Largest number of tokens to generate; the end of the document also ends a text."""
    temperature: Annotated[float, _within("temperature")] = 0.8
    """Sampling temperature, at most 100; 0 = always the likeliest token."""
    top_k: NonNegativeInt = 50
    """Sample from the k likeliest tokens; 0 = all."""
    top_p: PositiveFraction = 0.95
    """Sample from the smallest set of likeliest tokens with this total probability."""
    min_p: Annotated[float, _within("min_p")] = 0.0
    """Sample only from tokens with at least this fraction of the likeliest token's probability."""
    presence_penalty: Annotated[float, _within("presence_penalty")] = 0.0
    """Subtracted from the logits of tokens that the continuation contains, -2 to 2."""
    frequency_penalty: Annotated[float, _within("frequency_penalty")] = 0.0
    """Subtracted from the logit of a token for each time that the continuation contains it, -2 to 2."""
    repetition_penalty: Annotated[float, _within("repetition_penalty")] = 1.0
    """Logits of tokens in the prompt or the continuation are divided by it if above 0, and multiplied by it if below.
    0.01 to 100."""
    logit_bias: tuple[tuple[int, Annotated[float, _within("logit_bias")]], ...] = ()
    """Token ids and the numbers that are added to their logits, -100 to 100."""
    copy_strength: Annotated[float, _within("copy_strength")] = 1.0
    """Factor of the odds of copying from neighbors and datastore, 0 to 1; 0 = copy nothing from them, but still read
    neighbors."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the random numbers; every prompt of a batch uses the same seed."""
    stop: tuple[Text, ...] = ()
    """Texts that end the continuation; the continuation does not include them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the continuation, in addition to the end of the document."""
    ignore_eos: bool = False
    """Continue after the end of the document."""
    drafts: bool = True
    """Verify in one pass tokens that followed the last ones before, in the text or in its neighbors. The text stays the
    same."""
    logprobs: NonNegativeInt = 0
    """Number of likeliest tokens to return with each token."""

    @property
    def changes_logits(self) -> bool:
        """Whether logits depend on tokens that were generated before, or have a bias."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1 or self.logit_bias)

    def check_ids(self, size: int) -> None:
        """Raise InputError if `logit_bias` or `stop_token_ids` has an id outside a vocabulary of this size."""
        for name, ids in (("logit_bias", list(dict(self.logit_bias))), ("stop_token_ids", self.stop_token_ids)):
            if outside := [token for token in ids if not 0 <= token < size]:
                raise InputError(f"{name} has the token id {outside[0]}; accepted are 0 to {size - 1}.")
