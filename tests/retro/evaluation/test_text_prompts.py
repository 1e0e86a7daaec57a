"""Text prompts fill whole chunks, and are cut when too long."""

import pytest

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from indexing.tokenization.tokenizer import Tokenizer
from retro.evaluation.question_answering import answer_in_passages
from retro.evaluation.question_sets import Question
from retro.evaluation.text_prompts import PromptBuilder, room_for_prompts

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
    with pytest.raises(InputError, match=r"'q'.*at most 15"):
        text_of(tokenizer, tokens=16)


def test_room_for_prompts_is_in_whole_chunks_and_excludes_the_answer() -> None:
    assert [room_for_prompts(64, M, length) for length in (8, 16, 17)] == [48, 48, 32]
    with pytest.raises(InputError, match=r"max_tokens = 60.*16 tokens"):
        room_for_prompts(64, M, 60)


def test_a_string_is_one_passage_and_one_answer(tokenizer: Tokenizer) -> None:
    solved = Question("s", "when?", "now")  # type: ignore[arg-type]
    alone, listed = (
        PromptBuilder(tokenizer, "en", [shot], 200, M).prompt(QUESTION, passages)
        for shot, passages in ((solved, "a passage"), (Question("s", "when?", ("now",)), ["a passage"]))
    )
    assert alone.tolist() == listed.tolist()
    assert answer_in_passages([Question("q", "where?", "x")], ["a passage here"]) == 0  # type: ignore[arg-type]
    assert answer_in_passages([Question("q", "where?", "here")], ["a passage here"]) == 1  # type: ignore[arg-type]
