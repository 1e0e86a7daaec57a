"""Verbs read datastores that lack stages, and name a missing one only where it is needed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indexing.store.datastore import Datastore
from pipelines.cli.main import main
from pipelines.cli.settings.toml_file import to_toml
from retro.checkpoints.checkpoint import latest
from retro.model_settings import updated
from retro.training.trainer import train
from tests.conftest import tiny_config, without_stages


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 2
    return capsys.readouterr().err


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    assert main([*map(str, arguments), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory, copying_datastore: Datastore) -> Datastore:
    """The stages `chunk` and `suffixes` only."""
    return without_stages(copying_datastore, tmp_path_factory.mktemp("smallest") / "datastore", "sparse", "votes")


@pytest.fixture(scope="module")
def checkpoint(copying_run: Path) -> Path:
    newest = latest(copying_run)
    assert newest is not None
    return newest


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, copying_datastore: Datastore) -> Path:
    """The checkpoint of a model without retrieval."""
    config = replace(tiny_config(tmp_path_factory.mktemp("plain"), tiny_corpus), datastore=copying_datastore.folder)
    model = updated(config.model, {"retrieval.cca_layers": ()})
    return train(config.run, replace(config, model=model).run_settings).checkpoint


def test_search_by_terms_needs_no_vectors_and_finds_the_same(
    copying_datastore: Datastore, voting_datastore: Datastore, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, whole = (
        printed(capsys, "search", datastore.folder, "memory of a chunk", "--retrieval", "sparse")
        for datastore in (copying_datastore, voting_datastore)
    )
    assert [row["distance"] for row in rows] == [None] * len(rows)
    assert [row | {"distance": 0} for row in rows] == [row | {"distance": 0} for row in whole]
    assert main(["search", str(copying_datastore.folder), "memory", "--retrieval", "sparse"]) == 0
    assert "distance" not in capsys.readouterr().out


@pytest.mark.parametrize("way", ["dense", "hybrid"])
def test_search_by_vectors_names_the_stages_and_their_commands(
    copying_datastore: Datastore, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    error = error_of(capsys, "search", copying_datastore.folder, "memory", "--retrieval", way)
    assert "no finished 'add' stage" in error
    assert "`--stage embed`, then `--stage train-index`, then `--stage add`" in error


def test_evaluation_finds_votes_that_are_not_stored(
    checkpoint: Path, copying_datastore: Datastore, smallest: Datastore, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, searched = (
        printed(capsys, "eval", "perplexity", checkpoint, "--datastore", datastore.folder, "--device", "cpu")["results"]
        for datastore in (copying_datastore, smallest)
    )
    assert len(searched) == 2
    assert [row["bits_per_byte"] for row in searched] == [row["bits_per_byte"] for row in stored]


def test_an_evaluation_without_sorted_prefixes_names_the_stages(
    checkpoint: Path, smallest: Datastore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = without_stages(smallest, tmp_path / "bare", "suffixes")
    error = error_of(capsys, "eval", "perplexity", checkpoint, "--datastore", bare.folder)
    assert "`--stage suffixes`" in error


def test_generation_and_traces_need_sorted_prefixes_only(
    checkpoint: Path, smallest: Datastore, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--datastore", str(smallest.folder), "--device", "cpu"]
    (row,) = printed(capsys, "generate", checkpoint, "--prompt", "the index of", "--max-tokens", 4, *place)
    assert row["text"]
    assert printed(capsys, "trace", smallest.folder, row["prompt"], "--least", 2)["runs"]


def test_a_model_that_reads_neighbors_is_refused_before_its_weights_are_read(
    tiny_run: Path,
    smallest: Datastore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = without_stages(smallest, tmp_path / "bare", "suffixes")
    monkeypatch.setattr("retro.inference.language_model.load_scorer", lambda *_: pytest.fail("weights were read"))
    error = error_of(capsys, "generate", latest(tiny_run), "--datastore", bare.folder)
    assert "no finished 'add' stage" in error
    error = error_of(capsys, "eval", "perplexity", latest(tiny_run), "--datastore", bare.folder)
    assert "no finished 'neighbors' stage" in error


@pytest.mark.parametrize(("sources", "changes"), [(("--sources", "datastore"), 1), ((), 3)])
def test_copying_is_added_without_embeddings_and_with_neighbors_by_default(
    tmp_path: Path,
    plain_run: Path,
    smallest: Datastore,
    capsys: pytest.CaptureFixture[str],
    sources: tuple[str, ...],
    changes: int,
) -> None:
    """Neighbors, the datastore, and both."""
    output = tmp_path / "added.safetensors"
    options = ["--output", str(output), "--datastore", str(smallest.folder), "--tokens", "1000", *sources]
    assert main(["add-retrieval", str(plain_run), *options, "--device", "cpu"]) == 0
    assert ("neighbors" in capsys.readouterr().out) == (changes == 3)
    rows = printed(capsys, "eval", "perplexity", output, "--device", "cpu")["changes"]
    assert len(rows) == changes
    assert all(row["percent"] < 0 for row in rows)


def test_adding_a_source_names_its_stages_before_weights_are_read(
    tmp_path: Path,
    plain_run: Path,
    smallest: Datastore,
    tiny_datastore: Datastore,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`tiny_datastore` has neighbors and no `suffixes`, `bare` neither."""
    bare = without_stages(smallest, tmp_path / "bare", "suffixes")
    monkeypatch.setattr("retro.training.fitted_copy_head.load_scorer", lambda *_: pytest.fail("weights were read"))
    for source, stage, datastore in (("datastore", "votes", tiny_datastore), ("neighbors", "neighbors", bare)):
        options = ("--output", tmp_path / "added.safetensors", "--datastore", datastore.folder, "--sources", source)
        error = error_of(capsys, "add-retrieval", plain_run, *options)
        assert f"no finished '{stage}' stage" in error


def test_training_with_neighbors_names_their_stages(
    tmp_path: Path, copying_datastore: Datastore, tiny_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=copying_datastore.folder)
    (tmp_path / "config.toml").write_text(to_toml(config))
    error = error_of(capsys, "train", tmp_path / "config.toml")
    assert "no finished 'neighbors' stage" in error
