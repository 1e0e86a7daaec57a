"""The switch: copying from retrieval is as strong as it was right in the text so far.

    p = sum over strengths s of trust[s] p_s        trust: from the tokens read so far

p_s is the mixture of `head.py` with the log-odds of neighbors and datastore higher by `STRENGTHS[s]`; the last one is
retrieval OFF. Trust is the posterior of the strengths, if a text may change its kind (fixed share: Herbster and Warmuth
1998, Machine Learning 32):

    trust[s] <- trust[s] p_s / p                       after each token
    trust    <- trust @ TRANSITIONS

So a text of another kind than the datastore costs little, whatever the votes say: it is at least (1 - `PRIOR`) (1 -
`ENTERS`)^tokens times as likely as with OFF, 1.6 bits for 1,000 tokens. Text of the datastore's own kind gains, since
the gates do not fit every text. The switch has no parameters. Training does without, so the gates learn from all
tokens.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from indexing.store.errors import InputError

STRENGTHS = (0.0, 2.0, -2.0, -1e4)
"""Added to the log-odds of sources of retrieval. The last one is OFF: finite, since gradients of infinite numbers are
not defined."""
PRIOR = 1 / 8
"""Trust in copying before the first token of a text."""
ENTERS = 1 / 1024
"""Chance that a text begins to be copied with the next token."""
LEAVES = 1 / 512
"""Chance that a text ceases to be copied. It costs text of other kinds nothing."""
ALTERNATES = 1 / 128
"""Chance that the strength changes to another one that is not OFF, for each of these."""

START = (PRIOR / 3, PRIOR / 3, PRIOR / 3, 1 - PRIOR)
_STAYS = 1 - LEAVES - 2 * ALTERNATES
TRANSITIONS = (
    (_STAYS, ALTERNATES, ALTERNATES, LEAVES),
    (ALTERNATES, _STAYS, ALTERNATES, LEAVES),
    (ALTERNATES, ALTERNATES, _STAYS, LEAVES),
    (ENTERS / 3, ENTERS / 3, ENTERS / 3, 1 - ENTERS),
)


def checked_trust(name: str, trust: object) -> tuple[float, ...]:
    """The trust in each strength that a caller gives, divided by its sum.

    Args:
        name: of the argument, for errors.
        trust: 4 numbers.

    Raises:
        InputError: these are not 4 finite numbers from 0 to 1, or all are 0: the mixture would have no probability.
    """
    numbers = tuple(trust) if isinstance(trust, list | tuple) else ()
    fits = len(numbers) == len(STRENGTHS) and all(is_fraction(number) for number in numbers)
    if not fits or not any(numbers):
        raise InputError(
            f"{name} = {trust!r:.200}: accepted is what `trust_of` returns, {len(STRENGTHS)} numbers from 0 to 1 that are not all 0."
        )
    total = math.fsum(numbers)
    return tuple(float(number) / total for number in numbers)


def is_fraction(value: object) -> bool:
    """Whether a value is a number from 0 to 1. NaN and booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def trust_of(log_p: Tensor, starts: Tensor | None = None) -> Tensor:
    """Trust in each strength, with which the token after each one is predicted: float32 [B, T, 4].

    The steps are matrices, and their products of all lengths are found by doubling, as in `match_lengths`: 11 products
    of matrices for 2,048 tokens instead of 2,048 small steps.

    Args:
        log_p: log-probabilities of the token after each one with each strength, float32 [B, T, 4]; those of the last
            are not used.
        starts: bool [B, T], True for the first token of each document in its row; None = rows are documents.
    """
    start, steps = log_p.new_tensor(START), log_p.new_tensor(TRANSITIONS)
    begins = log_p.new_zeros(log_p.shape[:2], dtype=torch.bool)
    if starts is not None:  # after this step
        begins = F.pad(starts[:, 1:], (0, 1))
    # Only ratios of probabilities matter: the largest one is 1.
    products = (log_p - log_p.amax(-1, keepdim=True)).exp()[..., None] * steps  # [B, T, 4, 4]
    products = products.where(~begins[..., None, None], start)
    length, num_tokens = 1, log_p.shape[1]
    while length < num_tokens:  # products of the last `length` steps, or of all, of the same document
        last, longer = products[:, length:], products[:, :-length] @ products[:, length:]
        longer = (longer / longer.amax((-1, -2), keepdim=True)).where(~begins[:, length:, None, None], last)
        products = torch.cat((products[:, :length], longer), 1)
        begins = torch.cat((begins[:, :length], begins[:, length:] | begins[:, :-length]), 1)
        length *= 2
    # A document that begins in the row has products that forget what was before: each of their rows is `start`.
    after = start @ products[:, :-1]  # [B, T - 1, 4]
    first = start.expand(len(log_p), 1, -1)
    return torch.cat((first, after / after.sum(-1, keepdim=True)), 1)
