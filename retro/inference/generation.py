"""Batched sampling with retrieval; prompts stop independently.

prompts → decoder (finds neighbors of every completed chunk) → logits → one token of each row → text → …

A continuation depends only on its prompt and the seed, not on the other prompts of the batch: each row has its own random
generator with the same seed. (Up to rounding: matrix products of a batch may sum in another order than those of a single row.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from retro.inference.decoder import Decoder
from retro.inference.settings import GenerationSettings
from retro.inference.text_stream import Decode, TextStream

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GeneratedToken:
    """A generated token of one prompt.

    Attributes:
        row: number of the prompt.
        token: the sampled token id; it can be the end of the document.
        text: new text of the continuation. The concatenated texts of a row are its continuation.
        log_probability: log-probability of the token in nats, before temperature, top-k and top-p.
        finish_reason: for the row's last token `stop` (end of the document or a stop string) or `length`; else None.
        top: `GenerationSettings.logprobs` likeliest tokens with log-probabilities, likeliest first.
    """

    row: int
    token: int
    text: str
    log_probability: float
    finish_reason: FinishReason | None = None
    top: tuple[tuple[int, float], ...] = ()


def generate(
    decoder: Decoder, prompts: Sequence[np.ndarray], settings: GenerationSettings, *, decode: Decode, eos_id: int
) -> Iterator[list[GeneratedToken]]:
    """Continue prompts; yield after every step the new tokens of all unfinished rows, in order.

    Args:
        decoder: a new decoder.
        prompts: token ids [t] of each prompt, the beginning-of-document token first; t ≥ 1.
        settings: length and sampling.
        decode: converts tokens to text.
        eos_id: the end-of-document token.
    """
    rows = [_Row(number, prompt, settings, decode, eos_id) for number, prompt in enumerate(prompts)]
    if not rows:
        return
    logits = decoder.read(prompts)
    while True:
        drawn = draw(logits, settings, [row.random for row in rows])
        new = [row.add(*each) for row, each in zip(rows, drawn, strict=True)]
        yield new
        unfinished = [number for number, token in enumerate(new) if token.finish_reason is None]
        if not unfinished:
            return
        if len(unfinished) < len(rows):
            decoder.keep(unfinished)
            rows = [rows[number] for number in unfinished]
        logits = decoder.read([np.array([new[number].token]) for number in unfinished])


class _Row:
    """State of a row in addition to its tokens: text, random generator, remaining length."""

    def __init__(
        self, number: int, prompt: np.ndarray, settings: GenerationSettings, decode: Decode, eos_id: int
    ) -> None:
        self.number, self.left, self.eos_id = number, settings.max_tokens, eos_id
        self.text = TextStream(decode, prompt, settings.stop)
        self.random = torch.Generator().manual_seed(settings.seed)

    def add(self, token: int, log_probability: float, top: tuple[tuple[int, float], ...]) -> GeneratedToken:
        """Append a sampled token."""
        self.left -= 1
        shown = "" if token == self.eos_id else self.text.add(token)
        finish: FinishReason | None = "stop" if token == self.eos_id or self.text.stopped else None
        if finish is None and self.left == 0:
            finish = "length"
        if finish:
            shown += self.text.rest()
            finish = "stop" if self.text.stopped else finish
        return GeneratedToken(self.number, token, shown, log_probability, finish, top)


SampledToken = tuple[int, float, tuple[tuple[int, float], ...]]
"""Token id, its log-probability before temperature, top-k and top-p, and the likeliest tokens with log-probabilities."""


def draw(logits: Tensor, settings: GenerationSettings, random: Sequence[torch.Generator]) -> list[SampledToken]:
    """Sample a token for each row of logits [rows, V] float32, with temperature, then top-k, then top-p.

    Each row takes one number from its generator and looks it up in the cumulative sum of its probabilities.
    """
    log_p = logits.log_softmax(-1)
    if settings.temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
    else:
        kept = min(settings.top_k or logits.shape[1], logits.shape[1])
        ordered, ids = logits.topk(kept) if kept < logits.shape[1] else logits.sort(descending=True, stable=True)
        # Subtract the largest logit and divide in float64: any temperature above 0 is then safe.
        probabilities = ((ordered - ordered[:, :1]).double() / settings.temperature).softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # of all likelier tokens; the likeliest token is always kept
        below = probabilities.masked_fill(before >= settings.top_p, 0).cumsum(-1)  # [rows, kept]
        numbers = torch.cat([torch.rand(1, generator=each) for each in random])[:, None].to(logits.device)
        places = torch.searchsorted(below, numbers * below[:, -1:], right=True)
        last = (before < settings.top_p).sum(
            -1, keepdim=True
        ) - 1  # rounding near 1 must not go past the last kept token
        tokens = ids.gather(1, places.minimum(last))
    chosen = log_p.gather(1, tokens)[:, 0].tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(chosen)
    if settings.logprobs:
        values, likeliest = log_p.topk(min(settings.logprobs, logits.shape[1]))
        tops = [tuple(zip(*row, strict=True)) for row in zip(likeliest.tolist(), values.tolist(), strict=True)]
    return list(zip(tokens[:, 0].tolist(), chosen, tops, strict=True))
