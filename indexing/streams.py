"""The bytes of a file: as they are stored, hashed as they pass, and unpacked.

stored file ──StoredReader, HashingReader──► stored bytes ──unpacked (gzip, zstd)──► contents
"""

import gzip
import hashlib
import io
import zlib
from typing import Any

COMPRESSION_SUFFIXES = (".gz", ".zst")
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
"""What reading an unpacked stream raises where the file is cut off or is not what its name says."""


def uncompressed(name: str) -> str:
    """A file's name without the suffix of its compression."""
    return name.removesuffix(".gz").removesuffix(".zst") if name.endswith(COMPRESSION_SUFFIXES) else name


def unpacked(raw: "StoredReader", name: str) -> Any:
    """A buffered stream of the contents of a file with this name, in lower case."""
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    return io.BufferedReader(_ZstdReader(raw) if name.endswith(".zst") else raw, 1 << 20)


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

    def __init__(self, raw: io.RawIOBase) -> None:
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
