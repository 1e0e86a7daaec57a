"""Every benchmark can be imported, describes its options and has a time limit."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_terminated_experiment_ends_its_command() -> None:
    child = "import time; print('started', flush=True); time.sleep(600)"
    parent = f"from benchmarks.quality.experiments import run; import sys; sys.exit(run([sys.executable, '-c', {child!r}]) != -15)"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.terminate()
        assert process.wait(60) == 0  # the command was ended by SIGTERM
        assert process.stdout.read() == ""  # and no process holds the pipe any more
