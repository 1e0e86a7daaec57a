"""Errors that tell a user what is wrong, and errors of the operating system in words."""

import errno
import os
from pathlib import Path

_NO_SPACE = "free some space and run the same command again"
_PERMISSION = "change the permissions, or name another path"
_ADVICE = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: _NO_SPACE,
    errno.EROFS: "name a path that can be written",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
}


class InputError(ValueError):
    """A user's mistake: a bad file, key, line or setting.

    The message names what is wrong, what was found, what is accepted, and what to do next. The command line prints it
    without a traceback and exits with status 2. Any other exception that escapes is our bug.
    """


class NotFound(InputError):
    """Nothing has the requested id; over HTTP this is status 404."""


class OutOfRange(InputError, IndexError):
    """A row beyond the last one. Python takes IndexError for the end of a sequence."""


class DamagedFile(InputError):
    """A stored file is missing, or differs from when it was written; over HTTP this is status 503.

    Attributes:
        file: the file, or the folder of its artifact.
        problem: the file and how it differs.
        shown: the same with the file's path in its datastore only, for clients.
    """

    def __init__(self, message: str, file: Path = Path(), problem: str = "", shown: str = "") -> None:
        super().__init__(message)
        self.file, self.problem, self.shown = file, problem, shown


class DoesNotFit(ValueError):
    """The content of a file contradicts another file, or names something that does not exist. `artifact.reading` raises
    DamagedFile for it."""


class DatastoreChanged(InputError):
    """An open datastore was built again; over HTTP this is status 503."""


def in_words(error: OSError) -> str:
    """An error of the operating system as a sentence: the path that is in the way, the reason, and what to do."""
    reason = str(error.strerror or error)
    if error.errno in _ADVICE and reason == os.strerror(error.errno):
        reason += f"; {_ADVICE[error.errno]}"
    if not isinstance(error.filename, str | bytes):
        return f"{reason}."
    path = Path(os.fsdecode(error.filename))
    upward = (path, *path.parents)
    if error.errno in (errno.EEXIST, errno.ENOTDIR) and (files := [part for part in upward if part.is_file()]):
        return f"{files[0]} is a file, but a folder is needed in its place. Name another path, or move the file away."
    if error.errno == errno.EISDIR:
        return f"{path} is a folder, but a file is needed in its place. Name a file."
    if error.errno == errno.ENOENT and (missing := [part for part in upward if not part.exists()]):
        return f"{missing[-1]} does not exist. Create it, or name another path."
    return f"{path}: {reason}."
