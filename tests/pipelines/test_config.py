"""What a configuration accepts, and what it says of former keys and values."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from indexing.embedding.settings import EmbedderSettings
from indexing.neighbors.settings import NeighborSettings
from indexing.store.errors import InputError
from pipelines.cli.settings.load import leaf_types, load
from pipelines.config import REMOVED, Config
from pipelines.executors.settings import Resources
from pipelines.stages.choices import with_choices

TRANSFORMER = EmbedderSettings(kind="transformer", path="minilm")


@pytest.mark.parametrize(
    ("embedder", "rerank"),
    [(EmbedderSettings(), "tokens"), (TRANSFORMER, "embeddings")],
    ids=["lexical", "transformer"],
)
def test_only_the_lexical_embedder_has_token_weights_to_order_neighbors_by(
    tmp_path: Path, embedder: EmbedderSettings, rerank: str
) -> None:
    config = Config(datastore=tmp_path, embedder=embedder)
    assert with_choices(config).neighbors.rerank == rerank
    given = replace(config, neighbors=NeighborSettings(rerank="none", search="index"))
    assert with_choices(given) == given


def test_the_config_of_the_papers_model_has_its_chunks_and_order_of_neighbors() -> None:
    config = load(Config, Path("configs/paper_172m.toml"), [], verb="index")
    assert (config.chunks.chunk_length, config.neighbors.rerank) == (64, "embeddings")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[executor]\nembed.cpus = 4\n", ["a.toml:2: ", "executor.embed", "executor.resources.embed"]),
        ("[executor.embed]\ncpus = 4\n", ["a.toml:1: ", "executor.embed", "executor.resources.embed"]),
        ("[tuning]\nadapter = 'lora'\n", ["a.toml:1: ", "tuning", "train.weights and [lora]"]),
        ("[train]\nnum_threads = 4\n", ["a.toml:2: ", "train.num_threads", "OMP_NUM_THREADS"]),
        ("[neighbors]\nsearch = 'lists'\n", ["a.toml:2: ", 'neighbors.search = "lists"', "use index"]),
        ("[model]\nrope.low_freq_factor = 1.0\n", ["a.toml:2: ", "model.rope.low_freq_factor", "file of a model"]),
    ],
)
def test_a_former_key_or_value_is_refused_with_what_became_of_it(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(InputError) as caught:
        load(Config, tmp_path / "a.toml", [], verb="index")
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("key", REMOVED)
def test_every_former_option_is_refused_with_what_became_of_it(key: str) -> None:
    option, _, value = key.partition(" = ")
    with pytest.raises(InputError, match=re.escape(REMOVED[key])):
        load(Config, None, [f"--{option}", value or "1"], verb="index")


def test_a_similar_name_of_another_program_is_answered_with_the_keys_that_end_like_it() -> None:
    with pytest.raises(InputError, match=r"--train\.checkpoint-every"):
        load(Config, None, ["--train.save-every", "100"], verb="train")


def test_a_misspelled_section_is_answered_with_its_key_alone() -> None:
    with pytest.raises(InputError, match=r"Did you mean --executor\.resources\.train\.workers\?"):
        load(Config, None, ["--executor.resources.trian.workers", "2"], verb="train")


def test_workers_of_a_stage_are_set_in_the_file_and_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[executor.resources]\nembed = {cpus = 4, memory = "8GB"}\ntrain.workers = 2\n')
    options = ["--executor.resources.embed.cpus", "2", "--executor.resources.add.gpus=1"]
    executor = load(Config, tmp_path / "a.toml", options, verb="index").executor
    assert executor.resources_of("embed") == Resources(cpus=2, memory="8GB")
    assert executor.resources_of("train") == Resources(workers=2)
    assert (executor.resources_of("add"), executor.resources_of("chunk")) == (Resources(gpus=1), Resources())


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
