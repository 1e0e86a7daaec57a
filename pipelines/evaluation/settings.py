"""Settings of `retro eval perplexity` and `retro eval qa`."""

from dataclasses import dataclass
from typing import Literal

from indexing.sparse.candidates import Retrieval
from indexing.store.errors import InputError
from retro.evaluation.settings import EvaluationSettings


@dataclass(frozen=True)
class PerplexitySettings(EvaluationSettings):
    """What `retro eval perplexity` measures."""

    k: tuple[int, ...] = (2,)
    """Numbers of neighbors to measure with retrieval ON."""
    max_overlap: float | None = None
    """Used in place of the run's `data.max_overlap`; None = the run's."""

    def __post_init__(self) -> None:
        """As `EvaluationSettings`; and check the numbers of neighbors and their rule."""
        super().__post_init__()
        if any(k < 1 for k in self.k):
            raise InputError(f"k = {self.k}: each number of neighbors must be at least 1.")
        if self.max_overlap is not None and not 0 <= self.max_overlap <= 1:
            raise InputError(f"max_overlap = {self.max_overlap}: must be between 0 and 1; 1 skips no neighbor.")


@dataclass(frozen=True)
class QaSettings:
    """How `retro eval qa` asks questions."""

    k: int = 2
    """Neighbors of each chunk of a prompt with retrieval ON; 0 = do not measure ON."""
    prompt_passages: int = 2
    """Passages in an open-book prompt: the chunks nearest to the question, with their continuations."""
    neighbor_passages: int = 0
    """Passages found for the question that every chunk of the paper's prompt reads as neighbors, as in `retro finetune`
    (paper: 20); 0 = not measured."""
    gold: bool = False
    """Also measure these neighbors with the documents first that a question names as `positive_ids`."""
    retrieval: Retrieval = "dense"
    """How passages are found: by embeddings (`dense`), by terms (`sparse`), or by both (`hybrid`)."""
    shots: int = 0
    """Solved questions before each question, except in the paper's prompt. These are the first of the file and are not asked."""
    max_questions: int = 0
    """Number of questions to ask, from the beginning of the file; 0 = all."""
    max_tokens: int = 24
    """Maximum number of tokens of an answer. A line break ends it."""
    language: Literal["auto", "en", "zh"] = "auto"
    """Language of prompts and measures; `auto`: the language of most questions."""
    batch_size: int = 8
    """Prompts in a batch."""
    seed: int = 0
    """Seed of the bootstrap over questions."""

    def __post_init__(self) -> None:
        least = {"k": 0, "prompt_passages": 0, "neighbor_passages": 0, "shots": 0, "max_questions": 0}
        for key, smallest in (least | {"max_tokens": 1, "batch_size": 1}).items():
            if getattr(self, key) < smallest:
                raise InputError(f"{key} = {getattr(self, key)}: must be at least {smallest}.")
        if self.gold and not self.neighbor_passages:
            raise InputError(
                "gold needs passages as neighbors: set neighbor_passages, for example --neighbor-passages 20."
            )
