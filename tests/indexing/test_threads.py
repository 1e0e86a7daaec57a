"""Work on several threads, and torch's thread count afterwards."""

import threading

import pytest
import torch

from indexing.threads import map_ahead, one_thread_each
from tests.conftest import PATIENCE


def test_each_item_is_worked_on_with_one_thread_and_torch_gets_its_own_back() -> None:
    before, seen = torch.get_num_threads(), []
    with one_thread_each(3) as run:
        run(lambda item: seen.append((item, torch.get_num_threads())), range(50))
    assert sorted(seen) == [(item, 1) for item in range(50)]
    assert torch.get_num_threads() == before


def test_two_that_overlap_give_back_what_there_was() -> None:
    before, entered, inside = torch.get_num_threads(), threading.Event(), threading.Event()

    def first() -> None:
        with one_thread_each(1):
            entered.set()
            inside.wait(timeout=0.3)  # the second comes in here, if it is let

    def second() -> None:
        assert entered.wait(timeout=PATIENCE)
        with one_thread_each(1):
            inside.set()
            threads[0].join()

    threads = [threading.Thread(target=each) for each in (first, second)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    found: list[int] = []
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [before]


def test_an_error_in_a_thread_arrives() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), one_thread_each(2) as run:
        run(lambda item: 1 // item, [1, 0])
    assert torch.get_num_threads() == before


def test_results_come_in_order_and_the_next_ones_are_made_while_one_is_used() -> None:
    made = [threading.Event() for _ in range(5)]

    def make(number: int) -> int:
        made[number].set()
        return number

    results = map_ahead(make, range(5), 2)
    assert next(results) == 0
    assert made[1].wait(timeout=PATIENCE)
    assert made[2].wait(timeout=PATIENCE)
    assert not made[4].is_set()  # nor is everything made at once
    assert list(results) == [1, 2, 3, 4]


def test_an_error_comes_in_its_place() -> None:
    results = map_ahead(lambda item: 1 // item, [1, 0, 1], 2)
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
