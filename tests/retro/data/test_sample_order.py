"""A stateless data order: permutations and mixtures are functions of the sample number."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexing.splitmix64 import mix
from retro.data.sample_order import mixture, permuted


@given(size=st.integers(1, 300), seed=st.integers(0, 2**63))
def test_permuted_is_a_permutation(size: int, seed: int) -> None:
    assert sorted(permuted(position, size, seed) for position in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [3, 5, 8, 16, 64, 300])
def test_positions_and_successors_are_uniformly_distributed(size: int) -> None:
    """Measured by chi-squared per degree of freedom, which is 1 for a uniform shuffle."""
    seeds = 20_000 // size
    rows = np.array([[permuted(position, size, mix(seed)) for position in range(size)] for seed in range(seeds)])
    places, pairs = np.zeros((2, size, size))
    np.add.at(places, (np.arange(size), rows), 1)
    np.add.at(pairs, (rows[:, :-1], rows[:, 1:]), 1)
    for counts, freedom in ((places, (size - 1) ** 2), (pairs[~np.eye(size, dtype=bool)], size * (size - 1) - 1)):
        expected = counts.sum() / counts.size
        statistic = ((counts - expected) ** 2 / expected).sum() / freedom
        assert abs(statistic - 1) < 5 * (2 / freedom) ** 0.5


def test_permuted_depends_on_the_seed_and_handles_any_size() -> None:
    assert [permuted(i, 1000, 1) for i in range(20)] != [permuted(i, 1000, 2) for i in range(20)]
    assert 0 <= permuted(3 * 10**10, 10**12, 5) < 10**12


@given(weights=st.lists(st.floats(0.05, 1), min_size=1, max_size=4).map(tuple), seed=st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_a_mixture_follows_its_weights_and_numbers_each_source_consecutively(
    weights: tuple[float, ...], seed: int
) -> None:
    drawn = [mixture(sample, weights, seed) for sample in range(1500)]
    counts = Counter(source for source, _ in drawn)
    for source, weight in enumerate(weights):
        assert [number for chosen, number in drawn if chosen == source] == list(range(counts[source]))
        in_first_block = sum(chosen == source for chosen, _ in drawn[:1024])
        assert abs(in_first_block - 1024 * weight / sum(weights)) <= 1


def test_a_sample_does_not_depend_on_previous_requests() -> None:
    asked = [5, 4000, 3, 2**40, 1023, 1024, 5]
    alone = [mixture(sample, (1.0, 2.0), 7) for sample in asked]
    assert [mixture(sample, (1.0, 2.0), 7) for sample in reversed(asked)] == alone[::-1]
    assert alone != [mixture(sample, (1.0, 2.0), 8) for sample in asked]
