"""Each message on the page *Troubleshooting* is one that the code prints."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.test_docs import DOCS, ROOT

PAGE = DOCS / "how-to" / "troubleshooting.md"
MESSAGES = re.findall(r"^`([^`]+)`$", PAGE.read_text(), flags=re.MULTILINE)
"""The messages stand alone in their lines."""


def literals(tree: ast.AST) -> Iterator[str]:
    """All texts but docstrings, with … in place of values."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in docstrings:
            yield flat(node)


def flat(text: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(text, ast.Constant):
        return re.sub(r"%[.\d]*[sdfg]", "…", text.value) if isinstance(text.value, str) else ""
    return "".join(flat(part) if isinstance(part, ast.Constant) else "…" for part in text.values)


def fixed_parts(message: str) -> list[str]:
    parts = [part.strip(" ;:.,") for part in message.split("…")]
    return [part for part in parts if part]


@pytest.fixture(scope="module")
def printed() -> set[str]:
    """The texts in the files that hold all parts of a message. To parse all files would take seconds."""
    files = [path for folder in ("pipelines", "retro", "indexing") for path in (ROOT / folder).rglob("*.py")]
    sources = [path.read_text() for path in files]
    joined = [re.sub(r'"\s*\n\s*f?"', "", source) for source in sources]  # a text on several lines
    wanted = [
        source
        for source, text in zip(sources, joined, strict=True)
        if any(all(part in text for part in fixed_parts(message)) for message in MESSAGES)
    ]
    return {literal for source in wanted for literal in literals(ast.parse(source))}


def test_there_are_twenty_messages() -> None:
    assert len(MESSAGES) == len(set(MESSAGES)) == 20


@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_prints_the_message(message: str, printed: set[str]) -> None:
    parts = fixed_parts(message)
    assert max(map(len, parts)) >= 14
    in_order = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    assert any(in_order.search(literal) for literal in printed)


def test_each_message_is_followed_by_its_cause_and_remedy() -> None:
    _, *after = re.split(r"^`[^`]+`$", PAGE.read_text(), flags=re.MULTILINE)
    for message, text in zip(MESSAGES, after, strict=True):
        assert len(text.partition("\n## ")[0].split()) > 12, message
