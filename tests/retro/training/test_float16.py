"""Float16 with dynamic loss scaling follows float32 up to rounding; an overflow skips the step and lowers the scale."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from indexing.store.datastore import Datastore
from indexing.store.errors import InputError
from pipelines.config import Config
from retro.checkpoints import checkpoint as checkpoints
from retro.device import Placement, choose_inference_placement, choose_placement
from retro.training import step as training_step
from retro.training.step import GradScaler, judge
from retro.training.trainer import Outcome
from tests.conftest import tiny_config
from tests.retro.training.runs import run


@pytest.fixture
def config(tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore) -> Config:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder)
    return replace(config, train=replace(config.train, eval_every=0, precision="float16", lr=5e-3))


def lines(outcome: Outcome) -> list[dict]:
    timed = ("tokens_per_second", "mfu")
    return [
        {name: value for name, value in line.items() if name not in timed} for line in outcome.metrics if "loss" in line
    ]


def start_with_scale(monkeypatch: pytest.MonkeyPatch, scale: float, growth_interval: int = 4) -> None:
    def scaler(placement: Placement) -> GradScaler:
        enabled = placement.dtype == torch.float16
        return GradScaler("cpu", init_scale=scale, growth_interval=growth_interval, enabled=enabled)

    monkeypatch.setattr(training_step, "make_scaler", scaler)


def test_float16_follows_float32(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_with_scale(monkeypatch, 2.0**10, growth_interval=2000)
    ours = lines(run(config, steps=10))
    theirs = lines(run(replace(config, run=tmp_path / "float32"), steps=10, precision="float32"))
    assert theirs[-1]["loss"] < theirs[0]["loss"] - 0.5  # float32 itself learns
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=5e-3)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=2e-2)
    assert {line["loss_scale"] for line in ours} == {2.0**10}
    assert {line["skipped_steps"] for line in ours} == {0}
    assert "loss_scale" not in theirs[0]


def test_an_overflow_skips_the_step_and_halves_the_scale_and_good_steps_double_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_with_scale(monkeypatch, 2.0**26)
    found = lines(run(config, steps=16, checkpoint_every=1, keep_checkpoints=16))
    scales, skipped = ([line[name] for line in found] for name in ("loss_scale", "skipped_steps"))
    assert skipped[0] == 1
    assert skipped[-1] < 12
    halved = [after / before for before, after in itertools.pairwise(scales)]
    for step, change in enumerate(halved):
        overflowed = skipped[step] > (skipped[step - 1] if step else 0)
        assert math.isfinite(found[step]["gradient_norm"]) != overflowed
        assert change == 0.5 if overflowed else change in (1, 2)
    assert 2 in halved
    weights = [(checkpoints.step_folder(config.run, step) / "model.safetensors").read_bytes() for step in range(1, 17)]
    for step in range(1, 16):
        assert (weights[step] == weights[step - 1]) == (skipped[step] > skipped[step - 1])
    assert all(math.isfinite(line["loss"]) for line in found)


def test_a_resumed_run_restores_the_scale_and_its_counts(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_with_scale(monkeypatch, 2.0**24)
    config = replace(config, model=replace(config.model, dropout=0.1))
    straight = run(replace(config, run=tmp_path / "straight"), steps=12, lr_schedule="constant")
    run(config, steps=7, lr_schedule="constant")  # within the four good steps that double the scale
    state = json.loads((checkpoints.step_folder(config.run, 7) / "state.json").read_text())
    assert state["skipped"]["steps"] > 0
    assert 0 < state["scaler"]["_growth_tracker"] < 4
    resumed = run(config, steps=12, lr_schedule="constant")
    assert lines(resumed) == lines(straight)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (resumed.checkpoint / name).read_bytes() == (straight.checkpoint / name).read_bytes()


@pytest.mark.parametrize(
    ("loss", "norm", "scale", "update"),
    [
        (1.0, 2.0, None, "applied"),
        (1.0, 2.0, 0.5, "applied"),
        (1.0, math.inf, 65536.0, "overflow"),
        (1.0, math.nan, 1.0, "overflow"),
        (1.0, math.inf, 0.5, "refused"),  # no scale would help
        (1.0, math.inf, None, "refused"),
        (math.nan, 2.0, None, "refused"),
        (math.inf, math.inf, 65536.0, "refused"),
    ],
)
def test_updates_are_applied_skipped_as_overflow_or_refused(
    loss: float, norm: float, scale: float | None, update: str
) -> None:
    assert judge(loss, norm, scale) == update


def test_tf32_is_rejected_for_training_on_a_cpu_and_evaluated_there_in_float32() -> None:
    with pytest.raises(InputError, match=r"train\.precision = 'tf32'.*'cpu'"):
        choose_placement("cpu", "tf32")
    assert choose_inference_placement("cpu", "tf32") == Placement(torch.device("cpu"), torch.float32)


def test_on_a_cpu_float16_is_evaluated_in_float32_with_float16_weights() -> None:
    assert choose_placement("cpu", "float16") == Placement(torch.device("cpu"), torch.float16)
    inference = choose_inference_placement("cpu", "float16")
    assert inference == Placement(torch.device("cpu"), torch.float32, half_weights=True)
    assert choose_inference_placement("cpu", "auto").half_weights
    assert not choose_inference_placement("cpu", "float32").half_weights


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bfloat16", "float16"])
def test_on_cuda_each_precision_follows_float32(config: Config, tmp_path: Path, precision: str) -> None:
    options = {"device": "cuda", "compile": "no", "steps": 16}
    ours = lines(run(config, precision=precision, **options))
    theirs = lines(run(replace(config, run=tmp_path / "float32"), precision="float32", **options))
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-2)


@pytest.mark.gpu
def test_tf32_changes_cuda_products_only_while_it_is_selected() -> None:
    torch.manual_seed(0)
    a = torch.randn(512, 512, device="cuda")
    exact = a.double() @ a.double()
    errors = {}
    for precision in ("float32", "tf32", "float32"):
        choose_placement("cuda", precision)
        errors[precision] = float((a @ a - exact).abs().max())
    assert errors["float32"] < 1e-3 < errors["tf32"] < 1
