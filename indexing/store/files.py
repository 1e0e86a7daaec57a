"""Files on disk: arrays that grow row by row, JSON that is written atomically, checksums.

All files have common formats: `numpy.load(mmap_mode="r")` opens `.npy`, and any program reads JSON.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from indexing.store.errors import InputError

MANIFEST = "manifest.json"

# A version 1.0 .npy header is 10 bytes of magic, version and length, then text padded with blanks. With this fixed size
# it can be written first with a wrong number of rows, and overwritten in place once the rows have been counted.
_HEADER_BYTES = 128
# A part of a name that leads elsewhere: nothing, `.`, `..`, `C:`, `s3:`, or with a character that separates parts on
# some system.
_FOREIGN_PART = re.compile(r"^\.{0,2}$|^[A-Za-z]:|:$|[\\\x00]|[\ud800-\udc7f\udd00-\udfff]")
_LONGEST_NAME = 255
_DEEPEST = 100
# Rows arrive document by document, a few hundred bytes each. Network file systems need large sequential writes.
_WRITE_BYTES = 1 << 20


class NpyWriter:
    """Append rows to a `.npy` file of unknown length. Memory holds one block.

    Args:
        path: the file to create.
        dtype: type of the elements.
        row_shape: shape of one row; `()` for a one-dimensional array.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self.dtype = np.dtype(dtype)
        self.row_shape = row_shape
        self.rows = 0
        self._file = open(path, "wb", buffering=_WRITE_BYTES)  # noqa: SIM115  (closed by close())
        self._write_header()

    def _write_header(self) -> None:
        text = repr({"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, *self.row_shape)})
        header = b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little") + text.encode("latin1")
        assert len(header) < _HEADER_BYTES, header
        self._file.seek(0)
        self._file.write(header.ljust(_HEADER_BYTES - 1) + b"\n")

    def append(self, rows: np.ndarray) -> None:
        """Add `rows` of shape [n, *row_shape]."""
        assert rows.shape[1:] == self.row_shape, (rows.shape, self.row_shape)
        self._file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
        self.rows += len(rows)

    def close(self) -> None:
        """Write the true number of rows into the header and flush to disk."""
        try:
            self._write_header()
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()


def member(folder: Path, name: Any) -> Path:
    """The path of a file in a folder, by its name in a manifest or a listing. Another machine may have written the
    name.

    Raises:
        InputError: the name can lead out of the folder: it is absolute, or has `..`, a backslash, a drive or a
            protocol. Or it names no file.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(_FOREIGN_PART.search(part) or len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
        shown = repr(name) if len(repr(name)) < 2 * _LONGEST_NAME else f"a name of {len(repr(name)):,} characters"
        raise InputError(f"{folder}: {shown} is not the name of a file in this folder, such as 'train/tokens.npy'.")
    return folder / name


def files_of(manifest: Any, folder: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of each file of an artifact, by its name in the folder; none in the manifest of a datastore.

    Raises:
        InputError: a name leads out of the folder, or has no size and checksum.
    """
    files = manifest.get("files", {}) if isinstance(manifest, dict) else None
    entries = list(files.values()) if isinstance(files, dict) else [None]
    if not all(isinstance(entry, dict) and _is_entry(**entry) for entry in entries):
        raise InputError(f"{folder / MANIFEST} must give 'bytes' and 'checksum' of each file under 'files'.")
    for name in files or ():
        member(folder, name)
    return files or {}


def _is_entry(bytes: object = None, checksum: object = None, **others: object) -> bool:
    is_size = isinstance(bytes, int) and not isinstance(bytes, bool) and bytes >= 0
    return is_size and isinstance(checksum, str) and not others


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON with sorted keys, atomically: readers see the whole old or the whole new file."""
    write_bytes(path, _json_bytes(value))


def _json_bytes(value: object) -> bytes:
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    # File names can contain bytes that are not UTF-8: lone surrogates in Python, and escapes in JSON (\udce9).
    return text.encode(errors="backslashreplace")


def write_checked(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object like `write_json`, with a `checksum` of its other keys, so that `read_checked` detects any
    change."""
    write_json(path, _with_checksum(value))


def read_checked(path: Path) -> dict[str, Any]:
    """Read an object written by `write_checked`; returns it without its checksum.

    Raises:
        ValueError: the file has changed since it was written.
        FileNotFoundError: there is no such file.
    """
    data = path.read_bytes()
    value = parse_json(data)
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    # Compared as bytes, so that a changed blank or a lost line end counts as a change.
    if data != _json_bytes(_with_checksum(value)):
        raise ValueError("wrong checksum")
    return {key: item for key, item in value.items() if key != "checksum"}


def _with_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    checked = {key: item for key, item in value.items() if key != "checksum"}
    return checked | {"checksum": hashlib.blake2b(_json_bytes(checked), digest_size=16).hexdigest()}


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically: to a temporary name, flushed, then renamed.

    Raises:
        OSError: the disk is full, …; it names the file, and no partial file remains.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_folder(path.parent)


def save_array(path: Path, array: np.ndarray) -> None:
    """`numpy.save` through `write_bytes`. numpy's own error names neither file nor reason if the disk is full."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_bytes(path, buffer.getvalue())


def read_json(path: Path) -> Any:
    """Read a JSON file written by `write_json`.

    Raises:
        InputError: it is damaged.
    """
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}. Run the command that made it again.") from error


def parse_json(data: bytes | str) -> Any:
    """Parse JSON that others may have written.

    Raises:
        ValueError: it is not JSON, or nested so deeply that functions that call themselves would fail.
    """
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep") from None
    check_depth(value)
    return value


def check_depth(value: object) -> None:
    """Raise ValueError if lists and dictionaries are nested more than a hundred levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_DEEPEST):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list)
        ]
    if level:
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep")


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path, advance: Callable[[int], object] = lambda _: None) -> str:
    """The BLAKE2b-128 of a file's bytes, in hexadecimal; reads the file once in blocks, and calls `advance` with the
    bytes of each."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()
