"""`retro add-retrieval` writes a model that other verbs accept, and nothing if an option is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from indexing.store.datastore import Datastore
from pipelines.cli.main import main
from retro.model_settings import updated
from retro.training.trainer import train
from tests.conftest import tiny_config


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, tiny_datastore: Datastore) -> Path:
    """The run of a plain decoder."""
    config = replace(tiny_config(tmp_path_factory.mktemp("base"), tiny_corpus), datastore=tiny_datastore.folder)
    config = replace(config, model=updated(config.model, {"retrieval.cca_layers": ()}))
    train(config.run, config.run_settings)
    return config.run


def test_other_verbs_accept_the_model(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "added.safetensors"
    assert main(["add-retrieval", str(base), "--output", str(file), "--k", "2", "--tokens", "1000"]) == 0
    said = capsys.readouterr().out
    assert "tokens of training text" in said
    assert f"{file}: " in said
    assert main(["eval", "perplexity", str(file), "--against", str(base), "--k", "3"]) == 0
    assert "added.safetensors ON k=3" in capsys.readouterr().out
    assert main(["generate", str(file), "--prompt", "The", "--max-tokens", "20"]) == 0
    assert capsys.readouterr().out.startswith("The")
    assert main(["export", str(file), "--output", str(tmp_path / "copy.safetensors")]) == 0
    assert main(["verify", str(file)]) == 0


def test_a_datastore_with_votes_has_rows_of_its_own(
    base: Path, voting_datastore: Datastore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, store = tmp_path / "added.safetensors", ["--datastore", str(voting_datastore.folder)]
    assert main(["add-retrieval", str(base), *store, "--output", str(file), "--k", "2", "--tokens", "1000"]) == 0
    out = tmp_path / "results.json"
    assert main(["eval", "perplexity", str(file), "--k", "2", "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert all(mode in printed for mode in ("ON k=2 ", "ON datastore", "ON k=2 + datastore"))
    rows = {(row["k"], row["votes"]): row["bits_per_byte"] for row in json.loads(out.read_text())["results"]}
    assert list(rows) == [(0, False), (2, False), (0, True), (2, True)]
    assert len(set(rows.values())) == 4
    assert main(["generate", str(file), *store, "--prompt", "The", "--max-tokens", "20", "--k", "2"]) == 0
    assert main(["eval", "perplexity", str(file), "--k", "2", "--evaluation.sets", "other=" + str(base)]) == 2


def test_wrong_options_write_nothing(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, there = tmp_path / "added.safetensors", tmp_path / "there.safetensors"
    there.write_text("")
    for options, words in (
        (["--output", str(tmp_path / "added.bin")], "must end in .safetensors"),
        (["--output", str(there)], "exists already"),
        (["--output", str(file), "--k", "0"], "k = 0"),
        (["--output", str(file), "--k", "7"], "stores 6 neighbors of each chunk"),
        (["--output", str(file), "--tokens", "0"], "tokens = 0"),
        (["--output", str(file), "--reader", "encoder"], "reader"),
        (["--output", str(file), "--datastore", str(tmp_path / "none")], "none"),
    ):
        assert main(["add-retrieval", str(base), *options]) == 2
        assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [there]
