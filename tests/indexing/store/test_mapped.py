"""A file that gets shorter while it is read ends no process without a word: it is named, with what was found and the repair."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from indexing.store import damage_found, mapped
from indexing.store.artifact import Recipe, create
from indexing.store.compressed_array import CompressedArray, write_compressed
from indexing.store.errors import DamagedFile
from indexing.store.sharded_array import ShardedArray, open_array

ROOT = Path(__file__).resolve().parents[3]
ROWS = 4096

pytestmark = pytest.mark.skipif(not mapped._HAS_HANDLER, reason="only Linux has the handler")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An artifact with an array, and the same compressed."""
    with create(tmp_path / "datastore" / "chunks" / "00000", Recipe("chunk", 1)) as (work, _):
        rows = np.random.default_rng(0).integers(0, 1 << 62, (ROWS, 4))
        np.save(work / "rows.npy", rows)
        write_compressed(work / "packed", rows, 64)
    return tmp_path / "datastore" / "chunks" / "00000"


def gathered(folder: Path) -> Callable[[], object]:
    array = ShardedArray([folder / "rows.npy"], [ROWS])
    array.gather(np.arange(2))
    return lambda: array.gather(np.arange(ROWS)).sum()


def decompressed(folder: Path) -> Callable[[], object]:
    array = CompressedArray([folder / "packed"], [ROWS], 64)
    array.gather(np.arange(2), np.dtype(np.int64), 4)
    return lambda: array.gather(np.arange(ROWS), np.dtype(np.int64), 4).sum()


def compiled(folder: Path) -> Callable[[], object]:
    """A loop without the interpreter's lock, on another thread."""
    from concurrent.futures import ThreadPoolExecutor

    import numba

    array = np.asarray(open_array(folder / "rows.npy"))

    @numba.njit(nogil=True)
    def total(rows: np.ndarray) -> int:
        out = 0
        for row in range(len(rows)):
            out ^= rows[row, 0]
        return out

    total(array[:1])
    return lambda: ThreadPoolExecutor(1).submit(total, array).result()


READERS = {"rows.npy": gathered, "packed.zst": decompressed, "rows.npy compiled": compiled}


def in_child(act: Callable[[], None]) -> tuple[int, str]:
    """The exit status of a forked process, negative for a signal, and what it wrote to stderr."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.dup2(writing, 2)
        signal.alarm(600)
        try:
            act()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as errors:
        written = errors.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), written


@pytest.mark.parametrize("name", READERS)
def test_process_that_reads_a_truncated_file_ends_with_its_name_and_the_repair(folder: Path, name: str) -> None:
    file = folder / name.split()[0]
    size = file.stat().st_size

    def act() -> None:
        read = READERS[name](folder)
        os.truncate(file, 8192)
        read()

    status, written = in_child(act)
    assert status == 2, written
    assert f"error: {file} has 8,192 bytes instead of {size:,}. `retro verify DATASTORE --repair`" in written


@pytest.mark.parametrize("name", READERS)
def test_process_that_keeps_running_raises_after_the_read(folder: Path, name: str) -> None:
    def act() -> None:
        damage_found.keep_running([folder.parents[1]])
        read = READERS[name](folder)
        os.truncate(folder / name.split()[0], 8192)
        try:
            read()
            damage_found.require_whole()
        except DamagedFile as error:
            os.write(2, f"raised: {error}".encode())

    status, written = in_child(act)
    assert status == 0, written
    # A read may notice zeros itself: they are no frame of compressed votes.
    assert re.match(rf"raised: .*{name.split()[0]} has (8,192 bytes instead of|a frame that)", written)


def test_file_that_was_removed_after_it_was_truncated_is_named(folder: Path) -> None:
    def act() -> None:
        read = gathered(folder)
        os.truncate(folder / "rows.npy", 0)
        (folder / "rows.npy").unlink()
        read()

    status, written = in_child(act)
    assert (status, "rows.npy was truncated and removed while it was read" in written) == (2, True)


def test_other_causes_of_the_signal_have_their_usual_effect() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from indexing.store import mapped; from pathlib import Path\n"
    code += "mapped.registered(Path('none')); import os, signal; os.kill(os.getpid(), signal.SIGBUS)"
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], stderr=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGBUS


def test_files_are_mapped_in_one_place() -> None:
    maps = re.compile(r"np\.load\(.*mmap_mode|np\.memmap\(|\bmmap\.mmap\(|IO_FLAG_ONDISK|tantivy\.Index\.open")
    sources = [path for layer in ("indexing", "retro", "pipelines") for path in (ROOT / layer).rglob("*.py")]
    others = [path for path in sources if maps.search(path.read_text()) and path != ROOT / "indexing/store/mapped.py"]
    assert [path for path in others if "registered(" not in path.read_text()] == []
