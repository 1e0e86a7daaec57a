"""A model with a chat template is asked in its template: passages in the user's message, solved questions in the answer."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexing.retrieval.retriever import Retriever
from indexing.store.errors import InputError
from retro.evaluation.question_answering import ModePrompts, all_modes, answer, found_passages, open_model
from retro.evaluation.question_sets import Question
from retro.evaluation.settings import QaSettings
from retro.evaluation.text_prompts import CHAT_INSTRUCTIONS
from retro.inference.language_model import LanguageModel
from retro.inference.settings import GenerationSettings

TEMPLATE = "{% for m in messages %}{{ bos_token }}[{{ m.role }}]\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
SHOTS = [Question("a", "what is a chunk?", ("a token",)), Question("b", "what is a layer?", ("a head",))]


@pytest.fixture(scope="module")
def questions(retriever: Retriever) -> list[Question]:
    rows = retriever.retrieval.own.metadata([3, 40, 70])
    return [Question(row["id"], f"what is {row['title']}?", ("the",), (row["id"],)) for row in rows]


@pytest.fixture(scope="module")
def model(tiny_run: Path, retriever: Retriever) -> LanguageModel:
    """A model that retrieves, with a chat template and room for long prompts."""
    opened = LanguageModel.open(tiny_run, retriever, "cpu")
    opened.checkpoint.settings["imported"] = {"chat_template": TEMPLATE}
    return replace(opened, context=512)


def modes_of(
    model: LanguageModel, retriever: Retriever, questions: list[Question], settings: QaSettings, **options: Any
) -> dict[str, ModePrompts]:
    passages = found_passages(retriever, questions, settings)
    modes = all_modes(model, questions, settings, language="en", shots=SHOTS, passages=passages, **options)
    return {mode.mode.name: mode for mode in modes}


def texts_of(model: LanguageModel, mode: ModePrompts) -> Iterator[str]:
    """The prompts as text. Ends of turns are written as ¶."""
    tokenizer = model.tokenizer
    for prompt in mode.prompts:
        assert prompt[0] == tokenizer.bos_id
        assert prompt[1] != tokenizer.bos_id
        pieces = np.split(prompt, np.flatnonzero(prompt == tokenizer.eos_id))
        yield "¶".join(tokenizer.decode(piece[piece != tokenizer.eos_id]) for piece in pieces)


def test_passages_are_in_the_users_message_and_solved_questions_begin_the_answer(
    model: LanguageModel, retriever: Retriever, questions: list[Question]
) -> None:
    modes = modes_of(model, retriever, questions, QaSettings(k=0, prompt_passages=2, gold=True))
    assert list(modes) == [
        "chat, closed book",
        "chat, passages in the prompt",
        "chat, passages in the prompt, gold first",
    ]
    solved = "".join(f"Question: {shot.question}\nAnswer: {shot.answers[0]}\n" for shot in SHOTS)
    for mode in modes.values():
        read = mode.texts or [[]] * len(questions)
        for text, question, passages in zip(texts_of(model, mode), questions, read, strict=True):
            user = "".join(f"Passage: {' '.join(passage.split())}\n" for passage in passages)
            begin = f"[user]\n{user}{CHAT_INSTRUCTIONS['en']}¶\n[assistant]"
            assert text.split() == f"{begin} {solved}Question: {question.question}\nAnswer:".split()
    gold = modes["chat, passages in the prompt, gold first"].texts
    assert gold is not None
    for question, (first, _) in zip(questions, gold, strict=True):
        document = retriever.lookup.document(question.id, 0, 2)
        assert first.split() == "".join(chunk.text for chunk in document.chunks).split()


def test_neighbors_are_measured_without_and_with_the_passages_in_the_prompt(
    model: LanguageModel, retriever: Retriever, questions: list[Question]
) -> None:
    modes = modes_of(model, retriever, questions, QaSettings(k=1, prompt_passages=1, neighbor_passages=3, gold=True))
    assert list(modes) == [
        "chat, closed book",
        "chat, ON k=1",
        "chat, 3 passages as neighbors",
        "chat, 3 passages as neighbors, gold first",
        "chat, passages in the prompt",
        "chat, passages in the prompt, ON k=1",
        "chat, passages in the prompt, 3 passages as neighbors",
        "chat, passages in the prompt, gold first",
        "chat, passages in the prompt, ON k=1, gold first",
        "chat, passages in the prompt, 3 passages as neighbors, gold first",
    ]
    closed, alone = modes["chat, closed book"], modes["chat, 3 passages as neighbors"]
    both = modes["chat, passages in the prompt, 3 passages as neighbors"]
    for mode, others in ((alone, closed), (both, modes["chat, passages in the prompt"])):
        assert all(np.array_equal(*pair) for pair in zip(mode.prompts, others.prompts, strict=True))
        assert mode.given is not None
        assert mode.texts is not None
        assert others.given is None
    assert [len(texts) for texts in alone.texts or ()] == [3, 3, 3]
    assert [len(texts) for texts in both.texts or ()] == [4, 4, 4]

    def first_tokens(mode: ModePrompts) -> list[float]:
        step = next(model.generate(mode.prompts, GenerationSettings(max_tokens=1, temperature=0), given=mode.given))
        return [token.log_probability for token in step]

    assert first_tokens(alone) != first_tokens(closed)  # the model reads them


@pytest.mark.parametrize("context", [176, 192, 208, 224])
def test_long_passages_are_cut_and_the_words_of_the_template_are_kept(
    model: LanguageModel, retriever: Retriever, questions: list[Question], context: int
) -> None:
    small = replace(model, context=context)
    modes = modes_of(small, retriever, questions, QaSettings(k=0, prompt_passages=9, max_tokens=8))
    for text in texts_of(small, modes["chat, passages in the prompt"]):
        assert text.startswith("[user]\nPassage: ")
        assert f"\n{CHAT_INSTRUCTIONS['en']}¶" in text
        assert text.count("[assistant]") == 1
    assert all(context - 32 <= len(prompt) < context - 8 for prompt in modes["chat, passages in the prompt"].prompts)


def test_an_answer_ends_with_its_turn(
    model: LanguageModel, retriever: Retriever, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    (mode,) = modes_of(model, retriever, questions, QaSettings(k=0, prompt_passages=0)).values()
    assert mode.ends == (model.tokenizer.eos_id,)
    used: list[GenerationSettings] = []
    monkeypatch.setattr(LanguageModel, "generate", lambda _, prompts, settings, *others: used.append(settings) or [])
    answer(model, mode.prompts, ends=(7,), max_tokens=4, batch_size=8)
    assert [settings.stop_token_ids for settings in used] == [(7,)]


def test_a_model_that_learned_questions_is_asked_in_the_papers_prompt(
    model: LanguageModel, retriever: Retriever, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(model.checkpoint.settings, "finetune", {"format": "questions"})
    modes = modes_of(model, retriever, questions, QaSettings(k=0, prompt_passages=0, neighbor_passages=2))
    assert list(modes) == ["closed book", "paper's prompt, closed book", "paper's prompt, 2 passages as neighbors"]


def test_gold_needs_passages_and_their_datastore(tiny_run: Path) -> None:
    with pytest.raises(InputError, match="prompt_passages or neighbor_passages"):
        QaSettings(gold=True, prompt_passages=0)
    with pytest.raises(InputError, match=r"gold = true.*--passages"):
        open_model(tiny_run, None, QaSettings(gold=True), "cpu")
