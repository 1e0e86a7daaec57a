"""`retro chat`: questions of a terminal are answered from passages, whose documents follow; mistakes are one line."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore, delete_documents
from pipelines.cli.main import main
from retro.inference.language_model import LanguageModel
from tests.conftest import change_tokenizer
from tests.retro.server.conftest import CHAT_TEMPLATE


@pytest.fixture
def template(tmp_path: Path) -> str:
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE)
    return str(tmp_path / "chat.jinja")


@pytest.fixture(autouse=True)
def _roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have room for passages: those of tests were trained with four chunks."""
    opened = LanguageModel.open
    monkeypatch.setattr(LanguageModel, "open", lambda *given, **named: replace(opened(*given, **named), context=512))


@pytest.fixture
def arguments(tiny_datastore: Datastore, tiny_run: Path, template: str) -> list[str]:
    short = ["--max-tokens", "8", "--passages", "2", "--passage-tokens", "64"]
    return ["chat", str(tiny_datastore.folder), "--model", str(tiny_run), "--chat-template", template, *short]


def test_a_question_is_answered_with_its_passages(arguments: list[str], retriever: Retriever, capsys) -> None:
    passages = retriever.passages("title 42", 2, tokens=64)
    asked = [*arguments, "--question", "title 42"]
    assert main([*asked, "--format", "json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["question"] == "title 42"
    found = written["retrieval"]
    assert [row["text"] for row in found["passages"]] == [passage.text for passage in passages]
    assert 0 <= found["trust"]["share"] <= 1
    assert main(asked) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == written["answer"]
    for number, passage in enumerate(passages, 1):
        assert f"[{number}] {passage.document_id}  {passage.title}" in printed.err
    assert "of the answer's words are in these passages" in printed.err
    assert "of the answer was copied. Trust in retrieval is" in printed.err
    assert main([*asked, "--no-copy"]) == 0
    assert "Nothing was copied" in capsys.readouterr().err


def test_a_conversation_keeps_its_questions_until_it_is_new_or_ends(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    searched: list[tuple[str, ...]] = []
    passages = Retriever.passages

    def noted(self: Retriever, question: tuple[str, ...], *given, **named) -> list:
        searched.append(question)
        return passages(self, question, *given, **named)

    monkeypatch.setattr(Retriever, "passages", noted)
    monkeypatch.setattr("sys.stdin", io.StringIO("title 42\n\nwhy?\n/new\nwho?\n/quit\nnever\n"))
    assert main(arguments) == 0
    assert searched == [("title 42",), ("why?", "title 42"), ("who?",)]
    monkeypatch.setattr("sys.stdin", io.StringIO("title 7"))  # ends without a line break
    assert main(arguments) == 0
    assert searched[3:] == [("title 7",)]
    printed = capsys.readouterr().err
    assert printed.count("[1] ") == 3
    assert printed.count("No passage fits the question") == 1  # to "who?"


def test_a_question_that_is_too_long_is_refused_and_the_conversation_continues(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    long = "why " * 10_000
    assert main([*arguments, "--question", long]) == 2
    assert "error: the question has" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{long}\ntitle 42\n"))
    assert main(arguments) == 0
    printed = capsys.readouterr().err
    assert "tokens; at most 504 fit: the model's context of 512 minus the answer" in printed
    assert "[1] " in printed


def test_old_questions_are_left_out_of_a_long_conversation(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    questions = [f"title {n} {'index ' * 60}" for n in range(12)]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(questions)))
    assert main(arguments) == 0
    assert "error" not in capsys.readouterr().err


def test_deleted_documents_are_no_passages_of_later_questions(
    arguments: list[str], tiny_datastore: Datastore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    folder = Path(shutil.copytree(tiny_datastore.folder, tmp_path / "datastore"))
    gone = Retriever.open(folder).passages("title 42", 1)[0].document_id

    def lines():
        yield "title 42"
        delete_documents(folder, [gone])
        yield "title 42"

    monkeypatch.setattr("pipelines.cli.verbs.chat._questions", lines)
    assert main(["chat", str(folder), *arguments[2:]]) == 0
    first, second = capsys.readouterr().err.split("% of the answer was copied")[:2]
    assert f"[1] {gone} " in first
    assert gone not in second.split()


def test_a_datastore_of_another_tokenizer_gives_passages_and_nothing_is_copied(
    arguments: list[str], tiny_datastore: Datastore, tmp_path: Path, capsys
) -> None:
    other = Path(shutil.copytree(tiny_datastore.folder, tmp_path / "other"))
    change_tokenizer(other)
    assert main(["chat", str(other), *arguments[2:], "--question", "title 42"]) == 0
    printed = capsys.readouterr().err
    assert "The model copies nothing: " in printed
    assert "another tokenizer" in printed
    assert "[1] " in printed
    assert "Nothing was copied: the model reads passages in its prompt only." in printed


def test_no_passage_is_said(arguments: list[str], copying_datastore: Datastore, capsys) -> None:
    asked = ["chat", str(copying_datastore.folder), *arguments[2:], "--question", "zzz unheard", "--no-copy"]
    assert main(asked) == 0
    assert "No passage fits the question, so the answer is from the model alone." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--model is empty"]),
        (["--model", "RUN"], ["has no chat template", "retro generate RUN --prompt TEXT", "--chat-template"]),
        (["--model", "nowhere"], ["nowhere is neither a checkpoint nor a run"]),
        (["--model", "RUN", "--chat-template", "nowhere.jinja"], ["chat_template = 'nowhere.jinja'"]),
        (["--model", "RUN", "--format", "json"], ["--format json needs --question"]),
        (["--model", "RUN", "--passages", "0"], ["passages = 0"]),
    ],
)
def test_a_users_mistake_is_one_message(
    tiny_datastore: Datastore, tiny_run: Path, capsys, options: list[str], words: list[str]
) -> None:
    named = [str(tiny_run) if option == "RUN" else option for option in options]
    assert main(["chat", str(tiny_datastore.folder), *named]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert all(word.replace("RUN", str(tiny_run)) in printed for word in words), printed
