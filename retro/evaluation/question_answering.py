"""Question answering: exact match and F1 of a model's answers in every mode.

questions ─┬───────────────────► lines or chat ─► closed book ────────────┐ each with
           ├► passages ────────► lines or chat ─► passages in the prompt ─┘ retrieval OFF and ON
           ├► passages ────────► the paper's prompt (section 4.3) ─► passages as neighbors
           └───────────────────► the paper's prompt ─► closed book

prompts of a mode, neighbors ─► LanguageModel ─► answers ─► Answered: exact match, F1, refusals, what is from passages

A model with a chat template is asked as `retro serve` and `retro chat` ask it (`passage_prompts.py`), all others in
lines and in the paper's prompt.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from indexing.progress import FinishedBefore, Progress, percentage
from indexing.retrieval.passages import find_passages
from indexing.retrieval.results import Passage
from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.store.retrieval_set import tokenizer_fingerprint
from indexing.tokenization.language import Language, language_of
from indexing.tokenization.texts import as_texts
from retro.checkpoints.checkpoint import Checkpoint, open_checkpoint
from retro.evaluation.answer_journal import AnswerJournal
from retro.evaluation.answer_metrics import contains, exact_match, f1, is_refusal, mean_with_interval
from retro.evaluation.neighbor_prompts import NeighborPassage, QuestionFormat, find_neighbor_passages
from retro.evaluation.question_sets import Question
from retro.evaluation.retrieval_metrics import right_documents
from retro.evaluation.settings import QaSettings
from retro.evaluation.text_prompts import PromptBuilder, room_for_prompts
from retro.inference.chat_template import ChatTemplate, Message, stored_template
from retro.inference.language_model import GivenNeighbors, LanguageModel
from retro.inference.passage_prompts import passages_as_neighbors, room_for_prompt, write_prompt
from retro.inference.quotes import is_verbatim
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
    retriever.chunks.require(retriever.chunks.best if settings.retrieval == "auto" else settings.retrieval)
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
        InputError: a question has no answers, a solved example is unanswerable, or no question is left to ask.
    """
    for question in questions:
        if not question.answers and not question.unanswerable:
            raise InputError(
                f'{path}: question {question.id!r} has no answers, so it cannot be scored. Add "answers", or '
                '"unanswerable": true if no document has one.'
            )
    shots, chosen = questions[: settings.shots], questions[settings.shots :]
    if unsolved := [question.id for question in shots if question.unanswerable]:
        raise InputError(
            f"{path}: question {unsolved[0]!r} is unanswerable, and shots = {settings.shots} takes it as a solved one. "
            "Put questions with answers first."
        )
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
        prompt: `lines`: a line for each passage, question and answer; `chat`: a conversation in the model's chat
            template, with passages as `retro serve` and `retro chat` write them; `paper`: the paper's prompt with the
            question only.
        passages: number of passages in the prompt.
        k: neighbors of each chunk, searched with the chunk.
        neighbors: passages, searched with the question, that all chunks read instead.
        gold: whether passages with the answer come first among them.
        copying: whether a chat model also copies, from the passages of the prompt and from the datastore.
    """

    prompt: Literal["lines", "chat", "paper"] = "lines"
    passages: int = 0
    k: int = 0
    neighbors: int = 0
    gold: bool = False
    copying: bool = False

    @property
    def name(self) -> str:
        """`closed book`, or the open parts: `passages in the prompt, ON k=2`, `chat, passages in the prompt,
        copying`."""
        parts = ["passages in the prompt"] if self.passages else []
        parts += [f"ON k={self.k}"] if self.k else []
        parts += [f"{self.neighbors} passages as neighbors"] if self.neighbors else []
        parts += ["copying"] if self.copying else []
        parts += ["gold first"] if self.gold else []
        return ", ".join([*_PROMPT_NAMES[self.prompt], *(parts or ["closed book"])])


_PROMPT_NAMES = {"lines": (), "chat": ("chat",), "paper": ("paper's prompt",)}


@dataclass(frozen=True)
class ModePrompts:
    """All questions in one mode.

    Attributes:
        mode: how they are asked.
        prompts: tokens [t] of each.
        k: neighbors of each chunk that are searched in generation; 0 = retrieval OFF, or neighbors are given.
        given: neighbors of each prompt; None = none, or those that each chunk finds.
        texts: the passages of each, in the prompt or as neighbors; None = no passages.
        documents: ids of the documents of the passages in the prompt; None = no passages in it.
        ends: tokens that end an answer in addition to the end of the document.
        inserted: [start, stop) of the tokens of each prompt that are passages; None = they are not marked.
    """

    mode: QuestionMode
    prompts: list[np.ndarray]
    k: int = 0
    given: GivenNeighbors | None = None
    texts: list[list[str]] | None = None
    documents: list[list[str]] | None = None
    ends: tuple[int, ...] = ()
    inserted: list[tuple[int, int]] | None = None


@dataclass(frozen=True)
class Found:
    """The passages of each question, best first: as found (False), and with those first that the question names (True:
    gold).

    Attributes:
        retriever: that found them.
        prompts: passages for prompts.
        neighbors: chunks with their continuations, to read as neighbors.
    """

    retriever: Retriever
    prompts: dict[bool, list[list[Passage]]]
    neighbors: dict[bool, list[list[NeighborPassage]]]


def found_passages(
    retriever: Retriever, questions: Sequence[Question], settings: QaSettings, progress: Progress = percentage
) -> Found:
    """Find the passages that the settings need; `progress` shows the searches.

    Raises:
        InputError: `gold` is set, and a question with an answer names no document of the datastore.
    """
    found = Found(retriever, {}, {})
    way = retriever.chunks.best if settings.retrieval == "auto" else settings.retrieval
    right: list[np.ndarray] = [np.zeros(0, np.int64)] * len(questions)
    if settings.gold:
        rows = [row for row, question in enumerate(questions) if not question.unanswerable]
        documents = right_documents(retriever.retrieval, [questions[row] for row in rows])
        for row, of_question in zip(rows, documents, strict=True):
            right[row] = of_question
    for gold in (False, True) if settings.gold else (False,):
        name = "gold" if gold else "search"
        if settings.prompt_passages:
            with progress(name, total=len(questions), unit="questions") as advance:
                found.prompts[gold] = []
                for question, first in zip(questions, right, strict=True):
                    passages = find_passages(
                        retriever.chunks,
                        question.question,
                        settings.prompt_passages,
                        settings.passage_tokens,
                        retrieval=way,
                        least_match=0.0 if gold else settings.least_match,
                        documents_first=first.tolist() if gold else (),
                    )
                    found.prompts[gold].append(passages)
                    advance(1)
        if settings.neighbor_passages:
            with progress(f"{name}, neighbors", total=len(questions), unit="questions") as advance:
                found.neighbors[gold] = find_neighbor_passages(
                    retriever,
                    questions,
                    settings.neighbor_passages,
                    retrieval=way,
                    positives_first=gold,
                    advance=advance,
                )
    return found


def all_modes(
    language_model: LanguageModel,
    questions: Sequence[Question],
    settings: QaSettings,
    *,
    language: Language,
    shots: Sequence[Question] = (),
    found: Found | None,
) -> Iterator[ModePrompts]:
    """All modes that model, settings and passages allow, closed book first.

    Args:
        language_model: opened with retrieval, to measure ON.
        questions: n of them.
        settings: neighbors, lengths.
        language: of the prompts.
        shots: solved questions before each.
        found: passages of each question; None = no datastore of passages.

    Raises:
        InputError: a question is too long for the model.
    """
    template = _chat_template(language_model)
    if template is not None:
        yield from _in_chat(language_model, questions, settings, language, shots, found, template)
        return
    yield from _in_lines(language_model, questions, settings, language, shots, found)
    if settings.neighbor_passages:
        yield from _as_in_paper(language_model, questions, settings.neighbor_passages, language, found)


def _chat_template(language_model: LanguageModel) -> ChatTemplate | None:
    """The model's template; None for base models, and for models that learned questions in the paper's prompt."""
    settings = language_model.checkpoint.settings
    if settings.get("finetune", {}).get("format") == "questions":
        return None
    return stored_template(language_model.tokenizer, settings)


def _in_chat(
    language_model: LanguageModel,
    questions: Sequence[Question],
    settings: QaSettings,
    language: Language,
    shots: Sequence[Question],
    found: Found | None,
    template: ChatTemplate,
) -> Iterator[ModePrompts]:
    """Conversations as the server writes them."""
    most = room_for_prompt(language_model.context, settings.max_tokens)
    asked = [_conversation(template, question, shots, language, most) for question in questions]
    plain, ends = [tokens for _, tokens in asked], (template.end_of_turn,)
    retrieves = settings.k > 0 and language_model.retriever is not None
    for k in (0, settings.k) if retrieves else (0,):
        yield ModePrompts(QuestionMode("chat", k=k), plain, k, ends=ends)
    for gold, passages in found.prompts.items() if found else ():
        written = [
            write_prompt(template, *conversation, of_question, most)
            for conversation, of_question in zip(asked, passages, strict=True)
        ]
        texts, documents = _texts_and_documents([prompt.passages for prompt in written])
        mode = ModePrompts(
            QuestionMode("chat", settings.prompt_passages, gold=gold),
            [prompt.tokens for prompt in written],
            texts=texts,
            documents=documents,
            ends=ends,
            inserted=[prompt.inserted for prompt in written],
        )
        yield mode
        if retrieves:
            assert found is not None
            sets, given = found.retriever.retrieval, None
            if language_model.model.settings.retrieves:
                given = [passages_as_neighbors(sets, prompt.passages) for prompt in written]
            yield replace(mode, mode=replace(mode.mode, copying=True), k=settings.k, given=given)


def _conversation(
    template: ChatTemplate, question: Question, shots: Sequence[Question], language: Language, most: int
) -> tuple[list[Message], np.ndarray]:
    """A question after solved ones, and its prompt. Solved questions that do not fit are left out, the first ones
    first.

    Raises:
        InputError: the question alone is too long.
    """
    turns = [
        [Message("user", f"{s.question}\n{INSTRUCTIONS[language]}"), Message("assistant", as_texts(s.answers)[0])]
        for s in shots
    ]
    asked = Message("user", f"{question.question}\n{INSTRUCTIONS[language]}")
    for first in range(len(turns) + 1):
        messages = [*chain.from_iterable(turns[first:]), asked]
        tokens = template.prompt(messages)
        if len(tokens) <= most:
            return messages, tokens
    raise InputError(
        f"question {question.id!r} has {len(tokens):,} tokens; at most {most:,} fit: the model's context minus the longest "
        "answer. Shorten the question or lower max_tokens."
    )


INSTRUCTIONS: dict[Language, str] = {"en": "Answer in a few words.", "zh": "用几个字回答。"}
"""What a chat model is asked after each question, so that answers can be scored."""


def _in_lines(
    language_model: LanguageModel,
    questions: Sequence[Question],
    settings: QaSettings,
    language: Language,
    shots: Sequence[Question],
    found: Found | None,
) -> Iterator[ModePrompts]:
    m = language_model.model.settings.chunk_length
    room = room_for_prompts(language_model.context, m, settings.max_tokens)
    prompts = PromptBuilder(language_model.tokenizer, language, shots, room, m)
    nothing: list[list[Passage]] = [[] for _ in questions]
    for gold, ranked in (None, nothing), *(found.prompts.items() if found else ()):
        texts, documents = _texts_and_documents(ranked)
        filled = [prompts.prompt(*pair) for pair in zip(questions, texts, strict=True)]
        count = 0 if gold is None else settings.prompt_passages
        for k in (0, settings.k) if settings.k and language_model.retriever is not None else (0,):
            mode = QuestionMode("lines", count, k, gold=bool(gold))
            is_closed = gold is None
            yield ModePrompts(mode, filled, k, None, None if is_closed else texts, None if is_closed else documents)


def _texts_and_documents(passages: Sequence[Sequence[Passage]]) -> tuple[list[list[str]], list[list[str]]]:
    """The texts of the passages in each prompt, and the ids of their documents."""
    texts = [[passage.text for passage in row] for row in passages]
    return texts, [[passage.document_id for passage in row] for row in passages]


def _as_neighbors(
    form: QuestionFormat, ranked: Sequence[Sequence[NeighborPassage]], count: int
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
    found: Found | None,
) -> Iterator[ModePrompts]:
    model = language_model.model.settings
    form = QuestionFormat(language_model.tokenizer, model.chunk_length, language)
    prompts = [form.prompt(question.question) for question in questions]
    yield ModePrompts(QuestionMode("paper"), prompts)
    for gold, ranked in found.neighbors.items() if found and model.retrieves else ():
        given, texts = _as_neighbors(form, ranked, count)
        yield ModePrompts(QuestionMode("paper", neighbors=count, gold=gold), prompts, given=given, texts=texts)


# --- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answered:
    """The answers to all questions in one mode.

    Attributes:
        mode: how the questions were asked.
        answers: [n] texts.
        exact_match, f1, contains: float64 of each question that has an answer, in order.
        unanswerable: bool [n].
        refused: bool [n], answers that say that they do not know.
        verbatim: bool [n], answers that occur in a passage word for word; None: no passages.
        answer_in_passages: fraction of the questions that have an answer with a right one in the passages, the upper
            bound of a model that only copies; None: no passages.
        hit: fraction of the questions that name documents with one of these among the passages of the prompt: hit@k;
            None: no passages in the prompt, or no question names documents.
    """

    mode: QuestionMode
    answers: list[str]
    exact_match: np.ndarray = field(repr=False)
    f1: np.ndarray = field(repr=False)
    contains: np.ndarray = field(repr=False)
    unanswerable: np.ndarray = field(repr=False)
    refused: np.ndarray = field(repr=False)
    verbatim: np.ndarray | None = field(default=None, repr=False)
    answer_in_passages: float | None = None
    hit: float | None = None

    def as_json(self, seed: int, closed: "Answered") -> dict[str, Any]:
        """Means, with the range of 95% of bootstraps over questions; `_gain` is the difference to the answers without
        passages and retrieval, question by question."""
        row: dict[str, Any] = {"mode": self.mode.name, **asdict(self.mode), "questions": len(self.f1)}
        for name in ("exact_match", "f1", "contains"):
            values = getattr(self, name)
            pairs = {name: values, f"{name}_gain": values - getattr(closed, name)}
            for key, each in pairs.items() if len(values) else ():
                row[key], row[f"{key}_low"], row[f"{key}_high"] = mean_with_interval(each, seed)
        row |= {"answer_in_passages": self.answer_in_passages, "hit": self.hit}
        for kind, chosen in (("", ~self.unanswerable), ("unanswerable_", self.unanswerable)):
            row[f"{kind}refused"] = _mean(self.refused[chosen])
            row[f"{kind}verbatim"] = None if self.verbatim is None else _mean(self.verbatim[chosen])
        return row | {"unanswerable": int(self.unanswerable.sum())}


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def measure_answers(
    language_model: LanguageModel,
    modes: Iterable[ModePrompts],
    questions: Sequence[Question],
    settings: QaSettings,
    language: Language,
    journal: AnswerJournal,
    progress: Progress = percentage,
) -> list[Answered]:
    """Answer the questions in every mode.

    Args:
        language_model: opened with retrieval, if a mode needs it.
        modes: from `all_modes`.
        questions: all with answers, or unanswerable.
        settings: lengths.
        language: of the measures.
        journal: has the answers that an earlier process gave, and keeps those given here.
        progress: shows the answered questions.
    """
    rows = []
    for prepared in modes:
        name = prepared.mode.name
        with progress(f"answer, {name}", total=len(questions), unit="questions") as advance:
            done = len(journal.answers.get(name, ()))
            advance(FinishedBefore(done))
            for start in range(done, len(questions), settings.batch_size):
                block = slice(start, start + settings.batch_size)
                answers = answer(
                    language_model,
                    prepared.prompts[block],
                    k=prepared.k,
                    given=None if prepared.given is None else prepared.given[block],
                    inserted=None if prepared.inserted is None else prepared.inserted[block],
                    ends=prepared.ends,
                    max_tokens=settings.max_tokens,
                )
                journal.add(name, answers)
                advance(len(answers))
        rows.append(_scored(prepared, journal.answers[name], questions, language))
    return rows


def _scored(prepared: ModePrompts, answers: list[str], questions: Sequence[Question], language: Language) -> Answered:
    """Compare answers [n] with the right ones and with the passages."""
    answerable = [row for row, question in enumerate(questions) if not question.unanswerable]
    pairs = [(answers[row], questions[row].answers) for row in answerable]
    verbatim = held = hit = None
    if prepared.texts is not None:
        verbatim = np.array([is_verbatim(*pair) for pair in zip(answers, prepared.texts, strict=True)])
        held = answer_in_passages([questions[row] for row in answerable], [prepared.texts[row] for row in answerable])
    if prepared.documents is not None:
        named = [pair for pair in zip(questions, prepared.documents, strict=True) if pair[0].positive_ids]
        hit = _mean(np.array([not set(each.positive_ids).isdisjoint(ids) for each, ids in named]))
    return Answered(
        mode=prepared.mode,
        answers=answers,
        exact_match=np.array([exact_match(*pair, language) for pair in pairs]),
        f1=np.array([f1(*pair, language) for pair in pairs]),
        contains=np.array([contains(*pair, language) for pair in pairs]),
        unanswerable=np.array([question.unanswerable for question in questions]),
        refused=np.array([is_refusal(text) for text in answers]),
        verbatim=verbatim,
        answer_in_passages=held,
        hit=hit,
    )


def answer(
    language_model: LanguageModel,
    prompts: Sequence[np.ndarray],
    *,
    k: int = 0,
    given: GivenNeighbors | None = None,
    inserted: Sequence[tuple[int, int]] | None = None,
    ends: tuple[int, ...] = (),
    max_tokens: int,
) -> list[str]:
    """Continue the prompts of a batch greedily, each up to the end of its line or of the document.

    Args:
        language_model: opened with retrieval if k is not 0.
        prompts: token ids [t] of each.
        k: neighbors of each chunk; 0 = retrieval OFF.
        given: neighbors of each prompt; all chunks of prompt and answer read these, and no search runs.
        inserted: [start, stop) of the tokens of each prompt that are passages.
        ends: tokens that end an answer, in addition to the end of the document.
        max_tokens: largest number of tokens in an answer.
    """
    settings = GenerationSettings(max_tokens=max_tokens, temperature=0, stop=("\n",), stop_token_ids=ends)
    texts = [""] * len(prompts)
    for step in language_model.generate(prompts, settings, k, given, inserted=inserted):
        for token in step:
            texts[token.row] += token.text
    return [text.strip() for text in texts]


def answer_in_passages(questions: Sequence[Question], passages: Sequence[Sequence[str]]) -> float:
    """Fraction of the questions with a right answer in one of their passages."""
    held = [
        any(right.lower() in text.lower() for right in as_texts(question.answers) for text in as_texts(texts))
        for question, texts in zip(questions, passages, strict=True)
    ]
    return float(np.mean(held)) if held else 0.0


def as_json(rows: Sequence[Answered], questions: Sequence[Question], seed: int) -> dict[str, Any]:
    """`results`: a row for each mode; `answers`: for each question the right answers and the answer of each mode."""
    given = {row.mode.name: row.answers for row in rows}
    return {
        "results": [row.as_json(seed, rows[0]) for row in rows],
        "answers": [
            {"id": question.id, "question": question.question, "right": list(question.answers)}
            | {mode: texts[row] for mode, texts in given.items()}
            for row, question in enumerate(questions)
        ],
    }
