"""Concurrent requests become few calls: while a worker is busy requests gather, and it takes all that are there.

    requests ──► queue ──► one thread: what has gathered, by key ──► work(key, items) ──► each request its own results

A request that finds the worker free is worked on at once and alone. Requests with the same key are worked on together, and a
key holds all that the answer depends on, so that no answer depends on the company. A batch is limited by the cost of its items:
a large request does not hold back small ones that could have been answered before it. Long work asks `wanted` from time to time
and leaves out items whose client is gone or has been answered 504.

Clients that have just been answered often ask again at once. Were what has waited meanwhile worked on without them, batches
would be half as large as they could be. So the worker waits a moment, a third of the time that it has just worked, until as
many requests are there as were at the end of that work, answered and waiting. A lone client is all that there were, and who
asks for something else than those just answered waits for nobody.
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
"""Number of an item of a batch → whether a client still waits for it."""

_IDLE_SECONDS = 5.0
_SHARE_WAITED = 1 / 3  # of the time that the last requests took


@dataclass(frozen=True)
class _Request(Generic[K, T, R]):
    key: K
    items: Sequence[T]
    answer: "asyncio.Future[list[R]]"


@dataclass(frozen=True)
class _Company(Generic[K]):
    """Requests that were there when some had been worked on: these, and those that waited.

    Attributes:
        key: of the ones worked on.
        num_requests: of both.
        until: how long who has been answered may take to come back, in seconds of `time.monotonic`.
    """

    key: K
    num_requests: int
    until: float


class Batcher(Generic[K, T, R]):
    """`await batcher(key, items)` returns what `work(key, items, wanted)` does, called for several requests at once.

    Works from any number of event loops. The thread starts with a request, and ends when none has come for a while.

    Args:
        name: of the thread.
        work: (key, items, wanted) → a result for each item, in their order, anything for items that are not wanted any more.
            Called on one thread, one call at a time.
        max_batch: cost of one call, unless a single request costs more.
        on_batch: called with the number of items of each call.
        cost: of an item with a key.
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
        self._next: _Request[K, T, R] | None = None  # taken from the queue, and too large for the batch before it
        self._name, self._running = name, False
        self._last: _Company[K] | None = None
        self._lock = threading.Lock()  # of `_running`, and so that no request comes between the last look and the end

    def __len__(self) -> int:
        """Requests that wait."""
        return self._waiting.qsize() + (self._next is not None)

    async def __call__(self, key: K, items: Sequence[T]) -> list[R]:
        """Results of the items in their order. Cancelled before its turn, a request is never worked on."""
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
            for request in self._gathered(first):
                if not request.answer.cancelled():
                    by_key.setdefault(request.key, []).append(request)
            for key, requests in by_key.items():
                self._answer(key, requests)

    def _gathered(self, first: _Request[K, T, R]) -> list[_Request[K, T, R]]:
        """A request and those that wait behind it or come in a moment, up to a batch."""
        self._next, gathered, size = None, [first], self._cost_of(first)
        company = self._last if self._last and self._last.key == first.key else _Company(first.key, 0, 0.0)
        while size < self._max_batch:
            patience = company.until - time.monotonic() if len(gathered) < company.num_requests else 0
            try:
                request = self._waiting.get(timeout=max(0, patience))
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
        """Work on requests with one key together; where that fails, on each alone, so that one fails only itself."""
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
        # Before anybody can come back, who would be counted twice.
        self._last = _Company(key, len(requests) + len(self), ended + _SHARE_WAITED * (ended - started))
        _hand_over(requests, answers)


def _hand_over(requests: Sequence[_Request[K, T, R]], answers: Sequence[list[R] | Exception]) -> None:
    """Give requests their answers, all of a loop at once: to wake it takes as long as a short search."""
    for loop in {request.answer.get_loop() for request in requests}:
        mine = [each for each in zip(requests, answers, strict=True) if each[0].answer.get_loop() is loop]
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits
            loop.call_soon_threadsafe(_resume, mine)


def _resume(answered: Sequence[tuple[_Request[K, T, R], list[R] | Exception]]) -> None:
    for request, answer in answered:
        if request.answer.done():
            continue  # cancelled
        if isinstance(answer, Exception):
            request.answer.set_exception(answer)
        else:
            request.answer.set_result(answer)
