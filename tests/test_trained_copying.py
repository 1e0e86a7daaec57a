"""Scores of `trained_copying`: the same figures as an evaluation for what a model was trained with, and all other combinations."""

import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import Budget
from benchmarks.quality import trained_copying
from benchmarks.quality.trained_copying import COMBINATIONS, READERS, load, score_runs, summarize
from indexing.store.datastore import Datastore
from retro.checkpoints.checkpoint import latest, load_model, open_checkpoint
from retro.data.neighbor_choice import NeighborUse
from retro.device import choose_placement
from retro.evaluation.bits_per_byte import evaluate
from retro.evaluation.sets import EvaluationSet
from retro.evaluation.settings import EvaluationSettings
from retro.model.settings import updated
from retro.training.trainer import train
from tests.conftest import tiny_config

OPTIONS = Namespace(tokens=10**9, fitted_tokens=256, k=0)
MODELS = {
    "context": {"retrieval.cca_layers": (), "copy_head.context": True, "tied_embeddings": True},
    "all": {"copy_head.context": True, "copy_head.neighbors": True, "copy_head.datastore": True},
    "all-reads": {"retrieval.cca_layers": (), "retrieval.reader": "decoder", "copy_head.neighbors": True},
}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path, voting_datastore: Datastore) -> Path:
    """A folder as `retrieval_gain train` leaves it, scored."""
    out = tmp_path_factory.mktemp("experiment")
    config = replace(tiny_config(out, tiny_corpus), datastore=voting_datastore.folder)
    for name, changes in MODELS.items():
        own = replace(config, run=out / "seed-1" / f"run-{name}", model=updated(config.model, changes))
        train(own.run, own.run_settings)
    score_runs(out, OPTIONS, Budget(math.inf))
    return out


@pytest.mark.parametrize(
    ("model", "row", "use"),
    [
        ("context", "OFF/own context", NeighborUse(0)),
        ("all", "OFF/own context", NeighborUse(0)),
        ("all", "ON/own context, neighbors", NeighborUse(2)),
        ("all", "ON/all three", NeighborUse(2, votes=True)),
        ("all-reads", "ON/neighbors", NeighborUse(2)),
    ],
)
def test_scores_of_what_was_trained_are_those_of_an_evaluation(
    experiment: Path, voting_datastore: Datastore, model: str, row: str, use: NeighborUse
) -> None:
    folder = latest(experiment / "seed-1" / f"run-{model}")
    assert folder is not None
    here = choose_placement("cpu", "auto")
    loaded = load_model(open_checkpoint(folder), here.device)
    expected = evaluate(
        loaded, EvaluationSet("valid", voting_datastore), EvaluationSettings(), here, use=use, sequence_length=64
    )
    with np.load(experiment / "seed-1" / f"copying-{model}.npz") as rows:
        assert len(rows[row]) == expected.tokens
        assert rows[row].sum() == pytest.approx(expected.nats_by_document.sum(), rel=1e-3)


def test_every_combination_is_scored_once(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores, seeds = load(experiment)
    assert seeds == 1
    readers = {"context": READERS[:1], "all": READERS, "all-reads": READERS}
    assert set(scores) == {(m, r, s) for m in MODELS for r in readers[m] for s in COMBINATIONS}
    monkeypatch.setattr(trained_copying, "score", pytest.fail)
    score_runs(experiment, OPTIONS, Budget(math.inf))
    summarize([experiment])
    printed = capsys.readouterr().out
    assert "| all, ON, all three |" in printed
    assert "1 seeds" in printed
