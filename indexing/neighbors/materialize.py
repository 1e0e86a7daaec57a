"""Write the tokens of each chunk's first neighbors next to the chunk, so that training reads them in sequence.

stored neighbor ids [chunks, stored] → the first s of each → tokens with continuation [chunks, s, 2m], lengths [chunks,
s]
"""

from pathlib import Path

import numpy as np

from indexing.progress import Advance
from indexing.store.datastore import Split
from indexing.store.files import NpyWriter
from indexing.store.retrieval_set import RetrievalSet

_BLOCK_TOKENS = 1 << 22  # neighbor tokens per block: 32 MB as int64


def materialize_shard(
    work: Path,
    split: Split,
    rows: tuple[int, int],
    retrieval: RetrievalSet,
    num_neighbors: int,
    *,
    advance: Advance,
) -> dict[str, int]:
    """Write `tokens.npy` and `lengths.npy` of one shard and split into the folder `work`.

    Args:
        work: folder to create.
        split: the split of the chunks.
        rows: ids [first, stop) of the shard's chunks.
        retrieval: the chunks that neighbor ids name.
        num_neighbors: s, neighbors written per chunk.
        advance: called with the number of finished chunks.

    Returns:
        counts: chunks, and neighbors that are not missing.
    """
    work.mkdir(parents=True, exist_ok=True)
    counts = {"chunks": rows[1] - rows[0], "neighbors": 0}
    shape = num_neighbors, 2 * split.chunk_length
    step = max(1, _BLOCK_TOKENS // (shape[0] * shape[1]))
    dtype = split.tokens.shard(0).dtype
    with (
        NpyWriter(work / "tokens.npy", dtype, shape) as token_file,
        NpyWriter(work / "lengths.npy", np.uint32, shape[:1]) as length_file,
    ):
        for start in range(*rows, step):
            stop = min(start + step, rows[1])
            ids = split.neighbor_ids.read(start, stop)[:, :num_neighbors]
            tokens, lengths = retrieval.with_continuation(ids.ravel())
            token_file.append(tokens.reshape(-1, *shape))
            length_file.append(lengths.reshape(ids.shape))
            counts["neighbors"] += int((ids >= 0).sum())
            advance(stop - start)
    return counts
