"""Dynamic batching: requests that arrive while a worker is busy are processed together in its next call.

    requests ──► queue ──► one thread: all waiting requests, by key ──► work(key, items) ──► results of each request

If the worker is free, it processes a request at once and alone. Requests with the same key share a call. A key contains
everything that an answer depends on, so no answer depends on the other requests of its batch. The total cost of its items
limits a batch, so a large request does not delay small ones that arrived before it. Long work calls `wanted` between its parts
and skips items whose client has disconnected or was answered 504.

A client that was just answered can join the next batch: it often sends its next request at once. Without these clients the next
batch would hold about half of the possible requests. So the worker waits up to a third of the duration of its last call, until
as many requests are present as there were at the end of that call (answered plus waiting). A single client never waits, and
neither does a request with another key.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
R = TypeVar("R")

Wanted = Callable[[int], bool]
"""Number of an item in a batch → True if a client still waits for its result."""

_IDLE_SECONDS = 5.0
_WAIT_RATIO = 1 / 3  # longest wait for further requests, relative to the duration of the last call


@dataclass(frozen=True)
class _Request(Generic[K, T, R]):
    key: K
    items: Sequence[T]
    answer: "asyncio.Future[list[R]]"


@dataclass(frozen=True)
class _LastBatch(Generic[K]):
    """What `Batcher` remembers of its last call.

    Attributes:
        key: of the answered requests.
        num_requests: answered requests plus those that were waiting at that moment.
        until: time until which the next batch waits for further requests, in seconds of `time.monotonic`.
    """

    key: K
    num_requests: int
    until: float


class Batcher(Generic[K, T, R]):
    """`await batcher(key, items)` returns the results of `work(key, items, wanted)`, which is called for several requests at once.

    It can be used from any number of event loops. The thread starts with the first request and ends after some idle time.

    Args:
        name: name of the thread.
        work: (key, items, wanted) → a result for each item, in order; the results of items that are no longer wanted are ignored.
            Called on one thread, one call at a time.
        max_batch: largest total cost of a call, unless a single request costs more.
        on_batch: called with the number of items of each call.
        cost: (key, item) → cost of the item.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[K, list[T], Wanted], Sequence[R]],
        max_batch: int,
        on_batch: Callable[[int], None] = lambda size: None,
        cost: Callable[[K, T], int] = lambda key, item: 1,
    ) -> None:
        self._work, self._max_batch, self._on_batch, self._cost = work, max_batch, on_batch, cost
        self._waiting: queue.SimpleQueue[_Request[K, T, R]] = queue.SimpleQueue()
        self._next: _Request[K, T, R] | None = None  # taken from the queue, but too large for the previous batch
        self._name, self._running = name, False
        self._last: _LastBatch[K] | None = None
        self._lock = (
            threading.Lock()
        )  # guards `_running`: no request is added between the thread's last check and its end

    def __len__(self) -> int:
        """Number of waiting requests."""
        return self._waiting.qsize() + (self._next is not None)

    async def __call__(self, key: K, items: Sequence[T]) -> list[R]:
        """Return the results of the items in order. A request that is cancelled while it waits is never processed."""
        if not items:
            return []
        request = _Request[K, T, R](key, items, asyncio.get_running_loop().create_future())
        with self._lock:
            self._waiting.put(request)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return await request.answer

    def _run(self) -> None:
        while True:
            try:
                first = self._next or self._waiting.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    self._running = not self._waiting.empty()
                    if not self._running:
                        return
                continue
            by_key: dict[K, list[_Request[K, T, R]]] = {}
            for request in self._gather(first):
                if not request.answer.cancelled():
                    by_key.setdefault(request.key, []).append(request)
            for key, requests in by_key.items():
                self._answer(key, requests)

    def _gather(self, first: _Request[K, T, R]) -> list[_Request[K, T, R]]:
        """Return the first request and those that wait behind it or arrive shortly, up to a full batch."""
        self._next, gathered, size = None, [first], self._cost_of(first)
        last = self._last if self._last and self._last.key == first.key else _LastBatch(first.key, 0, 0.0)
        while size < self._max_batch:
            timeout = last.until - time.monotonic() if len(gathered) < last.num_requests else 0
            try:
                request = self._waiting.get(timeout=max(0, timeout))
            except queue.Empty:
                break
            size += self._cost_of(request)
            if size > self._max_batch:
                self._next = request
                break
            gathered.append(request)
        return gathered

    def _cost_of(self, request: _Request[K, T, R]) -> int:
        return sum(self._cost(request.key, item) for item in request.items)

    def _answer(self, key: K, requests: list[_Request[K, T, R]]) -> None:
        """Process requests with the same key together. If that fails, process each alone, so that only the faulty one fails."""
        items = [item for request in requests for item in request.items]
        request_of = [request for request in requests for _ in request.items]
        self._on_batch(len(items))
        started = time.monotonic()
        try:
            results = iter(self._work(key, items, lambda number: not request_of[number].answer.cancelled()))
            answers: list[list[R] | Exception] = [list(islice(results, len(each.items))) for each in requests]
        except Exception as error:
            if len(requests) > 1:
                for request in requests:
                    self._answer(key, [request])
                return
            answers = [error]
        ended = time.monotonic()
        # Count before the answers are sent: a client that returned already would be counted twice.
        self._last = _LastBatch(key, len(requests) + len(self), ended + _WAIT_RATIO * (ended - started))
        _hand_over(requests, answers)


def _hand_over(requests: Sequence[_Request[K, T, R]], answers: Sequence[list[R] | Exception]) -> None:
    """Send the answers to the requests. Each event loop is woken once: that takes as long as a short search."""
    for loop in {request.answer.get_loop() for request in requests}:
        mine = [each for each in zip(requests, answers, strict=True) if each[0].answer.get_loop() is loop]
        with contextlib.suppress(RuntimeError):  # the loop is closed: no client waits
            loop.call_soon_threadsafe(_resume, mine)


def _resume(answered: Sequence[tuple[_Request[K, T, R], list[R] | Exception]]) -> None:
    for request, answer in answered:
        if request.answer.done():
            continue  # cancelled
        if isinstance(answer, Exception):
            request.answer.set_exception(answer)
        else:
            request.answer.set_result(answer)
