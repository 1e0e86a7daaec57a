"""Remote code of an exported folder: the model's own files in one flat folder, which needs no installed package.

    retro/huggingface/remote_code/modeling_retro.py ─ imports ─► retro/inference/decoder.py ─ imports ─► …     followed by their syntax trees
    `from retro.model.positions import rotate`  ─►  `from .retro_model_positions import rotate`

transformers follows relative imports (with a leading dot) in one flat folder. This module does the same for imports at the top of
a file. Imports inside functions stay unchanged: they need the installed package.

transformers 4 copies only the files that the loaded module itself imports, not what those import. So each module that it loads ends
with imports of all files it needs. They are not executed: transformers finds them by a regular expression.
"""

import ast
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

MODEL = ("configuration_retro", "modeling_retro")
"""Modules that `auto_map` in config.json names."""

_ROOM = "retro.huggingface.remote_code."
_OURS = ("retro", "indexing")


def remote_files(wanted: Sequence[str]) -> dict[str, str]:
    """Return file name → text for modules of `remote_code` and everything that they import."""
    files: dict[str, str] = {}
    for loaded in wanted:
        needed = _with_imports(_ROOM + loaded)
        text = needed.pop(loaded)
        files = {f"{name}.py": each for name, each in needed.items()} | files
        listed = "".join(f"    from .{name} import *\n" for name in sorted(needed))
        files[f"{loaded}.py"] = (
            f"{text}\nif False:  # for transformers 4, which copies what is imported in this file\n{listed}"
        )
    return dict(sorted(files.items()))


def _with_imports(module: str) -> dict[str, str]:
    """Return flat name → text of a module and everything that it imports."""
    texts: dict[str, str] = {}
    waiting = [module]
    while waiting:
        module = waiting.pop()
        if flat_name(module) not in texts:
            text = _source(module).read_text(encoding="utf-8")
            texts[flat_name(module)] = _relative(text, module)
            waiting += imports_of(text)
    return texts


def flat_name(module: str) -> str:
    """Return a module's name in the folder, e.g. `retro_model_attention`; modules of `remote_code` keep their names."""
    return module.removeprefix(_ROOM).replace(".", "_")


def imports_of(text: str) -> list[str]:
    """Return the modules of this project that a file imports at its top level with `from MODULE import …`."""
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _OURS:
            found.append(str(node.module))
        elif isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] in _OURS for alias in node.names), (
                "import MODULE cannot be relative"
            )
    return found


def _relative(text: str, module: str) -> str:
    """Return a file's text with relative imports of this project and its origin on the first line."""
    for imported in imports_of(text):
        text = re.sub(
            rf"^from {re.escape(imported)} import ", f"from .{flat_name(imported)} import ", text, flags=re.MULTILINE
        )
    origin = "/".join(module.split("."))
    return f"# Copied from {origin}.py by `retro export`.\n{text}"


def _source(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin)
