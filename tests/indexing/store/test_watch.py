"""A watch finds every change of a file that its manifest does not have, and takes a file that was put back as intact."""

import os
from pathlib import Path

import numpy as np
import pytest

from indexing.store import watch
from indexing.store.artifact import Recipe, create
from indexing.store.errors import DamagedFile
from indexing.store.watch import Watch


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the only artifact of a datastore."""
    monkeypatch.setattr(watch, "_PAUSE", 0)
    artifact = tmp_path / "chunks" / "00000"
    with create(artifact, Recipe("chunk", 1)) as (work, _):
        np.save(work / "tokens.npy", np.arange(100))
    return artifact / "tokens.npy"


def test_touched_file_is_intact_and_a_changed_one_is_not_until_it_is_put_back(tmp_path: Path, file: Path) -> None:
    opened, whole = Watch([tmp_path]), file.read_bytes()
    os.utime(file)
    opened.require()
    for data in (whole[:-1], whole[:-1] + b"x", whole + b"x", b""):
        file.write_bytes(data)
        with pytest.raises(DamagedFile, match=r"tokens\.npy has ") as caught:
            opened.require()
        assert caught.value.shown.startswith("tokens.npy has ")
        file.write_bytes(whole)
        opened.require()


def test_intact_file_is_read_once_to_explain_errors(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(file, ns=(0, file.with_name("manifest.json").stat().st_mtime_ns + 10**9))  # as a copy can be
    opened, read = Watch([tmp_path]), list[str]()
    whole = watch.wrong_checksum
    monkeypatch.setattr(watch, "wrong_checksum", lambda *of: read.append(of[2]) or whole(*of))
    assert [opened.explain(), opened.explain()] == [None, None]
    assert read == ["tokens.npy"]


def test_reported_file_is_damaged_until_it_changes(tmp_path: Path, file: Path) -> None:
    opened = Watch([tmp_path])
    opened.report(watch.damaged(file, f"{file} has changed"))
    opened.require()
    for _ in range(2):
        with pytest.raises(DamagedFile, match="has changed"):
            opened.require_unreported()
    os.utime(file)
    opened.require_unreported()


def test_checks_take_a_small_part_of_the_time(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_PAUSE", 10**9)
    opened = Watch([tmp_path])
    opened.require()
    file.write_bytes(b"")
    opened.require()  # within the pause
    monkeypatch.setattr(opened, "_next", 0.0)
    with pytest.raises(DamagedFile):
        opened.require()
