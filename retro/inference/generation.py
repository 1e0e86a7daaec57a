"""Batched sampling with retrieval; prompts stop independently.

prompts → decoder (finds neighbors of every completed chunk) → logits → one token of each row → text → …

A continuation depends only on its prompt and the seed, not on the other prompts of the batch: each row has its own random
generator with the same seed. Several continuations of a prompt have consecutive seeds; their prompt is read once. (Up to
rounding: matrix products of a batch may sum in another order than those of a single row.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from retro.inference.decoder import Decoder
from retro.inference.sampling import draw, with_penalties
from retro.inference.settings import GenerationSettings
from retro.inference.sources import CopiedFrom, ReadChunk
from retro.inference.text_stream import Decode, TextStream

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GeneratedToken:
    """A generated token of one prompt.

    Attributes:
        row: number of the continuation: that of the prompt, or prompt · n + number of its continuation.
        token: the sampled token id; it can be the end of the document.
        text: new text of the continuation. The concatenated texts of a row are its continuation.
        log_probability: log-probability of the token in nats, before temperature, top-k and top-p.
        finish_reason: for the row's last token `stop` (end of the document, a stop token or a stop string) or `length`; else None.
        top: `GenerationSettings.logprobs` likeliest tokens with log-probabilities, likeliest first.
        read: chunks whose neighbors the model read for this token and for none before.
        copied: the token of a neighbor that it was copied from.
    """

    row: int
    token: int
    text: str
    log_probability: float
    finish_reason: FinishReason | None = None
    top: tuple[tuple[int, float], ...] = ()
    read: tuple[ReadChunk, ...] = ()
    copied: CopiedFrom | None = None


def generate(
    decoder: Decoder,
    prompts: Sequence[np.ndarray],
    settings: GenerationSettings,
    *,
    decode: Decode,
    eos_id: int,
    n: int = 1,
    sources: bool = False,
) -> Iterator[list[GeneratedToken]]:
    """Continue prompts; yield after every step the new tokens of all unfinished rows, in order.

    Args:
        decoder: a new decoder.
        prompts: token ids [t] of each prompt, the beginning-of-document token first; t ≥ 1.
        settings: length and sampling.
        decode: converts tokens to text.
        eos_id: the end-of-document token.
        n: continuations of each prompt.
        sources: return the neighbors that were read and the tokens that were copied.
    """
    rows = [
        _Row(number, prompts[number // n], settings, decode, eos_id, number % n) for number in range(len(prompts) * n)
    ]
    if not rows:
        return
    logits = decoder.read(prompts)
    if n > 1:
        decoder.keep([row.number // n for row in rows])
        logits = logits.repeat_interleave(n, 0)
    while True:
        changed = with_penalties(logits, settings, [row.prompt for row in rows], [row.generated for row in rows])
        drawn = draw(changed, logits, settings, [row.random for row in rows])
        new = [row.add(*each) for row, each in zip(rows, drawn, strict=True)]
        if sources:
            new = _with_sources(decoder, rows, new)
        yield new
        unfinished = [number for number, token in enumerate(new) if token.finish_reason is None]
        if not unfinished:
            return
        if len(unfinished) < len(rows):
            decoder.keep(unfinished)
            rows = [rows[number] for number in unfinished]
        logits = decoder.read([np.array([new[number].token]) for number in unfinished])


def _with_sources(decoder: Decoder, rows: list["_Row"], tokens: list[GeneratedToken]) -> list[GeneratedToken]:
    """Add to the tokens of a step what the model read for them first, and where they were copied from."""
    copied = decoder.copied_from([each.token for each in tokens], [each.log_probability for each in tokens])
    found = []
    for number, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        read = tuple(decoder.chunks_read(number, row.chunks_read))
        row.chunks_read = read[-1].number + 1 if read else row.chunks_read
        found.append(replace(token, read=read, copied=copied[number]))
    return found


class _Row:
    """State of a row in addition to its tokens: text, random generator, remaining length."""

    def __init__(
        self, number: int, prompt: np.ndarray, settings: GenerationSettings, decode: Decode, eos_id: int, copy: int
    ) -> None:
        self.number, self.prompt, self.left = number, prompt, settings.max_tokens
        self.ends = {*settings.stop_token_ids, *(() if settings.ignore_eos else (eos_id,))}
        self.generated: list[int] = []
        self.chunks_read = 0  # chunks whose neighbors were returned
        self.text = TextStream(decode, prompt, settings.stop)
        self.random = torch.Generator().manual_seed((settings.seed + copy) % 2**63)

    def add(self, token: int, log_probability: float, top: tuple[tuple[int, float], ...]) -> GeneratedToken:
        """Append a sampled token."""
        self.left -= 1
        self.generated.append(token)
        shown = "" if token in self.ends else self.text.add(token)
        finish: FinishReason | None = "stop" if token in self.ends or self.text.stopped else None
        if finish is None and self.left == 0:
            finish = "length"
        if finish:
            shown += self.text.rest()
            finish = "stop" if self.text.stopped else finish
        return GeneratedToken(self.number, token, shown, log_probability, finish, top)
