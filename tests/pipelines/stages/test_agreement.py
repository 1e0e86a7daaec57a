"""Training refuses settings other than those that its datastore was built with."""

from dataclasses import replace
from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from pipelines.cli.main import main
from pipelines.cli.settings.load import load
from pipelines.cli.settings.toml_file import to_toml
from pipelines.config import Config
from pipelines.stages.agreement import check_agreement
from tests.conftest import tiny_config


def loaded(folder: Path, config: Config, *options: str) -> Config:
    file = folder / "c.toml"
    file.write_text(to_toml(config))
    return load(Config, file, options, verb="train")


@pytest.mark.parametrize(
    ("option", "value", "stage"),
    [
        ("chunks.chunk_length", "32", "chunk"),
        ("corpus.text_key", "body", "chunk"),
        ("corpus.split", "9 1 0", "chunk"),
        ("tokenizer.vocab_size", "500", "chunk"),
        ("dedup.within", "true", "chunk"),
        ("embedder.dimension", "64", "embed"),
        ("index.seed", "3", "train-index"),
        ("index.recall_target", "0.9", "add"),
        ("neighbors.stored", "4", "neighbors"),
        ("neighbors.search", "index", "neighbors"),
    ],
)
def test_another_setting_of_the_datastore_is_refused_by_name(
    tmp_path: Path, tiny_datastore: Datastore, tiny_corpus: Path, option: str, value: str, stage: str
) -> None:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder)
    changed = loaded(tmp_path, config, f"--{option}", *value.split())
    with pytest.raises(InputError, match=rf"{option} was .*\n(.*\n)*.*--stage {stage} --rebuild") as refused:
        check_agreement(changed)
    assert str(refused.value).count(" was ") == 2  # "was built", and one setting


def test_the_settings_of_the_build_agree_and_those_that_are_not_given_are_not_compared(
    tmp_path: Path, tiny_datastore: Datastore, tiny_corpus: Path
) -> None:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder)
    whole = loaded(tmp_path, config, "--train.steps", "3", "--neighbors.search", "auto")
    check_agreement(whole)
    check_agreement(Config(datastore=tiny_datastore.folder))
    (tmp_path / "short.toml").write_text(f'datastore = "{tiny_datastore.folder}"\nmodel.preset = "tiny"\n')
    short = load(Config, tmp_path / "short.toml", [], verb="train")
    check_agreement(short)
    other = load(Config, None, ["--data.datastores", "elsewhere", "--chunks.chunk_length", "7"], verb="train")
    check_agreement(other)


def test_a_default_that_is_given_is_compared_too(tmp_path: Path, tiny_datastore: Datastore) -> None:
    (tmp_path / "c.toml").write_text(f'datastore = "{tiny_datastore.folder}"\nchunks.chunk_length = 32\n')
    config = load(Config, tmp_path / "c.toml", [], verb="train")
    with pytest.raises(InputError, match=r"chunks\.chunk_length was 16, now 32"):
        check_agreement(config)


def test_train_on_the_command_line_refuses_before_it_trains(
    tmp_path: Path, tiny_datastore: Datastore, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (tmp_path / "c.toml").write_text(f'datastore = "{tiny_datastore.folder}"\nrun = "{run}"\n')
    assert main(["train", str(tmp_path / "c.toml"), "--chunks.chunk-length", "24"]) == 2
    assert "chunks.chunk_length was 16, now 24" in capsys.readouterr().err
    assert not run.exists()
