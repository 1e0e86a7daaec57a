"""Metrics of each layer group; warnings come before a divergence and not without one."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from indexing.store.datastore import Datastore
from pipelines.config import Config
from retro.model.retro import Retro
from retro.training.monitor import _QUIET_STEPS, PREFIX, Monitor, gradient_figures, group_of, update_ratios
from tests.conftest import tiny_config
from tests.retro.training.runs import run


@pytest.fixture
def config(tmp_path: Path, tiny_corpus: Path, tiny_datastore: Datastore) -> Config:
    config = replace(tiny_config(tmp_path, tiny_corpus), datastore=tiny_datastore.folder)
    settings = replace(
        config.train,
        steps=40,
        warmup_steps=20,
        eval_every=0,
        checkpoint_every=100,
        monitor_every=10,
        precision="float32",
    )
    return replace(config, train=settings)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def make_monitor(every: int = 1) -> Monitor:
    return Monitor({}, 1e-38, every)


# --- figures -------------------------------------------------------------------------------------------------------


def test_every_parameter_is_in_one_group(tiny_model: Retro) -> None:
    groups = Monitor.of(tiny_model.named_parameters(), torch.float32, 1).groups
    assert list(groups) == [
        *(f"attention_0{layer}" for layer in (1, 2, 3)), "cross_02", "cross_03", "embedding", "encoder",
        *(f"feed_forward_0{layer}" for layer in (1, 2, 3)), "head",
    ]  # fmt: skip
    found = [id(parameter) for group in groups.values() for parameter in group]
    assert sorted(found) == sorted(map(id, tiny_model.parameters()))
    assert group_of("_wrapped.attention.11._checkpointed.block.q_proj.weight") == "attention_12"


def test_gradient_figures_are_computed_from_the_entries() -> None:
    """Overflow and underflow are counted in the scaled gradient; the norm is that of the unscaled gradient."""
    one, other = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(2))
    one.grad = torch.tensor([[3.0, 4.0, 0.0, 0.0], [1e-5, -1e-7, 0.0, 0.0]])
    other.grad = torch.tensor([math.inf, math.nan])
    found = gradient_figures({"one": [one], "both": [one, other], "none": []}, torch.finfo(torch.float16).tiny, scale=4)
    assert found["one"] == {"overflow": 0, "underflow": 2 / 8, "zero": 4 / 8, "gradient_norm": pytest.approx(5 / 4)}
    assert found["both"]["overflow"] == 2 / 10
    assert math.isnan(found["both"]["gradient_norm"])
    assert "none" not in found


def test_update_ratio_is_the_change_relative_to_the_weights_before() -> None:
    groups = {"all": [nn.Parameter(torch.full((4,), 1.0)), nn.Parameter(torch.full((12,), 1.0))]}
    before = {"all": [weight.detach().clone() for weight in groups["all"]]}
    with torch.no_grad():
        groups["all"][0] += 0.5
    assert update_ratios(groups, before)["all"]["update_ratio"] == pytest.approx(math.sqrt(4 * 0.25) / 4)


def test_measurements_are_frequent_at_the_start_and_then_regular() -> None:
    assert [step for step in range(1, 101) if make_monitor(every=30).due(step)] == [1, 2, 4, 8, 16, 30, 60, 90]


# --- a real training -----------------------------------------------------------------------------------------------


def test_a_normal_run_measures_all_groups_without_warnings(
    config: Config, caplog: pytest.LogCaptureFixture, tiny_model: Retro
) -> None:
    outcome = run(config)
    assert warnings_in(caplog) == []
    looked = [line for line in outcome.metrics if any(name.startswith(PREFIX) for name in line)]
    assert [line["step"] for line in looked] == [1, 2, 4, 8, 10, 20, 30, 40]
    groups = list(Monitor.of(tiny_model.named_parameters(), torch.float32, 1).groups)
    for figure in ("gradient_norm", "update_ratio", "overflow", "underflow", "zero"):
        for group in groups:
            assert all(math.isfinite(line[f"{PREFIX}{figure}/{group}"]) for line in looked)
    whole = {line["step"]: line["gradient_norm"] for line in outcome.metrics if "loss" in line}
    for line in looked:  # the groups partition the parameters
        norms = [line[f"{PREFIX}gradient_norm/{group}"] for group in groups]
        assert math.hypot(*norms) == pytest.approx(whole[line["step"]], rel=1e-4)


def test_monitoring_changes_no_weights(config: Config, tmp_path: Path) -> None:
    looked = run(config, steps=8, warmup_steps=2)
    not_looked = run(replace(config, run=tmp_path / "other"), steps=8, warmup_steps=2, monitor_every=0)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (looked.checkpoint / name).read_bytes() == (not_looked.checkpoint / name).read_bytes()


def test_the_warning_precedes_a_nan_loss(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(FloatingPointError):
        run(config, lr=1e4, max_grad_norm=0.0)
    assert "a step changes the weights by" in warnings_in(caplog)[0]


# --- rules ---------------------------------------------------------------------------------------------------------


def noisy(step: int, around: float) -> float:
    """Values within 5% of `around`, with one outlier, which alone causes no warning."""
    return around * (3 if step == 27 else 1 + 0.05 * math.sin(12.9898 * step))


def test_a_lasting_rise_of_the_loss_warns_once_and_a_spike_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    monitor = make_monitor()
    for step in range(1, 41):
        monitor.watch(step, noisy(step, 4.0 - 0.02 * step), 1.0, {})
    assert warnings_in(caplog) == []
    for step in range(41, 60):
        monitor.watch(step, noisy(step, 6.0), 1.0, {})
    assert len(warnings_in(caplog)) == 1
    assert warnings_in(caplog)[0].startswith("step 43: the loss is 5.8")


def test_a_tenfold_gradient_norm_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    monitor = make_monitor()
    for step in range(1, 21):
        monitor.watch(step, 4.0, noisy(step, 1.0), {f"{PREFIX}gradient_norm/cross_06": noisy(step, 0.1)})
    monitor.watch(21, 4.0, 5.0, {f"{PREFIX}gradient_norm/cross_06": 0.5})  # below the threshold
    assert warnings_in(caplog) == []
    for step in range(22, 26):
        monitor.watch(step, 4.0, 20.0, {f"{PREFIX}gradient_norm/cross_06": 2.0})
    group, whole = warnings_in(caplog)
    assert group.startswith("step 22: cross_06: the norm of the gradient is 2, it was about 0.1")
    assert whole.startswith("step 24: the norm of the gradient is 20")


def test_batches_without_neighbors_do_not_lower_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    monitor = make_monitor()
    for step in range(1, 60):
        monitor.watch(step, 4.0, 1.0, {f"{PREFIX}gradient_norm/encoder": 0.1 if step % 3 == 0 else 0.0})
    assert warnings_in(caplog) == []


def test_repeated_overflows_warn_at_long_intervals(caplog: pytest.LogCaptureFixture) -> None:
    monitor = make_monitor()
    for step in range(1, 20):
        monitor.watch(step, 4.0, 1.0, {f"{PREFIX}overflow/head": 0.01 if step % 3 else 0.0})
    assert warnings_in(caplog) == []
    for step in range(20, 20 + _QUIET_STEPS + 5):
        monitor.watch(step, 4.0, 1.0, {f"{PREFIX}overflow/head": 0.01, f"{PREFIX}overflow/encoder": 0.01})
    assert [warning.split(":")[0] for warning in warnings_in(caplog)] == ["step 21", f"step {21 + _QUIET_STEPS}"]
    assert "head: 1.00% of the gradient overflowed" in warnings_in(caplog)[0]
