"""Closed- and open-book question answering: a language model reads a question and writes an answer, greedily.

    retrieved passages, solved questions, question → prompt of whole chunks → LanguageModel.generate → answer
                                                          └ (retrieval ON: neighbors of these chunks) ┘

A prompt is a line `Passage: …` for each retrieved passage, then solved questions, then `Question: …` and `Answer:`
(in Chinese `段落：`, `问题：`, `回答：`); the answer ends with its line. Line ends stand in front, as many as fill the last
chunk: only complete chunks retrieve, so the question must end one (the paper pads at the same place, section 4.2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from indexing.store.errors import InputError
from indexing.tokenization.tokenizer import Tokenizer
from retro.inference.decoder import Given
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings
from retro.question_answering.answer_metrics import Language
from retro.question_answering.question_sets import Question


@dataclass(frozen=True)
class Template:
    """The words of a prompt in one language."""

    passage: str
    question: str
    answer: str


TEMPLATES: dict[Language, Template] = {
    "en": Template("Passage: {}\n", "Question: {}\nAnswer:", " {}\n"),
    "zh": Template("段落：{}\n", "问题：{}\n回答：", "{}\n"),
}
STOP = ("\n",)


@dataclass(frozen=True)
class Prompts:
    """How prompts are made.

    Attributes:
        tokenizer: the model's.
        language: of the words between.
        shots: solved questions that stand in front of each.
        tokens: a prompt has at most; a multiple of the chunk length.
        chunk_length: m; every prompt fills whole chunks.
    """

    tokenizer: Tokenizer
    language: Language
    shots: Sequence[Question]
    tokens: int
    chunk_length: int

    def prompt(self, question: Question, passages: Sequence[str]) -> np.ndarray:
        """The tokens [t] of a question's prompt, the beginning of the document first.

        What is too long loses the end of its passages first, then solved questions from the front.

        Raises:
            InputError: the question alone is too long.
        """
        template = TEMPLATES[self.language]
        asked = self._encoded(template.question.format(question.question))
        room = self.tokens - 1 - len(asked)
        if room < 0:
            raise InputError(
                f"question {question.id!r} has {len(asked)} tokens, and there is room for {self.tokens - 1}: "
                "the model's context less what an answer may take."
            )
        shots = [
            self._encoded(template.question.format(s.question) + template.answer.format(s.answers[0]))
            for s in self.shots
        ]
        while sum(map(len, shots)) > room:
            shots.pop(0)
        room -= sum(map(len, shots))
        read = self._encoded("".join(template.passage.format(" ".join(text.split())) for text in passages))
        if len(read) > room:
            line_end = self._line_end()
            read = [*read[: max(0, room - 1)], line_end][:room]
        tokens = [token for part in (read, *shots, asked) for token in part]
        padding = [self._line_end()] * (-(1 + len(tokens)) % self.chunk_length)
        return np.array([self.tokenizer.bos_id, *padding, *tokens], dtype=np.int64)

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist() if text else []

    def _line_end(self) -> int:
        return int(self.tokenizer.encode("\n")[-1])


def room_for_prompts(language_model: LanguageModel, max_tokens: int) -> int:
    """Tokens of whole chunks that leave room for an answer.

    Raises:
        InputError: there is none.
    """
    m = language_model.model.settings.chunk_length
    room = (language_model.context - max_tokens) // m * m
    if room < m:
        raise InputError(
            f"max_tokens = {max_tokens}: an answer leaves no room for a chunk of {m} tokens in a context of "
            f"{language_model.context}."
        )
    return room


def answer(
    language_model: LanguageModel,
    prompts: Sequence[np.ndarray],
    *,
    k: int = 0,
    given: Given | None = None,
    max_tokens: int,
    batch_size: int,
    advance: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """The likeliest continuation of each prompt, token by token, up to the end of its line or of the document.

    Args:
        language_model: open with retrieval, if k is not 0.
        prompts: token ids of each.
        k: neighbors of each chunk; 0 = retrieval OFF.
        given: neighbors of each prompt, which all its chunks read, and those of its answer: nothing is searched.
        max_tokens: of an answer.
        batch_size: prompts that go on together.
        advance: told of questions.
    """
    settings = GenerationSettings(max_tokens=max_tokens, temperature=0, stop=STOP)
    answers = []
    for start in range(0, len(prompts), batch_size):
        block = slice(start, start + batch_size)
        group, read = prompts[block], None if given is None else given[block]
        texts = [""] * len(group)
        for pieces in language_model.generate(group, settings, k, read):
            for piece in pieces:
                texts[piece.row] += piece.text
        answers += [text.strip() for text in texts]
        advance(len(group))
    return answers
