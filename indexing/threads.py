"""Run work on several threads."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_TORCH_THREADS = threading.RLock()  # torch's thread count is process-wide: whoever changes it restores it


@contextlib.contextmanager
def one_thread_each(workers: int | None = None) -> Iterator[Callable[[Callable[[Any], object], Sequence[Any]], object]]:
    """Yield `run(function, items)`, which calls the function with each item on several threads and waits for all.

    A single item runs on this thread: starting another one takes longer than the search of a single query.

    Torch uses one thread per call, so results do not depend on the number of threads: kernels that divide one product among
    threads round differently for another number of threads.

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
