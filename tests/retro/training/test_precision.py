"""`train.precision = "auto"` of a run is chosen once: when it is resumed, what was chosen holds."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from indexing.machine import Precision
from indexing.store.files import read_json
from retro.checkpoints import checkpoint as checkpoints
from retro.training.run_folder import precision_of

CPU = torch.device("cpu")
Choose = Callable[[str], None]


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """A processor that multiplies bfloat16. The function decides in which precision it is faster."""
    monkeypatch.setattr("retro.training.run_folder.onednn_has_bfloat16", lambda: True)

    def choose(precision: str) -> None:
        monkeypatch.setattr("retro.training.run_folder.fastest_products", lambda question, device: precision)

    return choose


def write(run: Path, tiny_run: Path, *recorded: str) -> Path:
    """Write the checkpoints of a run, each with its precision; "" = none, as earlier versions did."""
    like = checkpoints.latest(tiny_run)
    tensors = {"model.safetensors": load_file(like / "model.safetensors")}
    for step, precision in enumerate(recorded):
        state = {**read_json(like / "state.json"), "step": step, "precision": precision}
        checkpoints.write(run, {key: value for key, value in state.items() if value != ""}, tensors)
    return run


def test_checkpoints_name_the_precision_that_auto_became(tiny_run: Path) -> None:
    precision = checkpoints.read(checkpoints.latest(tiny_run)).precision
    assert precision == precision_of(tiny_run / "new", "auto", CPU)
    assert precision in ("float32", "bfloat16")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_new_run_takes_what_was_measured_and_a_setting_overrides(
    tmp_path: Path, faster: Choose, precision: Precision
) -> None:
    faster(precision)
    assert precision_of(tmp_path, "auto", CPU) == precision
    assert precision_of(tmp_path, "float16", CPU) == "float16"


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_a_resumed_run_keeps_its_precision(tiny_run: Path, tmp_path: Path, faster: Choose, kept: Precision) -> None:
    faster("float32" if kept == "bfloat16" else "bfloat16")
    assert precision_of(write(tmp_path, tiny_run, kept), "auto", CPU) == kept


def test_a_run_of_an_earlier_version_is_measured(tiny_run: Path, tmp_path: Path, faster: Choose) -> None:
    faster("bfloat16")
    assert precision_of(write(tmp_path, tiny_run, ""), "auto", CPU) == "bfloat16"


def test_a_damaged_checkpoint_is_passed_over(tiny_run: Path, tmp_path: Path, faster: Choose) -> None:
    write(tmp_path, tiny_run, "bfloat16", "bfloat16")
    (checkpoints.latest(tmp_path) / "state.json").write_text("{")
    faster("float32")
    assert precision_of(tmp_path, "auto", CPU) == "bfloat16"


def test_a_processor_without_bfloat16_continues_in_float32(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, tiny_run, "bfloat16")
    monkeypatch.setattr("retro.training.run_folder.onednn_has_bfloat16", lambda: False)
    with caplog.at_level(logging.WARNING, "retro"):
        assert precision_of(tmp_path, "auto", CPU) == "float32"
    assert "continues in float32" in caplog.text
