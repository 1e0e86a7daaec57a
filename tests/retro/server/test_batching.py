"""Concurrent requests are batched, and batching does not change any answer."""

import asyncio
import threading
import time

import pytest

from indexing.store.errors import InputError
from retro.server import batching
from retro.server.batching import Batcher
from tests.conftest import PATIENCE, wait_until


class Work:
    """Doubles numbers. The first call blocks until `let_go` is set; 13 raises InputError."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.let_go, self.begun = threading.Event(), threading.Event()

    def __call__(self, key: str, items: list[int]) -> list[int]:
        self.calls.append((key, list(items)))
        self.begun.set()
        assert self.let_go.wait(PATIENCE)
        if 13 in items:
            raise InputError("13")
        return [2 * item for item in items]


async def gathered(batcher: Batcher, work: Work, requests: list[tuple[str, list[int]]]) -> list:
    """Answers of requests that came while the worker was busy."""
    busy = asyncio.ensure_future(batcher("first", [0]))
    await asyncio.to_thread(work.begun.wait, PATIENCE)
    waiting = [asyncio.ensure_future(batcher(*request)) for request in requests]
    await asyncio.sleep(0)
    assert len(batcher) == len(requests)
    work.let_go.set()
    assert await busy == [0]
    return await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize(
    ("max_batch", "cost", "requests", "calls"),
    [
        (100, 0, [("a", [1, 2]), ("b", [3]), ("a", [4])], [("a", [1, 2, 4]), ("b", [3])]),
        (2, 0, [("a", [n]) for n in range(5)], [("a", [0, 1]), ("a", [2, 3]), ("a", [4])]),
        (10, 1, [("a", [4]), ("a", [5]), ("a", [30]), ("a", [1, 2]), ("a", [3])], [("a", [4, 5]), ("a", [30]), ("a", [1, 2, 3])]),
    ],
    ids=["equal keys share a call", "a batch has a maximum size", "an expensive request runs alone"],
)  # fmt: skip
def test_waiting_requests_are_batched_by_key_and_cost(max_batch: int, cost: int, requests: list, calls: list) -> None:
    work, sizes = Work(), list[int]()
    batcher = Batcher("test", work, max_batch, sizes.append, lambda key, item: item if cost else 1)
    answers = asyncio.run(gathered(batcher, work, requests))
    assert answers == [[2 * item for item in items] for _, items in requests]
    assert work.calls == [("first", [0]), *calls]
    assert sizes == [1, *(len(items) for _, items in calls)]


@pytest.mark.parametrize("keys", [["a"] * 6, ["a", "b"] * 3])
def test_a_small_request_does_not_wait_for_large_ones_that_came_before_it(keys: list[str]) -> None:
    work = Work()
    batcher = Batcher("test", work, 4)

    async def all_of_them() -> None:
        busy = asyncio.ensure_future(batcher("first", [0]))
        await asyncio.to_thread(work.begun.wait, PATIENCE)
        large = [asyncio.ensure_future(batcher(key, list(range(100, 140)))) for key in keys]
        await asyncio.sleep(0)
        small = asyncio.ensure_future(batcher("a", [7]))
        await asyncio.sleep(0)
        work.let_go.set()
        assert await asyncio.gather(busy, small) == [[0], [14]]
        assert await asyncio.gather(*large) == [[2 * item for item in range(100, 140)]] * 6

    asyncio.run(all_of_them())
    place = next(number for number, (_, items) in enumerate(work.calls) if 7 in items)
    assert place <= 2 * len(set(keys))  # after the call that was under way, the first or second of its key
    items = [item for _, items in work.calls for item in items]
    assert sorted(items) == sorted([0, 7, *list(range(100, 140)) * 6])  # each once


def test_a_cancelled_request_is_not_processed_to_its_end_or_not_at_all() -> None:
    work = Work()
    batcher = Batcher("test", work, 2)

    async def cancelled() -> None:
        large = asyncio.ensure_future(batcher("a", list(range(100))))
        await asyncio.to_thread(work.begun.wait, PATIENCE)
        waiting, stays = (asyncio.ensure_future(batcher("b", [number])) for number in (1, 2))
        await asyncio.sleep(0)
        for gone in (large, waiting):
            gone.cancel()
        await asyncio.sleep(0)
        assert large.cancelled()
        assert waiting.cancelled()
        work.let_go.set()
        assert await stays == [4]

    asyncio.run(cancelled())
    assert work.calls == [("a", [0, 1]), ("b", [2])]


@pytest.mark.parametrize("max_batch", [2, 100])
def test_a_request_that_fails_fails_alone_also_at_a_later_item(max_batch: int) -> None:
    work = Work()
    requests = [("a", [1, 2, 3, 13, 4]), ("a", [5, 6, 7, 8, 9])]
    failed, answered = asyncio.run(gathered(Batcher("test", work, max_batch), work, requests))
    assert isinstance(failed, InputError)
    assert answered == [10, 12, 14, 16, 18]


def test_an_idle_worker_starts_immediately_and_an_empty_request_needs_none() -> None:
    work = Work()
    work.let_go.set()
    batcher = Batcher("test", work, 100)

    async def one_by_one() -> list[list[int]]:
        return [await batcher("a", items) for items in ([0], [], [1], [2])]

    for calls in (3, 6):  # another event loop can use the same worker
        assert asyncio.run(one_by_one()) == [[0], [], [2], [4]]
        assert len(work.calls) == calls


def test_an_idle_thread_ends_and_restarts_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_IDLE_SECONDS", 0.02)
    work = Work()
    work.let_go.set()
    batcher = Batcher("ends when idle", work, 100)
    for _ in range(3):
        assert asyncio.run(batcher("a", [1])) == [2]
        wait_until(lambda: all(thread.name != "ends when idle" for thread in threading.enumerate()))


def batch_sizes(clients: int, requests: int, seconds: float = 0.01) -> list[int]:
    """Sizes of the batches when each client sends its next request as soon as it is answered."""
    sizes: list[int] = []

    def work(key: str, items: list[int]) -> list[int]:
        time.sleep(seconds)
        return items

    batcher = Batcher("test", work, 100, sizes.append)

    async def client(number: int) -> None:
        for _ in range(requests):
            assert await batcher("a", [number]) == [number]

    async def all_of_them() -> None:
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*map(client, range(clients)))

    asyncio.run(all_of_them())
    return sizes


def test_a_single_client_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_WAIT_RATIO", 1e6)  # any wait would take hours
    assert batch_sizes(1, 5) == [1] * 5


def test_a_batch_does_not_wait_for_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client can send two requests at once, as `/score` does."""
    monkeypatch.setattr(batching, "_WAIT_RATIO", 1e6)
    work = Work()
    batcher = Batcher("test", work, 100)
    answers = asyncio.run(asyncio.wait_for(gathered(batcher, work, [("a", [1])]), PATIENCE))
    assert answers == [[2]]


def test_just_answered_clients_join_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_WAIT_RATIO", 100)  # a second: enough for any machine, and only the end waits
    first, *others = batch_sizes(6, 5)
    together = others[: others.index(6) + 4] if 6 in others else others
    assert together[-4:] == [6] * 4, (first, others)


def test_the_wait_for_absent_clients_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clients leave; the remaining one is still answered."""
    monkeypatch.setattr(batching, "_WAIT_RATIO", 0.5)
    assert sum(batch_sizes(4, 1)) == 4
