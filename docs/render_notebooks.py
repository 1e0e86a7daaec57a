"""Notebooks of docs/ as pages of the site (a hook of MkDocs): a notebook is Markdown, code, and the outputs stored in
it.

Building the site runs no cell and needs no package: mkdocs-jupyter would bring 37 of them.
"""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File

_WIDTH = 86  # characters that fit into a block of code


class Notebook(File):
    """A page made of a notebook. Links to the notebook lead to it."""

    def is_documentation_page(self) -> bool:
        """True: it becomes a page, and is not copied."""
        return True

    @property
    def content_string(self) -> str:
        """The page in Markdown."""
        return markdown_of(super().content_string)


def on_files(files: Any, config: Any) -> None:
    """Replace notebooks by their pages."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        files.append(Notebook(file.src_uri, config.docs_dir, config.site_dir, config.use_directory_urls))


def markdown_of(notebook: str) -> str:
    """The cells of a notebook and their outputs as Markdown."""
    return "\n\n".join(part for cell in json.loads(notebook)["cells"] for part in _parts(cell))


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    yield f"```python\n{source}\n```" if cell["cell_type"] == "code" else source
    outputs = cell.get("outputs", ())
    if printed := "".join(line for output in outputs for line in output.get("text", ())):
        lines = (textwrap.fill(line, _WIDTH) if len(line) > _WIDTH else line for line in printed.splitlines())
        yield "\n".join(["```text", *lines, "```"])
    for output in outputs:
        if html := output.get("data", {}).get("text/html"):
            yield "".join(html).replace("`", "&#96;")  # backticks begin code, also inside HTML
