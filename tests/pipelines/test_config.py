"""Defaults of a configuration that depend on other settings: what pays, or the paper."""

import os
from pathlib import Path

import pytest

from indexing.embedding.settings import EmbedderSettings
from indexing.neighbors.settings import NeighborSettings
from indexing.store.errors import InputError
from pipelines.cli.settings.load import leaf_types, load
from pipelines.config import Config
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


def numbers() -> list[str]:
    """Options that take one number, except those that can be negative."""
    bare = {key: hint.__origin__ if hasattr(hint, "__metadata__") else hint for key, hint in leaf_types(Config).items()}
    return [key for key, hint in bare.items() if hint in (int, float) and key not in UNLIMITED]


UNLIMITED = ("data.seed", "train.seed", "evaluation.seed", "index.flat_below")


@pytest.mark.parametrize("key", numbers())
def test_every_number_has_a_least_value(key: str) -> None:
    option = "--" + key.replace("_", "-")
    with pytest.raises(InputError, match=key.replace("_", "[-_]")):
        load(Config, None, [option, "-2"], verb="index")


def test_names_of_files_that_are_not_utf_8_are_accepted() -> None:
    name = os.fsdecode(b"caf\xe9.jsonl")
    config = load(Config, None, ["--corpus.paths", name, "--datastore", name], verb="index")
    assert (config.corpus.paths, config.datastore) == ((name,), Path(name))
