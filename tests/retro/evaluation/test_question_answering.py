"""Prompts are answered in order, greedily, up to the end of a line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from retro.evaluation.question_answering import answer
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import GivenNeighbors
from retro.inference.settings import GenerationSettings

M = 16


@dataclass
class FakeLanguageModel:
    """Continues each prompt with the pieces of text listed for the prompt's length."""

    spoken: dict[int, list[str]]

    def generate(
        self, prompts: Sequence[np.ndarray], settings: GenerationSettings, k: int, given: GivenNeighbors | None = None
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
    speaker, advanced = FakeLanguageModel({16: [" a", " b"], 32: [" c"], 48: []}), []
    prompts = [np.zeros(length, dtype=np.int64) for length in (32, 16, 48, 16)]
    answers = answer(speaker, prompts, k=2, max_tokens=3, batch_size=3, advance=advanced.append)  # type: ignore[arg-type]
    assert answers == ["c", "a b", "", "a b"]
    assert advanced == [3, 1]
    given = [(np.zeros((1, 2 * M), dtype=np.int64), np.ones(1, dtype=np.int64))] * 4
    again = answer(speaker, prompts, given=given, max_tokens=3, batch_size=3)  # type: ignore[arg-type]
    assert again == answers
