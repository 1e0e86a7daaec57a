"""Settings of measurements: on held-out documents, and of answers to questions."""

from dataclasses import replace
from typing import Literal, Self

from pydantic import NonNegativeInt, PositiveInt

from indexing.retrieval.queries import Retrieval
from indexing.retrieval.results import PASSAGE_TOKENS, PASSAGES
from indexing.store.errors import InputError
from indexing.store.settings import Fraction, PositiveFraction, Text, settings
from retro.evaluation.sets import check_entries

LEAST_DOCUMENTS = 5
"""Held-out documents from which an interval over documents means something. Of fewer, no sentence says that retrieval
saves or costs bits."""


TextWindows = Literal["random", "beginning"]


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
    """Largest number of tokens of a set to score, from random windows of as many documents as possible (`seed`), at
    least one chunk; 0 = all held-out documents."""
    batch_size: PositiveInt = 8
    """Windows in a batch."""
    leakage_tokens: tuple[NonNegativeInt, ...] = (4, 8, 16, 32, 64)
    """Also measure bits per byte by leakage. If the datastore has votes: by the longest match of a document in it, and
    before a token; a row of the tables begins at each of these lengths, and those above 64 count as 64. Otherwise: over
    the chunks that share a run of at most this number of tokens with one of their ten nearest neighbors; divided by the
    chunk length, it is the paper's α, and larger numbers count as the chunk length, which includes all chunks. Empty:
    not. Not during training."""
    datastore_fractions: tuple[PositiveFraction, ...] = ()
    """Also measure retrieval ON with a new search in these fractions of the datastore's documents, for example 0.01 0.1
    0.5 1. A larger fraction contains the smaller ones. Not during training."""
    seed: int = 0
    """Seed of the bootstrap over documents, of the windows that `max_tokens` and `--texts` draw, and of the fractions
    of the datastore."""

    def __post_init__(self) -> None:
        check_entries(self.sets)

    def in_windows_of(self, tokens: int) -> Self:
        """The same settings, with windows of this number of tokens if they name none."""
        return replace(self, window=self.window or tokens)


@settings
class PerplexitySettings(EvaluationSettings):
    """What `retro eval perplexity` measures."""

    k: tuple[PositiveInt, ...] = (2,)
    """Numbers of neighbors to measure with retrieval ON."""
    max_overlap: Fraction | None = None
    """Used in place of the run's `data.max_overlap`; None = the run's."""
    texts: tuple[Text, ...] = ()
    """Files, folders or globs of texts that are not in the datastore, as in `corpus.paths`."""
    text_windows: TextWindows = "random"
    """Score a `random` window of each text, or its `beginning`."""


@settings
class QaSettings:
    """How `retro eval qa` asks questions."""

    k: NonNegativeInt = 2
    """Neighbors of each chunk of a prompt with retrieval ON; 0 = do not measure ON. In a chat with passages, the
    neighbors are these passages."""
    prompt_passages: NonNegativeInt = PASSAGES
    """Passages in an open-book prompt, found for the question as in `retro serve` and `retro chat`."""
    passage_tokens: PositiveInt = PASSAGE_TOKENS
    """Largest number of tokens of all passages in a prompt."""
    least_match: Fraction | None = None
    """How much of a question the best passage must say, by terms, or its prompt has none; None: 0.25, for Chinese 0.13, as
    in `retro chat`."""
    neighbor_passages: NonNegativeInt = 0
    """Passages found for the question that every chunk of the paper's prompt reads as neighbors (paper: 20), as in
    `retro finetune`; 0 = not measured."""
    gold: bool = False
    """Also measure these passages with the documents first that a question names as `positive_ids`."""
    retrieval: Retrieval | Literal["auto"] = "auto"
    """Search for passages: by embeddings (`dense`), by terms (`sparse`), by both (`hybrid`), or by the best of these
    that the datastore has (`auto`)."""
    shots: NonNegativeInt = 0
    """Solved questions before each question, except in the paper's prompt. These are the first of the file and are not
    asked."""
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
