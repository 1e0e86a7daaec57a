"""How much of each datastore a training run reads.

weights, or token budgets, or sizes under a temperature → shares → tokens and epochs of each datastore
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from indexing.store.errors import InputError

log = logging.getLogger("retro")


@dataclass(frozen=True)
class MixtureEntry:
    """What a run reads of one datastore.

    Attributes:
        folder: of the datastore.
        share: of all sequences, between 0 and 1.
        tokens: of the whole run.
        epochs: how often that is all that the datastore holds.
    """

    folder: Path
    share: float
    tokens: int
    epochs: float


def mixture_weights(
    sizes: Sequence[int], weights: Sequence[float], temperature: float, token_budgets: Sequence[int]
) -> tuple[float, ...]:
    """The weight of each datastore: as given, else its budget, else its size [chunks] to the power of 1/temperature."""
    if weights or token_budgets:
        return tuple(float(weight) for weight in weights or token_budgets)
    largest = max(sizes)  # shares are of sizes in relation, so that no power leaves the range of floats
    return tuple((size / largest) ** (1 / temperature) for size in sizes)


def shares(folders: Sequence[Path], sizes: Sequence[int], weights: Sequence[float], tokens: int) -> list[MixtureEntry]:
    """What a run of so many tokens reads of datastores that hold `sizes` tokens each."""
    total = sum(weights)
    return [
        MixtureEntry(folder, weight / total, round(tokens * weight / total), tokens * weight / total / size)
        for folder, size, weight in zip(folders, sizes, weights, strict=True)
    ]


def announce(found: Sequence[MixtureEntry]) -> None:
    """Log a line for each datastore: name, share, tokens, epochs."""
    for each in found:
        log.info(
            "data: %s: %.1f%% of the sequences, %s tokens, %.2f epochs",
            each.folder,
            100 * each.share,
            f"{each.tokens:,}",
            each.epochs,
        )


def check_budgets(token_budgets: Sequence[int], tokens: int) -> None:
    """Raise InputError if a run of so many tokens needs more than the budgets (none: no limit)."""
    if token_budgets and tokens > sum(token_budgets):
        raise InputError(
            f"data.token_budgets = {tuple(token_budgets)}: they sum to {sum(token_budgets):,} tokens, but the run reads "
            f"{tokens:,} (train.steps times the tokens of a step). Take fewer steps or raise a budget."
        )
