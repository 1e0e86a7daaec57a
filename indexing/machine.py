"""What the machine offers and how to use it: memory, threads, and devices. torch is imported inside functions."""

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import platform
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal, TypeVar

Precision = Literal["auto", "float32", "tf32", "bfloat16", "float16"]

log = logging.getLogger("retro")

T = TypeVar("T")
R = TypeVar("R")

_GROUPS = Path("/sys/fs/cgroup")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_TORCH_THREADS = threading.RLock()  # torch's thread count is process-wide: whoever changes it restores it


def usable_cores() -> int:
    """Cores that this process may use: a container or `taskset` may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allowed_threads() -> int:
    """Threads of this process: those that its executor or the user gave it (`OMP_NUM_THREADS`), or one for each core."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else usable_cores()


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as Linux knows it, or the kind of machine elsewhere."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@functools.cache
def usable_memory(membership: Path = Path("/proc/self/cgroup"), groups: Path = _GROUPS) -> int:
    """The machine's memory in bytes, or the lowest limit of the process's control groups (Linux), as in a container.

    Args:
        membership: names the groups of the process.
        groups: where the groups of the machine are mounted.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    lines = membership.read_text().splitlines() if membership.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "":  # version 2
            limits += _limits(groups, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(groups / "memory", path, "memory.limit_in_bytes")
    return min(limits)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """The limits of a group and all groups that it is in."""
    group = root / path.lstrip("/")
    files = [folder / name for folder in (group, *group.parents) if folder.is_relative_to(root)]
    texts = [file.read_text().strip() for file in files if file.exists()]
    return [int(text) for text in texts if text.isdigit()]  # version 2 writes `max` for no limit


@contextlib.contextmanager
def one_thread_each(workers: int | None = None) -> Iterator[Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]]:
    """Yield `run(function, items)`, which calls the function with each item on several threads and returns the results
    in order.

    A single item runs on this thread: starting another one takes longer than the search of a single query.

    Torch uses one thread per call, so results do not depend on the number of threads: kernels that divide one product
    among threads round differently for another number of threads.

    Args:
        workers: threads; None = torch's default number.
    """
    import torch

    with _TORCH_THREADS:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        pool = ThreadPoolExecutor(workers or threads, initializer=torch.set_num_threads, initargs=(1,))
        try:
            yield lambda function, items: list((pool.map if len(items) > 1 else map)(function, items))
        finally:
            pool.shutdown()
            torch.set_num_threads(threads)


def on_background_thread(name: str) -> ThreadPoolExecutor:
    """Start a thread with a name, for background work while torch computes on the calling thread.

    OpenMP starts helper threads for every thread that computes something large, and keeps them until that thread ends.
    If there are more helpers than cores, all of them sleep between operations, and small operations take up to twice as
    long. So torch uses one thread in the background, without helpers.
    """
    import torch

    with _TORCH_THREADS:
        threads = torch.get_num_threads()
        pool = ThreadPoolExecutor(1, name)
        pool.submit(torch.get_num_threads).result()  # later, this would set the thread's number to the process's
        pool.submit(torch.set_num_threads, 1).result()
        torch.set_num_threads(threads)  # the number for threads to come
    return pool


def on_ending_thread(function: Callable[[], R]) -> R:
    """Call a function on a new thread. When it ends, OpenMP's helper threads end too; see `on_background_thread`. Use it
    to prepare what another thread computes with."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def for_each(function: Callable[[T], object], items: Sequence[T], workers: int | None = None) -> None:
    """Call a function of numpy with each item, on several threads; a single item or worker stays on this thread.

    For the few queries of a server, starting threads would take longer than the work.

    Args:
        function: called with each item. What it calls of other libraries uses one thread, unless it runs on this
            thread.
        items: the items.
        workers: threads; None = torch's default number.
    """
    if len(items) < 2 or workers == 1:
        for item in items:
            function(item)
    else:
        with one_thread_each(workers) as run:
            run(function, items)


@functools.cache
def compiled(function: Callable[..., R], *, free_sums: bool = False) -> Callable[..., R]:
    """Compile loops over numpy arrays with numba, on the first call with some types of arguments. It takes about a
    second, more for functions that call others, and the file system keeps the result for later processes.

    Floats are rounded as written, so all processors give the same results. With `free_sums`, sums are
    added in the fastest order, which differs between processors but not between calls. The function releases the GIL, does not
    check indexes, and calls only functions of its own file. Constants keep their values: who changes one in another
    file has to change the function's file too, since the kept result is that of the file.

    Indexes that come from a file are checked before the call, or by the function: a wrong one ends the process.
    """
    import numba

    _log_compilations()
    _copy_read_only_cache()
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    if free_sums:
        options["fastmath"] = {"reassoc", "contract", "nsz"}
    try:
        dispatcher = numba.njit(cache=True, **options)(function)
        _KEPT[function] = True
    except RuntimeError:  # neither the folder of the code nor the user's cache can be written to
        dispatcher = numba.njit(**options)(function)
        _KEPT[function] = False
    return dispatcher


_KEPT: dict[Callable[..., object], bool] = {}
"""Functions of `compiled`, and whether the file system keeps the results."""


@functools.cache
def _log_compilations() -> None:
    """Log why a first call takes long. numba tells when it compiles; it does not if it has kept the result."""
    from numba.core import event

    class Compilations(event.Listener):
        def on_start(self, event: Any) -> None:
            function = event.data["dispatcher"].py_func
            if function in _KEPT:
                _log_compilation(function.__module__, _KEPT[function])

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", Compilations())


@functools.cache
def _log_compilation(module: str, kept: bool) -> None:
    how_often = "once for this version of the program and this processor"
    if not kept:
        how_often = (
            "in every process, since no folder for the results can be written (set NUMBA_CACHE_DIR to one that can)"
        )
    log.info("Compiling the loops of %s, %s: up to half a minute.", module, how_often)


@functools.cache
def _copy_read_only_cache() -> None:
    """Let numba use a copy of its cache in `NUMBA_CACHE_DIR` if that is read-only, as in a container.

    It ignores a cache that it cannot write to.
    """
    from numba import config

    stored = Path(config.CACHE_DIR)
    if config.CACHE_DIR and stored.is_dir() and not os.access(stored, os.W_OK):
        with contextlib.suppress(OSError):  # without room for the copy, this process compiles for itself
            copy = Path(tempfile.mkdtemp(prefix="retro-compiled-"))
            atexit.register(shutil.rmtree, copy, ignore_errors=True)
            for file in filter(Path.is_file, stored.rglob("*")):
                target = copy / file.relative_to(stored)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
            config.CACHE_DIR = str(copy)


def map_ahead(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """Yield results in the order of the items, and compute some of the next ones on other threads."""
    with ThreadPoolExecutor(workers) as pool:
        coming: deque[Future[R]] = deque()
        for item in items:
            coming.append(pool.submit(function, item))
            if len(coming) > workers:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def map_largest_first(
    function: Callable[[T, Callable[[int], None]], R],
    items: Sequence[T],
    sizes: Sequence[int],
    advance: Callable[[int], object] = lambda _: None,
) -> list[R]:
    """Call a function that needs no interpreter lock, such as hashing, with each item, on all cores.

    The first exception, or Ctrl-C, ends all calls: within them, `count` raises then.

    Args:
        function: called with an item and `count`, which it calls every few milliseconds with the units it finished.
        items: the items.
        sizes: of the items. The largest ones begin first, so that none of them runs alone at the end.
        advance: receives the units. One thread calls it at a time.

    Returns:
        the results, in the order of the items.
    """
    lock, ended = threading.Lock(), threading.Event()

    def count(units: int) -> None:
        with lock:
            if ended.is_set():
                raise CancelledError
            advance(units)

    with ThreadPoolExecutor(usable_cores()) as pool:
        try:
            order = sorted(range(len(items)), key=sizes.__getitem__, reverse=True)
            calls = {index: pool.submit(function, items[index], count) for index in order}
            for call in wait(calls.values(), return_when=FIRST_EXCEPTION).done:
                call.result()
            return [calls[index].result() for index in range(len(items))]
        except BaseException:
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def choose_blas_kernels(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Let OpenBLAS multiply with all vector instructions of an Intel processor. Call it before numpy and Faiss are
    imported.

    Their wheels bring OpenBLAS of 2021 and 2023. It takes an Intel server that it does not know for a processor of 2004
    (OpenBLAS, pull requests 3485 and 4268), and k-means takes five times as long (docs/results/speed.md).

    Args:
        cpuinfo: Linux's description of the processor; nothing is done where it is missing.
    """
    description = cpuinfo.read_text() if cpuinfo.exists() else ""
    if "GenuineIntel" in description:
        flags = description.split()
        kernels = "SkylakeX" if "avx512vl" in flags else "Haswell" if "avx2" in flags else None
        if kernels:
            os.environ.setdefault("OPENBLAS_CORETYPE", kernels)


def resolve(device: str) -> str:
    """Resolve `auto` to CUDA if available, else to the CPU. Other values stay."""
    import torch

    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def onednn_has_bfloat16() -> bool:
    """True if oneDNN, which multiplies matrices for PyTorch on a CPU, has kernels in bfloat16 for this one.

    They need AVX512 or AVX-NE-CONVERT, and `ONEDNN_MAX_CPU_ISA` can forbid these. Functions for such products exist in
    PyTorch on every CPU, and raise RuntimeError without the kernels.
    """
    import torch

    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def keep_freed_memory() -> None:
    """Let this process keep and reuse the memory of freed CPU tensors.

    glibc returns every large block to the kernel at once, and requests a new one, page fault by page fault, for the
    next tensor. That takes a fifth of a training step (docs/explanation/training-step.md) and a tenth of a search. With
    another C library this function has no effect.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
