"""Write a datastore of any size, for benchmarks of reading: computed tokens, neighbors drawn uniformly, no text and no index.

    python -m benchmarks.speed.large_store --output FOLDER [--chunks 24e6]

Every value is a function of the chunk's id. Neighbors that lie anywhere are the worst case for reading; real ones lie
closer together. An interrupted run is continued.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.common import add_minutes, budget
from indexing.store.artifact import Recipe, create, is_finished
from indexing.store.datastore import SPLITS, shard_name, write_datastore_manifest
from indexing.store.files import NpyWriter
from retro.data.neighbor_choice import random_numbers

CHUNK_LENGTH, VOCAB_SIZE, DOCUMENT = 64, 32_000, 16
"""Tokens of a chunk, vocabulary, chunks of a document."""
_BLOCK = 1 << 16  # chunks computed at once


def main() -> None:
    """Write the datastore."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--chunks", type=float, default=24e6)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--stored", type=int, default=10, help="neighbors stored for each chunk")
    parser.add_argument("--materialized", type=int, default=2, help="neighbors whose text is copied")
    add_minutes(parser)
    options = parser.parse_args()
    limit = budget(options)
    per_shard = int(options.chunks / options.shards) // DOCUMENT * DOCUMENT
    rows = [range(shard * per_shard, (shard + 1) * per_shard) for shard in range(options.shards)]
    done = 0
    for shard in limit.each(rows, "shard"):
        write_shard(options.output, shard, rows[-1].stop, options.stored, options.materialized)
        done += 1
    if done < len(rows):
        raise SystemExit("The datastore is not complete. Run the same command again to continue.")
    empty = [0] * options.shards
    chunks = {name: [per_shard] * options.shards if name == "train" else empty for name in SPLITS}
    write_datastore_manifest(
        options.output,
        {
            "chunk_length": CHUNK_LENGTH,
            "extra_datastores": [],
            "fingerprints": {name: f"{rows[-1].stop}" for name in ("chunk", "neighbors", "materialize")},
            "pad_id": 0,
            "splits": {
                name: {"chunks": counts, "documents": [count // DOCUMENT for count in counts]}
                for name, counts in chunks.items()
            },
            "vocab_size": VOCAB_SIZE,
        },
    )


def write_shard(folder: Path, rows: range, total: int, stored: int, materialized: int) -> None:
    """Write chunks, neighbors and materialized neighbors of the chunk ids `rows` of `total`."""
    shard = rows.start // len(rows)
    settings = {"rows": [rows.start, rows.stop, total], "stored": stored, "materialized": materialized}
    for stage in ("chunks", "neighbors", "materialized"):
        out, recipe = folder / stage / shard_name(shard), Recipe(stage, 1, settings, {})
        if is_finished(out, recipe):
            continue
        with create(out, recipe) as (work, _):
            (work / "train").mkdir()
            if stage == "chunks":
                write_chunks(work / "train", rows)
            elif stage == "neighbors":
                with NpyWriter(work / "train/ids.npy", np.int64, (stored,)) as file:
                    for ids in blocks(rows):
                        file.append(neighbors_of(ids, total, stored))
            else:
                write_materialized(work / "train", rows, total, materialized)


def write_chunks(folder: Path, rows: range) -> None:
    """Write tokens, lengths and offsets of documents."""
    with (
        NpyWriter(folder / "tokens.npy", np.uint16, (CHUNK_LENGTH,)) as tokens,
        NpyWriter(folder / "lengths.npy", np.uint16, ()) as lengths,
    ):
        for ids in blocks(rows):
            tokens.append(tokens_of(ids))
            lengths.append(np.full(len(ids), CHUNK_LENGTH, np.uint16))
    np.save(folder / "documents.npy", np.arange(0, len(rows) + 1, DOCUMENT, dtype=np.int64))


def write_materialized(folder: Path, rows: range, total: int, count: int) -> None:
    """Write the first `count` neighbors of each chunk with their continuations."""
    with (
        NpyWriter(folder / "tokens.npy", np.uint16, (count, 2 * CHUNK_LENGTH)) as tokens,
        NpyWriter(folder / "lengths.npy", np.uint16, (count,)) as lengths,
    ):
        for ids in blocks(rows):
            found = neighbors_of(ids, total, count)
            is_last = (found + 1) % DOCUMENT == 0
            following = np.where(is_last[..., None], 0, tokens_of(found + 1))
            tokens.append(np.concatenate([tokens_of(found), following], axis=-1))
            lengths.append(np.where(is_last, CHUNK_LENGTH, 2 * CHUNK_LENGTH).astype(np.uint16))


def blocks(rows: range) -> Iterator[np.ndarray]:
    """Yield ids [n] int64, a block at a time."""
    for first in range(rows.start, rows.stop, _BLOCK):
        yield np.arange(first, min(first + _BLOCK, rows.stop))


def neighbors_of(ids: np.ndarray, total: int, count: int) -> np.ndarray:
    """The neighbors of chunks: [n] → [n, count] int64, none in the chunk's document.

    The first ones do not depend on `count`.
    """
    drawn = random_numbers(ids, total - DOCUMENT, count, seed=0)
    return np.where(drawn >= ids[:, None] // DOCUMENT * DOCUMENT, drawn + DOCUMENT, drawn)


def tokens_of(ids: np.ndarray) -> np.ndarray:
    """The tokens of chunks: [...] → [..., CHUNK_LENGTH] uint16."""
    places = ids[..., None] * CHUNK_LENGTH + np.arange(CHUNK_LENGTH)
    return (places % VOCAB_SIZE).astype(np.uint16)


if __name__ == "__main__":
    main()
