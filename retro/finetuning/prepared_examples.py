"""Read prepared examples: chunks by number, across shards."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from indexing.store.artifact import recorded
from indexing.store.datastore import shard_name
from indexing.store.schemas import Rows
from indexing.store.sharded_array import ShardedArray, open_array
from retro.finetuning.prepare import num_shards


@dataclass(frozen=True)
class Prepared:
    """Prepared examples. Only the folder is pickled; another process opens the files itself.

    Attributes:
        folder: of the shards.
    """

    folder: Path

    def __reduce__(self) -> tuple[type["Prepared"], tuple[Path]]:
        return Prepared, (self.folder,)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the files and settings."""
        return self.folder.name

    @cached_property
    def tokens(self) -> ShardedArray:
        """[chunks, m], tokens."""
        return self._array("tokens")

    @cached_property
    def labels(self) -> ShardedArray:
        """[chunks, m] int32, the next token if it belongs to an answer, else -100."""
        return self._array("labels")

    @cached_property
    def lengths(self) -> np.ndarray:
        """[examples] int64, tokens of each example except its last one."""
        return self._whole("lengths")

    @cached_property
    def lines(self) -> np.ndarray:
        """[examples, 2] int64, number of the file (from 0) and of the line (from 1)."""
        return self._whole("lines")

    @cached_property
    def places(self) -> np.ndarray:
        """[examples] uint64, hashes of the questions: examples with small ones are held out."""
        return self._whole("places")

    @cached_property
    def first_chunks(self) -> np.ndarray:
        """[examples + 1] int64, the first chunk of each example."""
        counts = -(-self.lengths // self.tokens.row_shape[0])
        return np.concatenate(([0], np.cumsum(counts)))

    @cached_property
    def first_labels(self) -> np.ndarray:
        """[examples] int64, tokens before the first label of each example."""
        return self._whole("first_labels")

    def neighbors(self, chunks: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The first k neighbors of chunks [C]: tokens [C, k, 2m] and lengths [C, k], int64; length 0 = no neighbor."""
        rows = self._neighbors.gather(chunks)[:, :k]
        shards = np.searchsorted(self._neighbors.starts, chunks, side="right") - 1
        rows = np.where(rows < 0, -1, rows + self._neighbor_tokens.starts[shards][:, None])
        present = rows >= 0
        tokens = np.zeros((*rows.shape, *self._neighbor_tokens.row_shape), dtype=np.int64)
        lengths = np.zeros(rows.shape, dtype=np.int64)
        tokens[present] = self._neighbor_tokens.gather(rows[present])
        lengths[present] = self._neighbor_lengths.gather(rows[present])
        return tokens, lengths

    @cached_property
    def _neighbors(self) -> ShardedArray:
        return self._array("neighbors")

    @cached_property
    def _neighbor_tokens(self) -> ShardedArray:
        return self._array("neighbor_tokens")

    @cached_property
    def _neighbor_lengths(self) -> ShardedArray:
        return self._array("neighbor_lengths")

    @cached_property
    def _shards(self) -> list[Path]:
        return [self.folder / shard_name(number) for number in range(num_shards(self.folder))]

    @cached_property
    def _counts(self) -> list[dict[str, int]]:
        return [recorded(shard, "counts", dict[str, Rows]) for shard in self._shards]

    def _array(self, name: str) -> ShardedArray:
        return ShardedArray([shard / f"{name}.npy" for shard in self._shards], [count[name] for count in self._counts])

    def _whole(self, name: str) -> np.ndarray:
        return np.concatenate([open_array(shard / f"{name}.npy") for shard in self._shards])
