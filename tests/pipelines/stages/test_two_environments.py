"""Another environment (another Python, NumPy, without autofaiss) builds the same bytes and continues what this one has built."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import contents

ROOT = Path(__file__).resolve().parents[3]
OTHER = os.environ.get("RETRO_OTHER_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not OTHER, reason="RETRO_OTHER_PYTHON is not set: the Python of another environment"),
]
CONFIG = """
datastore = "ours"
corpus.paths = ["corpus/"]
index.flat_below = 100
neighbors.materialized = 2
"""


def index(python: str, folder: Path, datastore: str, *options: str) -> None:
    command = [python, "-m", "pipelines.index", "index.toml", "--datastore", datastore, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


def add_to_corpus(folder: Path, package: str) -> None:
    """Copy the sources of a package of this checkout into the corpus."""
    for path in (ROOT / package).rglob("*.py"):
        target = folder / "corpus" / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def differences(first: Path, second: Path) -> list[str]:
    ours, theirs = contents(first), contents(second)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def test_both_environments_build_the_same_datastore_and_continue_that_of_the_other(tmp_path: Path) -> None:
    (tmp_path / "index.toml").write_text(CONFIG)
    add_to_corpus(tmp_path, "indexing")
    index(sys.executable, tmp_path, "ours")
    index(OTHER, tmp_path, "theirs")
    assert not differences(tmp_path / "ours", tmp_path / "theirs")
    add_to_corpus(tmp_path, "retro/model")
    index(OTHER, tmp_path, "ours", "--append")
    index(sys.executable, tmp_path, "theirs", "--append")
    assert not differences(tmp_path / "ours", tmp_path / "theirs")
    index(sys.executable, tmp_path, "ours")  # finished: nothing is built again
    index(OTHER, tmp_path, "theirs")
    assert not differences(tmp_path / "ours", tmp_path / "theirs")
