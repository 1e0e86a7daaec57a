"""Dynamic batching: requests that arrive while a worker is busy are processed together in its next call.

    requests ──► queue ──► one thread: an item of each request with the first one's key, again and again, up to a full batch
                   ▲                        │
                   └── requests with items left, at the end ◄── work(key, items) ──► results of each request

If the worker is free, it processes a request at once and alone. Requests with the same key share a call. A key contains
everything that an answer depends on, so no answer depends on the other requests of its batch. The total cost of its
items limits a batch, and requests take turns item by item. So a large request delays a small one by a batch, not by its
length.

A client that was just answered can join the next batch: it often sends its next request at once. Without these clients
the next batch would hold about half of the possible requests. So the worker waits up to a third of the duration of its
last call, until as many requests are present as there were at the end of that call (answered plus waiting). A single
client never waits, and neither does a request with another key.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

from indexing.store.damage_found import require_whole

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
R = TypeVar("R")

_IDLE_SECONDS = 5.0
_WAIT_RATIO = 1 / 3  # longest wait for further requests, relative to the duration of the last call


@dataclass(eq=False)
class _Request(Generic[K, T, R]):
    key: K
    items: Sequence[T]
    answer: "asyncio.Future[list[R]]"
    results: list[R] = field(default_factory=list)  # of the first items


@dataclass(frozen=True)
class _LastBatch(Generic[K]):
    """What `Batcher` remembers of its last call.

    Attributes:
        key: of its requests.
        num_requests: answered requests plus those that were waiting at that moment.
        until: time until which the next batch waits for further requests, in seconds of `time.monotonic`.
    """

    key: K
    num_requests: int
    until: float


class Batcher(Generic[K, T, R]):
    """`await batcher(key, items)` returns the results of `work(key, items)`, which is called for items of several
    requests.

    It can be used from any number of event loops. The thread starts with the first request and ends after some idle
    time.

    Args:
        name: name of the thread.
        work: (key, items) → a result for each item, in order. Called on one thread, one call at a time.
        max_batch: largest total cost of a call, unless a single item costs more.
        on_batch: called with the number of items of each call.
        cost: (key, item) → cost of the item.
        before: called before each call of `work`; an exception ends the requests of the call.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[K, list[T]], Sequence[R]],
        max_batch: int,
        on_batch: Callable[[int], None] = lambda size: None,
        cost: Callable[[K, T], int] = lambda key, item: 1,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._before, self._work, self._cost = before, work, cost
        self._max_batch, self._on_batch = max_batch, on_batch
        self._waiting: deque[_Request[K, T, R]] = deque()
        self._name, self._running = name, False
        self._last: _LastBatch[K] | None = None
        self._arrival = threading.Condition()  # guards `_waiting` and `_running`

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    async def __call__(self, key: K, items: Sequence[T]) -> list[R]:
        """Return the results of the items in order. Items are no longer processed once the request is cancelled."""
        if not items:
            return []
        request = _Request[K, T, R](key, items, asyncio.get_running_loop().create_future())
        with self._arrival:
            self._waiting.append(request)
            self._arrival.notify()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return await request.answer

    def _run(self) -> None:
        while parts := self._gather():
            self._process(parts)

    def _gather(self) -> dict[_Request[K, T, R], int]:
        """Return requests with the first one's key, and the number of their next items in the batch. Empty = the thread
        ends."""
        with self._arrival:
            while not self._first():
                if not self._arrival.wait(_IDLE_SECONDS) and not self._waiting:
                    self._running = False
                    return {}
            last, key = self._last, self._waiting[0].key
            if last and last.key == key:
                self._arrival.wait_for(
                    lambda: len(self._waiting) >= last.num_requests or self._fill_a_batch(key),
                    max(0, last.until - time.monotonic()),
                )
            first = self._first()
            parts = self._parts(first.key) if first else {}
            self._waiting = deque(request for request in self._waiting if request not in parts)
        return parts or self._gather()

    def _first(self) -> _Request[K, T, R] | None:
        """Return the first request that was not cancelled; forget those before it."""
        while self._waiting and self._waiting[0].answer.cancelled():
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def _fill_a_batch(self, key: K) -> bool:
        size = 0
        for request in self._waiting:
            if request.key == key:
                for item in islice(request.items, len(request.results), None):
                    size += self._cost(key, item)
                    if size >= self._max_batch:
                        return True
        return False

    def _parts(self, key: K) -> dict[_Request[K, T, R], int]:
        """Give each request with a key an item in turn, up to a full batch."""
        turns = deque(other for other in self._waiting if other.key == key and not other.answer.cancelled())
        parts, size = dict[_Request[K, T, R], int](), 0
        while turns:
            request = turns.popleft()
            taken = parts.get(request, 0)
            index = len(request.results) + taken
            size += self._cost(key, request.items[index])
            if size > self._max_batch and parts:
                break
            parts[request] = taken + 1
            if index + 1 < len(request.items):
                turns.append(request)
        return parts

    def _process(self, parts: dict[_Request[K, T, R], int]) -> None:
        """Process the next items of requests together. If that fails, process each alone, so that only the faulty one
        fails."""
        (key,) = {request.key for request in parts}
        items = [
            item
            for request, count in parts.items()
            for item in request.items[len(request.results) : len(request.results) + count]
        ]
        self._on_batch(len(items))
        started = time.monotonic()
        answers: dict[_Request[K, T, R], list[R] | Exception] = {}
        try:
            self._before()
            results = iter(self._work(key, items))
            require_whole()
            for request, count in parts.items():
                request.results += islice(results, count)
                if len(request.results) == len(request.items):
                    answers[request] = request.results
        except Exception as error:
            if len(parts) > 1:
                for request, count in parts.items():
                    self._process({request: count})
                return
            answers = dict.fromkeys(parts, error)
        ended = time.monotonic()
        with self._arrival:
            self._waiting.extend(request for request in parts if request not in answers)
            # Count before the answers are sent: a client that returned already would be counted twice.
            present = len(answers) + len(self._waiting)
            self._last = _LastBatch(key, present, ended + _WAIT_RATIO * (ended - started))
        call_on_loops(
            (request.answer.get_loop(), partial(_answer, request.answer, answer)) for request, answer in answers.items()
        )


def _answer(future: "asyncio.Future[list[R]]", answer: list[R] | Exception) -> None:
    if future.done():
        return  # cancelled
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def call_on_loops(pairs: Iterable[tuple[asyncio.AbstractEventLoop, Callable[[], None]]]) -> None:
    """Make calls on event loops, in order. Each loop is woken once: that takes as long as a short search."""
    of_loops: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
    for loop, call in pairs:
        of_loops.setdefault(loop, []).append(call)
    for loop, calls in of_loops.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: no client waits
            loop.call_soon_threadsafe(_call_all, calls)


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()
