"""The notebooks of docs/tutorials: they run, with tiny parameters in place of their own, and become pages of the site."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from indexing.store.datastore import Datastore
from tests.conftest import write_corpus
from tests.retro.huggingface.any_models import save_model

TUTORIALS = Path(__file__).resolve().parents[1] / "docs" / "tutorials"
NOTEBOOK, BY_HAND = TUTORIALS / "any_model.ipynb", TUTORIALS / "by_hand.ipynb"


def cells_of(notebook: Path) -> list[dict[str, Any]]:
    """The cells with code."""
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; returns the value of its last line."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "a cell", "exec"), names)
    return eval(ast.unparse(last), names) if last else None


def run_cells(
    notebook: Path, parameters: Callable[[dict[str, Any]], dict[str, Any]]
) -> tuple[dict[str, Any], list[Any]]:
    """Run a notebook with other parameters, which are made from its own; returns its names and the values that it shows."""
    names, shown = dict[str, Any](), []
    for cell in cells_of(notebook):
        shown.append(run_cell("".join(cell["source"]), names))
        if cell["metadata"].get("tags") == ["parameters"]:
            names |= parameters(names)
    return names, [value for value in shown if value is not None]


def write_texts(folder: Path, corpus: Path) -> Path:
    """Write the documents of a corpus as text files."""
    folder.mkdir()
    for line in corpus.read_text().splitlines():
        document = json.loads(line)
        (folder / f"{document['id']}.txt").write_text(document["text"])
    return folder


def test_the_page_of_the_site_shows_what_a_cell_printed_and_drew() -> None:
    pytest.importorskip("mkdocs")
    from docs.render_notebooks import markdown_of

    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["one\n", "word " * 30]},
        {"output_type": "execute_result", "data": {"text/html": ["<b>a `code`</b>"], "text/plain": ["B()"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["x = 1\n", "x"], "outputs": outputs},
    ]
    title, code, printed, drawn = markdown_of(json.dumps({"cells": cells})).split("\n\n")
    assert title == "# Title\ntext"
    assert code == "```python\nx = 1\nx\n```"
    assert printed.splitlines()[:2] == ["```text", "one"]
    assert printed.split().count("word") == 30
    assert max(map(len, printed.splitlines())) < 90
    assert drawn == "<b>a &#96;code&#96;</b>"


@pytest.mark.parametrize(("notebook", "results"), [(NOTEBOOK, 2), (BY_HAND, 0)])
def test_the_stored_outputs_are_of_a_run_that_reached_the_end(notebook: Path, results: int) -> None:
    code = cells_of(notebook)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
    assert set(kinds) <= {"stream", "execute_result"}
    assert kinds.count("execute_result") == results
    assert code[-1]["outputs"]


@pytest.mark.parametrize("packages", [[], ["-S"]], ids=["installed", "missing"])
def test_the_first_cell_installs_the_project_where_it_is_missing_next_to_a_folder_of_the_user(
    tmp_path: Path, packages: list[str]
) -> None:
    """`-S` leaves out the installed packages."""
    (tmp_path / "pipelines").mkdir()
    cell = next(cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code")
    script = tmp_path / "cell.py"  # its folder is the first in which Python looks for modules
    script.write_text("import subprocess\nsubprocess.check_call = print\n" + "".join(cell["source"]))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *packages, str(script)]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.count("retro[transformer] @ ") == bool(packages)


@pytest.mark.slow
def test_the_notebook_ends_in_a_chart_and_a_colored_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    corpus = write_corpus(tmp_path / "corpus.jsonl", 200, num_paragraphs=20)
    model, text = save_model(tmp_path / "tiny", "gpt_neox"), write_texts(tmp_path / "text", corpus)
    names, shown = run_cells(NOTEBOOK, lambda _: {"MODEL": str(model), "TEXT": text, "MINUTES": 0.05})
    chart, colored = (value._repr_html_() for value in shown)
    assert Datastore.open("any-model/datastore").valid.num_documents > 1
    assert "retrieval ON" in names["comparison"].chart.light
    assert 'src="data:image/svg+xml;base64,' in chart
    assert 'class="up2"' in colored


@pytest.mark.slow
def test_the_pipeline_by_hand_ends_in_a_generated_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the beginnings of its documents, and few steps."""
    monkeypatch.chdir(tmp_path)
    names, _ = run_cells(
        BY_HAND,
        lambda own: {"DOCUMENTS": {name: text[:4000] for name, text in own["DOCUMENTS"].items()}, "STEPS": 3},
    )
    printed = capsys.readouterr().out
    assert "is continued by" in printed
    assert len(names["line"]) == len(names["begin"]) + 24
    assert names["on"] > 0
    assert names["off"] > 0
