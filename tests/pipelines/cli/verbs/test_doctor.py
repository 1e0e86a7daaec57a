"""`retro doctor` recognizes known conflicts between packages and problems of the machine."""

import pytest

from pipelines.cli.verbs import doctor
from pipelines.cli.verbs.doctor import Finding, conflicts, examine, faiss_conflicts, print_findings


@pytest.mark.parametrize(
    ("versions", "topic", "level"),
    [
        ({"numpy": "1.26.4", "pyarrow": "26.0.0"}, "pyarrow", "error"),
        ({"torch": "2.14.0"}, "torch", "warning"),
        ({"torch": "2.9.1+cu128"}, "torch", "warning"),
    ],
)
def test_known_conflict_is_found_with_the_command_that_repairs_it(versions, topic, level) -> None:
    (finding,) = conflicts(versions)
    assert (finding.topic, finding.level) == (topic, level)
    assert finding.action.startswith("pip install")


def test_compatible_versions_have_no_conflict() -> None:
    assert conflicts({"numpy": "1.26.4", "pyarrow": "25.0.1", "autofaiss": "2.18.0", "torch": "2.13.0+cpu"}) == []
    assert conflicts({"numpy": "2.5.0", "pyarrow": "26.0.1", "autofaiss": "2.18.0", "torch": "2.13.0"}) == []


def test_examination_of_this_machine_passes(capsys) -> None:
    findings = examine()
    assert print_findings(findings) == 0
    assert {"torch", "faiss build", "threads", "memory"} <= {finding.topic for finding in findings}
    assert "faiss build" in capsys.readouterr().out


def test_finding_at_error_level_gives_status_1(capsys) -> None:
    assert print_findings([Finding("error", "x", "broken", "install it")]) == 1
    assert "install it" in capsys.readouterr().out


def test_broken_package_is_reported_and_the_rest_is_still_examined(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    real = doctor.importlib.import_module

    def fail_on_faiss(name: str):
        if name == "faiss":
            raise ImportError("libopenblas.so.0: cannot open\nshared object file")
        return real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", fail_on_faiss)
    findings = {finding.topic: finding for finding in examine()}
    assert findings["faiss-cpu"].level == "error"
    assert "cannot open shared object file" in findings["faiss-cpu"].message
    assert findings["faiss-cpu"].action.startswith("pip install --force-reinstall --no-deps 'faiss-cpu")
    assert "faiss build" not in findings
    assert {"cpu", "threads", "disk"} <= set(findings)
    assert print_findings(list(findings.values())) == 1


def test_versions_of_python_from_3_11_are_fine_and_untested_ones_are_a_warning() -> None:
    levels = [doctor.check_python((3, minor)).level for minor in (10, 11, 12, 13, 15)]
    assert levels == ["error", "ok", "ok", "ok", "warning"]


def test_autofaiss_that_does_not_import_is_an_error_and_none_at_all_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.importlib.import_module

    def without_pipes(name: str):
        if name.startswith("autofaiss"):
            raise ModuleNotFoundError("No module named 'pipes'")
        return real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", without_pipes)
    versions = doctor.installed_versions() | {"autofaiss": "2.18.0"}
    monkeypatch.setattr(doctor, "installed_versions", lambda: versions)
    assert {finding.topic: finding.level for finding in examine()}["autofaiss"] == "error"
    del versions["autofaiss"]
    assert {finding.topic: finding.level for finding in examine()}["autofaiss"] == "ok"


@pytest.mark.parametrize(
    ("gpu", "cpu", "has_gpu", "level", "words"),
    [
        ("1.15.1", "1.15.1", False, "warning", "has the files of faiss-cpu"),
        ("1.15.1", "1.15.1", True, "ok", "the files of faiss-gpu are used"),
        ("1.14.0", "1.15.1", True, "warning", "has overwritten"),
    ],
)
def test_two_builds_of_faiss_in_one_folder_are_reported_with_the_one_in_use(gpu, cpu, has_gpu, level, words) -> None:
    (finding,) = faiss_conflicts({"faiss-gpu": gpu, "faiss-cpu": cpu}, has_gpu)
    assert (finding.level, words in finding.message) == (level, True)
    assert bool(finding.action) == (level == "warning")


def test_single_build_of_faiss_has_no_conflict() -> None:
    assert faiss_conflicts({"faiss-cpu": "1.15.1"}, has_gpu=False) == []
    assert faiss_conflicts({"faiss-gpu": "1.15.1"}, has_gpu=True) == []


def test_more_threads_than_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda process: {0})
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    finding = doctor.check_threads({"torch"})
    assert (finding.level, finding.action) == ("warning", "export OMP_NUM_THREADS=1")


def test_a_cpu_shows_what_was_chosen_and_the_times_that_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {
        "training": {"float32": 20.0, "bfloat16": 33.5},
        "inference": {"float32": 8.0, "bfloat16": 5.0},
        "attention in bfloat16": {"blocks of 64": 2.0, "fused": 1.0},
        "prompts": {"float16": 3.0, "fbgemm": 2.5, "float32": 1.5},
    }
    monkeypatch.setattr("indexing.machine.onednn_has_bfloat16", lambda: True)
    monkeypatch.setattr("retro.inference.packed_kernels.has_fbgemm", lambda: True)
    monkeypatch.setattr("indexing.measured.times_of", lambda question: times.get(question.name, {"0": 2.0, "1": 2.5}))
    first, *findings = doctor.check_cpu()
    shown = {finding.topic: finding.message for finding in findings}
    assert "measured.json" in first.message
    assert shown["training"] == "float32 is used (float32 20.00 ms, bfloat16 33.50 ms)"
    used = [shown[name].partition(" is used")[0] for name in times]
    assert used == ["float32", "bfloat16", "fused", "float32"]
    assert shown["drafts, packed"] == shown["drafts, unpacked"] == "0, 1, … tokens take 0.00, 0.25 passes more"
