"""The code that an exported folder carries: the model's own files, in one flat folder, without this package.

    retro/huggingface/remote_code/modeling_retro.py ─ imports ─► retro/inference/decoder.py ─ imports ─► …     followed by their syntax trees
    `from retro.model.positions import rotate`  ─►  `from .retro_model_positions import rotate`

transformers copies what a file imports with a leading dot, and what that imports, out of one flat folder. Imports at the top of
a file are followed; those inside functions stay as they are: they are of what only the installed package has.
"""

import ast
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

MODEL = ("configuration_retro", "modeling_retro")
"""What `auto_map` in config.json names."""

_ROOM = "retro.huggingface.remote_code."
_OURS = ("retro", "indexing")


def remote_files(wanted: Sequence[str]) -> dict[str, str]:
    """The text of every file, by its name in the folder: of some modules of `remote_code` and what they import."""
    files: dict[str, str] = {}
    waiting = [_ROOM + name for name in wanted]
    while waiting:
        module = waiting.pop()
        name = f"{flat_name(module)}.py"
        if name not in files:
            text = _source(module).read_text(encoding="utf-8")
            files[name] = _relative(text, module)
            waiting += imports_of(text)
    return dict(sorted(files.items()))


def flat_name(module: str) -> str:
    """A module's name in the folder: `retro_attention`; transformers' classes are in files that begin as its own do."""
    return module.removeprefix(_ROOM).replace(".", "_")


def imports_of(text: str) -> list[str]:
    """Modules of this project that a file imports at its top level, `from MODULE import …` alone."""
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
    """A file's text with the imports of this project made relative, and where it comes from on its first line."""
    for imported in imports_of(text):
        text = re.sub(
            rf"^from {re.escape(imported)} import ", f"from .{flat_name(imported)} import ", text, flags=re.MULTILINE
        )
    origin = "/".join(module.split("."))
    return f"# {origin}.py, as `retro export` has copied it.\n{text}"


def _source(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin)
