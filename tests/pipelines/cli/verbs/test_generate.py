"""`retro generate`: text appears as it is generated, copied words are marked on a terminal, and their sources are named."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from starlette.testclient import TestClient

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from pipelines.cli.main import main
from pipelines.cli.verbs.generate import GenerateOptions, in_order
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import LanguageModel
from retro.inference.verbatim_runs import TracedDatastore, traced_datastores
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.pipelines.conftest import Terminal

PROMPT = "the index of a chunk and the neighbor in memory with a vector from the store\n"
BLUE, END = "\x1b[38;5;33m", "\x1b[0m"


@pytest.fixture(scope="module")
def model(tiny_run: Path) -> LanguageModel:
    """A model that copies from neighbors with most of its probability."""
    model = LanguageModel.open(tiny_run, device="cpu")
    with torch.no_grad():
        model.model.copy_head.neighbors.outer_bias.fill_(10.0)
    return model


@pytest.fixture
def arguments(model: LanguageModel, trusted: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(LanguageModel, "open", lambda *given, **options: model)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return ["generate", ".", "--max-tokens", "24", "--temperature", "0", "--k", "3", "--prompt"]


def replace_model(steps: Callable[..., Iterator[list[GeneratedToken]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `steps` generate the tokens."""
    tokenizer = SimpleNamespace(bos_id=1, encode=lambda text: [2])
    model = SimpleNamespace(retriever=None, tokenizer=tokenizer, generate=steps)
    monkeypatch.setattr(LanguageModel, "open", lambda *given, **options: model)


def test_json_names_the_documents_that_runs_of_the_text_were_copied_from(model, arguments, capsys) -> None:
    assert main([*arguments, PROMPT, "a", "--format", "json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [answer["prompt"] for answer in answers] == [PROMPT, "a"]
    retriever = model.retriever
    assert isinstance(retriever, Retriever)
    assert answers[0]["sources"]
    for source in answers[0]["sources"]:
        document = retriever.lookup.document(source["document_id"], 0, 1024)
        assert source["title"] == document.title
        text = "".join(chunk.text for chunk in document.chunks)
        assert all(run in answers[0]["text"] and run in text for run in source["runs"])


def test_a_pipe_gets_only_the_text_and_standard_error_the_sources(arguments, capsys) -> None:
    assert main([*arguments, PROMPT, "--format", "json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert main([*arguments, PROMPT]) == 0
    printed = capsys.readouterr()
    assert printed.out == PROMPT + answer["text"] + "\n"
    assert answer["sources"]
    assert all(source["document_id"] in printed.err for source in answer["sources"])


def test_trust_and_copied_tokens_are_those_of_the_answer(arguments, capsys) -> None:
    assert main([*arguments, PROMPT, "--format", "json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["trust"] == {"share": pytest.approx(0.99), "prompt_tokens": ANY, "low_because": None}
    assert 0 < answer["copied_tokens"] <= 24
    assert main([*arguments, PROMPT]) == 0
    printed = capsys.readouterr().err
    assert f"Trust in retrieval is 0.99 after a prompt of {answer['trust']['prompt_tokens']} tokens. " in printed
    assert f"{answer['copied_tokens']:.1f} of 24 tokens were copied." in printed


def test_copied_words_are_blue_on_a_terminal(arguments, monkeypatch, capsys) -> None:
    assert main([*arguments, PROMPT]) == 0
    plain = capsys.readouterr().out
    assert BLUE not in plain
    monkeypatch.setattr("sys.stdout", screen := Terminal())
    assert main([*arguments, PROMPT]) == 0
    assert screen.getvalue().count(BLUE) > 1
    assert screen.getvalue().replace(BLUE, "").replace(END, "") == plain


@pytest.fixture
def traced(model: LanguageModel, voting_datastore: Datastore, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """The same model with a datastore that can be traced."""
    retriever = Retriever.open(voting_datastore.folder)
    opened = replace(model, retriever=retriever, _searches={})
    monkeypatch.setattr(LanguageModel, "open", lambda *given, **options: opened)
    return opened


def test_verbatim_runs_are_those_of_the_server_and_named_after_the_text(arguments, traced, capsys) -> None:
    assert main([*arguments, PROMPT, "--format", "json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    settings = ServeSettings(name="tiny", allowed_hosts=("testserver",))
    with TestClient(make_app(traced.retriever, traced, settings)) as client:
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "k": 3, "return_sources": True}
        served = client.post("/generate", json=body).json()
    assert answer["text"] == served["text"]
    assert answer["runs"] == served["sources"]["runs"]
    assert answer["runs"]
    assert main([*arguments, PROMPT]) == 0
    printed = capsys.readouterr()
    assert printed.out == PROMPT + answer["text"] + "\n"
    _, listed = printed.err.split("occurs verbatim in:\n")
    named = [run for run in answer["runs"] if run["tokens"] - run["prompt_tokens"] > 1]
    assert len(listed.splitlines()) == len(named) > 0
    for line, run in zip(listed.splitlines(), named, strict=True):
        assert all(place["document_id"] in line for place in run["places"])
        assert f"({run['tokens']} tokens" in line


def test_the_text_is_printed_before_the_datastore_is_opened_for_runs(arguments, traced, monkeypatch, capsys) -> None:
    seen = []

    def opened(*given: Any) -> list[TracedDatastore]:
        seen.append(capsys.readouterr().out)
        return traced_datastores(*given)

    monkeypatch.setattr("retro.inference.verbatim_runs.traced_datastores", opened)
    assert main([*arguments, PROMPT, "a"]) == 0
    (before,) = seen  # once for all prompts
    assert before.startswith(PROMPT)
    assert before.endswith("\n")


def test_without_sorted_prefixes_no_runs_are_listed(arguments, capsys) -> None:
    assert main([*arguments, PROMPT, "--format", "json"]) == 0
    printed = capsys.readouterr()
    assert "runs" not in json.loads(printed.out)[0]
    assert main([*arguments, PROMPT]) == 0
    assert "verbatim" not in capsys.readouterr().err


def test_a_text_is_printed_before_the_next_token_is_computed(arguments, monkeypatch, capsys) -> None:
    seen = []

    def steps(*_: object, **__: object) -> Iterator[list[GeneratedToken]]:
        for text, end in (("one", None), (" two", None), (" three", "length")):
            yield [GeneratedToken(0, 5, text, 0.0, end)]
            seen.append(capsys.readouterr().out)

    replace_model(steps, monkeypatch)
    assert main([*arguments, "zero "]) == 0
    assert seen[:2] == ["zero one", " two"]


def test_a_model_that_reads_no_datastore_says_so_unless_retrieval_is_off(arguments, monkeypatch, capsys) -> None:
    replace_model(lambda *_, **__: iter([[GeneratedToken(0, 5, "one", 0.0, "length")]]), monkeypatch)
    assert main([*arguments, "zero "]) == 0
    assert "reads no datastore" in capsys.readouterr().err
    assert main([*arguments, "zero ", "--retrieval", "false"]) == 0
    assert capsys.readouterr().err == ""


def test_tokens_of_later_prompts_wait_for_the_first_prompt() -> None:
    def token(row: int, text: str, end: bool = False) -> GeneratedToken:
        return GeneratedToken(row, 5, text, 0.0, "stop" if end else None)

    steps = [[token(0, "a"), token(1, "x", end=True)], [token(0, "b")], [token(0, "c", end=True)]]
    assert [each.text for each in in_order(steps, 2)] == ["a", "b", "c", "x"]


def test_ctrl_c_ends_the_line_and_promises_no_resume(arguments, monkeypatch, capsys) -> None:
    def steps(*_: object, **__: object) -> Iterator[list[GeneratedToken]]:
        yield [GeneratedToken(0, 5, "one", 0.0)]
        raise KeyboardInterrupt

    replace_model(steps, monkeypatch)
    assert main([*arguments, "zero ", "--retrieval", "false"]) == 130
    printed = capsys.readouterr()
    assert printed.out == "zero one\n"
    assert printed.err == "Stopped.\n"


@pytest.mark.parametrize("k", [-1, 17, 99])
def test_a_number_of_neighbors_that_no_model_reads_is_refused(k: int) -> None:
    with pytest.raises(InputError, match=rf"k = {k}"):
        GenerateOptions(k=k)
    assert GenerateOptions(k=0).k == 0
    assert GenerateOptions(k=16).k == 16
