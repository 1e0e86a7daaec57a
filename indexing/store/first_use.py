"""Compare a file that came from elsewhere with its checksum when it is first used on this machine.

    first_use(file) ─► remembered (checked_files.py)? ─► used
                            └─ no ─► small: compared now                           ─► remembered, or DamagedFile
                                     large, or many: compared by one thread        ─► remembered, or `damage_found.found`

Accidents of copies and disks are found so. Whoever changes a file on purpose can change its manifest too.
"""

import contextlib
import fcntl
import logging
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

from indexing.progress import during
from indexing.store.artifact import damaged, intact, recorded_file
from indexing.store.checked_files import cache_folder, is_checked, remember
from indexing.store.damage_found import found
from indexing.store.errors import InputError

log = logging.getLogger("retro")

AT_ONCE = 64_000_000
"""Largest file that is compared before it is used. A thread compares larger ones while the process works."""
_MOST_AT_ONCE = 1_000_000_000  # bytes of all files that a process compares before it uses them

_lock = threading.Lock()
_waiting: queue.SimpleQueue[Path] = queue.SimpleQueue()
_unchecked: dict[Path, int] = {}  # files that wait, and their sizes
_bytes_at_once = 0
_process = 0  # of the thread


def first_use(file: Path) -> Path:
    """Compare a local file of an artifact with its checksum, unless that is remembered, and return it.

    Raises:
        DamagedFile: the file differs from its manifest.
    """
    global _bytes_at_once
    entry = recorded_file(file)
    if entry is None or is_checked(file, entry["checksum"]):
        return file
    size = int(entry["bytes"])
    if size > AT_ONCE or _bytes_at_once + size > _MOST_AT_ONCE:
        if file.exists() and file.stat().st_size != size:
            raise damaged(file, f"{file} has {file.stat().st_size:,} bytes instead of {size:,}")
        _later(file, size)
        return file
    _bytes_at_once += size
    with during("comparing %s with its checksum", file):
        remember({intact(file): entry["checksum"]})
    return file


def unchecked() -> tuple[int, int]:
    """How many files are still to be compared, and their bytes."""
    with _lock:
        return len(_unchecked), sum(_unchecked.values())


def _later(file: Path, size: int) -> None:
    """Compare a file on the thread of this process; start the thread if there is none."""
    global _process
    with _lock:
        if _process != os.getpid():  # a forked process has no threads
            _process = os.getpid()
            _unchecked.clear()
            threading.Thread(target=_compare_all, name="checksums", daemon=True).start()
            log.info("Large files are used here for the first time: a thread compares them with their checksums.")
        if file in _unchecked:
            return
        _unchecked[file] = size
    _waiting.put(file)


def _compare_all() -> None:
    while True:
        file = _waiting.get()
        with _one_process():
            _compare(file)
        with _lock:
            _unchecked.pop(file, None)
            is_last = not _unchecked
        if is_last:
            log.info("All files that were used for the first time are as they were written.")


def _compare(file: Path) -> None:
    entry = recorded_file(file)
    if entry is None or is_checked(file, entry["checksum"]):  # another process has compared it
        return
    try:
        intact(file)
        remember({file: entry["checksum"]})
    except InputError as error:
        found(damaged(file, getattr(error, "problem", "") or str(error)))
    except OSError as error:
        log.warning("%s could not be compared with its checksum: %s", file, error)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Of all processes of this user, one reads a file. The others find it checked."""
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            folder = cache_folder() / "checked"
            folder.mkdir(parents=True, exist_ok=True)
            fcntl.flock(opened.enter_context(open(folder / ".lock", "w")), fcntl.LOCK_EX)
        yield
