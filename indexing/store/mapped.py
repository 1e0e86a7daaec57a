"""Map files into memory: the only place that does, and what happens to a file that gets shorter while it is read.

    map_array, map_bytes, registered ─► a list of mapped files, whose sizes a server watches (`watch.py`)
    a read behind the new end ─► SIGBUS ─► which file is mapped there? ─► the message of a damaged file, and exit status 2
                                                └─ in a server ─► zeros; `require_whole` raises after the read (`damage_found.py`)

No check before a read can win against a file that is truncated in the middle of it. So the signal itself is handled, on
Linux; without it the process would die without a word. Libraries map files too (Faiss, tantivy, safetensors): the
handler finds them by their address.
"""

import ctypes
import mmap
import os
import platform
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from indexing.store.artifact import damaged, recorded_file
from indexing.store.damage_found import found
from indexing.store.errors import DamagedFile
from indexing.store.first_use import first_use

_HAS_HANDLER = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_CODE, _ADDRESS = 8, 16  # bytes before `si_code` and `si_addr` in `siginfo_t`
_SA_SIGINFO = 4
_REPLACED = " (deleted)"  # behind the name of a file that was removed, in /proc/self/maps


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Region(NamedTuple):
    """A mapped part of a file: its addresses [start, stop), where it begins in the file, and the file."""

    start: int
    stop: int
    offset: int
    file: Path


_lock = threading.Lock()
_files: dict[Path, None] = {}  # mapped files, in order
_installed: list[object] = []  # the handler, which must stay in memory


# --- map --------------------------------------------------------------------------------------------------------------


def map_array(path: Path) -> np.ndarray:
    """Memory-map a `.npy` file for reading.

    Raises:
        ValueError: it is not an array, or shorter than its header says.
    """
    array: np.ndarray = np.load(registered(path), mmap_mode="r", allow_pickle=False)
    return array


def map_bytes(path: Path) -> memoryview:
    """Memory-map all bytes of a file for reading. An empty file has none."""
    with open(registered(path), "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def registered(path: Path) -> Path:
    """Note that a file is about to be mapped, here or by a library, and return it.

    Raises:
        DamagedFile: it differs from its manifest, see `first_use.py`.
    """
    first_use(path)
    with _lock:
        _files.setdefault(path)
        if _HAS_HANDLER and not _installed:
            _install()
    return path


def files(first: int = 0) -> Sequence[Path]:
    """The mapped files in the order in which they were mapped, without the `first` ones."""
    with _lock:
        return [*_files][first:]


# --- files that get shorter -------------------------------------------------------------------------------------------


def _install() -> None:
    """Handle SIGBUS. Other causes than files go to the handler before."""
    libc, before = ctypes.CDLL(None, use_errno=True), _Action()
    libc.mmap.restype = ctypes.c_void_p

    def handle(_: int, info: int, context: int) -> None:
        address = ctypes.c_void_p.from_address(info + _ADDRESS).value or 0
        region = _region_at(address)
        if region is None:
            libc.sigaction(signal.SIGBUS, ctypes.byref(before), None)
            was_sent = ctypes.c_int.from_address(info + _CODE).value <= 0
            if was_sent:  # by another process; otherwise the instruction runs again
                signal.raise_signal(signal.SIGBUS)
            return
        error, first = _explained(region, address)
        found(error)
        size, anonymous = region.stop - first, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
        libc.mmap(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.PROT_READ, anonymous, -1, ctypes.c_long(0))

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)(handle)
    action = _Action(handler=ctypes.cast(handler, ctypes.c_void_p), flags=_SA_SIGINFO)
    libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(before))
    _installed.append(handler)


def _region_at(address: int) -> _Region | None:
    """The file that is mapped at an address, or None."""
    with open("/proc/self/maps", encoding=sys.getfilesystemencoding(), errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            start, stop = (int(end, 16) for end in fields[0].split("-"))
            if start <= address < stop:
                return _Region(start, stop, int(fields[2], 16), Path(fields[5])) if fields[5:] else None
    return None


def _explained(region: _Region, address: int) -> tuple[DamagedFile, int]:
    """The error of a read that failed, and the address of the first page that cannot be read."""
    file, page = Path(str(region.file).removesuffix(_REPLACED)), address - address % mmap.PAGESIZE
    size = None if str(region.file).endswith(_REPLACED) or not file.exists() else file.stat().st_size
    position = region.offset + page - region.start
    if size is None:
        return damaged(file, f"{file} was truncated and removed while it was read"), page
    if size > position:
        return damaged(
            file, f"{file} could not be read at byte {position:,}: the disk failed, or it was shorter then"
        ), page
    entry = recorded_file(file)
    expected = f" instead of {entry['bytes']:,}" if entry else ", and was longer when it was opened"
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return damaged(file, f"{file} has {size:,} bytes{expected}"), max(
        region.start, region.start + whole - region.offset
    )
