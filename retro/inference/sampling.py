"""Sampling of the next token.

logits of each row ─ penalties, biases ─ temperature ─ top-k ─ top-p, min-p ─ one token
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from retro.inference.settings import GenerationSettings

SampledToken = tuple[int, float, tuple[tuple[int, float], ...]]
"""Token id, its log-probability before penalties, temperature, top-k and top-p, and the likeliest tokens with log-probabilities."""


def with_penalties(
    logits: Tensor,
    settings: Sequence[GenerationSettings],
    prompts: Sequence[np.ndarray],
    generated: Sequence[Sequence[int]],
) -> Tensor:
    """Apply penalties and biases to logits [rows, V].

    Args:
        logits: float32 [rows, V].
        settings: the penalties and biases of each row.
        prompts: int64 [t] of each row.
        generated: the tokens of each row's continuation.
    """
    if not any(own.changes_logits for own in settings):
        return logits
    logits = logits.clone()
    for row, own, prompt, tokens in zip(logits, settings, prompts, generated, strict=True):
        if own.changes_logits:
            _change(row, own, prompt, tokens)
    return logits


def _change(row: Tensor, settings: GenerationSettings, prompt: np.ndarray, generated: Sequence[int]) -> None:
    """Apply penalties and biases to the logits [V] of a row, in place."""
    penalty = settings.repetition_penalty
    if penalty != 1:
        seen = torch.from_numpy(np.union1d(prompt, generated).astype(np.int64)).to(row.device)
        row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    ids, counts = (
        torch.from_numpy(column).to(row.device)
        for column in np.unique(np.array(generated, np.int64), return_counts=True)
    )
    row[ids] -= settings.presence_penalty + settings.frequency_penalty * counts
    for token, bias in settings.logit_bias:
        row[token] += bias


def draw(
    logits: Tensor,
    unchanged: Tensor,
    settings: Sequence[GenerationSettings],
    random: Sequence[float],
    masked: Tensor | None = None,
) -> list[SampledToken]:
    """Sample a token for each row, with its temperature, then top-k, then top-p and min-p.

    Args:
        logits: float32 [rows, V], to sample from.
        unchanged: float32 [rows, V], without penalties and biases; the log-probabilities that are returned are theirs.
        settings: sampling of each row.
        random: a number of each row, 0 to 1; the token depends on it unless the temperature is 0.
        masked: bool [V], True for ids that are neither sampled nor returned as likeliest tokens; None = there are none.
    """
    # A row always has a token to sample, also one that a broken model gives infinite logits or NaN.
    logits, unchanged = (rows.nan_to_num(nan=torch.finfo(rows.dtype).min) for rows in (logits, unchanged))
    log_p, logits = unchanged.log_softmax(-1), without(logits, masked)
    tokens = logits.argmax(-1)
    drawing = [
        (row, min(own.top_k or logits.shape[1], logits.shape[1])) for row, own in enumerate(settings) if own.temperature
    ]
    for kept in {kept for _, kept in drawing}:
        rows = [row for row, top_k in drawing if top_k == kept]
        whole = len(rows) == len(logits)  # the usual case, without a copy
        tokens[rows] = _drawn(
            logits if whole else logits[rows], kept, [settings[row] for row in rows], [random[row] for row in rows]
        )
    chosen = log_p.gather(1, tokens[:, None])[:, 0].tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(chosen)
    if most := max((own.logprobs for own in settings), default=0):
        values, likeliest = without(log_p, masked).topk(min(most, log_p.shape[1]))
        columns = zip(likeliest.tolist(), values.tolist(), settings, strict=True)
        rows_of_tops = (zip(ids[: own.logprobs], row[: own.logprobs], strict=True) for ids, row, own in columns)
        tops = [tuple((token, value) for token, value in row if value > -torch.inf) for row in rows_of_tops]
    return list(zip(tokens.tolist(), chosen, tops, strict=True))


def without(logits: Tensor, masked: Tensor | None) -> Tensor:
    """Logits [..., V] with -inf at the masked ids, bool [V]; None = no id is masked."""
    return logits if masked is None else logits.masked_fill(masked, -torch.inf)


def _drawn(logits: Tensor, kept: int, settings: Sequence[GenerationSettings], random: Sequence[float]) -> Tensor:
    """Sample from the `kept` likeliest tokens of logits [rows, V]: int64 [rows].

    The random number of each row is looked up in the cumulative sum of its probabilities.
    """
    ordered, ids = logits.topk(kept) if kept < logits.shape[1] else logits.sort(descending=True, stable=True)
    table = [(own.temperature, own.top_p, own.min_p) for own in settings]
    temperature, top_p, min_p = torch.tensor(table, dtype=torch.float64, device=logits.device)[..., None].unbind(1)
    # Subtract the largest logit and divide in float64: any temperature above 0 is then safe.
    probabilities = ((ordered - ordered[:, :1]).double() / temperature).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # of all likelier tokens; the likeliest token is always kept
    usable = (before < top_p) & (probabilities >= min_p * probabilities[:, :1]) & (ordered > -torch.inf)
    below = probabilities.masked_fill(~usable, 0).cumsum(-1)  # [rows, kept]
    random_numbers = torch.tensor(random, dtype=torch.float32, device=logits.device)[:, None]
    ranks = torch.searchsorted(below, random_numbers * below[:, -1:], right=True)
    last = usable.sum(-1, keepdim=True) - 1  # rounding near 1 must not go past the last usable token
    return ids.gather(1, ranks.minimum(last))[:, 0]
