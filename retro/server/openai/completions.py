"""The answer to a completion request in parts: a stream sends the parts one by one, other answers join them.

prompt, if echoed ─┐
generated tokens ──┴► parts: (number of the prompt, text, log-probabilities, finish reason) ─► events, or one response
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from indexing.tokenization.tokenizer import Tokenizer
from retro.inference.generation import GeneratedToken
from retro.inference.language_model import Scores
from retro.inference.source_texts import Sources, joined
from retro.inference.spans import token_ends
from retro.server.openai.schemas import CompletionChoice, CompletionTokensDetails, Logprobs, Usage

LikeliestTokens = Sequence[tuple[int, float]]
"""Token ids with log-probabilities, likeliest first."""


@dataclass
class GeneratedCount:
    """Number of generated tokens so far, and of tokens of drafts that were accepted and rejected."""

    tokens: int = 0
    accepted: int = 0
    rejected: int = 0

    def add(self, new: GeneratedToken) -> None:
        self.tokens += 1
        self.accepted += new.accepted
        self.rejected += new.rejected


@dataclass
class CompletionBuilder:
    """Creates the parts of an answer and counts the characters and tokens so far.

    Attributes:
        tokenizer: the model's tokenizer.
        logprobs: number of likeliest tokens to return for each token; 0 = only its own log-probability; None = none at all.
        generated: tokens of all prompts.
    """

    tokenizer: Tokenizer
    logprobs: int | None
    generated: GeneratedCount = field(default_factory=GeneratedCount)
    _lengths: dict[int, int] = field(default_factory=dict)

    def echo(self, index: int, prompt: np.ndarray, scores: Scores | None) -> CompletionChoice:
        """Return the prompt [t] as a part; `scores` belong to its last tokens: all, or all except the first."""
        text, ends = token_ends(self.tokenizer.decode_batch, prompt)
        texts = [text[start:stop] for start, stop in pairwise([0, *ends])]
        values: list[float | None] = []
        tops: list[LikeliestTokens | None] = []
        if scores is not None:
            unscored = len(prompt) - len(scores.log_probabilities)
            values = [None] * unscored + scores.log_probabilities.tolist()
            rows = zip(scores.likeliest.tolist(), scores.likeliest_log_probabilities.tolist(), strict=True)
            tops = [None] * unscored + [list(zip(*row, strict=True)) for row in rows]
        return self._part(index, texts, prompt.tolist(), values, tops, None)

    def length(self, index: int) -> int:
        """Return the number of characters of an answer so far."""
        return self._lengths.get(index, 0)

    def add(self, new: GeneratedToken, sources: Sources | None) -> CompletionChoice:
        """Return a generated token as a part, with its sources."""
        self.generated.add(new)
        part = self._part(new.row, [new.text], [new.token], [new.log_probability], [new.top], new.finish_reason)
        part.sources = sources
        return part

    def end(self, index: int) -> CompletionChoice:
        """Return the end of an answer without generated tokens."""
        return self._part(index, [], [], [], [], "length")

    def _part(
        self,
        index: int,
        texts: list[str],
        tokens: list[int],
        values: list[float | None],
        tops: Sequence[LikeliestTokens | None],
        finish_reason: str | None,
    ) -> CompletionChoice:
        start = self._lengths.get(index, 0)
        offsets = np.cumsum([start, *map(len, texts)]).tolist()
        self._lengths[index] = offsets[-1]
        logprobs = None
        if self.logprobs is not None:
            named = list(map(self._named, tokens, values, tops)) if self.logprobs else None
            logprobs = Logprobs(tokens=texts, token_logprobs=values, top_logprobs=named, text_offset=offsets[:-1])
        return CompletionChoice.model_construct(
            index=index, text="".join(texts), logprobs=logprobs, finish_reason=finish_reason, sources=None
        )

    def _named(self, token: int, value: float | None, top: LikeliestTokens | None) -> dict[str, float] | None:
        """Return log-probabilities of the likeliest tokens and of the token itself, by text."""
        if value is None:
            return None
        return {token_name(self.tokenizer, likely): log_p for likely, log_p in (*(top or ()), (token, value))}


def join_choices(parts: Iterable[CompletionChoice], logprobs: int | None) -> list[CompletionChoice]:
    """Join the parts of each prompt."""
    by_index: dict[int, list[CompletionChoice]] = {}
    for part in parts:
        by_index.setdefault(part.index, []).append(part)
    choices = []
    for index, own in sorted(by_index.items()):
        whole = None
        if logprobs is not None:
            logprobs_of_parts = [part.logprobs for part in own if part.logprobs is not None]
            lists: dict[str, Any] = {
                name: [entry for part in logprobs_of_parts for entry in getattr(part, name) or ()]
                for name in Logprobs.model_fields
            }
            whole = Logprobs(**lists if logprobs else lists | {"top_logprobs": None})
        choices.append(
            CompletionChoice(
                index=index,
                text="".join(part.text for part in own),
                logprobs=whole,
                finish_reason=own[-1].finish_reason,
                sources=joined(part.sources for part in own),
            )
        )
    return choices


def usage_of(prompts: Sequence[np.ndarray], generated: GeneratedCount | None = None) -> Usage:
    """Count the tokens of prompts and of their continuations, if there are any."""
    received = sum(map(len, prompts))
    if generated is None:
        return Usage(prompt_tokens=received, total_tokens=received)
    details = CompletionTokensDetails(
        accepted_prediction_tokens=generated.accepted, rejected_prediction_tokens=generated.rejected
    )
    return Usage(
        prompt_tokens=received,
        completion_tokens=generated.tokens,
        total_tokens=received + generated.tokens,
        completion_tokens_details=details,
    )


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token, the name of a special token, or `token:ID` for a part of a character."""
    name = special_names(tokenizer).get(token) or tokenizer.decode([token])
    return f"token:{token}" if not name or "\ufffd" in name else name


def special_names(tokenizer: Tokenizer) -> dict[int, str]:
    """Return names for the special tokens, which have no text."""
    return {tokenizer.pad_id: "<pad>", tokenizer.bos_id: "<s>", tokenizer.eos_id: "</s>"}
