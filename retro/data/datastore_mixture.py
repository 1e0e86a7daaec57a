"""Compute how much of each datastore a run reads.

weights, token budgets, or sizes with a temperature → fractions → tokens and epochs of each datastore
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from indexing.store.errors import InputError

log = logging.getLogger("retro")


@dataclass(frozen=True)
class MixtureEntry:
    """The part of one datastore in a run.

    Attributes:
        folder: the datastore.
        share: fraction of all sequences, from 0 to 1.
        tokens: tokens that the whole run reads from it.
        epochs: these tokens over the datastore's tokens.
    """

    folder: Path
    share: float
    tokens: int
    epochs: float


def mixture_weights(
    sizes: Sequence[int], weights: Sequence[float], temperature: float, token_budgets: Sequence[int]
) -> tuple[float, ...]:
    """The weight of each datastore: the given weights, else the budgets, else sizes [chunks] to the power of 1/temperature."""
    if weights or token_budgets:
        return tuple(float(weight) for weight in weights or token_budgets)
    largest = max(sizes)  # relative sizes, so that no power overflows
    return tuple((size / largest) ** (1 / temperature) for size in sizes)


def shares(folders: Sequence[Path], sizes: Sequence[int], weights: Sequence[float], tokens: int) -> list[MixtureEntry]:
    """The parts of a run of `tokens` tokens, for datastores of `sizes` tokens."""
    total = sum(weights)
    return [
        MixtureEntry(folder, weight / total, round(tokens * weight / total), tokens * weight / total / size)
        for folder, size, weight in zip(folders, sizes, weights, strict=True)
    ]


def announce(found: Sequence[MixtureEntry]) -> None:
    """Log name, fraction, tokens and epochs of each datastore."""
    for each in found:
        log.info(
            "data: %s: %.1f%% of the sequences, %s tokens, %.2f epochs",
            each.folder,
            100 * each.share,
            f"{each.tokens:,}",
            each.epochs,
        )


def check_budgets(token_budgets: Sequence[int], tokens: int) -> None:
    """Raise InputError if a run of `tokens` tokens exceeds the budgets; empty = no limit."""
    if token_budgets and tokens > sum(token_budgets):
        raise InputError(
            f"data.token_budgets = {tuple(token_budgets)}: they sum to {sum(token_budgets):,} tokens, but the run reads "
            f"{tokens:,} (train.steps times the tokens of a step). Take fewer steps or raise a budget."
        )
