"""A model with a chat template is asked as the server asks it: solved questions as turns, passages in the last message."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexing.retrieval.retriever import Retriever
from indexing.store.errors import InputError
from retro.evaluation.question_answering import (
    INSTRUCTIONS,
    ModePrompts,
    all_modes,
    answer,
    found_passages,
    open_model,
)
from retro.evaluation.question_sets import Question
from retro.evaluation.settings import QaSettings
from retro.inference.chat_template import ChatTemplate, Message
from retro.inference.language_model import LanguageModel
from retro.inference.passage_prompts import write_prompt
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
    found = found_passages(retriever, questions, settings)
    modes = all_modes(model, questions, settings, language="en", shots=SHOTS, found=found, **options)
    return {mode.mode.name: mode for mode in modes}


def conversation(question: Question) -> list[Message]:
    turns = [(shot.question, shot.answers[0]) for shot in SHOTS]
    asked = [Message(*turn) for q, a in turns for turn in (("user", f"{q}\n{INSTRUCTIONS['en']}"), ("assistant", a))]
    return [*asked, Message("user", f"{question.question}\n{INSTRUCTIONS['en']}")]


def test_prompts_are_the_servers_with_solved_questions_as_turns(
    model: LanguageModel, retriever: Retriever, questions: list[Question]
) -> None:
    model = replace(model, context=2048)
    modes = modes_of(model, retriever, questions, QaSettings(k=0, prompt_passages=2, passage_tokens=300, gold=True))
    assert list(modes) == [
        "chat, closed book",
        "chat, passages in the prompt",
        "chat, passages in the prompt, gold first",
    ]
    template = ChatTemplate(model.tokenizer, TEMPLATE)
    closed, read, gold = modes.values()
    for row, question in enumerate(questions):
        messages = conversation(question)
        plain = template.prompt(messages)
        assert closed.prompts[row].tolist() == plain.tolist()
        passages = retriever.passages(question.question, 2, tokens=300)
        served = write_prompt(template, messages, plain, passages, 2048 - 24)
        assert read.prompts[row].tolist() == served.tokens.tolist()
        assert read.texts is not None
        assert read.inserted is not None
        assert (read.texts[row], read.inserted[row]) == ([passage.text for passage in passages], served.inserted)
        assert gold.documents is not None
        assert gold.documents[row][0] == question.id


def test_copying_reads_exactly_the_passages_of_the_prompt(
    model: LanguageModel, retriever: Retriever, questions: list[Question]
) -> None:
    modes = modes_of(model, retriever, questions, QaSettings(k=1, prompt_passages=1, passage_tokens=64, gold=True))
    assert list(modes) == [
        "chat, closed book",
        "chat, ON k=1",
        "chat, passages in the prompt",
        "chat, passages in the prompt, copying",
        "chat, passages in the prompt, gold first",
        "chat, passages in the prompt, copying, gold first",
    ]
    read, copying = modes["chat, passages in the prompt"], modes["chat, passages in the prompt, copying"]
    assert all(np.array_equal(*pair) for pair in zip(read.prompts, copying.prompts, strict=True))
    assert (read.given, read.k) == (None, 0)
    assert copying.given is not None
    assert copying.texts is not None
    for (tokens, lengths, *_), texts in zip(copying.given, copying.texts, strict=True):
        text = model.tokenizer.decode(
            np.concatenate([row[:length] for row, length in zip(tokens, lengths, strict=True)])
        )
        assert "".join(text.split()) == "".join("".join(texts).split())

    def first_tokens(mode: ModePrompts) -> list[float]:
        settings = GenerationSettings(max_tokens=1, temperature=0)
        step = next(model.generate(mode.prompts, settings, given=mode.given, inserted=mode.inserted))
        return [token.log_probability for token in step]

    assert first_tokens(copying) != first_tokens(read)  # the model reads them


def test_conversations_that_are_too_long_lose_passages_then_solved_questions(
    model: LanguageModel, retriever: Retriever, questions: list[Question]
) -> None:
    settings = QaSettings(k=0, prompt_passages=4, max_tokens=8)
    template = ChatTemplate(model.tokenizer, TEMPLATE)
    lengths = [len(template.prompt(conversation(questions[0])[first:])) for first in (0, 2, 4)]
    for length in lengths:
        small = replace(model, context=length + 8)
        closed, read = modes_of(small, retriever, questions[:1], settings).values()
        assert len(closed.prompts[0]) == length
        assert read.texts == [[]]
    with pytest.raises(
        InputError, match=rf"'{questions[0].id}' has {lengths[-1]} tokens; at most {lengths[-1] - 1} fit"
    ):
        modes_of(replace(model, context=lengths[-1] + 7), retriever, questions[:1], settings)


def test_an_answer_ends_with_its_turn(
    model: LanguageModel, retriever: Retriever, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    (mode,) = modes_of(model, retriever, questions, QaSettings(k=0, prompt_passages=0)).values()
    assert mode.ends == (model.tokenizer.eos_id,)
    used: list[GenerationSettings] = []
    monkeypatch.setattr(
        LanguageModel, "generate", lambda _, prompts, settings, *others, **named: used.append(settings) or []
    )
    answer(model, mode.prompts, ends=(7,), max_tokens=4)
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


def test_a_question_without_passages_is_asked_among_others_in_every_mode(
    model: LanguageModel, retriever: Retriever, questions: list[Question]
) -> None:
    unknown = Question("x", "when did quxzot meet plorfin near zworg?", (), unanswerable=True)
    modes = modes_of(model, retriever, [unknown, *questions], QaSettings(k=1, prompt_passages=1, passage_tokens=64))
    (nothing, *_) = modes["chat, passages in the prompt"].texts or [["some"]]
    assert nothing == []
    for mode in modes.values():
        texts = answer(
            model, mode.prompts, k=mode.k, given=mode.given, inserted=mode.inserted, ends=mode.ends, max_tokens=4
        )
        assert len(texts) == 4
        if mode.given is not None:
            assert mode.given[0][2].tolist() == [-1]
