"""Settings of `retro eval perplexity` and `retro eval qa`."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from indexing.retrieval.queries import Retrieval
from indexing.store.errors import InputError
from indexing.store.settings import Fraction, settings
from retro.evaluation.settings import EvaluationSettings


@settings
class PerplexitySettings(EvaluationSettings):
    """What `retro eval perplexity` measures."""

    k: tuple[PositiveInt, ...] = (2,)
    """Numbers of neighbors to measure with retrieval ON."""
    max_overlap: Fraction | None = None
    """Used in place of the run's `data.max_overlap`; None = the run's."""


@settings
class QaSettings:
    """How `retro eval qa` asks questions."""

    k: NonNegativeInt = 2
    """Neighbors of each chunk of a prompt with retrieval ON; 0 = do not measure ON."""
    prompt_passages: NonNegativeInt = 2
    """Passages in an open-book prompt: the chunks nearest to the question, with their continuations."""
    neighbor_passages: NonNegativeInt = 0
    """Passages found for the question that every chunk of the prompt reads as neighbors (paper: 20): of the paper's prompt, as in
    `retro finetune`, or of the chat prompt, without and with passages in it; 0 = not measured."""
    gold: bool = False
    """Also measure these passages with the documents first that a question names as `positive_ids`."""
    retrieval: Retrieval = "dense"
    """How passages are found: by embeddings (`dense`), by terms (`sparse`), or by both (`hybrid`)."""
    shots: NonNegativeInt = 0
    """Solved questions before each question, except in the paper's prompt. These are the first of the file and are not asked."""
    max_questions: NonNegativeInt = 0
    """Number of questions to ask, from the beginning of the file; 0 = all."""
    max_tokens: PositiveInt = 24
    """Maximum number of tokens of an answer. A line break ends it."""
    language: Literal["auto", "en", "zh"] = "auto"
    """Language of prompts and measures; `auto`: the language of most questions."""
    batch_size: PositiveInt = 8
    """Prompts in a batch."""
    seed: int = 0
    """Seed of the bootstrap over questions."""

    def __post_init__(self) -> None:
        if self.gold and not (self.prompt_passages or self.neighbor_passages):
            raise InputError(
                "gold needs passages: set prompt_passages or neighbor_passages, for example --prompt-passages 4."
            )
