"""Mixture weights of several datastores, and their tokens and epochs."""

import logging
from pathlib import Path

import pytest

from retro.data.datastore_mixture import announce, mixture_weights, shares


def test_temperature_flattens_the_size_ratio() -> None:
    sizes = [4_000_000, 1_000_000]
    for temperature, ratio in ((1, 4), (2, 2), (1e9, 1)):
        first, second = mixture_weights(sizes, (), temperature, ())
        assert first / second == pytest.approx(ratio)
    assert mixture_weights([3 * 10**10, 1], (), 0.01, ())[0] == 1  # no overflow


def test_weights_and_budgets_are_used_unchanged() -> None:
    assert mixture_weights([1, 2], (0.3, 0.7), 1, ()) == (0.3, 0.7)
    assert mixture_weights([1, 2], (), 1, (500, 100)) == (500, 100)


def test_the_log_names_percentage_tokens_and_epochs_of_each_datastore(caplog: pytest.LogCaptureFixture) -> None:
    found = shares([Path("wiki"), Path("books")], [1000, 4000], (3.0, 1.0), 4000)
    assert [(each.tokens, each.epochs) for each in found] == [(3000, 3.0), (1000, 0.25)]
    with caplog.at_level(logging.INFO, logger="retro"):
        announce(found)
    assert caplog.messages[0] == "data: wiki: 75.0% of the sequences, 3,000 tokens, 3.00 epochs"
