"""Sampling of the next token.

logits of each row ─ penalties, biases ─ temperature ─ top-k ─ top-p, min-p ─ one token
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from retro.inference.settings import GenerationSettings

SampledToken = tuple[int, float, tuple[tuple[int, float], ...]]
"""Token id, its log-probability before penalties, temperature, top-k and top-p, and the likeliest tokens with
log-probabilities."""


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
    groups = defaultdict[tuple[int, bool], list[int]](list)
    for row, own in enumerate(settings):
        if own.temperature:
            groups[min(own.top_k or logits.shape[1], logits.shape[1]), own.top_p < 1].append(row)
    for (top_k, has_top_p), rows in groups.items():
        whole = len(rows) == len(logits)  # the usual case, without a copy
        own_settings, own_random = [settings[row] for row in rows], [random[row] for row in rows]
        tokens[rows] = _drawn(logits if whole else logits[rows], top_k, has_top_p, own_settings, own_random)
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


def _drawn(
    logits: Tensor, top_k: int, has_top_p: bool, settings: Sequence[GenerationSettings], random: Sequence[float]
) -> Tensor:
    """Sample from the `top_k` likeliest tokens of logits [rows, V]: int64 [rows]. All rows have a top-p, or none.

    The random number of each row is looked up in the cumulative sum of its probabilities. They are in order of size if
    top-k or top-p needs this order, else in order of ids: to sort 49,152 of them takes 4 ms, and the rest a tenth of
    that.
    """
    table = [(own.temperature, own.top_p, own.min_p) for own in settings]
    temperature, top_p, min_p = torch.tensor(table, dtype=torch.float64, device=logits.device)[..., None].unbind(1)
    logits, ids = logits.topk(top_k) if top_k < logits.shape[1] else (logits, None)
    # Subtract the largest logit and divide in float64: any temperature above 0 is then safe.
    probabilities = (logits - logits.amax(-1, keepdim=True)).double().div_(temperature).softmax(-1)
    if any(own.min_p for own in settings):
        probabilities.masked_fill_(probabilities < min_p * probabilities.amax(-1, keepdim=True), 0)
    if has_top_p:
        if ids is None:
            probabilities, ids = _in_order(probabilities, top_p)
        before = probabilities.cumsum(-1) - probabilities  # of all likelier tokens; the likeliest token is always kept
        probabilities.masked_fill_(before >= top_p, 0)
    below = probabilities.cumsum(-1)  # [rows, tokens]
    total = below[:, -1:]
    random_numbers = torch.tensor(random, dtype=torch.float32, device=logits.device)[:, None]
    # Rounding near 1 must not go past the last token that is kept.
    sought = (random_numbers * total).minimum(total.nextafter(torch.zeros_like(total)))
    places = torch.searchsorted(below, sought, right=True)
    return (places if ids is None else ids.gather(1, places))[:, 0]


def _in_order(probabilities: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the probabilities [rows, V] that top-p [rows, 1] can keep: probabilities and ids, both [rows, tokens].

    The largest comes first, equal ones in order of ids; rows with fewer tokens end with probabilities of 0. Top-p drops
    all tokens below (1 - top_p) / V, since V of them have less than 1 - top_p together: most of a vocabulary is not
    sorted.
    """
    size = probabilities.shape[1]
    least = ((1 - top_p) / size).minimum(probabilities.amax(-1, keepdim=True))  # at least one, also after rounding
    candidates = [row.nonzero()[:, 0] for row in probabilities >= least]
    ids = pad_sequence(candidates, batch_first=True, padding_value=size)
    ordered, order = F.pad(probabilities, (0, 1)).gather(1, ids).sort(descending=True, stable=True)
    return ordered, ids.gather(1, order)
