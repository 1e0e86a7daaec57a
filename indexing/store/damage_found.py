"""Damage that is found while a process runs, not before a read: it ends the process with its message, or a server
answers with it."""

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from indexing.store.errors import DamagedFile

_EXIT_STATUS = 2  # as of any other damaged file
_watched: set[Path] = set()
_errors: list[DamagedFile] = []


def keep_running(datastores: Iterable[Path]) -> None:
    """Do not end the process because of files of these datastores. It calls `require_whole` after reads instead."""
    _watched.update(folder.resolve() for folder in datastores)


def require_whole() -> None:
    """Raise DamagedFile if damage was found in a file of `keep_running`. It stays so until a restart."""
    if _errors:
        raise _errors[0]


def found(error: DamagedFile) -> None:
    """End the process with the message of an error, unless `keep_running` has its file."""
    if any(folder in error.file.resolve().parents for folder in _watched):
        _errors.append(error)
        return
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os.write(2, f"error: {error}\n".encode(errors="backslashreplace"))
    os._exit(_EXIT_STATUS)
