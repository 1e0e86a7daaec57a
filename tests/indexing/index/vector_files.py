"""Vectors on disk in the format of embeddings."""

from pathlib import Path

import numpy as np

from indexing.store.sharded_array import ShardedArray


def stored(folder: Path, vectors: np.ndarray, files: int = 3) -> ShardedArray:
    """Write vectors [n, d], scaled to unit length, as float16 in several files."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    parts = np.array_split(unit.astype(np.float16), files)
    paths = [folder / f"{number}.npy" for number in range(files)]
    for path, part in zip(paths, parts, strict=True):
        np.save(path, part)
    return ShardedArray(paths, [len(part) for part in parts])
