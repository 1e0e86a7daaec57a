"""Requests that come together are worked on together, and no answer depends on the company."""

import asyncio
import threading
import time

import pytest

from indexing.store.errors import InputError
from retro.server import batching
from retro.server.batching import Batcher, Wanted
from tests.conftest import PATIENCE, wait_until


class Work:
    """Doubles numbers; the first call waits until it is let go; 13 cannot be doubled."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.let_go, self.begun = threading.Event(), threading.Event()

    def __call__(self, key: str, items: list[int], wanted: Wanted) -> list[int]:
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


def test_what_waits_with_one_key_is_one_call_and_each_gets_its_own() -> None:
    work, sizes = Work(), list[int]()
    batcher = Batcher("test", work, 100, sizes.append)
    answers = asyncio.run(gathered(batcher, work, [("a", [1, 2]), ("b", [3]), ("a", [4])]))
    assert answers == [[2, 4], [6], [8]]
    assert work.calls == [("first", [0]), ("a", [1, 2, 4]), ("b", [3])]
    assert sizes == [1, 3, 1]


def test_a_batch_is_no_larger_than_allowed() -> None:
    work = Work()
    batcher = Batcher("test", work, 2)
    assert asyncio.run(gathered(batcher, work, [("a", [n]) for n in range(5)])) == [[2 * n] for n in range(5)]
    assert [items for _, items in work.calls] == [[0], [0, 1], [2, 3], [4]]


def test_what_a_batch_costs_decides_and_a_large_request_is_alone() -> None:
    work = Work()
    batcher = Batcher("test", work, 10, cost=lambda key, item: item)
    requests = [("a", [4]), ("a", [5]), ("a", [30]), ("a", [1, 2]), ("a", [3])]
    assert asyncio.run(gathered(batcher, work, requests)) == [[8], [10], [60], [2, 4], [6]]
    assert [items for _, items in work.calls] == [[0], [4, 5], [30], [1, 2, 3]]


def test_work_can_ask_who_still_waits() -> None:
    found: list[bool] = []
    begun, go_on = ({key: threading.Event() for key in ("first", "a")} for _ in range(2))

    def work(key: str, items: list[int], wanted: Wanted) -> list[int]:
        begun[key].set()
        assert go_on[key].wait(10)
        if key == "a":
            found.extend(map(wanted, range(len(items))))
        return items

    async def one_goes() -> None:
        batcher = Batcher("test", work, 100)
        first = asyncio.ensure_future(batcher("first", [0]))
        await asyncio.to_thread(begun["first"].wait, 10)
        gone, stays = (asyncio.ensure_future(batcher("a", items)) for items in ([1, 2], [3]))
        await asyncio.sleep(0)
        go_on["first"].set()
        await first
        await asyncio.to_thread(begun["a"].wait, 10)
        gone.cancel()
        await asyncio.sleep(0)
        go_on["a"].set()
        assert await stays == [3]

    asyncio.run(one_goes())
    assert found == [False, False, True]


def test_an_idle_worker_starts_at_once() -> None:
    work = Work()
    work.let_go.set()
    batcher = Batcher("test", work, 100)

    async def one_by_one() -> list[list[int]]:
        return [await batcher("a", [n]) for n in range(3)]

    assert asyncio.run(one_by_one()) == [[0], [2], [4]]
    assert len(work.calls) == 3
    # Another event loop may go on with the same worker.
    assert asyncio.run(one_by_one()) == [[0], [2], [4]]


def test_one_bad_request_fails_alone() -> None:
    work = Work()
    good, bad, also_good = asyncio.run(
        gathered(Batcher("test", work, 100), work, [("a", [1]), ("a", [13]), ("a", [2])])
    )
    assert (good, also_good) == ([2], [4])
    assert isinstance(bad, InputError)


def test_what_was_cancelled_is_not_worked_on() -> None:
    work = Work()
    batcher = Batcher("test", work, 100)

    async def cancelled() -> None:
        busy = asyncio.ensure_future(batcher("first", [0]))
        await asyncio.to_thread(work.begun.wait, PATIENCE)
        gone = asyncio.ensure_future(batcher("a", [1]))
        stays = asyncio.ensure_future(batcher("a", [2]))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        work.let_go.set()
        assert await asyncio.gather(busy, stays) == [[0], [4]]

    asyncio.run(cancelled())
    assert work.calls == [("first", [0]), ("a", [2])]


def test_nothing_to_do_needs_no_worker() -> None:
    work = Work()
    assert asyncio.run(Batcher("test", work, 100)("a", [])) == []
    assert work.calls == []


def test_the_thread_ends_when_idle_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_IDLE_SECONDS", 0.02)
    work = Work()
    work.let_go.set()
    batcher = Batcher("ends when idle", work, 100)
    for _ in range(3):
        assert asyncio.run(batcher("a", [1])) == [2]
        wait_until(lambda: all(thread.name != "ends when idle" for thread in threading.enumerate()))


def sizes_with(clients: int, requests: int, seconds: float = 0.01) -> list[int]:
    """Sizes of the batches of clients that each ask again as soon as they have been answered."""
    sizes: list[int] = []

    def work(key: str, items: list[int], wanted: Wanted) -> list[int]:
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


def test_a_lone_client_never_waits_for_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_WAIT_RATIO", 1e6)  # any wait would be for hours
    assert sizes_with(1, 5) == [1] * 5


def test_what_has_another_key_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client may ask for two things at once, as `/score` does."""
    monkeypatch.setattr(batching, "_WAIT_RATIO", 1e6)
    work = Work()
    batcher = Batcher("test", work, 100)
    answers = asyncio.run(asyncio.wait_for(gathered(batcher, work, [("a", [1])]), PATIENCE))
    assert answers == [[2]]


def test_those_just_answered_join_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_WAIT_RATIO", 100)  # a second: long enough for any machine; waited only at the end
    first, *others = sizes_with(6, 5)
    together = others[: others.index(6) + 4] if 6 in others else others
    assert together[-4:] == [6] * 4, (first, others)


def test_who_does_not_come_is_waited_for_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three go and one stays, who is answered all the same."""
    monkeypatch.setattr(batching, "_WAIT_RATIO", 0.5)
    assert sum(sizes_with(4, 1)) == 4
