"""Settings of measurements on held-out documents."""

from dataclasses import dataclass

from indexing.store.errors import InputError
from retro.evaluation.sets import check_entries

LEAST_DOCUMENTS = 5
"""Held-out documents from which an interval over documents means something."""


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of measurements on held-out documents."""

    sets: tuple[str, ...] = ()
    """Each is `NAME=DATASTORE:SPLIT`, `NAME=DATASTORE` (split `valid`), or a SPLIT of the first training datastore.
    Empty: `valid` of every training datastore."""
    window: int = 0
    """Tokens in a window; 0 = the sequence length of training."""
    stride: int = 0
    """Tokens between two windows; 0 = half a window (the paper's 2048/1024)."""
    max_tokens: int = 0
    """Approximate number of tokens of a set to score; 0 = all held-out documents."""
    batch_size: int = 8
    """Windows in a batch."""
    leakage_tokens: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Also measure bits per byte over the chunks that share a run of at most this number of tokens with one of their ten
    nearest neighbors. Divided by the chunk length, a number is the paper's α. Larger numbers count as the chunk length, which
    includes all chunks. Not during training."""
    datastore_fractions: tuple[float, ...] = ()
    """Also measure retrieval ON with a new search in these fractions of the datastore's documents, for example 0.01 0.1 0.5 1.
    A larger fraction contains the smaller ones. Not during training."""
    seed: int = 0
    """Seed of the bootstrap over documents, and of the fractions of the datastore."""

    def __post_init__(self) -> None:
        check_entries(self.sets)
        if any(tokens < 0 for tokens in self.leakage_tokens):
            raise InputError(f"evaluation.leakage_tokens = {self.leakage_tokens}: each must be 0 or more.")
        if any(not 0 < fraction <= 1 for fraction in self.datastore_fractions):
            raise InputError(
                f"evaluation.datastore_fractions = {self.datastore_fractions}: each must be above 0 and at most 1."
            )
        for key in ("window", "stride", "max_tokens"):
            if getattr(self, key) < 0:
                raise InputError(f"evaluation.{key} = {getattr(self, key)}: must be 0 or more.")
        if self.batch_size < 1:
            raise InputError(f"evaluation.batch_size = {self.batch_size}: must be at least 1.")
