"""Threads that help each other, and what they leave as it was."""

import threading
from collections.abc import Iterator

import pytest
import torch

from indexing.threads import one_ahead, one_thread_each


def test_each_item_is_worked_on_with_one_thread_and_torch_gets_its_own_back() -> None:
    before, seen = torch.get_num_threads(), []
    with one_thread_each(3) as run:
        run(lambda item: seen.append((item, torch.get_num_threads())), range(50))
    assert sorted(seen) == [(item, 1) for item in range(50)]
    assert torch.get_num_threads() == before


def test_an_error_in_a_thread_arrives() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), one_thread_each(2) as run:
        run(lambda item: 1 // item, [1, 0])
    assert torch.get_num_threads() == before


def test_the_next_item_is_made_while_one_is_used() -> None:
    made = threading.Event()

    def items() -> Iterator[int]:
        yield 0
        made.set()
        yield 1

    ahead = one_ahead(items())
    assert next(ahead) == 0
    assert made.wait(timeout=10)
    assert list(ahead) == [1]


def test_an_error_of_the_source_comes_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise ValueError("the second")

    ahead = one_ahead(items())
    assert next(ahead) == 0
    with pytest.raises(ValueError, match="the second"):
        next(ahead)
