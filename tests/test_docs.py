"""Documentation: links resolve, and the commands and settings of the text exist."""

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.generate_reference import pages
from pipelines.cli.main import VERBS
from pipelines.cli.settings.load import leaf_types
from pipelines.config import Config
from tests.test_layers import LEVEL

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GENERATED = {DOCS / path: text for path, text in pages().items()}
"""Pages that exist on the site only."""
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
OPTIONS = {verb: set(leaf_types(row.load()[1])) for verb, row in VERBS.items()}
KEYS = set(leaf_types(Config))
SECTIONS = {key.rpartition(".")[0] for key in KEYS} - {""}


def arguments(path: Path) -> set[str]:
    """Options that a benchmark's source adds to its argument parser."""
    return {option.replace("-", "_") for option in re.findall(r'add_argument\(\s*"--([\w-]+)"', path.read_text())}


BENCHMARK_OPTIONS = {
    f"{path.parent.name}.{path.stem}": arguments(path) | arguments(ROOT / "benchmarks/common.py")
    for path in ROOT.glob("benchmarks/*/*.py")
}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(path: Path) -> str:
    """The text without its code blocks; of a notebook, its Markdown."""
    text = GENERATED.get(path) or path.read_text()
    if path in NOTEBOOKS:
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def code_blocks(path: Path, *languages: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [block for language, block in blocks if language in languages]


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and Python-Markdown both make them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [ROOT / "CHANGELOG.md", *WRITTEN, *GENERATED, *NOTEBOOKS], ids=name)
def test_links_resolve(path: Path) -> None:
    generated = GENERATED if path in GENERATED else {}  # a link from a written page must work on GitHub too
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", prose(path)):
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page in generated or page.exists(), target
        assert not anchor or anchor in anchors(page), f"{target}: no such heading"


def test_every_page_is_in_the_table_of_contents_and_in_the_navigation() -> None:
    contents = set(re.findall(r"\(([\w/-]+\.(?:md|ipynb))\)", (DOCS / "index.md").read_text()))
    navigation = set(re.findall(r": ([\w/-]+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    written = {path.relative_to(DOCS).as_posix() for path in (*WRITTEN[2:], *NOTEBOOKS)}
    indexes = {"reference/settings.md", "reference/commands.md"}
    assert contents | {"index.md"} == written == navigation - indexes


def test_every_page_named_in_the_code_exists() -> None:
    for folder in ("retro", "indexing", "pipelines", "benchmarks", "configs", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".toml", ".html", ".sbatch"}:
                for page in re.findall(r"docs/[\w/-]+\.md", path.read_text()):
                    assert (ROOT / page).exists(), f"{name(path)}: {page}"


@pytest.mark.parametrize("path", [ROOT / "CHANGELOG.md", *WRITTEN], ids=name)
def test_every_page_named_in_the_text_exists_or_is_named_with_a_commit_that_has_it(path: Path) -> None:
    """A removed page is named as `git show` takes it: COMMIT:PAGE."""
    for commit, page in re.findall(r"(?:\b([0-9a-f]{7,40}):)?\b(docs/[\w/-]+\.md)", path.read_text()):
        if not commit:
            assert (ROOT / page).exists() or ROOT / page in GENERATED, f"{page}: write COMMIT:{page} for a removed page"
        elif is_in_the_history(commit):  # not in a shallow clone
            assert is_in_the_history(f"{commit}:{page}"), f"{commit} has no {page}"


def is_in_the_history(revision: str) -> bool:
    return not subprocess.run(["git", "cat-file", "-e", revision], cwd=ROOT, stderr=subprocess.DEVNULL).returncode


def test_percentages_have_no_space_anywhere() -> None:
    """`28.5%` in the text, on the page and in what commands print. In code `%` after a number is also the remainder."""
    spaces = "[ \\u00a0\\u202f]"
    for path in [*WRITTEN, ROOT / "CHANGELOG.md", *NOTEBOOKS]:
        assert not (found := re.search(rf"\d{spaces}%", prose(path))), f"{name(path)}: {found[0]}"
    code = [path for folder in ("retro", "indexing", "pipelines", "docs") for path in (ROOT / folder).rglob("*")]
    for path in code:
        if path.suffix in {".py", ".js", ".html", ".css"}:
            found = re.search(rf"""\}}{spaces}%|\d{spaces}%(?=["'`.,;:)])""", path.read_text())
            assert not found, f"{name(path)}: {found[0]}"


WITH_REMOVED_BENCHMARKS = ("883d127", "cf7ae5e", "1a22a07")
"""A page whose benchmark has been removed names one of these commits, the last ones that have them."""
EXAMPLES = {
    "indexing/corpus/fortunes.py",
    "tests/indexing/corpus/test_fortunes.py",
    "indexing/embedding/bag.py",
    "indexing/neighbors/graph_search.py",
    "tests/indexing/neighbors/test_graph_search.py",
}
"""Files that the recipes of CONTRIBUTING.md add."""


@pytest.mark.parametrize("path", WRITTEN, ids=name)
def test_every_project_file_named_in_the_text_exists(path: Path) -> None:
    text = path.read_text()
    for file in re.findall(r"\b(?:retro|indexing|pipelines|benchmarks|configs|tests)/[\w./-]+\.[a-z]+\b", text):
        assert (ROOT / file).exists() or file in EXAMPLES, file
    for module in re.findall(r"\b(?:benchmarks\.(?:speed|quality)|pipelines|retro\.[a-z_]+)\.[a-z_]+\b(?!\()", text):
        file = ROOT / module.replace(".", "/")
        in_the_history = module.startswith("benchmarks.") and any(commit in text for commit in WITH_REMOVED_BENCHMARKS)
        assert file.is_dir() or file.with_suffix(".py").exists() or in_the_history, module


def test_the_architecture_page_shows_every_folder() -> None:
    shown = re.findall(r"\w+", "".join(code_blocks(DOCS / "explanation" / "architecture.md", "")))
    assert {room.split("/")[1] for room in LEVEL if not room.endswith(".py")} <= set(shown)


def test_no_two_pages_of_the_site_have_the_same_address() -> None:
    """MkDocs writes `a.md` and `a/index.md` to `a/index.html`, and one of them is lost."""
    addresses = [
        path.with_suffix("").as_posix().removesuffix("/index") for path in (*WRITTEN[2:], *NOTEBOOKS, *GENERATED)
    ]
    assert len(addresses) == len(set(addresses))


# --- commands and settings that exist ------------------------------------------------------------------------------


def commands(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The project's commands in a page's code and text: the verb, or "" for an unknown one, and its words.

    The first word of two-word verbs is skipped when it is alone or precedes "…": `retro eval …`.
    """
    blocks = "".join(code_blocks(path, "", "bash", "sh")).replace("\\\n", " ").splitlines()
    for line in [*blocks, *re.findall(r"`([^`\n]+)`", prose(path))]:
        found = re.search(r"(?:^|\s)(?:retro |pipelines\.cli |pipelines\.(?=(?:index|train)\b))([a-z].*)", line)
        if not found or not re.match(r"(\$ )?([A-Z_]+=\S+ )*(retro|python|torchrun|ray|sbatch|pip)\b", line.strip()):
            continue
        try:
            words = shlex.split(found[1], comments=True)
        except ValueError:  # an apostrophe in an explanation of a command
            words = found[1].split()
        two = " ".join(words[:2])
        verb = two if two in VERBS else words[0]
        if words[1:] not in ([], ["…"]) or verb not in {name.split()[0] for name in VERBS}:
            yield (verb if verb in VERBS else "", words)


def options(words: list[str]) -> list[str]:
    """Options among these words."""
    return [word[2:].partition("=")[0].replace("-", "_") for word in words if re.match(r"--[a-z]", word)]


def exists(option: str, known: set[str]) -> bool:
    section, _, leaf = option.rpartition(".")
    positive = f"{section}.{leaf.removeprefix('no_')}".lstrip(".")
    return option in known or positive in known


EXAMPLE_OPTIONS = {"help", "tokenizer", "model.embedding_norm"}
"""Options of every verb, that of `retro index CORPUS`, and the one that a recipe of CONTRIBUTING.md adds."""


@pytest.mark.parametrize("path", WRITTEN, ids=name)
def test_every_command_has_a_verb_and_options_that_exist(path: Path) -> None:
    for verb, words in commands(path):
        assert verb, f"retro {' '.join(words)}"
        for option in options(words):
            assert option in EXAMPLE_OPTIONS or exists(option, OPTIONS[verb]), f"retro {verb}: no option {option}"


OTHER_PROGRAMS = {"help", "max_restarts", "shutdown_timeout", "gpus_per_node", "working_dir", "run", "gpus"}
"""Options in the text that belong to torchrun, Slurm, Ray and Docker."""


@pytest.mark.parametrize("path", WRITTEN, ids=name)
def test_every_option_in_the_text_exists(path: Path) -> None:
    """On pages for users of another program the first column of tables has that program's options."""
    known = set().union(*OPTIONS.values(), *BENCHMARK_OPTIONS.values()) | OTHER_PROGRAMS
    text = (
        re.sub(r"^\|[^|\n]*\|", "|", prose(path), flags=re.MULTILINE) if path.stem.startswith("from-") else prose(path)
    )
    for code in re.findall(r"`(--[^`\n]+)`", text):
        for option in options(code.split()):
            assert exists(option, known), f"no option {option}"


@pytest.mark.parametrize("path", WRITTEN, ids=name)
def test_every_command_of_a_benchmark_has_options_that_exist(path: Path) -> None:
    lines = ["".join(code_blocks(path, "", "bash", "sh")), *re.findall(r"`([^`\n]+)`", prose(path))]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if found := re.search(r"benchmarks[./](\w+)[./]([a-z0-9_]+)(?:\.py)? (.*)", line):
            known = BENCHMARK_OPTIONS.get(f"{found[1]}.{found[2]}")  # None: removed
            assert known is None or set(options(found[3].split())) <= known | {"help"}, line


NO_KEYS = {"tokenizer.ggml.pre", "tokenizer.model", "index.search", "model.retrieve_from"}
"""Names in the text that look like configuration keys: a key of GGUF files, a file and functions."""
FILES = (".py", ".json", ".safetensors")


@pytest.mark.parametrize("path", WRITTEN, ids=name)
def test_every_key_in_the_text_exists(path: Path) -> None:
    past = set(Config.removed) if path.parent.name == "results" else set()
    for key in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)(?: = [^`]*)?`", prose(path)):
        if key.split(".")[0] in SECTIONS and key not in NO_KEYS and not key.endswith(FILES):
            assert key in KEYS | SECTIONS | past, key


@pytest.mark.parametrize("path", WRITTEN, ids=name)
def test_every_key_in_a_toml_block_exists(path: Path) -> None:
    for block in code_blocks(path, "toml"):
        for key in flat_keys(tomllib.loads(block)):
            assert key in KEYS, key


def flat_keys(values: dict, path: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat_keys(value, f"{path}{key}.")
        else:
            yield path + key


WIDTH_ON_GITHUB = 830


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.svg")), ids=name)
def test_the_text_of_a_picture_is_readable_at_the_width_of_github(path: Path) -> None:
    svg = path.read_text()
    box = re.search(r'viewBox="0 0 ([\d.]+)', svg)
    scale = min(1.0, WIDTH_ON_GITHUB / float(box[1])) if box else 1.0  # without a box it fits any width
    sizes = [float(size) for size in re.findall(r'font-size(?:="|: ?)([\d.]+)', svg)]
    assert scale * min(sizes) >= 14
