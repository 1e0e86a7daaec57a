"""The wheel and the source archive hold everything that is read at run time."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("retro", "indexing", "pipelines")


def run(*command: str | Path, folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Build an `sdist` or a `wheel` of a source tree by the hooks that pip calls, without a download."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    return target / run(sys.executable, "-c", code, folder=source).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the source archive, as `pip install retro-0.9.0.tar.gz` builds it."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "checkout"  # a copy, since a build writes into its source tree
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    archive = build("sdist", source, work)
    subprocess.run(["tar", "-xf", archive, "-C", work], check=True)  # Python 3.11.2 has no extractall(filter="data")
    return build("wheel", work / archive.name.removesuffix(".tar.gz"), work)


@pytest.mark.slow
def test_every_file_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    files = {path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*")}
    files = {file for file in files if (ROOT / file).is_file() and "__pycache__" not in file}
    with zipfile.ZipFile(wheel) as archive:
        assert files <= set(archive.namelist()), sorted(files - set(archive.namelist()))


@pytest.mark.slow
def test_the_demo_runs_from_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", folder=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    # Dependencies come from this environment; a path in a .pth file adds its packages, not the checkout installed in it.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    place = run(python, "-c", "import retro; print(retro.__file__)", folder=tmp_path)
    assert Path(place.strip()).is_relative_to(tmp_path)
    run(tmp_path / "venv/bin/retro", "demo", "--minutes", "0.5", "--output", "demo", folder=tmp_path)
    assert (tmp_path / "demo" / "report.html").stat().st_size > 0
