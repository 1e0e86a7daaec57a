"""Sampling with retrieval: several prompts go on together, each until it ends.

prompts → decoder (at every chunk boundary the chunk just finished asks for neighbors) → logits → a token of each row → text → …

What a prompt goes on with depends on itself and the seed alone, not on the prompts beside it: every row draws from a generator of
its own, and all of them begin with the seed. (To rounding: a batch may be multiplied in another order than a row alone.)
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
    """A token of one row.

    Attributes:
        row: number of the prompt.
        token: what was drawn, the end of the document included.
        text: what may be shown since the last piece; all of a row joined are its text.
        log_probability: of the token in nats, before temperature, top-k and top-p.
        finish_reason: of the row's last piece: `stop` (end of the document or a stop string) or `length`; else None.
        top: the likeliest tokens, likeliest first, with their log-probabilities, as many as the settings ask for.
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
    """Continue prompts: after every step the new token of each row that is not finished, in their order.

    Args:
        decoder: a new one.
        prompts: [t] tokens of each, the beginning-of-document token first; at least one.
        settings: length and sampling.
        decode: tokens to text.
        eos_id: the token that ends a document.
    """
    rows = [_Row(number, prompt, settings, decode, eos_id) for number, prompt in enumerate(prompts)]
    if not rows:
        return
    logits = decoder.read(prompts)
    while True:
        drawn = draw(logits, settings, [row.random for row in rows])
        pieces = [row.piece(*each) for row, each in zip(rows, drawn, strict=True)]
        yield pieces
        going_on = [place for place, piece in enumerate(pieces) if piece.finish_reason is None]
        if not going_on:
            return
        if len(going_on) < len(rows):
            decoder.keep(going_on)
            rows = [rows[place] for place in going_on]
        logits = decoder.read([np.array([pieces[place].token]) for place in going_on])


class _Row:
    """What a row remembers beside its tokens: its text, its draws, how long it is."""

    def __init__(
        self, number: int, prompt: np.ndarray, settings: GenerationSettings, decode: Decode, eos_id: int
    ) -> None:
        self.number, self.left, self.eos_id = number, settings.max_tokens, eos_id
        self.text = TextStream(decode, prompt, settings.stop)
        self.random = torch.Generator().manual_seed(settings.seed)

    def piece(self, token: int, log_probability: float, top: tuple[tuple[int, float], ...]) -> GeneratedToken:
        """Go on by a token."""
        self.left -= 1
        shown = "" if token == self.eos_id else self.text.add(token)
        finish: FinishReason | None = "stop" if token == self.eos_id or self.text.stopped else None
        if finish is None and self.left == 0:
            finish = "length"
        if finish:
            shown += self.text.rest()
            finish = "stop" if self.text.stopped else finish
        return GeneratedToken(self.number, token, shown, log_probability, finish, top)


Drawn = tuple[int, float, tuple[tuple[int, float], ...]]


def draw(logits: Tensor, settings: GenerationSettings, random: Sequence[torch.Generator]) -> list[Drawn]:
    """A token for each row of logits [rows, V] float32: temperature, then the top k, then the top p of what is left.

    Each row takes one number of its generator and looks it up in the running sum of its probabilities. Returns token,
    log-probability before all that, and the likeliest tokens with theirs.
    """
    log_p = logits.log_softmax(-1)
    if settings.temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
    else:
        kept = min(settings.top_k or logits.shape[1], logits.shape[1])
        ordered, ids = logits.topk(kept) if kept < logits.shape[1] else logits.sort(descending=True, stable=True)
        # Less the largest and in float64, so that no temperature is too low to divide by.
        probabilities = ((ordered - ordered[:, :1]).double() / settings.temperature).softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # of everything likelier; the likeliest always stays
        below = probabilities.masked_fill(before >= settings.top_p, 0).cumsum(-1)  # [rows, kept]
        numbers = torch.cat([torch.rand(1, generator=each) for each in random])[:, None].to(logits.device)
        places = torch.searchsorted(below, numbers * below[:, -1:], right=True)
        last = (before < settings.top_p).sum(-1, keepdim=True) - 1  # a number next to 1 must not lead beyond it
        tokens = ids.gather(1, places.minimum(last))
    chosen = log_p.gather(1, tokens)[:, 0].tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(chosen)
    if settings.logprobs:
        values, likeliest = log_p.topk(min(settings.logprobs, logits.shape[1]))
        tops = [tuple(zip(*row, strict=True)) for row in zip(likeliest.tolist(), values.tolist(), strict=True)]
    return list(zip(tokens[:, 0].tolist(), chosen, tops, strict=True))
