"""Lower layers never import upper ones; training needs neither faiss nor ray."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "indexing/store": {"indexing.store"},
    "indexing": {"indexing"},
    "retro": {"indexing", "retro"},
    "pipelines": {"indexing", "retro", "pipelines"},
}
REMOTE_CODE = ROOT / "retro" / "huggingface" / "remote_code"  # loaded by transformers alone
OURS = ("indexing", "retro", "pipelines")
FILES = sorted(path for layer in OURS for path in (ROOT / layer).rglob("*.py"))


def imports_of(path: Path, *, everywhere: bool) -> set[str]:
    """Modules that a file imports: at its top level, or everywhere in it."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else tree.body
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_imports_only_what_stands_below_it(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    layer = next(layer for layer in ALLOWED if name.startswith(layer + "/"))
    for module in imports_of(path, everywhere=True):
        if module.split(".")[0] in OURS:
            assert any(module == allowed or module.startswith(allowed + ".") for allowed in ALLOWED[layer]), module


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_ray_is_imported_by_pipelines_alone_and_never_at_the_top(path: Path) -> None:
    roots = {module.split(".")[0] for module in imports_of(path, everywhere=True)}
    if not path.is_relative_to(ROOT / "pipelines"):
        assert "ray" not in roots
    top = {module.split(".")[0] for module in imports_of(path, everywhere=False)}
    if path.parent == REMOTE_CODE:
        top -= {"transformers"}
    assert not top & {"ray", "faiss", "autofaiss", "pyarrow", "sentencepiece", "transformers", "peft"}
    if path.is_relative_to(ROOT / "retro"):
        assert not roots & {"faiss", "autofaiss", "ray"}


FOLDERS = sorted({path.parent for path in FILES})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_a_folder_has_at_most_twenty_files(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= 20


def test_modules_form_no_circle() -> None:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    graph = {name: imports_of(path, everywhere=True) & set(names) for name, path in names.items()}
    while free := [name for name, needed in graph.items() if not needed & set(graph)]:
        for name in free:
            del graph[name]
    assert not graph, f"a circle among {sorted(graph)}"
