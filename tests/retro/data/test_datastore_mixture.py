"""Tokens and epochs of each datastore of a mixture."""

import logging
from pathlib import Path

import pytest

from retro.data.datastore_mixture import announce, shares


def test_the_log_names_percentage_tokens_and_epochs_of_each_datastore(caplog: pytest.LogCaptureFixture) -> None:
    found = shares([Path("wiki"), Path("books")], [1000, 4000], (3.0, 1.0), 4000)
    assert [(each.tokens, each.epochs) for each in found] == [(3000, 3.0), (1000, 0.25)]
    with caplog.at_level(logging.INFO, logger="retro"):
        announce(found)
    assert caplog.messages[0] == "data: wiki: 75.0% of the sequences, 3,000 tokens, 3.00 epochs"
