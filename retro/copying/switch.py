"""The switch: copying is as strong as it was right in the text so far.

    p = sum over experts e of trust[e] p_e        trust: from the tokens read so far

p_e is the mixture of `head.py` with the log-odds of sources as an expert moves them (`Switch`). The last expert copies
from none of the sources that must earn trust. Trust is the posterior of the experts, if a text may change its
kind (fixed share: Herbster and Warmuth 1998, Machine Learning 32):

    trust[e] <- trust[e] p_e / p                       after each token
    trust    <- trust @ transitions

So a text costs little whatever the votes say: it is at least (1 - `PRIOR`) (1 - `ENTERS`)^tokens times as likely as
with the last expert alone, 1.6 bits for 1,000 tokens. Text that repeats the datastore or itself gains, and more than
with the gates alone, since these do not fit every text. The switch has no parameters. Training does without, so the
gates learn from all tokens.

Retrieval OFF removes neighbors and datastore. Which sources must earn trust, and so what OFF is, depends on how the
model got its own context:

| the own context | must earn trust | last expert, which the bound is against | OFF |
|---|---|---|---|
| none | neighbors, datastore | the model alone | the model alone |
| trained with the model | neighbors, datastore | OFF | vocabulary and context as in training, without a switch |
| added to a trained model | all three | the model alone | the experts that copy from the context alone, or not at all |

A model that was trained with a context was never without one: its loss was that of the mixture. A context is added by
`retro add-retrieval` (`CopyHeadSettings.context_added`), and to any decoder of transformers.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from indexing.store.errors import InputError

REMOVED = -1e4
"""Added to the log-odds of a source that an expert does not copy from: finite, since gradients of infinite numbers are
not defined."""
PRIOR = 1 / 8
"""Trust in copying before the first token of a text."""
ENTERS = 1 / 1024
"""Chance that a text begins to be copied with the next token."""
LEAVES = 1 / 512
"""Chance that a text ceases to be copied. It costs text of other kinds nothing."""
ALTERNATES = 1 / 128
"""Chance that the expert changes to another one that copies, for each of these."""
STAYS = 0.95
"""Chance that a text is still copied after a generated token. Generated tokens earn no trust, since they are copied
themselves. The chance is 1 after a prompt that is known."""
KNOWN = 16
"""A prompt is known if this many of its last tokens occur in a row in the datastore."""


class Switch(NamedTuple):
    """S experts. The first three copy from retrieval, the last one from no source that must earn trust.

    Attributes:
        of_retrieval: what each expert adds to the log-odds of neighbors and datastore, [S].
        of_context: the same for the own context, if it must earn trust, [S].
        start: trust in each expert before the first token of a text, [S]. Its sum is 1.
        transitions: chance of each expert to follow each one, [S, S]. The sum of a row is 1.
    """

    of_retrieval: tuple[float, ...]
    of_context: tuple[float, ...]
    start: tuple[float, ...]
    transitions: tuple[tuple[float, ...], ...]


def _switch(*copying: tuple[float, float]) -> Switch:
    """The switch of some experts that copy, each with what it adds for retrieval and for the context, and one that does
    not."""
    count = len(copying)
    stays = 1 - LEAVES - (count - 1) * ALTERNATES
    rows = [(*(stays if other == own else ALTERNATES for other in range(count)), LEAVES) for own in range(count)]
    of_retrieval, of_context = zip(*copying, (REMOVED, REMOVED), strict=True)
    start = (PRIOR / count,) * count + (1 - PRIOR,)
    return Switch(of_retrieval, of_context, start, (*rows, (ENTERS / count,) * count + (1 - ENTERS,)))


RETRIEVAL = _switch((0.0, 0.0), (2.0, 0.0), (-2.0, 0.0))
"""The switch of models whose context, if they have one, was trained with them."""
ALL_SOURCES = _switch((0.0, 0.0), (2.0, -2.0), (-2.0, -2.0), (REMOVED, 0.0))
"""The switch of models to which a context was added. One more expert copies from it alone. Two copy less from it, with
retrieval OFF too, since its network was fitted to text of smaller models, which need it more."""


def faded(trust: np.ndarray, generated: np.ndarray) -> np.ndarray:
    """Trust [N, S] that a prompt earned, after numbers [N] of generated tokens: what the experts that copy from
    retrieval lose goes to the next one, which does not."""
    lost = trust[:, :3] * (1 - STAYS ** generated[:, None])
    left = trust.copy()
    left[:, :3] -= lost
    left[:, 3] += lost.sum(1)
    return left


def trust_in_retrieval(trust: Sequence[float]) -> float:
    """The sum of the trust [S] in experts that copy from neighbors and datastore, of either switch."""
    return math.fsum(trust[:3])


def checked_trust(name: str, trust: object) -> tuple[float, ...]:
    """The trust in each expert of `RETRIEVAL` that a caller gives, divided by its sum.

    Args:
        name: of the argument, for errors.
        trust: 4 numbers.

    Raises:
        InputError: these are not 4 finite numbers from 0 to 1, or all are 0: the mixture would have no probability.
    """
    numbers = tuple(trust) if isinstance(trust, list | tuple) else ()
    fits = len(numbers) == len(RETRIEVAL.start) and all(is_fraction(number) for number in numbers)
    if not fits or not any(numbers):
        raise InputError(
            f"{name} = {trust!r:.200}: accepted is what `trust_of` returns, {len(RETRIEVAL.start)} numbers from 0 to 1 that are not all 0."
        )
    total = math.fsum(numbers)
    return tuple(float(number) / total for number in numbers)


def is_fraction(value: object) -> bool:
    """Whether a value is a number from 0 to 1. NaN and booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def trust_of(log_p: Tensor, switch: Switch, starts: Tensor | None = None) -> Tensor:
    """Trust in each expert, with which the token after each one is predicted: float32 [B, T, S].

    The steps are matrices, and their products of all lengths are found by doubling, as in `match_lengths`: 11 products
    of matrices for 2,048 tokens instead of 2,048 small steps.

    Args:
        log_p: log-probabilities of the token after each one with each expert, float32 [B, T, S]; those of the last are
            not used.
        switch: of the experts.
        starts: bool [B, T], True for the first token of each document in its row; None = rows are documents.
    """
    start, steps = log_p.new_tensor(switch.start), log_p.new_tensor(switch.transitions)
    begins = log_p.new_zeros(log_p.shape[:2], dtype=torch.bool)
    if starts is not None:  # after this step
        begins = F.pad(starts[:, 1:], (0, 1))
    # Only ratios of probabilities matter: the largest one is 1.
    products = (log_p - log_p.amax(-1, keepdim=True)).exp()[..., None] * steps  # [B, T, S, S]
    products = products.where(~begins[..., None, None], start)
    length, num_tokens = 1, log_p.shape[1]
    while length < num_tokens:  # products of the last `length` steps, or of all, of the same document
        last, longer = products[:, length:], products[:, :-length] @ products[:, length:]
        longer = (longer / longer.amax((-1, -2), keepdim=True)).where(~begins[:, length:, None, None], last)
        products = torch.cat((products[:, :length], longer), 1)
        begins = torch.cat((begins[:, :length], begins[:, length:] | begins[:, :-length]), 1)
        length *= 2
    # A document that begins in the row has products that forget what was before: each of their rows is `start`.
    after = start @ products[:, :-1]  # [B, T - 1, S]
    first = start.expand(len(log_p), 1, -1)
    return torch.cat((first, after / after.sum(-1, keepdim=True)), 1)
