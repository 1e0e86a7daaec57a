"""Control characters from a corpus, a model or an error are escaped, so the terminal does not execute them."""

import ast
import io
import json
import logging
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.cli.main import main
from pipelines.cli.verbs import model as model_verbs
from pipelines.terminal.output import echo_shaded, one_line, print_rows, printable
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import LanguageModel
from tests.conftest import build_local, tiny_config
from tests.pipelines.conftest import Terminal

ROOT = Path(__file__).resolve().parents[2]
ATTACK = "\x1b]0;owned\x07\x1b]52;c;cm0gLXJm\x07\x1b[31mred \x9b2J \x7f\b \u202egnp.exe"


def controls(text: str) -> set[str]:
    """Characters that a terminal interprets, except line breaks and tabs, which are intended."""
    return {each for each in text if unicodedata.category(each) in ("Cc", "Cs") or each in "\u202e\u2066"} - {
        "\n",
        "\t",
    }


def test_control_characters_are_escaped_and_other_text_is_unchanged() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert controls(printable(every)) == set()
    plain = "a\tb\n汉字 é 👩‍💻 \u200f\n"
    assert printable(plain) == plain
    assert printable("a\r\nb\rc") == "a\nb\\u000dc"
    assert printable(ATTACK).startswith("\\u001b]0;owned\\u0007")
    assert json.loads(printable(json.dumps(ATTACK, ensure_ascii=False))) == ATTACK


def test_name_with_line_breaks_is_printed_on_one_line() -> None:
    assert one_line("a\nb\tc\x1b") == "a\\u000ab\\u0009c\\u001b"


def shaded(file: io.StringIO) -> str:
    echo_shaded([("same", 0), (" a", 1), ("b", 2), (" ", -1), ("c", -1), ("d\x1b[0m", -2), ("\n", 1)], file)
    return file.getvalue()


def test_shades_are_colors_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = "same {+ab+} [-cd\\u001b[0m-]\n\n"
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert shaded(io.StringIO()) == plain
    colored = shaded(Terminal())
    blue, orange = "38;5;33m", "38;5;166m"
    assert colored == (
        f"same \x1b[{blue}a\x1b[0m\x1b[1;{blue}b\x1b[0m \x1b[{orange}c\x1b[0m\x1b[1;{orange}d\\u001b[0m\x1b[0m\n\n"
    )
    monkeypatch.setenv("NO_COLOR", "1")
    assert shaded(Terminal()) == plain


@pytest.mark.parametrize("layer", ["indexing", "retro", "pipelines"])
def test_only_one_module_prints(layer: str) -> None:
    for path in (ROOT / layer).rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert "print" not in names or path == ROOT / "pipelines/terminal/output.py", path


def test_search_escapes_control_characters_of_the_corpus(tmp_path, capsys) -> None:
    corpus = tmp_path / "corpus.jsonl"
    with open(corpus, "w") as file:
        for number in range(30):
            file.write(json.dumps({"id": f"{ATTACK}\n{number}", "text": f"{ATTACK} text {number} of it\n" * 3}) + "\n")
    folder = build_local(tiny_config(tmp_path, corpus)).folder
    capsys.readouterr()
    assert main(["search", str(folder), "text of it"]) == 0
    printed = capsys.readouterr().out
    assert controls(printed) == set()
    assert printed.startswith("1. ")
    assert sum(line[:3] in ("1. ", "2. ", "3. ", "4. ", "5. ") for line in printed.splitlines()) == 5
    assert "\\u001b]0;owned" in printed
    assert main(["search", str(folder), "text of it", "--format", "json"]) == 0
    printed = capsys.readouterr().out
    assert controls(printed) == set()
    assert all(hit["document"]["id"].startswith(ATTACK) for hit in json.loads(printed))


def test_generate_escapes_control_characters_of_the_model(monkeypatch, capsys, tmp_path) -> None:
    tokens = [GeneratedToken(0, 5, text, 0.0, end) for text, end in ((ATTACK, None), ("\n\tend", "stop"))]
    model = SimpleNamespace(
        retriever=None,
        tokenizer=SimpleNamespace(bos_id=1, encode=lambda text: [2]),
        generate=lambda *given, **options: iter([[token] for token in tokens]),
    )
    monkeypatch.setattr(LanguageModel, "open", lambda *given, **options: model)
    assert main(["generate", str(tmp_path), "--prompt", "begin "]) == 0
    printed = capsys.readouterr().out
    assert controls(printed) == set()
    assert printed.endswith("\n\tend\n")


def test_errors_messages_and_tables_escape_control_characters(monkeypatch, capsys) -> None:
    assert main(["inspect", f"nowhere{ATTACK}"]) == 2
    model_verbs.log.warning("%s", ATTACK)
    library = logging.getLogger("library")
    monkeypatch.setattr(library, "propagate", False)  # pytest attaches handlers to its parents
    library.warning("of a library %s", ATTACK)
    print_rows([[ATTACK, "b"]])
    printed = capsys.readouterr()
    assert controls(printed.out + printed.err) == set()
    assert printed.out.startswith("\\u001b]0;owned")
    assert "error: nowhere\\u001b]0;owned" in printed.err
    assert "warning: \\u001b]0;owned" in printed.err
    assert "warning: of a library \\u001b]0;owned" in printed.err


@pytest.mark.parametrize("arguments", [["--help"], ["search", "--help"]])
def test_closed_output_pipe_ends_the_program_without_an_error_message(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *arguments], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (141, b"")
