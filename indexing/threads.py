"""Work on several threads."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def one_thread_each(workers: int | None = None) -> Iterator[Callable[[Callable[[Any], object], Iterable[Any]], object]]:
    """Yields `run(function, items)`, which calls the function with each item and returns when all are done.

    Every thread calculates with one, so the bytes do not depend on how many there are: kernels that share a product among
    threads round differently with another number of them.

    Args:
        workers: threads; as many as torch has by default.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(workers or threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield lambda function, items: list(pool.map(function, items))
    finally:
        pool.shutdown()
        torch.set_num_threads(threads)


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """The items in their order; while one is used, the next is being made on another thread."""
    source, end = iter(items), object()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, source, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, source, end)
            yield item  # type: ignore[misc]  # it is not `end`
