"""The tests marked `gpu`, from a checkout of the repository. An installed package has no tests."""

import subprocess
import sys
from pathlib import Path

from pipelines.gpu_checks.part import Finding, Job, Skipped

ROOT = Path(__file__).resolve().parents[2]


def run(job: Job) -> list[Finding]:
    """Run them all; a tiny job only collects them."""
    if not (ROOT / "tests" / "conftest.py").exists():
        raise Skipped("needs a checkout of the repository with `pip install -e '.[test]'`")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    ended = subprocess.run(
        [*command, *(["--collect-only"] if job.tiny else [])], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = [line for line in ended.stdout.splitlines() if line.strip()]
    failed = [Finding("failed", line, False) for line in lines if line.startswith(("FAILED", "ERROR"))]
    return [*failed, Finding("pytest -m gpu", lines[-1] if lines else ended.stderr[-500:], ended.returncode == 0)]
