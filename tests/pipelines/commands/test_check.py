"""`retro check gpu`: every part runs on a CPU at a tiny size, so that only the device is unproven; limits, report and exit status."""

import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.cli import main
from pipelines.commands import check
from pipelines.gpu_checks import attention, packed_documents, table
from pipelines.gpu_checks.part import Finding, Job, Skipped, distance
from pipelines.gpu_checks.table import PARTS, Outcome, run_apart, run_part
from retro.model import attention as model_attention
from retro.model.kernels import Bounds
from retro.model.loss import _compiled_logit_gradients
from tests.retro.varlen_loops import varlen_on_cpu as varlen_on_cpu  # a fixture

TINY = Job("cpu", tiny=True)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile without generating code, which takes long on a CPU."""
    _compiled_logit_gradients.cache_clear()
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    _compiled_logit_gradients.cache_clear()
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # as in the process of a part; FlexAttention warns on a CPU, for example
@pytest.mark.parametrize("name", [name for name in PARTS if name != "tests"])
def test_every_part_passes_on_a_cpu_at_a_tiny_size(name: str, traced: None) -> None:
    result = run_part(name, "cpu", tiny=True)
    assert result["status"] == "passed" or (result["status"] == "skipped" and "not installed" in result["message"]), (
        result
    )
    assert result["findings"] or result["status"] == "skipped"
    assert json.loads(json.dumps(result)) == result


@pytest.mark.slow
def test_the_tests_marked_gpu_are_found_and_run_in_another_process() -> None:
    outcome = run_apart("tests", "cpu", tiny=True, limit=300)
    assert outcome.status == "passed", outcome
    assert "collected" in outcome.findings[-1]["value"] or "selected" in outcome.findings[-1]["value"]


def test_all_parts_together_take_less_than_ten_minutes() -> None:
    assert sum(row.seconds for row in PARTS.values()) < 600


def test_without_a_gpu_the_parts_are_listed_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check", "gpu", "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed and row.summary in printed for name, row in PARTS.items())
    assert "no CUDA device" in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [(["--parts", "speed"], "attention"), (["--device", "cpu"], "tiny"), (["--device", "tpu"], "cuda")],
)
def test_a_mistake_is_named_with_what_is_accepted(
    arguments: list[str], accepted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "gpu", *arguments]) == 2
    assert accepted in capsys.readouterr().err


def checked(outcomes: list[Outcome], folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON and page of a run with these outcomes."""
    by_name = {each.part: each for each in outcomes}
    monkeypatch.setattr(check, "run_apart", lambda name, device, tiny: by_name[name])
    options = ["--device", "cpu", "--tiny", "--output", str(folder), "--parts", *by_name]
    status = main(["check", "gpu", *options])
    return status, json.loads((folder / "gpu.json").read_text()), (folder / "gpu.md").read_text()


def outcome(part: str, status: Any, passed: bool | None, message: str = "") -> Outcome:
    findings = [{"name": "a | check", "value": "1.0", "passed": passed}] if status != "skipped" else []
    return Outcome(part, status, 2.0, findings, message)


def test_a_failed_check_is_reported_and_gives_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [outcome("attention", "failed", False), outcome("faiss", "skipped", None, "no faiss-gpu")]
    status, found, page = checked(outcomes, tmp_path, monkeypatch)
    assert status == 1
    assert [each["status"] for each in found["parts"]] == ["failed", "skipped"]
    assert {"device", "torch", "commit", "command"} <= set(found)
    assert "| attention | failed | 2 |" in page
    assert "| a \\| check | 1.0 | ✗ |" in page
    assert "Skipped: no faiss-gpu" in page


def test_skipped_and_passed_parts_give_status_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [outcome("attention", "passed", True), outcome("faiss", "skipped", None, "no faiss-gpu")]
    assert checked(outcomes, tmp_path, monkeypatch)[0] == 0


def instead(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let parts run this script in place of their own process."""
    popen = subprocess.Popen
    monkeypatch.setattr(
        table.subprocess, "Popen", lambda _, **options: popen([sys.executable, "-c", script], **options)
    )


def test_a_part_that_exceeds_its_limit_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    instead("import time; time.sleep(600)", monkeypatch)
    found = run_apart("attention", "cpu", tiny=True, limit=0.1)
    assert (found.status, found.message) == ("failed", "stopped after its limit of 0.1 s")


def test_children_of_a_part_are_killed_with_it() -> None:
    script = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        assert process.stdout is not None
        child = Path("/proc") / process.stdout.readline().strip() / "stat"
        assert child.exists()
        table._kill(process)
        while child.exists() and child.read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.05)  # the kernel has not run it yet; a test that waits forever fails


def test_a_process_that_dies_fails_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    instead("raise SystemExit(3)", monkeypatch)
    found = run_apart("attention", "cpu", tiny=True)
    assert (found.status, found.message) == ("failed", "the process ended with status 3")


def raises(error: Exception) -> Any:
    def run(job: Job) -> list[Finding]:
        raise error

    return run


@pytest.mark.parametrize(("error", "status"), [(Skipped("no package"), "skipped"), (ValueError("no"), "failed")])
def test_a_part_that_raises_is_skipped_or_failed(
    error: Exception, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "run", raises(error))
    found = run_part("attention", "cpu", tiny=True)
    assert found["status"] == status
    assert str(error) in found["message"]


def test_one_failed_finding_fails_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding("a", "1", True), Finding("b", "2", False), Finding("c", "3")]
    monkeypatch.setattr(attention, "run", lambda job: findings)
    assert run_part("attention", "cpu", tiny=True)["status"] == "failed"


def test_the_kernel_of_every_attention_is_named() -> None:
    """In float32 every attention on a CPU calls `scaled_dot_product_attention`."""
    found = attention.run(Job("cpu", tiny=True, precision="float32"))
    assert len(found) == len(list(attention.cases(tiny=True)))
    for each in found:
        assert each.value.startswith(("FLASH_ATTENTION; ", "MATH; ")), each
        assert each.passed, each


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention.Case("self", "rope", 2, 16)
    assert max(attention.compare(case, TINY)[1].values()) < 2e-2
    right, gradients, number = model_attention.dot_product_attention, attention._gradients, iter((1, 2))

    def changed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        return right(q, k, v.flip(2), *rest)

    def second_changed(*args: Any) -> Any:  # the first call computes the reference
        monkeypatch.setattr(model_attention, "dot_product_attention", right if next(number) == 1 else changed)
        return gradients(*args)

    monkeypatch.setattr(attention, "_gradients", second_changed)
    assert max(attention.compare(case, TINY)[1].values()) > 0.1


def test_packed_documents_by_bounds_are_compared_with_those_by_mask(varlen_on_cpu: list[Bounds]) -> None:
    job = Job("cpu", tiny=True, precision="float32")
    found = packed_documents.run(job)
    assert [(each.name, each.passed) for each in found] == [("mask", True), ("bounds", True)]
    assert len(varlen_on_cpu) == 1
    by_bounds = [each for each in attention.cases(tiny=True) if each.mask == "documents" and each.scheme == "rope"]
    for case in by_bounds:
        assert attention.compare(case, job)[0] == {"FLASH_ATTENTION by bounds"}
    assert len(by_bounds) == 3


def test_the_distance_of_values_that_are_not_finite_is_infinite() -> None:
    assert distance(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
    assert distance(torch.ones(2), torch.ones(2)) == 0
