"""Folders import only lower levels; training needs neither faiss nor ray."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEVELS = (
    ("indexing/machine.py", "indexing/progress.py", "indexing/splitmix64.py"),
    ("indexing/store",),
    ("indexing/measured.py",),
    ("indexing/embedding", "indexing/tokenization"),
    ("indexing/corpus", "indexing/index"),
    ("indexing/similarity", "indexing/suffixes"),
    ("indexing/ngrams", "indexing/sparse"),
    ("indexing/dedup", "indexing/neighbors", "indexing/verification"),
    ("indexing/retrieval",),
    ("retro/model_settings.py",),
    ("retro/batch",),
    ("retro/copying",),
    ("retro/model",),
    ("retro/device.py",),
    ("retro/data", "retro/parallel"),
    ("retro/adapters", "retro/api", "retro/optimizers"),
    ("retro/checkpoints", "retro/estimates"),
    ("retro/inference",),
    ("retro/evaluation",),
    ("retro/training",),
    ("retro/huggingface",),
    ("retro/finetuning",),
    ("retro/server",),
    ("pipelines/terminal", "pipelines/executors"),
    ("pipelines/config.py",),
    ("pipelines/launch", "pipelines/stages"),
    ("pipelines/cli/settings", "pipelines/cli/results.py", "pipelines/cli/hub.py"),
    ("pipelines/cli/planning", "pipelines/cli/reports"),
    ("pipelines/cli/verbs", "pipelines/cli/corpus_options.py"),
    ("pipelines/cli/main.py",),
    ("pipelines/cli/__main__.py", "pipelines/compile_ahead.py", "pipelines/index.py", "pipelines/train.py"),
)
"""Folders and single files, from the lowest level to the highest. Each imports only itself and lower levels."""
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
COMPILED = ROOT / "indexing/suffixes/compiled_search.py"
"""Its functions call each other in compiled code. It is imported by the first search."""
SUBCLASSES = {
    ROOT / "retro" / "huggingface" / f"{name}.py"
    for name in ("logits_processor", "modeling", "register", "tokenization")
}  # of transformers
OURS = ("indexing", "retro", "pipelines")
FILES = sorted(path for layer in OURS for path in (ROOT / layer).rglob("*.py"))


@functools.cache
def imports_of(path: Path, *, everywhere: bool) -> frozenset[str]:
    """Modules that a file imports: at its top level only, or everywhere."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else tree.body
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}  # of a folder: its files
            found |= {name for name in names if (ROOT / (name.replace(".", "/") + ".py")).exists()} or {module}
    return frozenset(found)


def level_of(path: Path) -> str | None:
    """The row of `LEVELS` that a file belongs to; None for the empty file that makes a top-level folder a package."""
    folder, *rest = path.relative_to(ROOT).parts
    if rest[0] == "cli":
        folder, rest = f"{folder}/cli", rest[1:]
    return None if rest == ["__init__.py"] else f"{folder}/{rest[0]}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_imports_only_lower_levels(path: Path) -> None:
    own = level_of(path)
    for module in imports_of(path, everywhere=True):
        if module.split(".")[0] in OURS and own is not None:
            file = ROOT / (module.replace(".", "/") + ".py")
            other = level_of(file if file.exists() else file.with_suffix("") / "__init__.py")
            assert other == own or other is None or LEVEL[other] < LEVEL[own], f"{own} imports {module}"


def test_only_the_verb_and_the_deployment_of_the_server_import_it() -> None:
    importers = {
        path for path in FILES if any(name.startswith("retro.server") for name in imports_of(path, everywhere=True))
    }
    outside = {
        path.relative_to(ROOT).as_posix() for path in importers if not path.is_relative_to(ROOT / "retro/server")
    }
    assert outside == {"pipelines/cli/verbs/serve.py", "pipelines/launch/ray_serve.py"}


def test_every_folder_has_a_level() -> None:
    assert {level_of(path) for path in FILES} - {None} == set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_only_pipelines_imports_ray_and_never_at_module_level(path: Path) -> None:
    roots = {module.split(".")[0] for module in imports_of(path, everywhere=True)}
    if not path.is_relative_to(ROOT / "pipelines"):
        assert "ray" not in roots
    top = {module.split(".")[0] for module in imports_of(path, everywhere=False)}
    if path in SUBCLASSES:
        top -= {"transformers"}
    if path == COMPILED:
        top -= {"numba"}
    assert not top & {
        "ray",
        "faiss",
        "autofaiss",
        "pyarrow",
        "sentencepiece",
        "tantivy",
        "transformers",
        "peft",
        "numba",
    }
    if path.is_relative_to(ROOT / "retro"):
        assert not roots & {"faiss", "autofaiss", "ray"}


def test_imports_between_modules_have_no_cycle() -> None:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    graph = {name: imports_of(path, everywhere=True) & set(names) for name, path in names.items()}
    while free := [name for name, needed in graph.items() if not needed & set(graph)]:
        for name in free:
            del graph[name]
    assert not graph, f"a circle among {sorted(graph)}"
