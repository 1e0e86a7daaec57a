"""Which files were compared with their checksums, in the user's cache: datastores may be read-only, and several
processes open the same.

    file, size, modification time, inode, checksum in its manifest ─► a line of RETRO_CACHE/checked/HASH, one file for each artifact

A file without a note came from elsewhere: it is a copy, or another machine or user made it. Files never
change after they were written, so one line is enough, and a file that changes has no line any more.
"""

import contextlib
import hashlib
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

_MOST_BYTES = 1 << 22  # of remembered lines of an artifact; then they begin again


def cache_folder() -> Path:
    """The folder in the environment variable RETRO_CACHE, else `~/.cache/retro`."""
    return Path(os.environ.get("RETRO_CACHE") or Path.home() / ".cache" / "retro").absolute()


def is_checked(file: Path, checksum: str) -> bool:
    """Whether this user has written the file here, or compared it with this checksum, and it has not changed since."""
    lines, stamp = _lines(file.parent), _stamp(file, checksum)
    try:
        stat = os.stat(lines)
    except OSError:
        return False
    return stamp in _read(lines, (stat.st_mtime_ns, stat.st_size))


def remember(checksums: Mapping[Path, str]) -> None:
    """Remember files that have just been written, or compared. Without a cache that can be written, they are compared
    again later."""
    by_folder: dict[Path, list[str]] = {}
    for file, checksum in checksums.items():
        by_folder.setdefault(_lines(file.parent), []).append(f"{_stamp(file, checksum)}\n")
    with contextlib.suppress(OSError):
        for path, lines in by_folder.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            is_large = path.exists() and path.stat().st_size > _MOST_BYTES
            with open(path, "w" if is_large else "a") as opened:
                opened.write("".join(lines))  # one write: several processes may append


@lru_cache(maxsize=4096)
def _read(path: Path, _: tuple[int, ...]) -> frozenset[str]:
    try:
        return frozenset(path.read_text().split())
    except (OSError, ValueError):
        return frozenset()


def _lines(folder: Path) -> Path:
    return cache_folder() / "checked" / _hash(os.path.realpath(folder))


def _stamp(file: Path, checksum: str) -> str:
    try:
        stat = os.stat(file)
    except OSError:
        return ""
    return _hash(f"{file.name}\n{stat.st_size}\n{stat.st_mtime_ns}\n{stat.st_ino}\n{checksum}")


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()
