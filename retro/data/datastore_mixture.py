"""Compute how much of each datastore a run reads.

weights or sizes → fractions → tokens and epochs of each datastore
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
