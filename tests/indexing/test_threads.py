"""Work on several threads, and torch's number of threads during and after it."""

import threading

import pytest
import torch

from indexing.threads import map_ahead, one_thread_each
from tests.conftest import PATIENCE


def test_items_run_with_one_torch_thread_and_the_number_is_restored() -> None:
    before, seen = torch.get_num_threads(), []
    with one_thread_each(3) as run:
        run(lambda item: seen.append((item, torch.get_num_threads())), range(50))
    assert sorted(seen) == [(item, 1) for item in range(50)]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("size", [1, 3])
def test_only_a_single_item_runs_on_the_calling_thread(size: int) -> None:
    seen: set[int] = set()
    with one_thread_each(3) as run:
        run(lambda _: seen.add(threading.get_ident()), range(size))
    assert (threading.get_ident() in seen) == (size == 1)


def test_overlapping_users_restore_the_original_number_of_threads() -> None:
    before, entered, inside = torch.get_num_threads(), threading.Event(), threading.Event()

    def first() -> None:
        with one_thread_each(1):
            entered.set()
            inside.wait(timeout=0.3)  # a second user could enter here if it were allowed to

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


def test_error_in_a_thread_is_raised_and_threads_are_restored() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), one_thread_each(2) as run:
        run(lambda item: 1 // item, [1, 0])
    assert torch.get_num_threads() == before


def test_results_are_ordered_and_the_next_ones_are_computed_ahead() -> None:
    made = [threading.Event() for _ in range(5)]

    def make(number: int) -> int:
        made[number].set()
        return number

    results = map_ahead(make, range(5), 2)
    assert next(results) == 0
    assert made[1].wait(timeout=PATIENCE)
    assert made[2].wait(timeout=PATIENCE)
    assert not made[4].is_set()  # the whole input is not computed at once
    assert list(results) == [1, 2, 3, 4]


def test_error_is_raised_at_the_position_of_its_item() -> None:
    results = map_ahead(lambda item: 1 // item, [1, 0, 1], 2)
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
