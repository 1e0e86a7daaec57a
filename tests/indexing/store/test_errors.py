"""Errors of the operating system name the path that is in the way, and contain no number of the kernel."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from indexing.store.errors import in_words


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda folder: (folder / "file").mkdir(), "file is a file, but a folder is needed"),
        (lambda folder: (folder / "file" / "a" / "b").mkdir(parents=True), "file is a file, but a folder is needed"),
        (lambda folder: (folder / "file" / "a.json").write_text(""), "file is a file, but a folder is needed"),
        (lambda folder: (folder / "none" / "a" / "b.json").write_text(""), "none does not exist"),
        (lambda folder: folder.write_text(""), "is a folder, but a file is needed"),
    ],
)
def test_the_path_in_the_way_is_named(tmp_path: Path, act: Callable[[Path], object], words: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"Errno") as error:
        act(tmp_path)
    assert in_words(error.value).startswith(str(tmp_path))
    assert words in in_words(error.value)
    assert "Errno" not in in_words(error.value)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_path_and_reason_are_named(number: int) -> None:
    sentence = in_words(OSError(number, os.strerror(number), "/disk/x"))
    assert sentence.startswith("/disk/x: ")
    assert os.strerror(number) in sentence
    assert in_words(OSError(number, os.strerror(number))).startswith(os.strerror(number))
