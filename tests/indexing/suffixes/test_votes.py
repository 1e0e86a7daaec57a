"""The format of votes: what is packed is read again, in 21 or 24 bytes, and limits on the length of a match hold."""

from dataclasses import replace

import numpy as np
import pytest

from indexing.store.datastore import Datastore
from indexing.suffixes.votes import COLUMNS, KEPT, LENGTHS, LONGEST, as_columns, packed, vote_dtype, within_limit


@pytest.mark.parametrize(("chunk_length", "longest"), [(16, 12), (64, 48), (128, 63)])
def test_a_stored_length_that_stands_for_longer_matches_is_over_every_limit(
    planted_datastore: Datastore, chunk_length: int, longest: int
) -> None:
    votes = np.arange(LONGEST + 1)[:, None].repeat(COLUMNS, axis=1)
    split = replace(planted_datastore.train, chunk_length=chunk_length)
    assert np.array_equal(within_limit(votes.copy(), split), votes)
    assert within_limit(votes.copy(), split, 0.75).any(axis=1).sum() == longest


@pytest.mark.parametrize(("dtype", "size", "largest"), [(np.uint16, 21, 2**16), (np.uint32, 24, 2**24)])
def test_stored_votes_are_read_as_they_were_packed(dtype: type, size: int, largest: int) -> None:
    random = np.random.default_rng(0)
    candidates = random.integers(0, largest, (50, KEPT)).astype(np.int32)
    numbers = random.integers(0, 16, (50, len(LENGTHS), 1 + KEPT)).astype(np.uint8)
    candidates[0], numbers[1] = -1, 0
    stored = packed(np.arange(1, 51), candidates, numbers, np.dtype(dtype))
    assert stored.dtype == vote_dtype(np.dtype(dtype))
    assert stored.dtype.itemsize == size
    columns = as_columns(stored.reshape(5, 10))
    assert columns.shape == (5, 10, COLUMNS)
    columns = columns.reshape(50, COLUMNS)
    assert columns[:, 0].tolist() == [1, 0, *range(3, 51)]
    assert np.array_equal(columns[:, 1 : 1 + KEPT], candidates.clip(0))
    assert np.array_equal(columns[:, 1 + KEPT :], numbers.reshape(50, -1))
