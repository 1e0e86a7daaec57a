"""Speed of reading random training batches with each reading method, with a cold and with a warm page cache.

    python -m benchmarks.speed.reading DATASTORE [--rounds 5] [--batches 50]

Build the datastore with `neighbors.materialized` to include the materialized cases. In a round every case reads the
same batches, first cold, then warm; the order of the cases changes from round to round. Cold: all files of the training
split are flushed (fsync) and dropped from the page cache (`posix_fadvise` with POSIX_FADV_DONTNEED, which needs no
root) while they are not mapped. The benchmark prints how much of them is cached nevertheless. Caches below the page
cache (of a disk, of a file server) keep their content: to measure a disk, use a datastore that is larger than these.

The floor reads as many bytes sequentially, from one position of the token files. Rows are chunks: those of the
sequences, and two per neighbor. Bytes are those of the tokens in the files.
"""

import argparse
import ctypes
import mmap
import os
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import add_minutes, budget, say, seconds, write
from indexing.store.datastore import Datastore
from retro.data.batches import TrainingData
from retro.data.settings import DataSettings

CASES: dict[str, dict[str, Any]] = {
    "mmap": {"reading": "mmap"},
    "pread": {"reading": "pread"},
    "materialized, mmap": {"reading": "mmap", "materialized": True},
    "materialized, pread": {"reading": "pread", "materialized": True},
}
FLOOR = "floor: sequential"
_BLOCK = 1 << 20


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--k", type=int, default=2)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-reading.json"))
    options = parser.parse_args()
    limit = budget(options)
    datastore = Datastore.open(options.datastore)
    names = [name for name, case in CASES.items() if datastore.has("materialize") or not case.get("materialized")]
    files = files_of(datastore, with_materialized=len(names) == len(CASES))
    itemsize = datastore.train.tokens.shard(0).dtype.itemsize
    rows = (
        options.batches * options.batch_size * (options.sequence_length // datastore.chunk_length) * (1 + 2 * options.k)
    )
    total = rows * datastore.chunk_length * itemsize
    del datastore  # mapped files cannot be dropped from the cache

    def work_of(name: str, number: int) -> Callable[[], object]:
        if name == FLOOR:
            return lambda: read_in_sequence([file for file in files if file.name == "tokens.npy"], total, number)
        settings = DataSettings(sequence_length=options.sequence_length, k=options.k, **CASES[name])
        return lambda: read_batches(options.datastore, settings, number, options.batches, options.batch_size)

    took: dict[tuple[str, str], list[float]] = {
        (name, cache): [] for name in (*names, FLOOR) for cache in ("cold", "warm")
    }
    cached: list[float] = []
    for number in limit.rounds(options.rounds):
        order = [*names, FLOOR]
        random.Random(number).shuffle(order)
        for name in order:
            drop(files)
            cached.append(cached_fraction(files))
            for cache in ("cold", "warm"):
                took[name, cache].append(seconds(work_of(name, number)))
    table = []
    for (name, cache), values in took.items():
        slower = statistics.median(a / b for a, b in zip(values, took[FLOOR, cache], strict=True))  # paired by round
        second = statistics.median(values)
        table.append(
            {"case": name, "cache": cache, "rows_per_second": rows / second, "bytes_per_second": total / second}
            | {"seconds": values, "times_the_floor": slower}
        )
        say(
            f"{name:22} {cache:5} {rows / second:12,.0f} rows/s {total / second / 1e6:10,.1f} MB/s  {slower:8.1f} × floor"
        )
    print(f"still cached before a cold run: at most {100 * max(cached):.1f}%")
    settings = {key: value for key, value in vars(options).items() if key not in ("datastore", "output")}
    sizes = {"bytes_of_files": sum(file.stat().st_size for file in files), "still_cached": max(cached)}
    write(options.output, {"settings": settings, **sizes, "rows_read": rows, "bytes_read": total, "rows": table})


def files_of(datastore: Datastore, *, with_materialized: bool) -> list[Path]:
    """Return the files of the training split that batches read."""
    train = datastore.train
    arrays = [train.tokens, train.lengths, train.neighbor_ids]
    arrays += [train.materialized_tokens, train.materialized_lengths] if with_materialized else []
    documents = [path.with_name("documents.npy") for path in train.tokens.paths]
    return [*documents, *(path for array in arrays for path in array.paths)]


def read_batches(folder: Path, settings: DataSettings, number: int, count: int, size: int) -> int:
    """Open the datastore and make the batches of a round. Files are closed and unmapped afterwards."""
    data = TrainingData([folder], settings, retrieval=True)
    firsts = range(number * count * size, (number + 1) * count * size, size)
    return sum(data.batch(range(first, first + size)).tokens.size for first in firsts)


def read_in_sequence(files: list[Path], total: int, number: int) -> None:
    """Read `total` bytes block by block, from a random position that depends on the round."""
    sizes = [file.stat().st_size for file in files]
    at = random.Random(number).randrange(max(1, sum(sizes) - total))
    first = 0
    while at >= sizes[first]:
        at -= sizes[first]
        first += 1
    while total > 0:  # start again if the files have fewer bytes
        with open(files[first % len(files)], "rb", buffering=0) as file:
            file.seek(at)
            while total > 0 and (block := file.read(min(_BLOCK, total))):
                total -= len(block)
        first, at = first + 1, 0


def drop(files: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # unwritten pages stay in the cache
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cached_fraction(files: list[Path]) -> float:
    """Return the fraction of the files' pages that is in the page cache (mincore)."""
    library, cached, pages = ctypes.CDLL(None, use_errno=True), 0, 0
    for path in files:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            address = np.frombuffer(mapped, np.uint8)  # keeps the map alive
            found = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
            places = (ctypes.c_void_p(address.ctypes.data), ctypes.c_size_t(len(mapped)))
            if library.mincore(*places, ctypes.c_void_p(found.ctypes.data)):
                raise OSError(ctypes.get_errno(), "mincore", str(path))
            cached, pages = cached + int((found & 1).sum()), pages + len(found)
            del address
    return cached / pages


if __name__ == "__main__":
    main()
