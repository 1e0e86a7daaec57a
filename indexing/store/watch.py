"""Watch the files of open datastores: a process that reads a memory-mapped file beyond its end is killed (SIGBUS).

    open ─► sizes of all files ─► before each piece of work: sizes, modification times and inodes again
                                      └─ changed ─► compared with the manifest and its checksum ─► DamagedFile

Files of an artifact never change after they were written. So one with another modification time is read once to its
end.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from indexing.store import mapped, remote
from indexing.store.artifact import damaged, parse_manifest, recorded_file, wrong_checksum, wrong_sizes
from indexing.store.damage_found import keep_running, require_whole
from indexing.store.errors import DamagedFile, InputError
from indexing.store.files import MANIFEST
from indexing.store.first_use import first_use

_IN_MEMORY = ("dedup", "appended", "trained", "tuned")  # not read by those who search, or read once
_REPLACED = ("neighbors", "votes", "materialized")  # made again while a datastore grows, and only examples read them
_PAUSE = 20
"""The next check comes after this many times the duration of the last one: checks take 5% of the time at most."""
_LONGEST_PAUSE = 1.0  # seconds
_MOST_BYTES = 4 << 30  # read to explain an error


class Watch:
    """The files of datastores that a process has open. Several threads may use it.

    Args:
        datastores: their folders. Of a mirror, files that are local now are watched.

    Raises:
        InputError: a file is missing, or has another size than in its manifest.
    """

    def __init__(self, datastores: Iterable[Path]) -> None:
        self._files: dict[Path, Path] = {}  # file → its artifact
        self._intact: dict[Path, tuple[int, ...]] = {}  # file → size, modification time and inode when it was intact
        self._broken: dict[Path, tuple[int, ...]] = {}
        self._compared: dict[Path, tuple[int, ...]] = {}  # file → the same when `explain` compared its bytes
        self._reported: dict[Path, tuple[tuple[int, ...], str]] = {}
        self._lock, self._next = threading.Lock(), 0.0
        self._problem: tuple[Path, str] | None = None
        self._datastores, self._seen = tuple(datastores), 0
        keep_running(self._datastores)
        for folder in (folder for datastore in self._datastores for folder in _artifacts(datastore)):
            manifest = parse_manifest(folder)
            if problem := next(wrong_sizes(folder, manifest), None):
                raise damaged(folder, problem)
            self._files |= {folder / name: folder for name in manifest["files"] if (folder / name).exists()}
        self._intact = {file: _state(file) for file in self._files}

    def compare(self) -> None:
        """Compare all files with their checksums that are used here for the first time, large ones on a thread; see
        `first_use.py`.

        Raises:
            DamagedFile: one differs.
        """
        for file in self._files:
            first_use(file)

    def require(self) -> None:
        """Check all files, unless the last check was just now.

        Raises:
            DamagedFile: one is missing, has another size, or other bytes than when it was written.
        """
        require_whole()
        with self._lock:
            self._add_mapped()
            begun = time.monotonic()
            if begun >= self._next:
                self._problem = next(filter(None, map(self._problem_of, self._files)), None)
                now = time.monotonic()
                self._next = now + min(_PAUSE * (now - begun), _LONGEST_PAUSE)
            if self._problem:
                self._next = 0.0  # a repaired file is read again at once
                raise damaged(*self._problem)

    def require_unreported(self) -> None:
        """As `require`; files that readers reported are damaged until they change."""
        self.require()
        for file, (state, problem) in list(self._reported.items()):
            if _state(file) == state:
                raise damaged(file, problem)
            self._reported.pop(file, None)

    def report(self, error: DamagedFile) -> None:
        """Remember a damaged file that a reader found: one that was damaged before it was watched, or is not
        watched."""
        self._reported[error.file] = _state(error.file), error.problem

    def explain(self) -> DamagedFile | None:
        """Look for a damaged file after an unexpected error: compare files that are younger than their manifest with
        its checksums.

        A manifest is written last. A file that was found intact is not read again.
        """
        num_bytes = 0
        for file, folder in self._files.items():
            state = _state(file)
            is_known = state == self._compared.get(file) or file in self._broken
            if not state or is_known or state[1] <= (_state(folder / MANIFEST) or state)[1]:
                continue
            num_bytes += state[0]
            if num_bytes > _MOST_BYTES:
                break
            with self._lock:
                problem = self._difference(file, folder)
            if problem:
                return damaged(file, problem)
            self._compared[file] = state
        return None

    def _add_mapped(self) -> None:
        """Watch files that were mapped since the last check: of a mirror, those that were fetched."""
        added = mapped.files(self._seen)
        self._seen += len(added)
        for file in added:
            folder = next((folder for folder in file.parents[:2] if (folder / MANIFEST).exists()), None)
            if folder is not None and file not in self._files and _is_in(file, self._datastores):
                entry, state = recorded_file(file), _state(file)
                is_whole = entry and state and state[0] == entry["bytes"]  # its bytes were compared when it was mapped
                self._files[file], self._intact[file] = folder, state if is_whole else ()

    def _problem_of(self, file: Path) -> tuple[Path, str] | None:
        """The file with its damage, or None."""
        state, folder = _state(file), self._files[file]
        if state == self._intact[file]:
            return None
        if not state and (remote.url_of(folder) or folder.parent.name in _REPLACED):
            return None  # dropped from a mirror, or made again; what is mapped stays readable
        problem = self._difference(file, folder)
        if problem and state:  # of a removed file, what is mapped stays readable
            self._broken[file] = state
        elif problem:
            pass
        elif file in self._broken and state[2:] != self._broken[file][2:]:
            problem = f"{file} was damaged and has been replaced: start the process that reads it again"
        else:
            self._broken.pop(file, None)
            self._intact[file] = state
        return (file, problem) if problem else None

    def _difference(self, file: Path, folder: Path) -> str | None:
        """How a file differs from the manifest on disk, which is another one if the artifact was made again."""
        try:
            manifest, name = parse_manifest(folder), file.relative_to(folder).as_posix()
            if name not in manifest["files"]:
                return None
            own = {"files": {name: manifest["files"][name]}}
            return next(wrong_sizes(folder, own), None) or wrong_checksum(folder, manifest, name)
        except InputError as error:
            return str(error)
        except OSError as error:
            return f"{file} cannot be read ({error.strerror})"


def _artifacts(datastore: Path) -> Iterator[Path]:
    """The finished artifacts of a datastore, of all kinds but those that are read once. So a new kind is watched
    too."""
    for manifest in sorted(datastore.glob(f"*/*/{MANIFEST}")):
        folder = manifest.parent
        if not {folder.name, folder.parent.name} & {*_IN_MEMORY} and not folder.name.startswith("."):
            yield folder


def _is_in(file: Path, folders: Iterable[Path]) -> bool:
    return any(file.is_relative_to(folder) for folder in folders)


def _state(file: Path) -> tuple[int, ...]:
    """Size, modification time in nanoseconds, and inode; empty for a missing file."""
    try:
        stat = os.stat(file)
    except OSError:
        return ()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
