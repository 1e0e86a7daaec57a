"""Text prompts fill whole chunks, are cut when too long, and are answered greedily up to the end of a line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.tokenization.tokenizer import Tokenizer
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import GivenNeighbors
from retro.inference.settings import GenerationSettings
from retro.question_answering.question_sets import Question
from retro.question_answering.text_prompts import PromptBuilder, answer, room_for_prompts

M = 16
QUESTION = Question("q", "which index is it?", ("this",))
SHOTS = [Question("a", "what is a chunk?", ("a token",)), Question("b", "what is a layer?", ("a head",))]
PASSAGES = ["the first passage\nof the index", "the second passage"]


@pytest.fixture(scope="module")
def tokenizer(tiny_datastore: Datastore) -> Tokenizer:
    return Tokenizer.open(tiny_datastore.folder / "tokenizer")


def text_of(tokenizer: Tokenizer, language="en", shots=(), tokens=1024, question=QUESTION, passages=()) -> str:
    row = PromptBuilder(tokenizer, language, shots, tokens, M).prompt(question, passages)
    assert row[0] == tokenizer.bos_id
    assert len(row) % M == 0
    assert len(row) <= tokens
    text = tokenizer.decode(row)
    assert text.startswith("\n" * (M - 1)) is False  # less than a chunk of padding
    return text.lstrip("\n")


def test_a_prompt_ends_with_the_question_at_the_end_of_a_chunk(tokenizer: Tokenizer) -> None:
    assert text_of(tokenizer) == "Question: which index is it?\nAnswer:"
    assert text_of(tokenizer, "zh") == "问题：which index is it?\n回答："


def test_passages_come_first_then_solved_questions(tokenizer: Tokenizer) -> None:
    assert text_of(tokenizer, shots=SHOTS, passages=PASSAGES) == (
        "Passage: the first passage of the index\nPassage: the second passage\n"
        "Question: what is a chunk?\nAnswer: a token\nQuestion: what is a layer?\nAnswer: a head\n"
        "Question: which index is it?\nAnswer:"
    )
    assert "段落：the second passage\n" in text_of(tokenizer, "zh", passages=PASSAGES)


def test_long_prompts_lose_passages_first_then_solved_questions(tokenizer: Tokenizer) -> None:
    whole = len(tokenizer.encode(text_of(tokenizer, shots=SHOTS)))
    cut = text_of(tokenizer, shots=SHOTS, tokens=whole // M * M + 2 * M, passages=PASSAGES)
    passage, line_end, rest = cut.partition("\n")
    assert rest == text_of(tokenizer, shots=SHOTS)
    assert line_end
    assert "Passage: the first passage of the index".startswith(passage)
    assert len(passage) > len("Passage:")
    fewer = text_of(tokenizer, shots=SHOTS, tokens=whole // M * M, passages=PASSAGES)
    assert "chunk" not in fewer
    assert "layer" in fewer
    with pytest.raises(InputError, match=r"question 'q' has \d+ tokens; at most 15 fit"):
        text_of(tokenizer, tokens=16)


@dataclass
class FakeLanguageModel:
    """Continues each prompt with the pieces of text listed for the prompt's length."""

    spoken: dict[int, list[str]]
    context: int = 64

    @property
    def model(self) -> SimpleNamespace:
        return SimpleNamespace(settings=SimpleNamespace(chunk_length=M))

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


def test_room_for_prompts_is_in_whole_chunks_and_excludes_the_answer() -> None:
    assert room_for_prompts(FakeLanguageModel({}), 8) == 48  # type: ignore[arg-type]
    assert room_for_prompts(FakeLanguageModel({}), 16) == 48  # type: ignore[arg-type]
    assert room_for_prompts(FakeLanguageModel({}), 17) == 32  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"max_tokens = 60: an answer of this length leaves no room .*16 tokens"):
        room_for_prompts(FakeLanguageModel({}), 60)  # type: ignore[arg-type]
