"""Documents: short pages, links that resolve, commands that exist."""

import re
from pathlib import Path

import pytest

from pipelines.cli import VERBS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / "README.md", *PAGES]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(path: Path) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and Python-Markdown both make them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_a_page_has_fewer_than_1500_words(path: Path) -> None:
    assert len(path.read_text().split()) < 1500


def test_the_readme_has_at_most_150_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("folder", sorted({path.parent for path in PAGES}), ids=name)
def test_a_folder_has_at_most_twenty_pages(folder: Path) -> None:
    assert len(list(folder.glob("*.md"))) <= 20


@pytest.mark.parametrize("path", [*TEXTS, ROOT / "CHANGELOG.md"], ids=name)
def test_links_resolve(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", prose(path)):
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), f"{target}: no such heading"


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (DOCS / "index.md").read_text()
    for path in PAGES:
        if path.name != "index.md":
            assert f"({path.relative_to(DOCS).as_posix()})" in index, path


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_every_retro_command_is_a_verb(path: Path) -> None:
    for verb in re.findall(r"^\s*\$? ?retro ([a-z][a-z-]*)", path.read_text(), flags=re.MULTILINE):
        assert verb in VERBS, f"retro {verb}"


CODE = [
    path
    for folder in ("retro", "indexing", "pipelines", "benchmarks", "configs", "tests")
    for path in (ROOT / folder).rglob("*.*")
]


def test_every_page_that_the_code_names_exists() -> None:
    for path in CODE:
        if path.suffix in {".py", ".toml", ".html", ".sbatch"}:
            for page in re.findall(r"docs/[\w/-]+\.md", path.read_text()):
                assert (ROOT / page).exists(), f"{name(path)}: {page}"
