"""The doctor knows the conflicts that others have met."""

import pytest

from pipelines.doctor import Finding, conflicts, examine, print_findings


@pytest.mark.parametrize(
    ("versions", "topic", "level"),
    [
        ({"numpy": "2.1.0", "autofaiss": "2.18.0"}, "numpy", "error"),
        ({"numpy": "1.26.4", "pyarrow": "26.0.0"}, "pyarrow", "error"),
        ({"torch": "2.14.0"}, "torch", "warning"),
        ({"torch": "2.9.1+cu128"}, "torch", "warning"),
    ],
)
def test_a_known_conflict_is_found_and_mended_by_a_command(versions, topic, level) -> None:
    (finding,) = conflicts(versions)
    assert (finding.topic, finding.level) == (topic, level)
    assert finding.action.startswith("pip install")


def test_what_fits_together_is_no_conflict() -> None:
    assert conflicts({"numpy": "1.26.4", "pyarrow": "25.0.1", "autofaiss": "2.18.0", "torch": "2.13.0+cpu"}) == []


def test_this_machine_passes(capsys) -> None:
    findings = examine()
    assert print_findings(findings) == 0
    assert {"torch", "faiss build", "threads", "memory"} <= {finding.topic for finding in findings}
    assert "faiss build" in capsys.readouterr().out


def test_an_error_gives_status_1(capsys) -> None:
    assert print_findings([Finding("error", "x", "broken", "mend it")]) == 1
    assert "mend it" in capsys.readouterr().out
