"""Hashes of numbers equal those of the published SplitMix64."""

import numpy as np

from indexing.splitmix64 import finalize, mix


def test_hash_of_a_seed_is_the_first_number_of_the_generator() -> None:
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(1234567) == 6457827717110365317


def test_hashes_of_an_array_are_the_hashes_of_its_numbers() -> None:
    numbers = [0, 1, 2**63, 2**64 - 1]
    for function in (mix, finalize):
        assert function(np.array(numbers, dtype=np.uint64)).tolist() == [function(number) for number in numbers]
