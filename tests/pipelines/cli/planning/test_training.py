"""`retro plan train`: figures follow from the settings, and impossible settings are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indexing.store.errors import InputError
from indexing.store.files import read_json, write_json
from indexing.tokenization.settings import TokenizerSettings
from pipelines.cli.main import main
from pipelines.cli.planning.training import (
    PlanTrainOptions,
    advice,
    flops_per_token,
    measured_flops,
    plan_training,
    tables,
    vocabulary,
)
from pipelines.cli.settings.load import load
from pipelines.cli.settings.toml_file import to_toml
from pipelines.terminal.units import human_bytes
from retro.data.settings import DataSettings
from retro.estimates.flops import forward_flops
from retro.model_settings import ModelSettings, RetrievalSettings, updated
from tests.conftest import tiny_config
from tests.indexing.tokenization.models import byte_level

SMALL = ["--model.preset", "tiny", "--data.sequence-length", "128", "--tokenizer.vocab-size", "500"]


def planned(*arguments: str) -> tuple[PlanTrainOptions, dict]:
    options = load(PlanTrainOptions, None, [*SMALL, *arguments], verb="plan train")
    plan = plan_training(options)
    return options, {"plan": plan, "told": advice(plan, options)}


@pytest.fixture
def measured_run(tmp_path: Path) -> Path:
    """The folder of a run that has logged its speed."""
    sizes = {"vocab_size": 500, "chunk_length": 64, "num_layers": 2, "retrieval": {"cca_layers": [2]}}
    (tmp_path / "settings.json").write_text(
        json.dumps({"model": sizes, "train": {}, "data": {"datastores": [], "sequence_length": 128, "k": 1}})
    )
    at = {"step": 10, "tokens": 1280}
    lines = [{**at, "tokens_per_second": rate} for rate in (10.0, 1000.0, 1100.0)] + [{**at, "valid": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_verb_writes_every_mode_and_prints_the_cheapest(tmp_path: Path, capsys) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", "train", *SMALL, "--tokens", "1e9", "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    plan = json.loads(out.read_text())
    assert len(plan["modes"]) == 4 * 3 + 3 * 3  # offloading needs ZeRO
    assert f"{plan['all_parameters']:,} with embeddings" in printed
    assert 'zero = 0, activation_checkpointing = "none"' in printed
    assert {(mode["step_seconds"], mode["days"]) for mode in plan["modes"]} == {(None, None)}  # nothing was measured
    assert "--measured RUN" in printed


def test_three_modes_are_printed_and_all_on_request() -> None:
    options, made = planned("--device-memory", "30MB")
    _, modes = tables(made["plan"], options)
    assert 2 <= len(modes) <= 4  # with the head
    least = min(made["plan"].modes, key=lambda mode: mode.memory.device)
    assert modes[-1][9] == human_bytes(least.memory.device)
    _, every = tables(made["plan"], replace(options, all_modes=True))
    assert every[0] == modes[0]
    assert len(every) == 1 + len(made["plan"].modes)
    assert all(row in every for row in modes)


def test_verb_accepts_a_settings_file_and_plan_datastore_checks_its_own_options(
    tmp_path: Path, tiny_corpus: Path, capsys
) -> None:
    (tmp_path / "config.toml").write_text(to_toml(tiny_config(tmp_path, tiny_corpus)))
    assert main(["plan", "train", str(tmp_path / "config.toml"), "--devices", "1"]) == 0
    assert "1 of 80GB" in capsys.readouterr().out
    assert main(["plan", "datastore", "--machines", "0"]) == 2
    assert "machines = 0" in capsys.readouterr().err


def test_time_is_operations_divided_by_device_throughput() -> None:
    rate = ["--peak-tflops", "100", "--mfu", "0.5"]
    paper = ["--model.preset", "172m", "--chunks.chunk-length", "64"]
    options, made = planned("--tokens", "1e9", "--devices", "2", *paper, *rate)
    plan, sizes = made["plan"], {"preset": "172m", "vocab_size": 500, "chunk_length": 64}
    from retro.model.presets import resolve

    per_token = 3 * forward_flops(resolve(updated(ModelSettings(), sizes)), 128, 2) / 128  # type: ignore[arg-type]
    assert plan.flops_per_token == per_token
    by_checkpointing = {mode.parallel.activation_checkpointing: mode for mode in plan.modes}
    assert by_checkpointing["none"].days == pytest.approx(1e9 * per_token / (2 * 50e12) / 86_400)
    assert by_checkpointing["none"].step_seconds == pytest.approx(8 * 128 * per_token / (2 * 50e12))
    assert by_checkpointing["full"].days == pytest.approx(by_checkpointing["none"].days * 4 / 3)
    assert options.tokens == 1e9


def test_pipeline_plan_includes_the_bubble(measured_run: Path) -> None:
    options = ["--devices", "4", "--train.batch-size", "32", "--measured", str(measured_run)]
    options += ["--model.copy-head.no-neighbors"]  # pipelines do not support it
    alone, four = (planned(*options, "--parallel.pipeline", p)[1]["plan"] for p in ("1", "4"))
    assert four.modes[0].step_seconds == pytest.approx(alone.modes[0].step_seconds * (8 + 3) / 8)


def test_modes_that_fit_are_marked_and_the_cheapest_is_named() -> None:
    needed = sorted(mode.memory.device for mode in planned()[1]["plan"].modes)
    room = needed[len(needed) // 2]
    plan = planned("--device-memory", f"{room / 0.9 / 1e6 + 0.001}MB")[1]["plan"]
    assert [mode.fits for mode in plan.modes] == [mode.memory.device <= room for mode in plan.modes]
    assert not plan.modes[0].fits
    assert plan.cheapest == next(mode for mode in plan.modes if mode.fits)
    assert "No mode fits into 1MB" in planned("--device-memory", "1MB")[1]["told"]


def test_device_throughput_comes_from_the_median_of_a_measured_run(measured_run: Path) -> None:
    model = ModelSettings(vocab_size=500, chunk_length=64, num_layers=2, retrieval=RetrievalSettings(cca_layers=(2,)))
    expected = 1000.0 * flops_per_token(model, DataSettings(sequence_length=128, k=1))
    assert measured_flops(measured_run, 1) == pytest.approx(expected)
    assert planned("--measured", str(measured_run))[1]["plan"].device_flops == pytest.approx(expected)


@pytest.mark.parametrize(
    "key", ["model", "train", "data", "lora", "data.k", "data.sequence_length", "lora.rank", "model.num_layers"]
)
@pytest.mark.parametrize("value", [-1, 1e300, "x" * 10_000, [], None])
def test_damaged_settings_of_a_measured_run_are_named(measured_run: Path, tmp_path: Path, key: str, value: Any) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(measured_run / "metrics.jsonl", run)
    sections = read_json(measured_run / "settings.json")
    section, _, name = key.partition(".")
    if name:
        sections[section] = {**sections.get(section, {}), name: value}
    else:
        sections[section] = value
    write_json(run / "settings.json", sections)
    with pytest.raises(InputError, match=name or section):
        measured_flops(run, 1)


@pytest.mark.parametrize(
    "line", ['{"step": "x", "tokens": 5}', '{"step": 5}', "5", '{"step": 5, "tokens": 5, "tokens_per_second": "x"}']
)
def test_damaged_metrics_of_a_measured_run_are_named(measured_run: Path, tmp_path: Path, line: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(measured_run / "settings.json", run)
    (run / "metrics.jsonl").write_text((measured_run / "metrics.jsonl").read_text() + line + "\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl:\d+: "):
        measured_flops(run, 1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--devices", "0"], "devices = 0"),
        (["--devices", "3", "--parallel.tensor", "2"], "devices = 3"),
        (["--device-memory", "much"], "--device-memory = much"),
        (["--mfu", "40"], "mfu = 40"),
        (["--peak-tflops", "0"], "peak-tflops = 0"),
        (["--devices", "3"], "train.batch_size = 8"),
        (["--data.sequence-length", "100"], "data.sequence_length = 100"),
        (["--measured", "nowhere"], "nowhere is not the folder of a run"),
        (["--zero", "1"], "--zero"),
        (["nowhere.toml"], "nowhere.toml"),
    ],
)
def test_invalid_settings_are_refused(arguments: list[str], told: str, capsys) -> None:
    leading = [a for a in arguments if a.endswith(".toml")]
    assert main(["plan", "train", *leading, *SMALL, *(a for a in arguments if a not in leading)]) == 2
    assert told in capsys.readouterr().err


def test_run_without_logged_speed_is_refused(measured_run: Path, capsys) -> None:
    (measured_run / "metrics.jsonl").write_text('{"step": 1, "tokens": 100}\n')
    assert main(["plan", "train", *SMALL, "--measured", str(measured_run)]) == 2
    assert "tokens_per_second" in capsys.readouterr().err


def test_the_vocabulary_is_that_of_an_existing_tokenizer(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "tokenizer")
    existing = vocabulary(TokenizerSettings(kind="huggingface", path=str(folder)))
    assert existing == 402  # 400 of the model, with its token that ends a text; a token for padding and one more
    assert vocabulary(TokenizerSettings(vocab_size=5000)) == 5000
    assert vocabulary(TokenizerSettings(kind="huggingface", path="not-here-yet", vocab_size=700)) == 700
