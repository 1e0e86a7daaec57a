"""Question answering: exact match and F1 of a model's answers in every mode.

questions ─┬─────────────────────────────► lines or chat ────► closed book ─────────────────────────┐ each with
           │                         ┌───► lines or chat ────► passages in the prompt ──────────────┘ retrieval OFF and ON
           ├► find_passages ─► texts ┼───► chat ─► passages as neighbors, passages in the prompt and as neighbors
           │                         └───► the paper's prompt (section 4.3) ─► passages as neighbors
           └─────────────────────────────► the paper's prompt ─► closed book

prompts of a mode, neighbors ─► LanguageModel ─► answers ─► Answered: exact match, F1

A model with a chat template is asked in its template, all others in lines and in the paper's prompt.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from indexing.progress import Advance, Progress, percentage
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import tokenizer_fingerprint
from indexing.tokenization.language import Language, language_of
from indexing.tokenization.texts import as_texts
from retro.checkpoints.checkpoint import Checkpoint, open_checkpoint
from retro.evaluation.answer_metrics import exact_match, f1, mean_with_interval
from retro.evaluation.neighbor_prompts import Passage, QuestionFormat, find_passages
from retro.evaluation.question_sets import Question
from retro.evaluation.settings import QaSettings
from retro.evaluation.text_prompts import CHAT_INSTRUCTIONS, PromptBuilder, room_for_prompts
from retro.inference.chat_template import ChatTemplate, Message, stored_template
from retro.inference.language_model import GivenNeighbors, LanguageModel
from retro.inference.settings import GenerationSettings


def open_model(
    checkpoint: Path, passages: Path | str | None, settings: QaSettings, device: str
) -> tuple[LanguageModel, Retriever | None]:
    """Open the model with its retriever, and the datastore of passages.

    Retrieval ON searches the passages, or without passages the datastore of the training run.

    Raises:
        InputError: a path cannot be opened, the passages do not fit retrieval ON, or passages as neighbors are set
            without a datastore of passages.
    """
    opened = open_checkpoint(checkpoint)
    if settings.neighbor_passages and passages is None and opened.model.retrieves:
        raise InputError(f"neighbor_passages = {settings.neighbor_passages}: name the datastore to search, --passages.")
    if settings.gold and passages is None:
        raise InputError("gold = true: name the datastore of the documents in positive_ids, --passages.")
    retrieval = bool(settings.k) and opened.model.retrieves
    if passages is None:
        return LanguageModel.open(checkpoint, None, device, retrieval=retrieval), None
    retriever = Retriever.open(passages)
    retriever.chunks.require(settings.retrieval)
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


def select(questions: Sequence[Question], settings: QaSettings, path: Path) -> tuple[list[Question], list[Question]]:
    """Split the questions into solved examples and questions to ask.

    Raises:
        InputError: a question has no answers, or no question is left to ask.
    """
    for question in questions:
        if not question.answers:
            raise InputError(f"{path}: question {question.id!r} has no answers, so it cannot be scored.")
    shots, chosen = questions[: settings.shots], questions[settings.shots :]
    chosen = chosen[: settings.max_questions or None]
    if not chosen:
        raise InputError(f"{path} has {len(questions)} questions: with shots = {settings.shots} none is left to ask.")
    return list(shots), list(chosen)


def language_for(questions: Sequence[Question], settings: QaSettings) -> Language:
    """The language of the settings, or of the questions."""
    return (
        language_of([question.question for question in questions]) if settings.language == "auto" else settings.language
    )


# --- prompts of every mode ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuestionMode:
    """How questions are asked.

    Attributes:
        prompt: `lines`: a line for each passage, question and answer; `chat`: the same in the model's chat
            template; `paper`: the paper's prompt with the question only.
        passages: number of passages in the prompt.
        k: neighbors of each chunk, searched with the chunk.
        neighbors: passages, searched with the question, that all chunks read instead.
        gold: whether passages with the answer come first among them.
    """

    prompt: Literal["lines", "chat", "paper"] = "lines"
    passages: int = 0
    k: int = 0
    neighbors: int = 0
    gold: bool = False

    @property
    def name(self) -> str:
        """`closed book`, or the open parts: `passages in the prompt, ON k=2`,
        `paper's prompt, 20 passages as neighbors`."""
        parts = ["passages in the prompt"] if self.passages else []
        parts += [f"ON k={self.k}"] if self.k else []
        parts += [f"{self.neighbors} passages as neighbors"] if self.neighbors else []
        parts += ["gold first"] if self.gold else []
        return ", ".join([*_PROMPT_NAMES[self.prompt], *(parts or ["closed book"])])


_PROMPT_NAMES = {"lines": (), "chat": ("chat",), "paper": ("paper's prompt",)}


class ModePrompts(NamedTuple):
    """All questions in one mode: tokens of each prompt, its given neighbors, the texts of its passages, and the tokens
    that end an answer in addition to the end of the document."""

    mode: QuestionMode
    prompts: list[np.ndarray]
    given: GivenNeighbors | None = None  # None: no neighbors, or those that each chunk finds
    texts: list[list[str]] | None = None  # passages in the prompt or as neighbors; None: no passages
    ends: tuple[int, ...] = ()


Rankings = dict[bool, list[list[Passage]]]
"""The passages of each question, best first, as found (False), and with those first that the question names (True:
gold)."""


def found_passages(
    retriever: Retriever, questions: Sequence[Question], settings: QaSettings, progress: Progress = percentage
) -> Rankings:
    """Find the passages that the settings need; `progress` shows the searches.

    Raises:
        InputError: `gold` is set, and a question names no document of the datastore.
    """
    k, rankings = max(settings.prompt_passages, settings.neighbor_passages), Rankings()
    for gold in (False, True) if settings.gold else (False,) if k else ():
        with progress("gold" if gold else "search", total=len(questions), unit="questions") as advance:
            rankings[gold] = find_passages(
                retriever, questions, k, retrieval=settings.retrieval, positives_first=gold, advance=advance
            )
    return rankings


def all_modes(
    language_model: LanguageModel,
    questions: Sequence[Question],
    settings: QaSettings,
    *,
    language: Language,
    shots: Sequence[Question] = (),
    passages: Rankings,
) -> Iterator[ModePrompts]:
    """All modes that model, settings and passages allow, closed book first.

    Args:
        language_model: opened with retrieval, to measure ON.
        questions: n of them.
        settings: neighbors, lengths.
        language: of the prompts.
        shots: solved questions before each.
        passages: of each question.

    Raises:
        InputError: a question is too long for the model.
    """
    template = _chat_template(language_model)
    yield from _in_lines(language_model, questions, settings, language, shots, passages, template)
    if settings.neighbor_passages and template is None:
        yield from _as_in_paper(language_model, questions, settings.neighbor_passages, language, passages)


def _chat_template(language_model: LanguageModel) -> ChatTemplate | None:
    """The model's template; None for base models, and for models that learned questions in the paper's prompt."""
    settings = language_model.checkpoint.settings
    if settings.get("finetune", {}).get("format") == "questions":
        return None
    return stored_template(language_model.tokenizer, settings)


def _in_lines(
    language_model: LanguageModel,
    questions: Sequence[Question],
    settings: QaSettings,
    language: Language,
    shots: Sequence[Question],
    passages: Rankings,
    template: ChatTemplate | None,
) -> Iterator[ModePrompts]:
    m = language_model.model.settings.chunk_length
    room = room_for_prompts(language_model.context, m, settings.max_tokens)

    def opening(text: str) -> np.ndarray:
        """The text of passages as the user's message. The assistant's answer begins after it, with solved questions."""
        assert template is not None
        return template.prompt([Message("user", "\n".join([*text.splitlines(), CHAT_INSTRUCTIONS[language]]))])

    prompts = PromptBuilder(language_model.tokenizer, language, shots, room, m, opening if template else None)
    form = QuestionFormat(language_model.tokenizer, m, language)
    ends = (template.end_of_turn,) if template else ()
    count, neighbors = settings.prompt_passages, settings.neighbor_passages
    in_neighbors = passages if neighbors and template and language_model.model.settings.retrieves else {}
    nothing: list[list[Passage]] = [[] for _ in questions]
    for gold, ranked in (None, nothing), *(passages.items() if count else ()):
        texts = [[passage.text for passage in row[:count]] for row in ranked]
        filled = [prompts.prompt(*pair) for pair in zip(questions, texts, strict=True)]
        mode = QuestionMode("chat" if template else "lines", 0 if gold is None else count, gold=bool(gold))
        for k in (0, settings.k) if settings.k and language_model.retriever is not None else (0,):
            yield ModePrompts(replace(mode, k=k), filled, None, None if gold is None else texts, ends)
        for is_gold, row in in_neighbors.items():
            if gold in (None, is_gold):  # without passages in the prompt, or with those of the prompt
                given, read = _as_neighbors(form, row, neighbors)
                both = [one + other for one, other in zip(texts, read, strict=True)]
                yield ModePrompts(replace(mode, neighbors=neighbors, gold=is_gold), filled, given, both, ends)


def _as_neighbors(
    form: QuestionFormat, ranked: Sequence[Sequence[Passage]], count: int
) -> tuple[GivenNeighbors, list[list[str]]]:
    """The first passages of each question as neighbors, and their texts: passages may be cut off, so these are
    decoded."""
    given = [form.neighbors(row, count) for row in ranked]
    read = [[row[:length] for row, length in zip(*pair, strict=True)] for pair in given]
    return given, [form.tokenizer.decode_batch(rows) for rows in read]


def _as_in_paper(
    language_model: LanguageModel,
    questions: Sequence[Question],
    count: int,
    language: Language,
    passages: Rankings,
) -> Iterator[ModePrompts]:
    model = language_model.model.settings
    form = QuestionFormat(language_model.tokenizer, model.chunk_length, language)
    prompts = [form.prompt(question.question) for question in questions]
    yield ModePrompts(QuestionMode("paper"), prompts)
    for gold, ranked in passages.items() if model.retrieves else ():
        given, texts = _as_neighbors(form, ranked, count)
        yield ModePrompts(QuestionMode("paper", neighbors=count, gold=gold), prompts, given, texts)


# --- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answered:
    """The answers to all questions in one mode.

    Attributes:
        mode: how the questions were asked.
        answers: [n] texts.
        exact_match, f1: [n] float64 of each.
        answer_in_passages: fraction of the questions with a right answer in the passages, the upper bound of a model
            that only copies; None: no passages.
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


def measure_answers(
    language_model: LanguageModel,
    modes: Iterable[ModePrompts],
    questions: Sequence[Question],
    settings: QaSettings,
    language: Language,
    progress: Progress = percentage,
) -> list[Answered]:
    """Answer the questions in every mode.

    Args:
        language_model: opened with retrieval, if a mode needs it.
        modes: from `all_modes`.
        questions: all with answers.
        settings: lengths.
        language: of the measures.
        progress: shows the answered questions.
    """
    rows = []
    for prepared in modes:
        with progress(f"answer, {prepared.mode.name}", total=len(questions), unit="questions") as advance:
            answers = answer(
                language_model,
                prepared.prompts,
                k=prepared.mode.k,
                given=prepared.given,
                ends=prepared.ends,
                max_tokens=settings.max_tokens,
                batch_size=settings.batch_size,
                advance=advance,
            )
        pairs = list(zip(answers, questions, strict=True))
        rows.append(
            Answered(
                mode=prepared.mode,
                answers=answers,
                exact_match=np.array([exact_match(text, question.answers, language) for text, question in pairs]),
                f1=np.array([f1(text, question.answers, language) for text, question in pairs]),
                answer_in_passages=None if prepared.texts is None else answer_in_passages(questions, prepared.texts),
            )
        )
    return rows


def answer(
    language_model: LanguageModel,
    prompts: Sequence[np.ndarray],
    *,
    k: int = 0,
    given: GivenNeighbors | None = None,
    ends: tuple[int, ...] = (),
    max_tokens: int,
    batch_size: int,
    advance: Advance = lambda _: None,
) -> list[str]:
    """Continue each prompt greedily up to the end of its line or of the document.

    Args:
        language_model: opened with retrieval if k is not 0.
        prompts: token ids [t] of each.
        k: neighbors of each chunk; 0 = retrieval OFF.
        given: neighbors of each prompt; all chunks of prompt and answer read these, and no search runs.
        ends: tokens that end an answer, in addition to the end of the document.
        max_tokens: largest number of tokens in an answer.
        batch_size: number of prompts that are continued together.
        advance: called with numbers of answered questions.
    """
    settings = GenerationSettings(max_tokens=max_tokens, temperature=0, stop=("\n",), stop_token_ids=ends)
    answers = []
    for start in range(0, len(prompts), batch_size):
        block = slice(start, start + batch_size)
        group, read = prompts[block], None if given is None else given[block]
        texts = [""] * len(group)
        for step in language_model.generate(group, settings, k, read):
            for token in step:
                texts[token.row] += token.text
        answers += [text.strip() for text in texts]
        advance(len(group))
    return answers


def answer_in_passages(questions: Sequence[Question], passages: Sequence[Sequence[str]]) -> float:
    """Fraction of the questions with a right answer in one of their passages."""
    held = [
        any(right.lower() in text.lower() for right in as_texts(question.answers) for text in as_texts(texts))
        for question, texts in zip(questions, passages, strict=True)
    ]
    return float(np.mean(held))


def as_json(rows: Sequence[Answered], questions: Sequence[Question], seed: int) -> dict[str, Any]:
    """`results`: a row for each mode; `answers`: for each question the right answers and the answer of each mode."""
    given = {row.mode.name: row.answers for row in rows}
    return {
        "results": [row.as_json(seed) for row in rows],
        "answers": [
            {"id": question.id, "question": question.question, "right": list(question.answers)}
            | {mode: texts[row] for mode, texts in given.items()}
            for row, question in enumerate(questions)
        ],
    }
