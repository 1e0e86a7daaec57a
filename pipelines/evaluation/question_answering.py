"""Measurements of `retro eval qa`: exact match and F1 of a model's answers in every mode.

questions ─► modes (`question_answering_modes.py`) ─► prompts, neighbors ─► LanguageModel ─► answers ─► Answered: exact match, F1
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import tokenizer_fingerprint
from pipelines.evaluation.question_answering_modes import ModePrompts, QuestionMode
from pipelines.evaluation.settings import QaSettings
from pipelines.results import Table
from pipelines.terminal import progress
from retro.checkpoints.checkpoint import Checkpoint, open_checkpoint
from retro.inference.language_model import LanguageModel
from retro.question_answering.answer_metrics import Language, exact_match, f1, language_of, mean_with_interval
from retro.question_answering.question_sets import Question
from retro.question_answering.text_prompts import answer


@dataclass(frozen=True)
class Answered:
    """The answers to all questions in one mode.

    Attributes:
        mode: how the questions were asked.
        answers: [n] texts.
        exact_match, f1: [n] float64 of each.
        answer_in_passages: fraction of the questions with a right answer in the passages, the upper bound of a model that only
            copies; None: no passages.
    """

    mode: QuestionMode
    answers: list[str]
    exact_match: np.ndarray = field(repr=False)
    f1: np.ndarray = field(repr=False)
    answer_in_passages: float | None = None

    def as_json(self, seed: int) -> dict[str, Any]:
        """Means, with the range of 95% of bootstraps over questions."""
        row: dict[str, Any] = {"mode": self.mode.name, **asdict(self.mode), "questions": len(self.answers)}
        for name in ("exact_match", "f1"):
            row[name], row[f"{name}_low"], row[f"{name}_high"] = mean_with_interval(getattr(self, name), seed)
        return row | {"answer_in_passages": self.answer_in_passages}


def open_model(
    checkpoint: Path, passages: Path | str | None, settings: QaSettings, device: str
) -> tuple[LanguageModel, Retriever | None]:
    """Open the model with its retriever, and the datastore of passages.

    Retrieval ON searches the passages, or without passages the datastore of the training run.

    Raises:
        InputError: a path cannot be opened, the passages do not fit retrieval ON, or passages as neighbors are set without
            a datastore of passages.
    """
    opened = open_checkpoint(checkpoint)
    if settings.neighbor_passages and passages is None and opened.model.retrieves:
        raise InputError(f"neighbor_passages = {settings.neighbor_passages}: name the datastore to search, --passages.")
    retrieval = bool(settings.k) and opened.model.retrieves
    if passages is None:
        return LanguageModel.open(checkpoint, None, device, retrieval=retrieval), None
    retriever = Retriever.open(passages)
    if retrieval:
        _check_readable(opened, retriever.datastore)
    source = retriever if retrieval or not opened.datastores else None  # a base model has no other tokenizer
    return LanguageModel.open(checkpoint, source, device, retrieval=retrieval), retriever


def _check_readable(checkpoint: Checkpoint, passages: Datastore) -> None:
    again = "Build it with the model's tokenizer and chunk length, or set --k 0 to use passages in the prompt only."
    checkpoint.check_fits(
        passages.manifest,
        f"--passages {passages.folder}",
        tokenizer=tokenizer_fingerprint(passages.folder),
        advice=again,
    )


def measure_answers(
    language_model: LanguageModel,
    modes: Iterable[ModePrompts],
    questions: Sequence[Question],
    settings: QaSettings,
    language: Language,
) -> list[Answered]:
    """Answer the questions in every mode, with progress bars.

    Args:
        language_model: opened with retrieval, if a mode needs it.
        modes: from `all_modes`.
        questions: all with answers.
        settings: lengths.
        language: of the measures.
    """
    rows = []
    for prepared in modes:
        with progress(f"answer, {prepared.mode.name}", total=len(questions), unit="questions") as advance:
            answers = answer(
                language_model,
                prepared.prompts,
                k=prepared.mode.k,
                given=prepared.given,
                max_tokens=settings.max_tokens,
                batch_size=settings.batch_size,
                advance=advance,
            )
        pairs = list(zip(answers, questions, strict=True))
        rows.append(
            Answered(
                mode=prepared.mode,
                answers=answers,
                exact_match=np.array([exact_match(text, each.answers, language) for text, each in pairs]),
                f1=np.array([f1(text, each.answers, language) for text, each in pairs]),
                answer_in_passages=None if prepared.texts is None else answer_in_passages(questions, prepared.texts),
            )
        )
    return rows


def select(questions: Sequence[Question], settings: QaSettings, path: Path) -> tuple[list[Question], list[Question]]:
    """Split the questions into solved examples and questions to ask.

    Raises:
        InputError: a question has no answers, or no question is left to ask.
    """
    for each in questions:
        if not each.answers:
            raise InputError(f"{path}: question {each.id!r} has no answers, so it cannot be scored.")
    shots, chosen = questions[: settings.shots], questions[settings.shots :]
    chosen = chosen[: settings.max_questions or None]
    if not chosen:
        raise InputError(f"{path} has {len(questions)} questions: with shots = {settings.shots} none is left to ask.")
    return list(shots), list(chosen)


def language_for(questions: Sequence[Question], settings: QaSettings) -> Language:
    """The language of the settings, or of the questions."""
    return language_of([each.question for each in questions]) if settings.language == "auto" else settings.language


def answer_in_passages(questions: Sequence[Question], passages: Sequence[Sequence[str]]) -> float:
    """Fraction of the questions with a right answer in one of their passages."""
    held = [
        any(right.lower() in text.lower() for right in each.answers for text in texts)
        for each, texts in zip(questions, passages, strict=True)
    ]
    return float(np.mean(held))


def answers_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each mode, from rows of `Answered.as_json`."""
    cells = []
    for row in rows:
        figures = [
            f"{100 * row[name]:.2f} ({100 * row[f'{name}_low']:.2f} to {100 * row[f'{name}_high']:.2f})"
            for name in ("exact_match", "f1")
        ]
        held = row["answer_in_passages"]
        cells.append([row["mode"], *figures, "–" if held is None else f"{100 * held:.1f}", f"{row['questions']:,}"])
    return Table(["mode", "exact match", "F1", "answer in passages", "questions"], cells)


def as_json(rows: Sequence[Answered], questions: Sequence[Question], seed: int) -> dict[str, Any]:
    """`results`: a row for each mode; `answers`: for each question the right answers and the answer of each mode."""
    given = {row.mode.name: row.answers for row in rows}
    return {
        "results": [row.as_json(seed) for row in rows],
        "answers": [
            {"id": each.id, "question": each.question, "right": list(each.answers)}
            | {mode: texts[number] for mode, texts in given.items()}
            for number, each in enumerate(questions)
        ],
    }
