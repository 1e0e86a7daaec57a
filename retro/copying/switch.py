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
| added to a trained model | all three | the model alone | a switch of the context alone: two strengths, or none |

A model that was trained with a context was never without one: its loss was that of the mixture. A context is added by
`retro add-retrieval` (`CopyHeadSettings.context_added`), and to any decoder of transformers. Then ON is bounded against
OFF too, see `ALL_SOURCES`.
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
LEAVES = 1 / 1024
"""Chance that a text ceases to be copied. It costs text of other kinds nothing."""
ALTERNATES = 1 / 256
"""Chance that the expert changes to another one that copies, for each of these."""
RETRIEVES = 1 / 3
"""Chance that a text that begins to be copied is copied from retrieval too, if the context must earn trust."""
CHANGES = 1 / 4096
"""Chance that a copied text begins, or ceases, to be copied from retrieval with the next token."""
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


class Expert(NamedTuple):
    """What an expert adds to the log-odds of retrieval, and to those of the own context if it must earn trust."""

    of_retrieval: float
    of_context: float


def _of_retrieval() -> Switch:
    """Three strengths of retrieval, and none."""
    count = 3
    stays = 1 - LEAVES - (count - 1) * ALTERNATES
    rows = [(*(stays if other == own else ALTERNATES for other in range(count)), LEAVES) for own in range(count)]
    start = (PRIOR / count,) * count + (1 - PRIOR,)
    transitions = (*rows, (ENTERS / count,) * count + (1 - ENTERS,))
    return Switch((0.0, 2.0, -2.0, REMOVED), (0.0, 0.0, 0.0, REMOVED), start, transitions)


def _of_all_sources() -> Switch:
    """Three strengths of retrieval and context, two of the context alone, and none.

    Chances are products: first that of the context's strength, then that of retrieval's with it.
    """
    moves = ((0.0, 0.0), (2.0, -2.0), (-2.0, -2.0), (REMOVED, 0.0), (REMOVED, -2.0), (REMOVED, REMOVED))
    experts = [Expert(*each) for each in moves]

    def row(before: Expert, enters: float) -> tuple[float, ...]:
        return tuple(_of_context(before, after, enters) * _with_context(before, after) for after in experts)

    of_retrieval, of_context = zip(*moves, strict=True)
    rows = tuple(row(expert, ENTERS) for expert in experts)
    return Switch(of_retrieval, of_context, row(experts[-1], PRIOR), rows)


def _of_context(before: Expert, after: Expert, enters: float) -> float:
    """Chance of a strength of the context after an expert, with the chance that a text begins to be copied."""
    if before.of_context == REMOVED:
        return 1 - enters if after.of_context == REMOVED else enters / 2  # of two strengths
    if after.of_context == REMOVED:
        return LEAVES
    return 2 * ALTERNATES if after.of_context != before.of_context else 1 - LEAVES - 2 * ALTERNATES


def _with_context(before: Expert, after: Expert) -> float:
    """Chance of an expert among those with its strength of the context."""
    if after.of_context == REMOVED:
        return 1.0  # there is no other one
    retrieved, retrieves = before.of_retrieval > REMOVED, after.of_retrieval > REMOVED
    chance = RETRIEVES if before.of_context == REMOVED else 1 - CHANGES if retrieved else CHANGES
    if not retrieves:
        return 1 - chance
    if after.of_context == 0:
        return chance
    if not retrieved or before.of_context == 0:
        return chance / 2  # of two experts with this strength of the context
    return chance * (1 - ALTERNATES if after == before else ALTERNATES)


RETRIEVAL = _of_retrieval()
"""The switch of models whose context, if they have one, was trained with them."""
ALL_SOURCES = _of_all_sources()
"""The switch of models to which a context was added. Strengths of the context are followed in the same way with and
without retrieval, so without it the sums of experts with the same strength are a switch of the context alone. With
retrieval, 1 - `RETRIEVES` of the trust that begins to copy stays in that switch, and all but `CHANGES` of it after each
token. So no text costs much more than OFF, whatever retrieval votes for.

Some copy less from the context, with retrieval OFF too: its network was fitted to text of smaller models, which need it
more."""


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
