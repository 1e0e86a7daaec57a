"""Rows of an order lead to the longest match and to all rows that share it, without reading any text."""

from pathlib import Path

import numpy as np
import pytest

from indexing.store.sharded_array import open_array
from indexing.suffixes import compiled_search
from indexing.suffixes.compiled_search import PART_COLUMNS, Files
from indexing.suffixes.order import blocks
from indexing.suffixes.rows import LONGEST_SHARED, RowWriter, open_rows, spread, stride


def following(rows: np.ndarray) -> np.ndarray:
    return rows * 7 % 60_000 - 1


def texts_in_order(tokens: np.ndarray, count: int, dtype: type) -> np.ndarray:
    """Random texts that share long ends, sorted: [count, 64]; some begin after a few tokens."""
    random = np.random.default_rng(0)
    window = tokens[
        np.minimum(random.integers(0, len(tokens), (count, 64)), random.integers(0, len(tokens), (count, 64)))
    ]
    copied = random.integers(0, 40, count)
    window = np.where(np.arange(64) < copied[:, None], window[random.integers(0, min(50, count), count)], window)
    window[np.arange(64) >= random.integers(1, 200, count)[:, None]] = 0
    return window[np.lexsort(window.T[::-1])].astype(dtype)


class Rows:
    """The rows of an order of one part."""

    def __init__(self, folder: Path, count: int, dtype: np.dtype) -> None:
        self._rows, self._order = open_rows(folder, count, dtype), np.array([0, 1])
        self._part = np.zeros(PART_COLUMNS, np.int64)
        self._part[1:4] = count, self._rows.ctypes.data, len(self._rows)
        addresses = [0, self._part.ctypes.data, 0, self._order.ctypes.data]
        self._damaged = np.zeros(1, np.int64)
        sizes = 0, 1, 1, 1, 1 << 32, 2, self._rows.shape[1], 4, 256, 1024, 8
        self.files = Files(*addresses, *sizes, self._damaged.ctypes.data)

    def change(self, number: int) -> None:
        """Let all stored numbers be this one, and the vocabulary be small."""
        self._rows = np.full_like(self._rows, number, subok=False)
        self._part[2] = self._rows.ctypes.data
        self.files = self.files._replace(vocabulary=1000)

    def around(self, row: int, size: int, most: int = 1 << 48) -> tuple[int, int, int]:
        return compiled_search.around(0, row, size, most, self.files)

    def deepest(self, first: int, stop: int, text: np.ndarray) -> tuple[int, int]:
        return compiled_search.deepest(0, first, stop, text, len(text), self.files)

    def following(self, rows: np.ndarray, step: int) -> np.ndarray:
        return compiled_search.following_rows(np.zeros(len(rows), np.int64), rows, step, self.files)


def shared_tokens(window: np.ndarray, text: np.ndarray) -> np.ndarray:
    """How many last tokens each of some texts has in common with a text."""
    return np.logical_and.accumulate((window == text) & (window > 0), axis=1).sum(axis=1)


@pytest.fixture(params=[(20, np.uint16), (1000, np.uint16), (5000, np.uint32), (40_000, np.uint16)])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[np.ndarray, Rows]:
    """Texts in order, and their rows."""
    count, dtype = request.param
    window = texts_in_order(np.array([1, 2, 3, 3 + 2048, 4, 5, 9, 17]), count, dtype)
    tokens = np.column_stack([(following(np.arange(count)) + 1).astype(dtype), window])
    with RowWriter(tmp_path, window.dtype) as file:
        for rows in blocks(count, 1001):
            file.append(tokens[rows])
    return window, Rows(tmp_path, count, window.dtype)


def test_the_rows_around_a_row_are_all_that_share_its_last_tokens(written: tuple[np.ndarray, Rows]) -> None:
    window, rows = written
    for row in np.linspace(0, len(window) - 1, 60).astype(int).tolist():
        length = min(int((window[row] > 0).sum()), LONGEST_SHARED)
        shared = shared_tokens(window, window[row])
        for size in {1, 2, 3, 5, 12, length} & {*range(length + 1)}:
            assert np.flatnonzero(shared >= size).tolist() == [*range(*rows.around(row, size)[:2])]


@pytest.mark.parametrize("most", [1, 2, 32])
def test_a_range_that_is_drawn_from_has_the_same_rows_of_that_level(
    most: int, written: tuple[np.ndarray, Rows]
) -> None:
    """Its ends are not read, so it can have a few rows less."""
    window, rows = written
    for row in np.linspace(0, len(window) - 1, 60).astype(int).tolist():
        for size in {1, 2, 3, 5} & {*range(1 + int((window[row] > 0).sum()))}:
            first, stop, nothing = rows.around(row, size)
            begin, end, loose = rows.around(row, size, most)
            step = stride(end - begin, most)
            assert [at for at in range(first, stop) if at % step == 0] == [
                at for at in range(begin, end) if at % step == 0
            ]
            assert first <= begin <= row < end <= stop <= first + end - begin + loose
            assert nothing == 0
            assert (end == len(window)) == (stop == len(window))


def test_what_follows_is_read_at_every_step_also_in_a_part_of_fewer_levels(written: tuple[np.ndarray, Rows]) -> None:
    """A match that is frequent in another part is read in steps for which this one has too few rows."""
    window, rows = written
    for step in (1, 32, 32**2, 32**3, 32**4):
        multiples = np.arange(0, len(window), step)
        assert rows.following(multiples, step).tolist() == following(multiples).tolist()


@pytest.mark.parametrize("damaged", ["shared", "token"])
def test_content_that_leads_outside_of_a_part_is_an_error(damaged: str, written: tuple[np.ndarray, Rows]) -> None:
    _, rows = written
    rows.change(0xFFFF)
    with pytest.raises(compiled_search.DamagedRows):
        rows.around(5, 1) if damaged == "shared" else rows.following(np.array([5]), 1)


def test_the_deepest_row_shares_most_with_a_text_unless_two_tokens_look_the_same(
    written: tuple[np.ndarray, Rows],
) -> None:
    window, rows = written
    random, exact = np.random.default_rng(1), 0
    for _ in range(200):
        text = window[random.integers(len(window))].copy()
        text[random.integers(0, 64)] = random.choice([2, 3, 9, 30])
        text = text[: int((text == 0).argmax()) or 64]
        shared = shared_tokens(window[:, : len(text)], text)
        first = random.integers(0, int(shared.argmax()) + 1)
        stop = random.integers(int(shared.argmax()) + 1, len(window) + 1)
        row, followed = rows.deepest(int(first), int(stop), text.astype(np.int64) - 1)
        best = int(shared[first:stop].max())
        same = followed >> int(shared[row]) & 1
        assert min(shared[row], LONGEST_SHARED) == min(best, LONGEST_SHARED) or same
        exact += not same
    assert exact > 40


def test_what_follows_is_the_same_in_all_levels(written: tuple[np.ndarray, Rows]) -> None:
    window, rows = written
    for step in (1, 32, 1024):
        if stride(len(window), 1) >= step:
            some = np.arange(0, len(window), step)
            assert np.array_equal(rows.following(some, step), following(some))


def test_a_level_above_adds_a_thirtieth(written: tuple[np.ndarray, Rows], tmp_path: Path) -> None:
    window, _ = written
    stored = open_array(tmp_path / "rows.npy")
    assert stored.shape[1] == 1 + window.itemsize // 2
    assert len(window) <= len(stored) <= 1 + len(window) * 32 / 31 + np.log2(len(window))


def test_at_least_as_many_rows_as_are_read_are_in_the_level_that_they_are_read_from() -> None:
    for count in (1, 31, 32, 1023, 1024, 1025, 40_000, 10**9):
        step = stride(count, 32)
        assert step == 1 or 32 <= count // step < 32 * 32 + 1
        assert step in (1, 32, 1024, 32_768, 1 << 20, 1 << 25)


def test_places_are_spread_evenly() -> None:
    assert spread(3, 32).tolist() == [0, 1, 2]
    assert spread(0, 32).tolist() == []
    places = spread(100, 32)
    assert len(places) == 32
    assert set(np.diff(places).tolist()) == {3, 4}
