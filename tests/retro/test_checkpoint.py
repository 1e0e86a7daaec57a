"""Checkpoints: whole or not there, and nothing in them is ever unpickled."""

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


def test_a_truncated_or_changed_file_is_refused_by_name_and_an_unfinished_folder_is_not_seen(
    run: Path, tmp_path: Path
) -> None:
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "checkpoints" / ".00000009.tmp").mkdir()
    newest = checkpoints.latest(copy)
    assert newest is not None
    assert newest.name == "00000008"
    file = newest / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        checkpoints.open_checkpoint(copy)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match=r"model\.safetensors has changed"):
        checkpoints.open_checkpoint(copy)
    shutil.rmtree(newest)
    assert checkpoints.open_checkpoint(copy).step == 4


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="retro train"):
        checkpoints.open_checkpoint(tmp_path)
