"""`retro eval perplexity` on a datastore with votes: bits per byte by the longest match, also of planted copies."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indexing.store.datastore import Datastore, delete_documents
from pipelines.cli.main import main
from pipelines.cli.settings.toml_file import to_toml
from retro.model_settings import updated
from tests.conftest import tiny_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, planted_datastore: Datastore) -> Path:
    """A run of two steps, of a model that copies from the whole datastore."""
    folder = tmp_path_factory.mktemp("copies")
    config = tiny_config(folder, planted_datastore.folder.parent / "corpus.jsonl")
    model = updated(config.model, {"copy_head.datastore": True, "retrieval.cca_layers": ()})
    train = replace(config.train, steps=2, warmup_steps=1, eval_every=2, checkpoint_every=2)
    config = replace(config, datastore=planted_datastore.folder, model=model, train=train)
    (folder / "config.toml").write_text(to_toml(config))
    assert main(["train", str(folder / "config.toml")]) == 0
    return config.run


def measured(run: Path, folder: Path, *options: str) -> dict[str, Any]:
    out = folder / "results.json"
    assert main(["eval", "perplexity", str(run), *options, "--output", str(out)]) == 0
    written: dict[str, Any] = json.loads(out.read_text())
    return written


def changes_of(written: dict[str, Any], unit: str) -> dict[int, float]:
    """Band → change of ON against OFF in percent."""
    levels = [level for level in written["matches"] if level["of"] == unit]
    return {level["match_at_least"]: level["changes"][0]["percent"] for level in levels if level["changes"]}


def test_planted_copies_are_shown_by_document_and_by_token(trained: Path, tmp_path: Path, capsys) -> None:
    written = measured(trained, tmp_path)
    printed = capsys.readouterr().out
    assert re.search(r"valid +64 and more +6 +[\d,]+ +OFF +\d\.\d{4}", printed)
    assert "By longest match before the token" in printed
    assert "By leakage" not in printed
    assert written["leakage"] == []
    longest = {row["id"]: row["longest_match"] for row in written["longest_matches"]}
    assert len(longest) == 12
    assert all((length == 64) == name.startswith("planted") for name, length in longest.items())
    off = written["results"][0]
    for unit in ("document", "token"):
        levels = [level for level in written["matches"] if level["of"] == unit]
        assert [level["match_at_least"] for level in levels] == [0, 4, 8, 16, 32, 64]
        assert [level["match_at_most"] for level in levels] == [3, 7, 15, 31, 63, None]
        for key in ("tokens", "bytes"):
            assert sum(row[key] for level in levels for row in level["results"][:1]) == off[key]
    by_document, by_token = (changes_of(written, unit) for unit in ("document", "token"))
    assert by_document[64] < -20 < max(change for band, change in by_document.items() if band < 64)
    assert by_token[64] < -50


def test_votes_of_fractions_of_the_datastore_gain_less_than_those_of_all(trained: Path, tmp_path: Path, capsys) -> None:
    written = measured(trained, tmp_path, "--evaluation.datastore-fractions", "1", "0.2")
    small, whole = written["datastore_fractions"]
    assert re.search(r"valid +0\.2 +\d+ +\d+ +ON datastore", capsys.readouterr().out)
    assert 0 < small["datastore_chunks"] < whole["datastore_chunks"]
    gains = [level["changes"][0]["percent"] for level in (whole, small)]
    assert gains[0] < gains[1] <= 0
    assert whole["results"][1]["bits_per_byte"] == pytest.approx(written["results"][1]["bits_per_byte"], rel=1e-3)


def test_matches_can_come_from_another_datastore_of_the_same_chunks(
    trained: Path, planted_datastore: Datastore, tmp_path: Path, capsys
) -> None:
    other = Path(shutil.copytree(planted_datastore.folder, tmp_path / "other"))
    own, same = measured(trained, tmp_path), measured(trained, tmp_path, "--leakage-from", str(other))
    assert same["longest_matches"] == own["longest_matches"]
    assert all(changes_of(same, unit) == changes_of(own, unit) for unit in ("document", "token"))
    ids = [str(row["id"]) for row in planted_datastore.train.metadata([0])]
    delete_documents(other, ids)  # the votes are outdated, and there are no neighbors
    assert main(["eval", "perplexity", str(trained), "--leakage-from", str(other)]) == 2
    assert "neighbors" in capsys.readouterr().err
