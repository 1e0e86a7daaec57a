"""The files in configs/ are settings that load, and the README's commands are commands that exist."""

import re
from pathlib import Path

import pytest

from pipelines.cli import VERBS
from pipelines.config import Config
from pipelines.config_files import load
from retro.model.presets import resolve
from retro.model.settings import ModelSettings

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_a_config_loads_and_names_a_model_that_can_be_built(path: Path) -> None:
    config = load(Config, path, [], verb="index")
    assert resolve(config.model, ModelSettings()).num_layers > 0
    whole_chunks = config.data.sequence_length % config.chunks.chunk_length == 0
    assert whole_chunks or config.finetune.examples  # rows of examples may end inside a chunk


def test_every_retro_command_in_the_documents_is_a_verb() -> None:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for verb in re.findall(r"^\s*\$? ?retro ([a-z][a-z-]*)", path.read_text(), flags=re.MULTILINE):
            assert verb in VERBS, f"{path.name}: retro {verb}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_links_between_documents_resolve() -> None:
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\((?!https?://)([^)#\s]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
