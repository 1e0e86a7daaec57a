"""A corpus that every machine has: the documentation and sources that ship with Python."""

import json
import sysconfig
from pathlib import Path

from indexing.store.files import write_bytes


def write_python_corpus(folder: Path) -> Path:
    """Write the language reference (`pydoc_data.topics`) and the standard library's sources without tests as JSON
    Lines."""
    from pydoc_data import topics

    path = folder / "python.jsonl"
    if path.exists():
        return path
    documents = [{"id": f"topics/{name}", "title": name, "text": text} for name, text in sorted(topics.topics.items())]
    library = Path(sysconfig.get_path("stdlib"))
    unwanted = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}
    for source in sorted(library.rglob("*.py")):
        name = source.relative_to(library)
        if not unwanted & set(name.parts):
            text = source.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                documents.append({"id": f"lib/{name.as_posix()}", "title": name.stem, "text": text})
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(document, ensure_ascii=False) for document in documents)
    write_bytes(path, ("\n".join(lines) + "\n").encode(errors="replace"))
    return path
