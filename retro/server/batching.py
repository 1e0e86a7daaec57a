"""Concurrent requests become few calls: while a worker is busy requests gather, and it takes all that are there.

    requests ──► queue ──► one thread: what has gathered, by key ──► work(key, items) ──► each request its own results

Nothing waits for company: a request that finds the worker free is worked on at once and alone. Requests with the same key
are worked on together, and a key holds all that the answer depends on, so that no answer depends on the company.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class _Request(Generic[K, T, R]):
    key: K
    items: Sequence[T]
    answer: "Future[list[R]]"


class Batcher(Generic[K, T, R]):
    """`await batcher(key, items)` returns what `work(key, items)` does, called for several requests at once.

    Works from any number of event loops; the thread starts with the first request.

    Args:
        name: of the thread.
        work: (key, items) → a result for each item, in their order. Called on one thread, one call at a time.
        max_batch: items in one call, unless a single request has more.
        on_batch: called with the number of items of each call.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[K, list[T]], Sequence[R]],
        max_batch: int,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._work, self._max_batch, self._on_batch = work, max_batch, on_batch
        self._waiting: queue.SimpleQueue[_Request[K, T, R] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._starting = threading.Lock()

    def __len__(self) -> int:
        """Requests that wait."""
        return self._waiting.qsize()

    async def __call__(self, key: K, items: Sequence[T]) -> list[R]:
        """Results of the items in their order. Cancelled before its turn, a request is never worked on."""
        if not items:
            return []
        if self._thread.ident is None:
            with self._starting:
                if self._thread.ident is None:
                    self._thread.start()
        request = _Request[K, T, R](key, items, Future())
        self._waiting.put(request)
        return await asyncio.wrap_future(request.answer)

    def close(self) -> None:
        """Let the thread end after what waits."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            gathered, size, last = [first], len(first.items), False
            while size < self._max_batch and not last:
                try:
                    following = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    last = True
                else:
                    gathered.append(following)
                    size += len(following.items)
            by_key: dict[K, list[_Request[K, T, R]]] = {}
            for request in gathered:
                if request.answer.set_running_or_notify_cancel():
                    by_key.setdefault(request.key, []).append(request)
            for key, requests in by_key.items():
                self._answer(key, requests)
            if last:
                return

    def _answer(self, key: K, requests: list[_Request[K, T, R]]) -> None:
        """Work on requests with one key together; where that fails, on each alone, so that one fails only itself."""
        items = [item for request in requests for item in request.items]
        self._on_batch(len(items))
        try:
            results = self._work(key, items)
        except Exception as error:
            if len(requests) == 1:
                requests[0].answer.set_exception(error)
            else:
                for request in requests:
                    self._answer(key, [request])
            return
        start = 0
        for request in requests:
            request.answer.set_result(list(results[start : start + len(request.items)]))
            start += len(request.items)
