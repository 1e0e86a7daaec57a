"""Decompress zstd block by block, in memory that the window bounds, however much a stream expands.

    stream   frames one after the other: of data, or skippable (magic number, size, that many bytes)
    frame    header  block …  checksum
    block    3 bytes: whether it is the last, its type, its size; then its bytes, which decompress to at most 128 KiB

`zstandard` decompresses all the bytes that it receives, and 4 of them can hold a block of 128 KiB. So each call
receives one block (RFC 8878, section 3.1.1). Its `stream_reader` bounds memory too, but ends silently if a file is
truncated.
"""

import io
from collections.abc import Iterator
from typing import Any

_MAGIC, _MAGIC_BYTES, _SKIPPABLE = b"\x28\xb5\x2f\xfd", 4, b"\x2a\x4d\x18"
_BLOCK_BYTES = 1 << 17
_REPEATED, _COMPRESSED = 1, 2  # types of blocks; 0 is a copy
# zstd writes windows of up to 2 GiB (`--long=31`), and large published corpora have them. Memory holds what was
# decompressed, up to the window. Above the limit that the program `zstd` has too, the stored bytes must be enough for
# it.
_WINDOW_BYTES, _MOST_EXPANSION = 1 << 27, 256


class DamagedZstd(Exception):
    """An error of the zstd decompressor."""


class ZstdReader(io.RawIOBase):
    """The contents of all frames of a zstd stream.

    Reading raises EOFError if the stream is truncated, and DamagedZstd if it is damaged, or expands to more than memory
    should hold.
    """

    def __init__(self, raw: io.BufferedIOBase) -> None:
        self._blocks, self._ready = _blocks(raw), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._ready = memoryview(block)
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def _blocks(raw: io.BufferedIOBase) -> Iterator[bytes]:
    """Decompress the blocks of a stream."""
    while magic := raw.read(_MAGIC_BYTES):
        if 0x50 <= magic[0] < 0x60 and magic[1:] == _SKIPPABLE:
            left = int.from_bytes(_exactly(raw, 4), "little")
            while left:
                left -= len(_exactly(raw, min(left, _BLOCK_BYTES)))
        elif magic == _MAGIC:
            yield from _blocks_of_frame(raw)
        elif _MAGIC.startswith(magic):
            raise EOFError("the file ends inside a zstd frame")
        else:
            raise DamagedZstd("Unknown frame descriptor")


def _blocks_of_frame(raw: io.BufferedIOBase) -> Iterator[bytes]:
    """Decompress the blocks of a frame, after its magic number."""
    import zstandard

    frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    try:
        header = _read_header(raw)
        window = zstandard.get_frame_parameters(header).window_size
        yield frame.decompress(header)
        read, expanded, is_last = len(header), 0, False
        while not is_last:
            head = _exactly(raw, 3)
            fields = int.from_bytes(head, "little")
            is_last, kind, size = bool(fields & 1), fields >> 1 & 3, fields >> 3
            if kind > _COMPRESSED or size > _BLOCK_BYTES:
                raise DamagedZstd(f"a block of type {kind} with {size:,} bytes; accepted: {_BLOCK_BYTES:,}")
            stored = head + _exactly(raw, 1 if kind == _REPEATED else size)
            block = frame.decompress(stored)
            read, expanded = read + len(stored), expanded + len(block)
            if min(window, expanded) > _WINDOW_BYTES + _MOST_EXPANSION * read:
                raise DamagedZstd(
                    f"a window of {window:,} bytes, and {read:,} bytes that expand to {expanded:,} already; with windows above "
                    f"{_WINDOW_BYTES:,}, accepted is an expansion by {_MOST_EXPANSION}"
                )
            yield block
        if header[_MAGIC_BYTES] & 4:
            yield frame.decompress(_exactly(raw, 4))
    except zstandard.ZstdError as error:
        raise DamagedZstd(str(error)) from error


def _read_header(raw: io.BufferedIOBase) -> bytes:
    """The header of a frame with its magic number. Its first byte says which of the other fields it has."""
    first = _exactly(raw, 1)
    has_window = not first[0] & 0x20
    size_bytes = (0 if has_window else 1, 2, 4, 8)[first[0] >> 6]
    return _MAGIC + first + _exactly(raw, has_window + (0, 1, 2, 4)[first[0] & 3] + size_bytes)


def _exactly(raw: io.BufferedIOBase, size: int) -> bytes:
    data: bytes = raw.read(size)
    if len(data) < size:
        raise EOFError("the file ends inside a zstd frame")
    return data
