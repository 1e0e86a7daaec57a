"""Work on several threads."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_TORCH_THREADS = threading.RLock()  # their number belongs to the process: whoever changes it gives back what there was


@contextlib.contextmanager
def one_thread_each(workers: int | None = None) -> Iterator[Callable[[Callable[[Any], object], Iterable[Any]], object]]:
    """Yields `run(function, items)`, which calls the function with each item and returns when all are done.

    Every thread calculates with one, so the bytes do not depend on how many there are: kernels that share a product among
    threads round differently with another number of them.

    Args:
        workers: threads; as many as torch has by default.
    """
    import torch

    with _TORCH_THREADS:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        pool = ThreadPoolExecutor(workers or threads, initializer=torch.set_num_threads, initargs=(1,))
        try:
            yield lambda function, items: list(pool.map(function, items))
        finally:
            pool.shutdown()
            torch.set_num_threads(threads)


def map_ahead(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """The results in the order of the items, some of them being made on other threads while one is used."""
    with ThreadPoolExecutor(workers) as pool:
        coming: deque[Future[R]] = deque()
        for item in items:
            coming.append(pool.submit(function, item))
            if len(coming) > workers:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
