"""Text prompts for closed- and open-book question answering.

    retrieved passages, solved questions, question → prompt of whole chunks, which is continued greedily
                                                          └ (retrieval ON: neighbors of these chunks)

A prompt has a line `Passage: …` for each retrieved passage, then solved questions, then `Question: …` and `Answer:` (in
Chinese `段落：`, `问题：`, `回答：`); the answer ends at the end of its line. The prompt is padded in front with line ends to
whole chunks: only complete chunks retrieve, so the question must end a chunk (the paper pads there too, section 4.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from indexing.store.errors import InputError
from indexing.tokenization.language import Language
from indexing.tokenization.texts import as_texts
from indexing.tokenization.tokenizer import Tokenizer
from retro.evaluation.question_sets import Question


@dataclass(frozen=True)
class Template:
    """Formats of the parts of a prompt in one language."""

    passage: str
    question: str
    answer: str


TEMPLATES: dict[Language, Template] = {
    "en": Template("Passage: {}\n", "Question: {}\nAnswer:", " {}\n"),
    "zh": Template("段落：{}\n", "问题：{}\n回答：", "{}\n"),
}


@dataclass(frozen=True)
class PromptBuilder:
    """Creates prompts.

    Attributes:
        tokenizer: the model's tokenizer.
        language: language of the template in `TEMPLATES`.
        shots: solved questions at the beginning of each prompt.
        tokens: largest number of tokens in a prompt, a multiple of the chunk length.
        chunk_length: m; every prompt has whole chunks.
    """

    tokenizer: Tokenizer
    language: Language
    shots: Sequence[Question]
    tokens: int
    chunk_length: int

    def prompt(self, question: Question, passages: Sequence[str]) -> np.ndarray:
        """Return the tokens [t] of a question's prompt, with the beginning-of-document token.

        A prompt that is too long loses the end of its passages first, then solved questions from the front.

        Raises:
            InputError: the question alone is too long.
        """
        template = TEMPLATES[self.language]
        final = self._encoded(template.question.format(question.question))
        room = self.tokens - 1 - len(final)
        if room < 0:
            raise InputError(
                f"question {question.id!r} has {len(final)} tokens; at most {self.tokens - 1} fit: the model's context minus "
                "the longest answer. Shorten the question or lower max_tokens."
            )
        shots = [
            self._encoded(template.question.format(s.question) + template.answer.format(as_texts(s.answers)[0]))
            for s in self.shots
        ]
        while sum(map(len, shots)) > room:
            shots.pop(0)
        room -= sum(map(len, shots))
        read = self._read("".join(template.passage.format(" ".join(text.split())) for text in as_texts(passages)), room)
        tokens = [token for part in (read, *shots, final) for token in part]
        padding = [self._line_end()] * (-(1 + len(tokens)) % self.chunk_length)
        return np.array([self.tokenizer.bos_id, *padding, *tokens], dtype=np.int64)

    def _read(self, text: str, room: int) -> list[int]:
        """Return the tokens of the passages; the end of what does not fit in `room` is cut."""
        read = self._encoded(text)
        return read if len(read) <= room else [*read[: max(0, room - 1)], self._line_end()][:room]

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist() if text else []

    def _line_end(self) -> int:
        return int(self.tokenizer.encode("\n")[-1])


def room_for_prompts(context: int, m: int, max_tokens: int) -> int:
    """Return the largest number of prompt tokens, in whole chunks, that leaves room for an answer in a model's context.

    Raises:
        InputError: there is no room for a chunk.
    """
    room = (context - max_tokens) // m * m
    if room < m:
        raise InputError(
            f"max_tokens = {max_tokens}: an answer of this length leaves no room for a prompt of one chunk ({m} tokens) in a "
            f"context of {context} tokens. Lower max_tokens."
        )
    return room
