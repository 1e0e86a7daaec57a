"""The measure of leakage: the longest run of tokens that a chunk shares with a neighbor."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexing.similarity.overlap import longest_common_substring, overlap


def naive_substring(first: list[int], second: list[int]) -> int:
    best = 0
    for i in range(len(first)):
        for j in range(len(second)):
            run = 0
            while i + run < len(first) and j + run < len(second) and first[i + run] == second[j + run]:
                run += 1
            best = max(best, run)
    return best


@given(
    pairs=st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=6, max_size=6), st.lists(st.integers(0, 3), min_size=9, max_size=9)
        ),
        min_size=1,
        max_size=5,
    )
)
def test_longest_common_substring_equals_the_naive_one(pairs) -> None:
    first, second = (np.array(part) for part in zip(*pairs, strict=True))
    assert longest_common_substring(first, second).tolist() == [naive_substring(*pair) for pair in pairs]


def test_padding_never_counts_as_overlap() -> None:
    chunk, neighbor = np.array([[1, 2, 0, 0]]), np.array([[3, 4, 0, 0]])
    assert overlap(chunk, np.array([2]), neighbor, np.array([2])).tolist() == [0]
    assert overlap(chunk, np.array([2]), np.array([[9, 1, 2, 7]]), np.array([4])).tolist() == [1]


def test_runs_longer_than_255_tokens_are_counted() -> None:
    text = np.arange(600)[None]
    assert longest_common_substring(text, np.roll(text, 7)).tolist() == [593]


def test_empty_input_gives_empty_overlap() -> None:
    assert longest_common_substring(np.empty((0, 4), int), np.empty((0, 8), int)).tolist() == []
