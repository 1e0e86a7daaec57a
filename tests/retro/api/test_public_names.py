"""`import retro` loads nothing but itself; its three names are imported on first use and have complete types."""

import ast
import subprocess
import sys

import pytest

import retro
from tests.test_layers import ROOT

HEAVY = {"torch", "faiss", "numpy", "numba", "pyarrow", "pydantic", "ray", "transformers", "sentencepiece"}


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a new process has loaded after some code."""
    code += "; import sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    return set(done.stdout.split())


def test_the_import_of_the_package_loads_no_other_package() -> None:
    loaded = loaded_by("import retro")
    assert "retro" in loaded
    assert not loaded & (HEAVY | {"indexing", "pipelines"})


def test_rows_and_counts_need_neither_torch_nor_faiss() -> None:
    assert not loaded_by("import retro; retro.Datastore, retro.NGrams") & {"torch", "faiss", "numba", "pyarrow"}


def test_the_names_are_the_classes_and_others_are_errors() -> None:
    assert [getattr(retro, name).__name__ for name in retro.__all__] == retro.__all__
    assert set(retro.__all__) <= set(dir(retro))
    with pytest.raises(AttributeError, match="no attribute 'Datastor'"):
        retro.Datastor  # noqa: B018


@pytest.mark.parametrize("path", sorted((ROOT / "retro" / "api").glob("*.py")), ids=lambda path: path.name)
def test_public_functions_have_types_without_any_and_docstrings(path) -> None:
    tree = ast.parse(path.read_text())
    assert "Any" not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert node.returns is not None
            assert all(one.annotation for one in node.args.args + node.args.kwonlyargs if one.arg != "self")
            assert ast.get_docstring(node) or any(ast.unparse(one) == "overload" for one in node.decorator_list)
