"""The files in configs/ load as valid settings."""

from pathlib import Path

import pytest

from pipelines.cli.settings.load import load
from pipelines.config import Config
from retro.model.presets import resolve
from retro.model_settings import ModelSettings

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_config_loads_and_its_model_can_be_built(path: Path) -> None:
    config = load(Config, path, [], verb="index")
    assert resolve(config.model, ModelSettings()).num_layers > 0
    whole_chunks = config.data.sequence_length % config.chunks.chunk_length == 0
    assert whole_chunks or config.finetune.examples  # rows of examples can end inside a chunk
