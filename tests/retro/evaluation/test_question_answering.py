"""Prompts are answered in order, greedily, up to the end of a line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from indexing.store.errors import InputError
from retro.evaluation.answer_journal import AnswerJournal
from retro.evaluation.question_answering import (
    ModePrompts,
    QuestionMode,
    answer,
    as_json,
    measure_answers,
    select,
)
from retro.evaluation.question_sets import Question
from retro.evaluation.settings import QaSettings
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import GivenNeighbors
from retro.inference.settings import GenerationSettings

M = 16


@dataclass
class FakeLanguageModel:
    """Continues each prompt with the pieces of text listed for the prompt's length."""

    spoken: dict[int, list[str]]

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        settings: GenerationSettings,
        k: int,
        given: GivenNeighbors | None = None,
        inserted: Sequence[tuple[int, int]] | None = None,
    ) -> Iterator[list[GeneratedToken]]:
        assert settings.temperature == 0
        assert settings.stop == ("\n",)
        assert k == 2 if given is None else len(given) == len(prompts)
        for step in range(settings.max_tokens):
            pieces = [
                GeneratedToken(row, 0, self.spoken[len(prompt)][step], 0.0)
                for row, prompt in enumerate(prompts)
                if step < len(self.spoken[len(prompt)])
            ]
            if pieces:
                yield pieces


def test_answers_keep_the_order_of_prompts_and_are_stripped() -> None:
    speaker = FakeLanguageModel({16: [" a", " b"], 32: [" c"], 48: []})
    prompts = [np.zeros(length, dtype=np.int64) for length in (32, 16, 48, 16)]
    answers = answer(speaker, prompts, k=2, max_tokens=3)  # type: ignore[arg-type]
    assert answers == ["c", "a b", "", "a b"]
    given = [(np.zeros((1, 2 * M), dtype=np.int64), np.ones(1, dtype=np.int64))] * 4
    assert answer(speaker, prompts, given=given, max_tokens=3) == answers  # type: ignore[arg-type]


QUESTIONS = [
    Question("a", "who?", ("Ada",), ("d1",)),
    Question("b", "when?", ("1989", "in 1989"), ("d2",)),
    Question("c", "why?", (), (), unanswerable=True),
    Question("d", "how?", (), (), unanswerable=True),
]


def test_answers_are_scored_by_what_they_say_and_what_the_passages_have(tmp_path: Path) -> None:
    speaker = FakeLanguageModel({16: ["Ada"], 32: ["1990"], 48: ["I do not know"], 64: ["a swan"]})
    prompts = [np.zeros(length, dtype=np.int64) for length in (16, 32, 48, 64)]
    texts = [["Ada was here"], ["in 1989"], ["nothing"], ["a swan sings"]]
    closed = ModePrompts(QuestionMode("chat", k=2), prompts, 2)
    read = ModePrompts(
        QuestionMode("chat", 4, k=2), prompts, 2, texts=texts, documents=[["d1"], ["d9"], ["d3"], ["d4"]]
    )
    settings, journal = QaSettings(max_tokens=1, batch_size=3), AnswerJournal(None, {})
    rows = measure_answers(speaker, [closed, read], QUESTIONS, settings, "en", journal)  # type: ignore[arg-type]
    first, second = as_json(rows, QUESTIONS, 0)["results"]
    assert (first["exact_match"], first["questions"], first["unanswerable"]) == (0.5, 2, 2)
    assert (first["verbatim"], first["hit"], first["answer_in_passages"]) == (None, None, None)
    assert (first["refused"], first["unanswerable_refused"]) == (0.0, 0.5)
    assert (second["f1_gain"], second["f1_gain_low"], second["f1_gain_high"]) == (0, 0, 0)
    assert (second["hit"], second["answer_in_passages"]) == (0.5, 1.0)
    assert (second["verbatim"], second["unanswerable_verbatim"]) == (0.5, 0.5)


def test_a_measurement_that_was_stopped_asks_only_the_other_questions(tmp_path: Path) -> None:
    file, identity = tmp_path / "qa.unfinished.jsonl", {"model": "m", "k": 2}
    prompts = [np.zeros(16, dtype=np.int64) for _ in QUESTIONS]
    mode = ModePrompts(QuestionMode("chat", k=2), prompts, 2)
    settings = QaSettings(max_tokens=1, batch_size=1)

    def measured(speaker: FakeLanguageModel, identity: dict) -> list[str]:
        journal = AnswerJournal(file, identity)
        return measure_answers(speaker, [mode], QUESTIONS, settings, "en", journal)[0].answers  # type: ignore[arg-type]

    AnswerJournal(file, identity).add(mode.mode.name, ["one", "two"])
    file.write_text(file.read_text() + '{"mode": "chat, ON k=2", "ans')  # killed while it wrote
    assert measured(FakeLanguageModel({16: ["x"]}), identity) == ["one", "two", "x", "x"]
    assert measured(FakeLanguageModel({}), identity) == ["one", "two", "x", "x"]  # nothing is asked again
    assert measured(FakeLanguageModel({16: ["y"]}), identity | {"k": 3}) == ["y"] * 4


@pytest.mark.parametrize(
    ("questions", "shots", "words"),
    [
        ([Question("a", "who?", ())], 0, "'a' has no answers.*unanswerable"),
        (QUESTIONS[2:], 1, "'c' is unanswerable, and shots = 1"),
        (QUESTIONS[:1], 1, "has 1 questions: with shots = 1 none is left"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(questions: list[Question], shots: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        select(questions, QaSettings(shots=shots), Path("q.jsonl"))
