"""Read the bytes of a file: as stored, hashed in passing, and decompressed.

stored file ──StoredReader, HashingReader──► stored bytes ──unpacked (gzip, zstd)──► contents
"""

import gzip
import hashlib
import io
import os
import re
import zlib
from typing import Any, Literal

from indexing.corpus.zstd_frames import DamagedZstd, ZstdReader

COMPRESSION_SUFFIXES = (".gz", ".zst")


DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, DamagedZstd)
"""Exceptions of a decompressed stream if the file is truncated or damaged, or has another format than its name says."""
Damage = Literal["truncated file", "damaged file", "wrong checksum", "missing dictionary", "foreign bytes"]
_DAMAGE: tuple[tuple[str, Damage], ...] = (
    ("CRC check failed", "wrong checksum"),
    ("Incorrect length", "wrong checksum"),  # gzip stores both
    ("match checksum", "wrong checksum"),
    ("Dictionary mismatch", "missing dictionary"),
    ("Not a gzipped file", "foreign bytes"),  # at the beginning, or after the compressed data
    ("Unknown frame descriptor", "foreign bytes"),
)
_MAGIC = re.compile(rb"(?P<gz>\x1f\x8b)|(?P<zst>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)")
_SNIFFED_BYTES = 4096


def damage_of(error: Exception) -> Damage:
    """The kind of damage that one of the exceptions `DAMAGED` means."""
    if isinstance(error, EOFError):
        return "truncated file"
    return next((kind for words, kind in _DAMAGE if words in str(error)), "damaged file")


def filesystem_of(location: str) -> tuple[Any, str]:
    """The fsspec filesystem of a path, glob or URL, and the path in it.

    An existing local path is local even if its name contains `::`, which chains URLs.

    Raises:
        ImportError, ValueError: the package for its protocol is not installed, or the protocol is unknown.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    fixed = re.split(r"[*?\[]", location)[0].rpartition("/")[0]  # the folder before a glob
    if os.path.isabs(location) or os.path.lexists(location) or ("://" not in location and os.path.isdir(fixed)):
        return LocalFileSystem(), LocalFileSystem._strip_protocol(location)
    return fsspec.core.url_to_fs(location)


def check_regular(path: str) -> None:
    """Raise PermissionError if a local path is a named pipe, a socket or a device: opening one may wait forever."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise PermissionError(f"{path} is a named pipe, a socket or a device, not a regular file")


def listed_filesystem(location: str) -> tuple[Any, str]:
    """`filesystem_of`, without what this process remembers of earlier listings and of archives."""
    from fsspec.archive import AbstractArchiveFileSystem

    filesystem, path = filesystem_of(location)
    if isinstance(filesystem, AbstractArchiveFileSystem):  # it keeps the table of contents that it was opened with
        type(filesystem).clear_instance_cache()
        filesystem, path = filesystem_of(location)
    filesystem.invalidate_cache()
    return filesystem, path


def compression_suffix(name: str) -> str:
    """The compression suffix of a file name: `.gz`, `.zst`, or empty."""
    return next((suffix for suffix in COMPRESSION_SUFFIXES if name.endswith(suffix)), "")


def uncompressed(name: str) -> str:
    """A file name without its compression suffix."""
    return name.removesuffix(compression_suffix(name))


def unpacked(raw: "StoredReader", name: str) -> tuple[io.BufferedIOBase, str]:
    """The contents of a file as a buffered stream, and its compression: `.gz`, `.zst`, or empty. `name` is in lower
    case.

    The first bytes decide the compression. The name decides only if they are neither those of a compressed file nor
    text.
    """
    stored = io.BufferedReader(raw, 1 << 20)
    head = stored.peek(_SNIFFED_BYTES)[:_SNIFFED_BYTES]
    magic = _MAGIC.match(head)
    compression = f".{magic.lastgroup}" if magic else "" if head and _is_text(head) else compression_suffix(name)
    if compression == ".gz":
        return gzip.GzipFile(fileobj=stored), compression
    return io.BufferedReader(ZstdReader(stored), 1 << 20) if compression == ".zst" else stored, compression


def _is_text(head: bytes) -> bool:
    """True if the first bytes of a file are UTF-8 without NUL; the last character may be incomplete."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:
            return False
    return b"\0" not in head


class StoredReader(io.RawIOBase):
    """The stored bytes of an open file. Closing the reader does not close the file."""

    def __init__(self, stored: Any) -> None:
        self.stored = stored

    def readable(self) -> bool:
        return True

    def include(self, data: Any) -> None:
        """Count bytes of another file as part of this one."""

    def readinto(self, buffer: Any) -> int:
        data = self.stored.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class HashingReader(StoredReader):
    """A reader that hashes the bytes it reads."""

    def __init__(self, stored: Any) -> None:
        super().__init__(stored)
        self.digest = hashlib.blake2b(digest_size=16)

    def include(self, data: Any) -> None:
        self.digest.update(data)

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer)
        self.digest.update(buffer[:size])
        return size

    def finish(self) -> str:
        """Read the rest and return the checksum of the whole file and of included bytes."""
        while block := self.stored.read(1 << 20):
            self.digest.update(block)
        return self.digest.hexdigest()
