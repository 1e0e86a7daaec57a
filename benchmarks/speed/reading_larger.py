"""Speed of reading training batches from a datastore that is larger than memory.

    python -m benchmarks.speed.large_store --output FOLDER
    python -m benchmarks.speed.reading_larger FOLDER [--memory-gb 0.5] [--workers 1 2]

Every case is a process with its own limit of memory, which includes its page cache (a control group of Linux; it needs
root). It makes batches for `--seconds`, in 1, 2 … processes, after the files were dropped from the page cache. The floors
read pages of 4 KB at random places, one at a time and 64 announced together, and files in sequence.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, cycle
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from benchmarks.common import add_minutes, budget, say, write
from benchmarks.speed.reading import CASES, drop, files_of
from indexing.store.datastore import Datastore
from retro.data.batches import TrainingData
from retro.data.settings import DataSettings

FLOORS = {"floor: pages, one at a time": 1, "floor: pages, 64 at a time": 64, "floor: bytes in sequence": 0}
"""Pages that are announced together; 0: files in sequence."""
_GROUPS = Path("/sys/fs/cgroup")
_PAGE = 4096


def main() -> None:
    """Print the table and write it as JSON."""
    options = parsed()
    if options.case:
        print(json.dumps(floor(options) if options.case in FLOORS else read(options)))
        return
    limit = budget(options)
    datastore = Datastore.open(options.datastore)
    has_copies = datastore.has("materialize")
    files = files_of(datastore, with_materialized=has_copies)
    plain = sum(file.stat().st_size for file in files_of(datastore, with_materialized=False))
    times = plain / (options.memory_gb * 1e9)
    say(f"{plain / 1e9:.1f} GB of tokens and neighbors, {times:.1f} times the memory of {options.memory_gb:g} GB")
    cases = [(name, 1) for name in FLOORS]
    cases += [(name, n) for name in CASES if has_copies or "materialized" not in name for n in options.workers]
    found: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in cases}
    for number in limit.rounds(options.rounds):
        for name, workers in random.Random(number).sample(cases, len(cases)):
            drop(files)
            found[name, workers].append(limited(options, name, workers, number))
    rows = []
    for (name, workers), results in found.items():
        median = {key: statistics.median(each[key] for each in results) for key in results[0]}
        rows.append({"case": name, "workers": workers, **median, "rounds": results})
        say(
            f"{name:28} {workers} workers {median['per_second']:13,.0f} {unit(name)}/s "
            f"{median['disk_bytes_per_second'] / 1e6:8.1f} MB/s of the disk, {median['disk_bytes_each']:8.1f} bytes for each"
        )
    settings = {key: str(value) for key, value in vars(options).items()}
    write(options.output, {"settings": settings, "bytes": plain, "times_memory": times, "rows": rows})


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datastore", type=Path)
    parser.add_argument("--memory-gb", type=float, default=0.5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=10, help="of reading in each case")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--k", type=int, default=2)
    add_minutes(parser)
    parser.add_argument("--output", type=Path, default=Path("benchmark-reading-larger.json"))
    parser.add_argument("--case", help=argparse.SUPPRESS)  # of one process
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def unit(case: str) -> str:
    """What a case counts."""
    return case.split()[1].strip(",") if case in FLOORS else "tokens"


# --- one case --------------------------------------------------------------------------------------------------------


def limited(options: argparse.Namespace, case: str, workers: int, number: int) -> dict[str, float]:
    """Run a case in a process of its own, with limited memory."""
    names = ("seconds", "batch_size", "sequence_length", "k")
    arguments = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    command = [sys.executable, "-m", "benchmarks.speed.reading_larger", str(options.datastore), *arguments]
    command += [f"--case={case}", f"--workers={workers}", f"--number={number}"]
    with memory_limit(int(options.memory_gb * 1e9)) as members:
        joined = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(members), *command]
        done = subprocess.run(joined, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def memory_limit(limit: int) -> Iterator[Path]:
    """Make a control group with at most `limit` bytes of memory; yield the file that a process joins it with.

    Raises:
        SystemExit: the machine does not allow it.
    """
    version_1 = (_GROUPS / "memory").is_dir()
    group = (_GROUPS / "memory" if version_1 else _GROUPS) / f"retro-benchmark-{os.getpid()}"
    name = "memory.limit_in_bytes" if version_1 else "memory.max"
    try:
        group.mkdir()
        (group / name).write_text(str(limit))
    except OSError as error:
        raise SystemExit(f"{group}: {error.strerror}. Limiting memory needs root and control groups.") from error
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def read(options: argparse.Namespace) -> dict[str, float]:
    """Make batches in one or several processes that share nothing but the page cache."""
    settings = DataSettings(sequence_length=options.sequence_length, k=options.k, **CASES[options.case])

    def batches(worker: int, rates: SimpleQueue) -> None:
        data = TrainingData([options.datastore], settings, retrieval=True)
        firsts = count((options.number * 100 + worker) * 1_000_000, options.batch_size)
        rates.put(
            measured(
                lambda: data.batch(range(first := next(firsts), first + options.batch_size)).tokens.size,
                options.seconds,
            )
        )

    # Forked, because each process that imports torch itself takes 190 MB of the limit.
    context = get_context("fork")
    rates = context.SimpleQueue()
    workers = [context.Process(target=batches, args=(worker, rates)) for worker in range(options.workers[0])]
    for worker in workers:
        worker.start()
    found = [rates.get() for _ in workers]
    rate, disk = (sum(each[key] for each in found) for key in ("per_second", "disk_bytes_per_second"))
    return {"per_second": rate, "disk_bytes_per_second": disk, "disk_bytes_each": disk / rate}


def floor(options: argparse.Namespace) -> dict[str, float]:
    """Read the datastore's files: pages at random places, or blocks in sequence."""
    datastore = Datastore.open(options.datastore)
    files = files_of(datastore, with_materialized=datastore.has("materialize"))
    draw, together = random.Random(options.number), FLOORS[options.case]
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    weights = [file.stat().st_size // _PAGE for file in files]
    in_sequence = cycle(draw.sample(descriptors, len(descriptors)))

    def pages() -> int:
        chosen = draw.choices(range(len(files)), weights, k=together)
        places = [(descriptors[file], draw.randrange(weights[file]) * _PAGE) for file in chosen]
        for descriptor, place in places if together > 1 else ():
            os.posix_fadvise(descriptor, place, _PAGE, os.POSIX_FADV_WILLNEED)
        return sum(len(os.pread(descriptor, _PAGE, place)) > 0 for descriptor, place in places)

    def whole_file() -> int:
        descriptor = next(in_sequence)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return sum(len(block) for block in iter(lambda: os.read(descriptor, 1 << 20), b""))

    for descriptor in descriptors if together else ():
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return measured(pages if together else whole_file, options.seconds)


def measured(work: Any, seconds: float) -> dict[str, float]:
    """Repeat `work`, which returns a count, for some seconds: its rate, and what the disk read."""
    read_before, started, total = disk_bytes(), time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        total += work()
    took = time.perf_counter() - started
    read = disk_bytes() - read_before
    return {
        "per_second": total / took,
        "disk_bytes_per_second": read / took,
        "disk_bytes_each": read / total,
    }


def disk_bytes() -> int:
    """Bytes that the disk has read for this process."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


if __name__ == "__main__":
    main()
