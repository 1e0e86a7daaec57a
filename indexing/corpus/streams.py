"""The bytes of a file: as they are stored, hashed as they pass, and unpacked.

stored file ──StoredReader, HashingReader──► stored bytes ──unpacked (gzip, zstd)──► contents
"""

import gzip
import hashlib
import io
import os
import re
import zlib
from typing import Any

COMPRESSION_SUFFIXES = (".gz", ".zst")
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
"""What reading an unpacked stream raises where the file is cut off or is not what its name says."""
_MAGIC = re.compile(rb"(?P<gz>\x1f\x8b)|(?P<zst>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)")
_SNIFFED_BYTES = 4096


def filesystem_of(location: str) -> tuple[Any, str]:
    """The fsspec filesystem of a path, glob or URL, and the path in it.

    What is on this machine is local even if its name holds `::`, which chains URLs elsewhere.

    Raises:
        ImportError, ValueError: the package for its protocol is not installed, or there is no such protocol.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    fixed = re.split(r"[*?\[]", location)[0].rpartition("/")[0]  # of a glob, the folder before it
    if os.path.isabs(location) or os.path.lexists(location) or ("://" not in location and os.path.isdir(fixed)):
        return LocalFileSystem(), LocalFileSystem._strip_protocol(location)
    return fsspec.core.url_to_fs(location)


def compression_suffix(name: str) -> str:
    """The suffix of a file's name that says how it is compressed: `.gz`, `.zst`, or empty."""
    return next((suffix for suffix in COMPRESSION_SUFFIXES if name.endswith(suffix)), "")


def uncompressed(name: str) -> str:
    """A file's name without the suffix of its compression."""
    return name.removesuffix(compression_suffix(name))


def unpacked(raw: "StoredReader", name: str) -> tuple[Any, str]:
    """The contents of a file with this name (in lower case), as a buffered stream, and its compression: `.gz`, `.zst`, or empty.

    The first bytes tell the compression, not the name. A name that ends in `.gz` or `.zst` counts where they tell nothing: they
    are neither those of a compressed file nor text.
    """
    stored = io.BufferedReader(raw, 1 << 20)
    head = stored.peek(_SNIFFED_BYTES)[:_SNIFFED_BYTES]
    magic = _MAGIC.match(head)
    compression = f".{magic.lastgroup}" if magic else "" if head and _is_text(head) else compression_suffix(name)
    if compression == ".gz":
        return gzip.GzipFile(fileobj=stored), compression
    return io.BufferedReader(_ZstdReader(stored), 1 << 20) if compression == ".zst" else stored, compression


def _is_text(head: bytes) -> bool:
    """Whether the first bytes of a file are UTF-8 without NUL; the last character may be cut."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:
            return False
    return b"\0" not in head


class StoredReader(io.RawIOBase):
    """The stored bytes of an open file; closing it leaves the file open, which belongs to somebody else."""

    def __init__(self, stored: Any) -> None:
        self.stored = stored

    def readable(self) -> bool:
        return True

    def include(self, data: Any) -> None:
        """Take bytes of another file as part of this one."""

    def readinto(self, buffer: Any) -> int:
        data = self.stored.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class HashingReader(StoredReader):
    """A reader that hashes what passes."""

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
        """Read what is left and return the checksum of the whole file and of what it includes."""
        while block := self.stored.read(1 << 20):
            self.digest.update(block)
        return self.digest.hexdigest()


class _ZstdReader(io.RawIOBase):
    """Decompresses all frames of a zstd stream.

    `zstandard.ZstdDecompressor.stream_reader` ends quietly where a file was cut off; this raises EOFError.
    """

    def __init__(self, raw: io.BufferedIOBase) -> None:
        import zstandard

        self.raw = raw
        # Published corpora are compressed with `--long=31`, which needs more than the default window.
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
        self.error = zstandard.ZstdError
        self.frame: Any = None
        self.waiting = b""  # stored bytes not yet decompressed
        self.ready = memoryview(b"")  # decompressed bytes not yet read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            # Small blocks, because what one block expands to is held in memory.
            self.waiting = self.waiting or self.raw.read(1 << 15) or b""
            if not self.waiting:
                if self.frame is not None:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            self.frame = self.frame or self.decompressor.decompressobj()
            try:
                self.ready = memoryview(self.frame.decompress(self.waiting))
            except self.error as error:
                raise EOFError(str(error)) from error
            self.waiting = self.frame.unused_data
            if self.frame.eof:
                self.frame = None
        size = min(len(buffer), len(self.ready))
        buffer[:size] = self.ready[:size]
        self.ready = self.ready[size:]
        return size
