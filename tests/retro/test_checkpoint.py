"""Checkpoints: whole or not there, and nothing in them is ever unpickled."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from retro import checkpoint as checkpoints
from retro.trainer import train
from tests.conftest import tiny_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore) -> Path:
    config = replace(tiny_config(tmp_path_factory.mktemp("checkpoint"), tiny_corpus), datastore=tiny_datastore.folder)
    train(config.run, [config.datastore], config.model, config.data, config.train, config.evaluation)
    return config.run


def test_the_newest_one_stands_for_the_run_and_holds_no_pickle(run: Path) -> None:
    opened = checkpoints.open_checkpoint(run)
    assert (opened.step, opened.tokens) == (8, 8 * 2 * 64)
    assert {path.suffix for path in opened.folder.iterdir()} == {".safetensors", ".json"}
    assert checkpoints.open_checkpoint(opened.folder) == opened


def test_a_loaded_model_computes_what_was_saved(run: Path, tmp_path: Path) -> None:
    opened = checkpoints.open_checkpoint(run)
    model = checkpoints.load_model(opened, torch.device("cpu"))
    tokens = torch.arange(32)[None]
    again = checkpoints.load_model(opened, torch.device("cpu"))
    assert torch.equal(model(tokens), again(tokens))
    assert not model.training


FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A copy of the run to be damaged."""
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_refused_by_name(copy: Path, name: str) -> None:
    file = copy / "checkpoints" / "00000008" / name
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        checkpoints.open_checkpoint(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused(copy: Path, name: str) -> None:
    """Wherever it is, but for the manifest's counts, which nothing reads, and its blanks."""
    file, draw = copy / "checkpoints" / "00000008" / name, random.Random(name)
    whole = file.read_bytes()
    counts = range(whole.find(b'"counts"'), whole.find(b'"files"'))
    places = [place for place, byte in enumerate(whole) if place not in counts and not chr(byte).isspace()]
    for _ in range(30):
        changed = bytearray(whole)
        changed[draw.choice(places)] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        with pytest.raises(InputError, match=r"(?s)00000008.*Remove"):
            checkpoints.open_checkpoint(copy)


def test_an_unfinished_folder_is_not_seen_and_without_the_newest_the_one_before_stands_for_the_run(copy: Path) -> None:
    (copy / "checkpoints" / ".00000009.tmp").mkdir()
    assert checkpoints.open_checkpoint(copy).step == 8
    shutil.rmtree(copy / "checkpoints" / "00000008")
    assert checkpoints.open_checkpoint(copy).step == 4


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="retro train"):
        checkpoints.open_checkpoint(tmp_path)
