"""Settings of measurements on held-out documents."""

from pydantic import NonNegativeInt, PositiveInt

from indexing.store.settings import PositiveFraction, settings
from retro.evaluation.sets import check_entries

LEAST_DOCUMENTS = 5
"""Held-out documents from which an interval over documents means something."""


@settings
class EvaluationSettings:
    """Settings of measurements on held-out documents."""

    sets: tuple[str, ...] = ()
    """Each is `NAME=DATASTORE:SPLIT`, `NAME=DATASTORE` (split `valid`), or a SPLIT of the first training datastore.
    Empty: `valid` of every training datastore."""
    window: NonNegativeInt = 0
    """Tokens in a window; 0 = the sequence length of training."""
    stride: NonNegativeInt = 0
    """Tokens between two windows; 0 = half a window (the paper's 2048/1024)."""
    max_tokens: NonNegativeInt = 0
    """Approximate number of tokens of a set to score; 0 = all held-out documents."""
    batch_size: PositiveInt = 8
    """Windows in a batch."""
    leakage_tokens: tuple[NonNegativeInt, ...] = (4, 8, 16, 32, 64)
    """Also measure bits per byte by leakage. If the datastore has votes: by the longest match of a document in it, and before a token;
    a row of the tables begins at each of these lengths, and those above 64 count as 64. Otherwise: over the chunks that share a
    run of at most this number of tokens with one of their ten nearest neighbors; divided by the chunk length, it is the paper's α,
    and larger numbers count as the chunk length, which includes all chunks. Empty: not. Not during training."""
    datastore_fractions: tuple[PositiveFraction, ...] = ()
    """Also measure retrieval ON with a new search in these fractions of the datastore's documents, for example 0.01 0.1 0.5 1.
    A larger fraction contains the smaller ones. Not during training."""
    seed: int = 0
    """Seed of the bootstrap over documents, and of the fractions of the datastore."""

    def __post_init__(self) -> None:
        check_entries(self.sets)
