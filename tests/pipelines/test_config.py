"""Defaults of a configuration that depend on other settings: what pays, or the paper."""

import pytest

from indexing.embedding.settings import EmbedderSettings
from indexing.neighbors.search import NeighborSettings
from pipelines.config import Config
from pipelines.settings.load import load
from retro.model.presets import PRESETS
from retro.model.settings import PAPER_PRESETS, ModelSettings

TRANSFORMER = EmbedderSettings(kind="transformer", path="minilm")


@pytest.mark.parametrize("preset", ["", "base", *PRESETS])
def test_chunks_and_order_of_neighbors_are_for_copying_except_with_the_papers_presets(preset: str) -> None:
    config = Config(model=ModelSettings(preset=preset))
    expected = (64, "embeddings") if preset in PAPER_PRESETS else (32, "tokens")
    assert (config.chunks.chunk_length, config.neighbors.rerank) == expected


def test_a_transformer_has_no_token_weights_so_its_neighbors_are_ordered_by_embeddings() -> None:
    assert Config(embedder=TRANSFORMER).neighbors.rerank == "embeddings"


@pytest.mark.parametrize("preset", ["small", "172m"])
def test_a_set_chunk_length_and_order_stay(preset: str) -> None:
    options = ["--chunks.chunk-length", "48", "--neighbors.rerank", "none", "--model.preset", preset]
    config = load(Config, None, options, verb="index")
    assert (config.chunks.chunk_length, config.neighbors.rerank) == (48, "none")
    assert Config(neighbors=NeighborSettings(rerank="embeddings")).neighbors.rerank == "embeddings"
