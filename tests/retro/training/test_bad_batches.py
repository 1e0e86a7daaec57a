"""Batches with a non-finite loss: the run stops before the update and names the batch, or skips it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from indexing.store.datastore import Datastore
from pipelines.config import Config
from retro.checkpoints import checkpoint as checkpoints
from retro.data.batches import TrainingData
from retro.parallel import forward_backward as passes
from retro.training.trainer import MAX_REFUSED_IN_A_ROW
from tests.conftest import tiny_config
from tests.retro.training.runs import run

BAD = 6  # the step with the bad batch, counted from 1; a batch has 2 sequences


@pytest.fixture
def config(tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore) -> Config:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder)
    config = replace(config, model=replace(config.model, dropout=0.1))  # makes the random state matter
    return replace(config, train=replace(config.train, eval_every=0, monitor_every=2))


@pytest.fixture
def bad_tokens(config: Config) -> torch.Tensor:
    """The tokens of the bad batch, which identify it."""
    data = TrainingData([config.datastore], config.data, retrieval=True)
    return torch.from_numpy(data.batch(range(2 * BAD - 2, 2 * BAD)).tokens)


@pytest.fixture
def nan_losses(bad_tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every loss of the bad batch NaN."""
    real = passes.summed_loss

    def summed_loss(hidden, weight, labels, *arguments, **options):
        bad = torch.equal(labels[:, 0], bad_tokens[:, 1])
        total, parts = real(hidden, weight, labels, *arguments, **options)
        return total * (math.nan if bad else 1), parts

    monkeypatch.setattr(passes, "summed_loss", summed_loss)


def weights(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


def bad_batch_report(config: Config) -> dict:
    return json.loads((config.run / "bad_batches" / f"{BAD:08d}.json").read_text())


@pytest.mark.usefixtures("nan_losses")
def test_the_run_stops_before_the_update_and_names_the_batch(
    config: Config, tmp_path: Path, bad_tokens: torch.Tensor, tiny_datastore: Datastore
) -> None:
    with pytest.raises(FloatingPointError, match=rf"step {BAD}: loss nan.*{BAD:08d}\.json.*--train\.on-nan skip"):
        run(config)
    checkpoint = checkpoints.open_checkpoint(config.run)
    assert checkpoint.step == BAD - 1
    named = bad_batch_report(config)
    assert named["step"] == BAD
    assert named["loss"] == "nan"
    for sequence, tokens in zip(named["sequences"], bad_tokens, strict=True):
        split = tiny_datastore.train
        chunks = np.arange(*sequence["chunks"])
        assert np.array_equal(split.tokens.gather(chunks).ravel(), tokens.numpy())
        numbers = np.unique(split.documents_of(chunks)[0])
        assert sequence["document_ids"] == [row["id"] for row in split.metadata(numbers)]
        assert sequence["datastore"] == str(tiny_datastore.folder)
    assert [sequence["sample"] for sequence in named["sequences"]] == [2 * BAD - 2, 2 * BAD - 1]


def test_the_checkpoint_before_a_bad_batch_equals_that_of_an_undisturbed_run(
    config: Config, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    straight = replace(config, run=tmp_path / "straight")
    run(straight, checkpoint_every=BAD - 1)
    request.getfixturevalue("nan_losses")
    with pytest.raises(FloatingPointError):
        run(config)
    ours, theirs = (checkpoints.step_folder(each.run, BAD - 1) for each in (config, straight))
    assert weights(ours) == weights(theirs)


@pytest.mark.usefixtures("nan_losses")
def test_a_resumed_run_that_skips_the_batch_equals_an_uninterrupted_one(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight = replace(config, run=tmp_path / "straight")
    skipping = run(straight, on_nan="skip")
    assert f"step {BAD}: loss nan" in caplog.text
    lines = [line for line in skipping.metrics if "loss" in line]
    assert [line["skipped_batches"] for line in lines] == [0] * (BAD - 1) + [1] * (8 - BAD + 1)
    assert math.isnan(lines[BAD - 1]["loss"])
    assert all(math.isfinite(line["loss"]) for line in lines[BAD:])
    with pytest.raises(FloatingPointError):
        run(config)
    resumed = run(config, on_nan="skip")
    assert weights(resumed.checkpoint) == weights(skipping.checkpoint)
    assert bad_batch_report(config) == bad_batch_report(straight)
    # Also from a checkpoint after the batch.
    assert checkpoints.open_checkpoint(straight.run).skipped == {"steps": 0, "batches": 1}


def test_a_skipped_step_changes_no_weights(config: Config, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("nan_losses")
    run(config, on_nan="skip", checkpoint_every=1, keep_checkpoints=8)
    before, after, later = (weights(checkpoints.step_folder(config.run, BAD + n)) for n in (-1, 0, 1))
    assert before == after
    assert after != later


def test_too_many_bad_batches_in_a_row_stop_a_skipping_run(config: Config, monkeypatch) -> None:
    real = passes.summed_loss

    def summed_loss(*arguments, **options):
        total, parts = real(*arguments, **options)
        return total * math.nan, parts

    monkeypatch.setattr(passes, "summed_loss", summed_loss)
    with pytest.raises(FloatingPointError, match="in a row"):
        run(config, on_nan="skip", steps=MAX_REFUSED_IN_A_ROW + 5)
    assert checkpoints.open_checkpoint(config.run).step == MAX_REFUSED_IN_A_ROW


def test_a_non_finite_gradient_stops_the_run(config: Config, monkeypatch) -> None:
    real = passes.gradients

    def gradients(parameters):
        found = real(parameters)
        found[0][0] = math.inf
        return found

    monkeypatch.setattr(passes, "gradients", gradients)
    with pytest.raises(FloatingPointError, match="norm of the gradient inf"):
        run(config)
    assert checkpoints.open_checkpoint(config.run).step == 0
