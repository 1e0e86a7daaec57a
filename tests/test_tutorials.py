"""The notebook of docs/tutorials runs from its first to its last cell, with a tiny model in place of the one that it names."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from indexing.store.datastore import Datastore
from tests.conftest import write_corpus
from tests.retro.huggingface.any_models import save_model

pytest.importorskip("transformers")
NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "tutorials" / "any_model.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; returns the value of its last line."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return eval(ast.unparse(last), names) if last else None


def write_texts(folder: Path, corpus: Path) -> Path:
    """Write the documents of a corpus as text files."""
    folder.mkdir()
    for line in corpus.read_text().splitlines():
        document = json.loads(line)
        (folder / f"{document['id']}.txt").write_text(document["text"])
    return folder


@pytest.mark.slow
def test_the_notebook_ends_in_a_chart_and_a_colored_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    corpus = write_corpus(tmp_path / "corpus.jsonl", 200, num_paragraphs=20)
    shown = []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            shown.append(run_cell("".join(cell["source"]), names))
        if cell["metadata"].get("tags") == ["parameters"]:
            model, text = save_model(tmp_path / "tiny", "gpt_neox"), write_texts(tmp_path / "text", corpus)
            names |= {"MODEL": str(model), "TEXT": text, "MINUTES": 0.05}
    chart, colored = (value._repr_html_() for value in shown if value is not None)
    assert Datastore.open("any-model/datastore").valid.num_documents > 1
    assert "retrieval ON" in names["comparison"].chart.light
    assert 'src="data:image/svg+xml;base64,' in chart
    assert 'class="up2"' in colored
