"""Rows of several files that are compressed in blocks, read as one array.

NAME.zst   one frame of zstandard for each block of rows
NAME.npy   [blocks + 1] int64, first byte of each frame, then the size of the file

ids → their blocks → one read for each → decompressed → rows in the requested order
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from indexing.store import remote
from indexing.store.artifact import damaged, reading
from indexing.store.files import save_array, write_bytes
from indexing.store.mapped import map_bytes
from indexing.store.ranged_reads import RangedFiles, Reading, check_array
from indexing.store.sharded_array import ShardedArray

BLOCK_TOKENS = 2048
"""Tokens of a block. Votes of real text take a fifth more in blocks of 512, and are read in two thirds of the time."""
_LEVEL = 1
"""Votes of real text take a sixth more with level -1, and are read in three quarters of the time: it has no Huffman
codes."""

_FRAME_BYTES = 512
"""A frame of incompressible bytes is longer than these by a 256th and less than this."""


def rows_of_block(chunk_length: int) -> int:
    """Rows of a block if a row is a chunk of this many tokens."""
    return max(1, BLOCK_TOKENS // chunk_length)


def write_compressed(path: Path, rows: np.ndarray, block: int) -> None:
    """Write an array [n, ...] as PATH.zst and PATH.npy.

    Args:
        path: without suffix.
        rows: the array.
        block: rows of a block.
    """
    import zstandard

    compress = zstandard.ZstdCompressor(level=_LEVEL).compress
    frames = [compress(np.ascontiguousarray(rows[row : row + block]).data) for row in range(0, len(rows), block)]
    write_bytes(path.with_suffix(".zst"), b"".join(frames))
    save_array(path.with_suffix(".npy"), np.array([0, *accumulate(map(len, frames))]))


class CompressedArray:
    """Rows of files of `write_compressed`. Files are opened on first use.

    Args:
        paths: the files without suffix, in order.
        rows: rows in each.
        block: rows of a block.
        reading: read frames from memory maps or by ranges of bytes.
    """

    def __init__(self, paths: Sequence[Path], rows: Sequence[int], block: int, reading: Reading = "mmap") -> None:
        blocks = [-(-count // block) for count in rows]
        self._rows, self._block, self._reading = np.array(rows, np.int64), block, reading
        self._data = [path.with_suffix(".zst") for path in paths]
        self._starts, self._first_blocks = (
            np.append(0, np.cumsum(counts, dtype=np.int64)) for counts in (rows, blocks)
        )
        # Small, and searched, so always memory-mapped.
        self._offsets = ShardedArray([path.with_suffix(".npy") for path in paths], [count + 1 for count in blocks])
        self._maps: dict[int, memoryview] = {}
        self._files = RangedFiles()

    def __reduce__(self) -> tuple[type["CompressedArray"], tuple[Sequence[Path], Sequence[int], int, Reading]]:
        """A copy, in this or another process, opens its own files; see `ShardedArray`."""
        paths = [path.with_suffix("") for path in self._data]
        return CompressedArray, (paths, self._rows.tolist(), self._block, self._reading)

    def gather(self, ids: np.ndarray, dtype: np.dtype, width: int) -> np.ndarray:
        """Rows by id, in the order of `ids`.

        Args:
            ids: [n] int64.
            dtype: of an element.
            width: elements of a row.

        Returns:
            [n, width] of dtype.

        Raises:
            InputError: a file is missing or damaged.
        """
        shards = np.searchsorted(self._starts, ids, side="right") - 1
        blocks, rows = np.divmod(ids - self._starts[shards], self._block)
        needed, number = np.unique(self._first_blocks[shards] + blocks, return_inverse=True)
        shards = np.asarray(np.searchsorted(self._first_blocks, needed, side="right") - 1)
        blocks = needed - self._first_blocks[shards]
        sizes = np.minimum(self._block, self._rows[shards] - blocks * self._block)
        present = np.unique(shards).tolist()
        with reading(*(file for shard in present for file in (self._data[shard], self._offsets.paths[shard]))):
            block_bytes, ranges = sizes * width * dtype.itemsize, list[tuple[int, int, int]]()
            for shard in present:
                offsets, own = self._offsets.shard(shard), blocks[shards == shard]
                check_array(self._offsets.paths[shard], offsets, np.int64, (), 0)
                spans = [*zip(offsets[own].tolist(), offsets[own + 1].tolist(), strict=True)]
                for (first, stop), size in zip(spans, block_bytes[shards == shard].tolist(), strict=True):
                    if not 0 <= first <= stop <= first + size + size // 256 + _FRAME_BYTES:
                        path = self._offsets.paths[shard]
                        raise damaged(
                            path, f"{path} claims a frame of the bytes {first:,} to {stop:,} for {size:,} bytes"
                        )
                ranges += [(shard, *span) for span in spans]
            frames = zip(self._read(ranges), block_bytes.tolist(), strict=True)
            data = b"".join(self._decompressed(frames, shards.tolist()))
            found = np.frombuffer(data, dtype).reshape(int(sizes.sum()), width)
        return found.take((np.cumsum(sizes) - sizes)[number] + rows, axis=0)

    def _read(self, ranges: Sequence[tuple[int, int, int]]) -> Sequence[bytes | memoryview]:
        """The bytes [first, stop) of shards."""
        if self._reading == "mmap":
            return [self._map(shard)[first:stop] for shard, first, stop in ranges]
        return self._files.read([(self._data[shard], first, stop) for shard, first, stop in ranges])

    def _decompressed(self, frames: Iterable[tuple[bytes | memoryview, int]], shards: Sequence[int]) -> Iterator[bytes]:
        """The contents of frames, each with the bytes that it must have, of these shards."""
        import zstandard

        decompress = zstandard.ZstdDecompressor().decompress
        for (frame, size), shard in zip(frames, shards, strict=True):
            path = self._data[shard]
            try:
                if (claimed := zstandard.frame_content_size(frame)) != size:  # so much memory would be taken
                    raise damaged(path, f"{path} has a frame that claims {claimed:,} bytes instead of {size:,}")
                yield decompress(frame)
            except zstandard.ZstdError as error:
                raise damaged(path, f"{path} has a frame that is not one of zstandard ({error})") from error

    def _map(self, shard: int) -> memoryview:
        if shard not in self._maps:
            self._maps[shard] = map_bytes(remote.present(self._data[shard]))
        return self._maps[shard]
