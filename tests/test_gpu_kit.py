"""The kit for a GPU machine: loads that are small enough, from which files are joined as they were."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.speed import gpu_kit
from benchmarks.speed.gpu_kit import check_size, cut, join


def files_of(folder: Path, sizes: dict[str, int]) -> list[Path]:
    for number, (name, size) in enumerate(sizes.items()):
        (folder / name).write_bytes(bytes((number + 7 * n) % 251 for n in range(size)))
    return [folder / name for name in sizes]


def test_files_are_joined_as_they_were_and_no_load_is_too_large(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"small": 10, "model.gguf": 2_500, "empty": 0, "text.jsonl": 700})
    kit = tmp_path / "kit"
    (kit / "load-0").mkdir(parents=True)
    loads = cut(kit, files, limit=1_000, used=400)
    assert loads == ["load-0", "load-1", "load-2", "load-3"]
    for number, load in enumerate(loads):
        size = sum(file.stat().st_size for file in (kit / load).glob("*.part-*"))
        assert 0 < size <= 1_000 - 400 * (number == 0)
    assert dict(join(kit)) == {file.name: [] for file in files}
    assert all((kit / "files" / file.name).read_bytes() == file.read_bytes() for file in files)


def test_a_file_waits_for_its_parts_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"small": 10, "model.gguf": 900})
    kit, there = tmp_path / "kit", tmp_path / "there"
    (kit / "load-0").mkdir(parents=True)
    cut(kit, files, limit=500)
    there.mkdir()
    (kit / "load-0").rename(there / "load-0")  # the first load travels
    assert dict(join(there)) == {"small": [], "model.gguf": ["load-1/model.gguf.part-001"]}
    (kit / "load-1").rename(there / "load-1")
    part = there / "load-1/model.gguf.part-001"
    good = part.read_bytes()
    part.write_bytes(good[:-1] + b"x")
    with pytest.raises(SystemExit, match=r"model.gguf: its parts are damaged"):
        dict(join(there))
    part.write_bytes(good)
    assert dict(join(there)) == {"small": [], "model.gguf": []}
    found = hashlib.sha256((there / "files/model.gguf").read_bytes()).digest()
    assert found == hashlib.sha256(files[1].read_bytes()).digest()


def test_wheels_that_are_too_large_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files_of(tmp_path, {"a.whl": 600, "b.whl": 500})
    assert check_size(tmp_path, 1_100) == 1_100
    with pytest.raises(SystemExit, match="too large"):
        check_size(tmp_path, 1_099)
    assert "b.whl" in capsys.readouterr().out


def test_without_a_load_the_command_says_what_to_carry(tmp_path: Path) -> None:
    """It runs where nothing but Python is installed."""
    command = [sys.executable, "-S", gpu_kit.__file__, "install", "--kit", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "Carry" in ran.stderr


LACKING = (
    "ray",
    "autofaiss",
    "fastapi",
    "uvicorn",
    "tantivy",
    "datasketch",
    "s3fs",
    "prometheus_client",
    "mcp",
)
IMPORTS = f"""
import sys

class Lacking:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {LACKING}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Lacking())
import benchmarks.speed.gpu, benchmarks.speed.gpu_run, benchmarks.speed.gpu_cross_attention
import pipelines.cli.verbs.datastore, pipelines.cli.verbs.model, pipelines.cli.verbs.huggingface, pipelines.cli.verbs.evaluation
import retro.inference.language_model
"""


def test_training_search_and_decoding_import_no_package_that_a_gpu_machine_lacks() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=Path(gpu_kit.__file__).parents[2], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
