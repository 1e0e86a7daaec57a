"""What `retro eval-qa` measures: exact match and F1 of a model's answers, closed-book and open-book, as a table and JSON.

questions ─┬───────────────────────────────► prompts ─► answers, retrieval OFF and ON ─► Answered: exact match, F1
           └► Retriever.search ► passages ─► prompts ─► answers, retrieval OFF and ON ─┘
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from indexing.retriever import Retriever
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.remote import url_of
from indexing.store.retrieval import check_tokenizer
from pipelines.progress import progress
from pipelines.report import Table
from retro.checkpoint import Checkpoint, open_checkpoint
from retro.language_model import LanguageModel
from retro.qa import Language, exact_match, f1, language_of, mean_with_interval
from retro.question_answering import Prompts, answer, room_for_prompts
from retro.questions import Question

_BLOCK_QUESTIONS = 256  # searched together


@dataclass(frozen=True)
class QaSettings:
    """How questions are asked."""

    k: int = 2
    """Neighbors of each chunk of a prompt with retrieval ON; 0 = ON is not measured."""
    prompt_passages: int = 2
    """Passages in an open-book prompt, the nearest chunks to the question with their continuations."""
    rerank: Literal["embeddings", "bm25", "hybrid"] = "embeddings"
    """What the candidates for these passages are ordered by."""
    shots: int = 0
    """Solved questions in front of each: the first of the file, which are not asked then."""
    max_questions: int = 0
    """Ask so many, the first of the file; 0 = all."""
    max_tokens: int = 24
    """Tokens of an answer, at most; it ends with its line."""
    language: Literal["auto", "en", "zh"] = "auto"
    """Of the prompts' words and of the measures; `auto`: that of most questions."""
    batch_size: int = 8
    """Prompts that are continued together."""
    seed: int = 0
    """Of the bootstrap over questions."""

    def __post_init__(self) -> None:
        for key, least in (("k", 0), ("prompt_passages", 0), ("shots", 0), ("max_questions", 0), ("max_tokens", 1)):
            if getattr(self, key) < least:
                raise InputError(f"qa.{key} = {getattr(self, key)}: must be at least {least}.")
        if self.batch_size < 1:
            raise InputError(f"qa.batch_size = {self.batch_size}: must be at least 1.")


@dataclass(frozen=True)
class Answered:
    """The answers to all questions in one mode.

    Attributes:
        passages: in the prompt; 0 = closed book, unless k.
        k: neighbors of each chunk; 0 = retrieval OFF.
        answers: [n] texts.
        exact_match, f1: [n] float64 of each.
    """

    passages: int
    k: int
    answers: list[str]
    exact_match: np.ndarray = field(repr=False)
    f1: np.ndarray = field(repr=False)

    @property
    def mode(self) -> str:
        """`closed book`, or what is open: `passages in the prompt, ON k=2`."""
        return (
            ", ".join((["passages in the prompt"] if self.passages else []) + ([f"ON k={self.k}"] if self.k else []))
            or "closed book"
        )

    def as_json(self, seed: int) -> dict[str, Any]:
        """Means with 95% of bootstraps over questions."""
        row: dict[str, Any] = {
            "mode": self.mode,
            "passages": self.passages,
            "k": self.k,
            "questions": len(self.answers),
        }
        for name in ("exact_match", "f1"):
            row[name], row[f"{name}_low"], row[f"{name}_high"] = mean_with_interval(getattr(self, name), seed)
        return row


def open_model(
    checkpoint: Path, passages: Path | str | None, settings: QaSettings, device: str
) -> tuple[LanguageModel, Retriever | None]:
    """The model, with what it retrieves from, and the passages opened for search.

    With passages, retrieval ON reads them too, else the datastore of the training run.

    Raises:
        InputError: one cannot be opened, or retrieval ON is asked of passages that the model cannot read.
    """
    opened = open_checkpoint(checkpoint)
    retrieval = bool(settings.k and opened.model.cca_layers)
    if passages is None:
        return LanguageModel.open(checkpoint, None, device, retrieval=retrieval), None
    retriever = Retriever.open(passages)
    if retrieval:
        _check_readable(opened, retriever.datastore)
    source = retriever if retrieval else None
    return LanguageModel.open(checkpoint, source, device, retrieval=retrieval), retriever


def _check_readable(checkpoint: Checkpoint, passages: Datastore) -> None:
    again = (
        "Build it with the model's tokenizer and chunk length, or set --qa.k 0: passages are then in the prompt only."
    )
    for key in ("vocab_size", "chunk_length"):
        if (ours := getattr(checkpoint.model, key)) != (theirs := passages.manifest[key]):
            raise InputError(f"--passages {passages.folder} has {key} {theirs}, the model {ours}. {again}")
    first = Path(checkpoint.settings["data"]["datastores"][0])
    if url_of(first) or (first / "tokenizer").exists():  # a checkpoint may have outlived what it was trained on
        check_tokenizer(Datastore.open(first), passages, "--passages")


def retrieved_passages(retriever: Retriever, questions: Sequence[Question], settings: QaSettings) -> list[list[str]]:
    """For each question the texts of its nearest chunks with their continuations, nearest first; with a progress bar."""
    out: list[list[str]] = []
    with progress("search", total=len(questions), unit="questions") as advance:
        for start in range(0, len(questions), _BLOCK_QUESTIONS):
            block = [each.question for each in questions[start : start + _BLOCK_QUESTIONS]]
            found = retriever.search(block, settings.prompt_passages, rerank=settings.rerank)
            out += [[hit.text + hit.continuation for hit in hits] for hits in found.hits]
            advance(len(block))
    return out


def measure_answers(
    language_model: LanguageModel,
    questions: Sequence[Question],
    settings: QaSettings,
    *,
    language: Language,
    shots: Sequence[Question] = (),
    passages: Sequence[Sequence[str]] | None = None,
) -> list[Answered]:
    """Every mode that the model and the settings allow, closed book first, with progress bars.

    Args:
        language_model: open with retrieval, if ON shall be measured.
        questions: which all have answers.
        settings: neighbors, lengths.
        language: of prompts and measures.
        shots: solved questions in front of each.
        passages: for each question those of its open-book prompt; None: no passages in prompts.

    Raises:
        InputError: a question is too long for the model.
    """
    prompts = Prompts(
        language_model.tokenizer,
        language,
        shots,
        room_for_prompts(language_model, settings.max_tokens),
        language_model.model.settings.chunk_length,
    )
    rows = []
    ks = (0, settings.k) if settings.k and language_model.retriever is not None else (0,)
    for given in [None, passages] if passages is not None and settings.prompt_passages else [None]:
        made = [prompts.prompt(each, given[number] if given else ()) for number, each in enumerate(questions)]
        for k in ks:
            name = f"answer, {'open' if given else 'closed'}{f', k={k}' if k else ''}"
            with progress(name, total=len(made), unit="questions") as advance:
                answers = answer(
                    language_model,
                    made,
                    k=k,
                    max_tokens=settings.max_tokens,
                    batch_size=settings.batch_size,
                    advance=advance,
                )
            pairs = list(zip(answers, questions, strict=True))
            rows.append(
                Answered(
                    passages=settings.prompt_passages if given else 0,
                    k=k,
                    answers=answers,
                    exact_match=np.array([exact_match(text, each.answers, language) for text, each in pairs]),
                    f1=np.array([f1(text, each.answers, language) for text, each in pairs]),
                )
            )
    return rows


def select(questions: Sequence[Question], settings: QaSettings, path: Path) -> tuple[list[Question], list[Question]]:
    """The solved questions in front, and the ones that are asked.

    Raises:
        InputError: one has no answers, or none is left to ask.
    """
    for each in questions:
        if not each.answers:
            raise InputError(f"{path}: question {each.id!r} has no answers: nothing can be scored against it.")
    shots, asked = questions[: settings.shots], questions[settings.shots :]
    asked = asked[: settings.max_questions or None]
    if not asked:
        raise InputError(
            f"{path} has {len(questions)} questions: with qa.shots = {settings.shots} none is left to ask."
        )
    return list(shots), list(asked)


def language_for(questions: Sequence[Question], settings: QaSettings) -> Language:
    """The language that the settings name, or that of the questions."""
    return language_of([each.question for each in questions]) if settings.language == "auto" else settings.language


def answer_in_passages(questions: Sequence[Question], passages: Sequence[Sequence[str]]) -> float:
    """Share of the questions of which a right answer stands in a passage: no reader of passages alone does better."""
    held = [
        any(right.lower() in text.lower() for right in each.answers for text in texts)
        for each, texts in zip(questions, passages, strict=True)
    ]
    return float(np.mean(held))


def answers_table(rows: Sequence[Answered], seed: int) -> Table:
    """A row for each mode."""
    cells = []
    for row in (each.as_json(seed) for each in rows):
        figures = [
            f"{100 * row[name]:.2f} ({100 * row[f'{name}_low']:.2f} to {100 * row[f'{name}_high']:.2f})"
            for name in ("exact_match", "f1")
        ]
        cells.append([row["mode"], *figures, f"{row['questions']:,}"])
    return Table(["mode", "exact match", "F1", "questions"], cells)


def as_json(rows: Sequence[Answered], questions: Sequence[Question], seed: int) -> dict[str, Any]:
    """`results`: a row for each mode; `answers`: for each question the right ones, and what each mode answered."""
    given = {row.mode: row.answers for row in rows}
    return {
        "results": [row.as_json(seed) for row in rows],
        "answers": [
            {"id": each.id, "right": list(each.answers)} | {mode: texts[number] for mode, texts in given.items()}
            for number, each in enumerate(questions)
        ],
    }
