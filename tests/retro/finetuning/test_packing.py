"""Packed rows contain every example once, aligned to chunks and inside the row, with little padding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retro.finetuning.example_batches import pack

M = 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 30), st.integers(0, 3))
def test_every_example_is_in_one_row_and_fits(lengths: list[int], row_length: int, seed: int) -> None:
    rows = pack(np.array(lengths, dtype=np.int64), row_length, M, seed)
    assert sorted(example for row in rows for example in row) == list(range(len(lengths)))
    for row in rows:
        at = 0
        for example in row:
            end = at + min(lengths[example], row_length)
            assert end <= row_length
            at = -(-end // M) * M


def test_rows_of_short_examples_are_almost_full() -> None:
    lengths = np.random.default_rng(0).integers(1, 16, 500)
    rows = pack(lengths, 32, M, seed=0)
    chunks = (-(-lengths // M)).sum()
    assert len(rows) == pytest.approx(chunks / 8, rel=0.02)
    assert rows != pack(lengths, 32, M, seed=1)
