"""A file that came from elsewhere is compared with its checksum once, when it is first used; one that was made here is not."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from indexing.store import artifact, first_use
from indexing.store.artifact import Recipe, create
from indexing.store.checked_files import is_checked
from indexing.store.errors import DamagedFile
from indexing.store.files import checksum
from indexing.store.sharded_array import open_array
from tests.conftest import wait_until


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact, made here."""
    monkeypatch.setenv("RETRO_CACHE", str(tmp_path / "cache"))
    with create(tmp_path / "made" / "chunks" / "00000", Recipe("chunk", 1)) as (work, _):
        np.save(work / "tokens.npy", np.arange(100))
    return tmp_path / "made" / "chunks" / "00000"


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A file of a copy of it."""
    return Path(shutil.copytree(made, tmp_path / "copied" / "chunks" / "00000")) / "tokens.npy"


@pytest.fixture
def read(made: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files whose bytes are compared, in order."""
    files: list[Path] = []
    monkeypatch.setattr(artifact, "checksum", lambda file, *rest: files.append(file) or checksum(file, *rest))
    return files


def change(file: Path) -> None:
    """Change a byte, but neither size nor modification time."""
    before = file.stat()
    with open(file, "r+b") as opened:
        opened.seek(200)
        opened.write(b"\x77")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_file_that_was_made_here_is_not_read_and_a_copy_is_read_once(
    made: Path, copied: Path, read: list[Path]
) -> None:
    open_array(made / "tokens.npy")
    assert read == []
    for _ in range(3):
        open_array(copied)
    assert read == [copied]
    os.utime(copied, ns=(0, 0))
    open_array(copied)
    assert read == [copied] * 2


def test_copy_with_another_byte_is_refused_each_time(copied: Path) -> None:
    change(copied)
    for _ in range(2):
        with pytest.raises(
            DamagedFile, match=r"copied/chunks/00000/tokens\.npy has changed since it was written \(checksum\)"
        ):
            open_array(copied)


def test_without_a_cache_that_can_be_written_a_file_is_compared_each_time(
    copied: Path, read: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RETRO_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        open_array(copied)
    assert read == [copied] * 2


def test_large_file_is_compared_while_the_process_works(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "AT_ONCE", 0)
    assert len(open_array(copied)) == 100
    wait_until(lambda: is_checked(copied, checksum(copied)))
    wait_until(lambda: first_use.unchecked() == (0, 0))


def test_damage_of_a_large_file_is_reported(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[DamagedFile] = []
    monkeypatch.setattr(first_use, "found", errors.append)
    monkeypatch.setattr(first_use, "AT_ONCE", 0)
    change(copied)
    open_array(copied)
    wait_until(lambda: errors)
    assert errors[0].problem == f"{copied} has changed since it was written (checksum)"


def test_large_file_of_another_size_is_refused_at_once(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "AT_ONCE", 0)
    with open(copied, "ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedFile, match="bytes instead of"):
        open_array(copied)
