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
    logits: Tensor, settings: GenerationSettings, prompts: Sequence[np.ndarray], generated: Sequence[Sequence[int]]
) -> Tensor:
    """Apply penalties and biases to logits [rows, V].

    Args:
        logits: float32 [rows, V].
        settings: the penalties and biases.
        prompts: int64 [t] of each row.
        generated: the tokens of each row's continuation.
    """
    if not settings.changes_logits:
        return logits
    logits, penalty = logits.clone(), settings.repetition_penalty
    for row, prompt, own in zip(logits, prompts, generated, strict=True):
        if penalty != 1:
            seen = torch.from_numpy(np.union1d(prompt, own).astype(np.int64)).to(row.device)
            row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        ids, counts = (
            torch.from_numpy(each).to(row.device) for each in np.unique(np.array(own, np.int64), return_counts=True)
        )
        row[ids] -= settings.presence_penalty + settings.frequency_penalty * counts
    for token, bias in settings.logit_bias:
        logits[:, token] += bias
    return logits


def draw(
    logits: Tensor, unchanged: Tensor, settings: GenerationSettings, random: Sequence[torch.Generator]
) -> list[SampledToken]:
    """Sample a token for each row, with temperature, then top-k, then top-p and min-p.

    Each row takes one number from its generator and looks it up in the cumulative sum of its probabilities.

    Args:
        logits: float32 [rows, V], to sample from.
        unchanged: float32 [rows, V], without penalties and biases; the log-probabilities that are returned are theirs.
        settings: sampling.
        random: generator of each row.
    """
    log_p = unchanged.log_softmax(-1)
    if settings.temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
    else:
        kept = min(settings.top_k or logits.shape[1], logits.shape[1])
        ordered, ids = logits.topk(kept) if kept < logits.shape[1] else logits.sort(descending=True, stable=True)
        # Subtract the largest logit and divide in float64: any temperature above 0 is then safe.
        probabilities = ((ordered - ordered[:, :1]).double() / settings.temperature).softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # of all likelier tokens; the likeliest token is always kept
        usable = (before < settings.top_p) & (probabilities >= settings.min_p * probabilities[:, :1])
        below = probabilities.masked_fill(~usable, 0).cumsum(-1)  # [rows, kept]
        numbers = torch.cat([torch.rand(1, generator=each) for each in random])[:, None].to(logits.device)
        places = torch.searchsorted(below, numbers * below[:, -1:], right=True)
        last = usable.sum(-1, keepdim=True) - 1  # rounding near 1 must not go past the last usable token
        tokens = ids.gather(1, places.minimum(last))
    chosen = log_p.gather(1, tokens)[:, 0].tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(chosen)
    if settings.logprobs:
        values, likeliest = log_p.topk(min(settings.logprobs, log_p.shape[1]))
        tops = [tuple(zip(*row, strict=True)) for row in zip(likeliest.tolist(), values.tolist(), strict=True)]
    return list(zip(tokens[:, 0].tolist(), chosen, tops, strict=True))
