"""Modes of `retro eval qa`: prompts of all questions, and the passages in them or given as neighbors.

questions ─┬─────────────────────────────► lines ──────────► closed book ─────────────────────────┐ each with
           │                         ┌───► lines ──────────► passages in the prompt ──────────────┘ retrieval OFF and ON
           ├► find_passages ─► texts ┤
           │                         └───► the paper's prompt (section 4.3) ─► passages as neighbors
           └─────────────────────────────► the paper's prompt ─► closed book
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from indexing.retrieval.retriever import Retriever
from pipelines.evaluation.settings import QaSettings
from pipelines.terminal import progress
from retro.inference.language_model import GivenNeighbors, LanguageModel
from retro.question_answering.answer_metrics import Language
from retro.question_answering.neighbor_prompts import Passage, QuestionFormat, find_passages
from retro.question_answering.question_sets import Question
from retro.question_answering.text_prompts import PromptBuilder, room_for_prompts


@dataclass(frozen=True)
class QuestionMode:
    """How questions are asked.

    Attributes:
        prompt: `lines`: a line for each passage, question and answer; `paper`: the paper's prompt with the question only.
        passages: number of passages in the prompt.
        k: neighbors of each chunk, searched with the chunk.
        neighbors: passages, searched with the question, that all chunks read instead.
        gold: whether passages with the answer come first among them.
    """

    prompt: Literal["lines", "paper"] = "lines"
    passages: int = 0
    k: int = 0
    neighbors: int = 0
    gold: bool = False

    @property
    def name(self) -> str:
        """`closed book`, or the open parts: `passages in the prompt, ON k=2`, `paper's prompt, 20 passages as neighbors`."""
        parts = ["passages in the prompt"] if self.passages else []
        parts += [f"ON k={self.k}"] if self.k else []
        parts += [f"{self.neighbors} passages as neighbors"] if self.neighbors else []
        parts += ["gold first"] if self.gold else []
        return ", ".join((["paper's prompt"] if self.prompt == "paper" else []) + (parts or ["closed book"]))


class ModePrompts(NamedTuple):
    """All questions in one mode: tokens of each prompt, its given neighbors, and the texts of its passages."""

    mode: QuestionMode
    prompts: list[np.ndarray]
    given: GivenNeighbors | None = None  # None: no neighbors, or those that each chunk finds
    texts: list[list[str]] | None = None  # passages in the prompt or as neighbors; None: no passages


class FoundPassages(NamedTuple):
    """The passages of each question, best first."""

    searched: list[list[Passage]]
    gold: list[list[Passage]] | None  # with those first that the question names; None: not measured


def found_passages(retriever: Retriever, questions: Sequence[Question], settings: QaSettings) -> FoundPassages | None:
    """Find the passages that the settings need, with a progress bar; None if they need none.

    Raises:
        InputError: `gold` is set, and a question names no document of the datastore.
    """

    def find(name: str, k: int, *, positives_first: bool) -> list[list[Passage]]:
        with progress(name, total=len(questions), unit="questions") as advance:
            return find_passages(
                retriever, questions, k, retrieval=settings.retrieval, positives_first=positives_first, advance=advance
            )

    k = max(settings.prompt_passages, settings.neighbor_passages)
    if not k:
        return None
    searched = find("search", k, positives_first=False)
    gold = find("gold", settings.neighbor_passages, positives_first=True) if settings.gold else None
    return FoundPassages(searched, gold)


def all_modes(
    language_model: LanguageModel,
    questions: Sequence[Question],
    settings: QaSettings,
    *,
    language: Language,
    shots: Sequence[Question] = (),
    found: FoundPassages | None = None,
) -> Iterator[ModePrompts]:
    """All modes that model, settings and passages allow, closed book first.

    Args:
        language_model: opened with retrieval, to measure ON.
        questions: n of them.
        settings: neighbors, lengths.
        language: of the prompts.
        shots: solved questions before each.
        found: the passages of each question; None: no passages.

    Raises:
        InputError: a question is too long for the model.
    """
    yield from _in_lines(language_model, questions, settings, language, shots, found)
    if settings.neighbor_passages:
        yield from _as_in_paper(language_model, questions, settings.neighbor_passages, language, found)


def _in_lines(
    language_model: LanguageModel,
    questions: Sequence[Question],
    settings: QaSettings,
    language: Language,
    shots: Sequence[Question],
    found: FoundPassages | None,
) -> Iterator[ModePrompts]:
    m, room = language_model.model.settings.chunk_length, room_for_prompts(language_model, settings.max_tokens)
    prompts = PromptBuilder(language_model.tokenizer, language, shots, room, m)
    count = settings.prompt_passages if found else 0
    texts = [[each.text for each in row[:count]] for row in found.searched] if found and count else None
    for read in (None, texts) if texts else (None,):
        made = [prompts.prompt(each, read[number] if read else ()) for number, each in enumerate(questions)]
        for k in (0, settings.k) if settings.k and language_model.retriever is not None else (0,):
            yield ModePrompts(QuestionMode(passages=count if read else 0, k=k), made, texts=read)


def _as_in_paper(
    language_model: LanguageModel,
    questions: Sequence[Question],
    count: int,
    language: Language,
    found: FoundPassages | None,
) -> Iterator[ModePrompts]:
    model = language_model.model.settings
    form = QuestionFormat(language_model.tokenizer, model.chunk_length, language)
    prompts = [form.prompt(each.question) for each in questions]
    yield ModePrompts(QuestionMode("paper"), prompts)
    if not found or not model.retrieves:
        return
    for gold, passages in ((False, found.searched), (True, found.gold)):
        if passages is not None:
            given = [form.neighbors(each, count) for each in passages]
            # Passages may be cut off, so their texts are decoded from the tokens.
            kept = [[row[:length] for row, length in zip(*each, strict=True)] for each in given]
            texts = [form.tokenizer.decode_batch(each) for each in kept]
            yield ModePrompts(QuestionMode("paper", neighbors=count, gold=gold), prompts, given, texts)
