"""Continuous batching: texts are continued together, and join and leave the batch between any two steps.

prompts ─ add ─► decoder (finds neighbors of every completed chunk) ─► logits ─► one token of each row ─► text ─► …
                    ▲                                                                 │
                    └──────────── draft of each row (`drafts.py`) ◄───────────────────┘

With drafts, a step gives a row several tokens. After every token of the draft the next token is sampled as without
drafts, with the same random number, until it differs from the draft. So a token x of a draft is accepted with its
probability p(x), and another one is sampled with p(y) / (1 - p(x)): the rejection sampling of Leviathan et al. (2023,
arXiv 2211.17192) for a draft without randomness.

A continuation depends only on its prompt and settings, not on the other texts of the batch: each has its own random
generator. Several continuations of a prompt have consecutive seeds; their prompt is read once. (Up to rounding: matrix
products of a batch may sum in another order than those of a single row.)
"""

import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from retro.copying.provenance import ChunkWithNeighbors, CopiedFrom
from retro.copying.rows import RetrieveNeighbors, Row, WholeDatastore
from retro.inference.decoder import Decoder
from retro.inference.draft_costs import draft_costs
from retro.inference.drafts import NOTHING, Account, propose
from retro.inference.sampling import SampledToken, draw, with_penalties
from retro.inference.settings import GenerationSettings
from retro.inference.text_stream import Decode, TextStream
from retro.inference.trust import Trust

log = logging.getLogger("retro")

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GeneratedToken:
    """A generated token of one prompt.

    Attributes:
        row: number of the continuation: that of the prompt, or prompt · n + number of its continuation.
        token: the sampled token id; it can be the end of the document.
        text: new text of the continuation. The concatenated texts of a row are its continuation.
        log_probability: log-probability of the token in nats, before temperature, top-k and top-p.
        finish_reason: for the row's last token `stop` (end of the document, a stop token or a stop string) or `length`;
            else None.
        top: `GenerationSettings.logprobs` likeliest tokens with log-probabilities, likeliest first.
        read: chunks whose neighbors the model read for this token and for none before.
        copied: the token of a neighbor that it was copied from.
        copied_share: share of its probability that was copied from neighbors and datastore, 0 to 1; None if `sources`
            were not requested.
        trust: in retrieval, with the first token of a continuation whose `sources` were requested; None if the model
            copies nothing from it.
        accepted: True if it was the next token of a draft.
        rejected: tokens of the draft that were wrong, this one's place included.
    """

    row: int
    token: int
    text: str
    log_probability: float
    finish_reason: FinishReason | None = None
    top: tuple[tuple[int, float], ...] = ()
    read: tuple[ChunkWithNeighbors, ...] = ()
    copied: CopiedFrom | None = None
    accepted: bool = False
    rejected: int = 0
    copied_share: float | None = None
    trust: Trust | None = None


class Continuation:
    """A text in the batch: the state of a row in addition to its tokens."""

    def __init__(
        self,
        number: int,
        copy: int,
        prompt: np.ndarray,
        settings: GenerationSettings,
        decode: Decode,
        ends: Set[int],
        sources: bool,
        inserted: tuple[int, int],
    ) -> None:
        self.number, self.prompt, self.settings, self.sources = number, prompt, settings, sources
        self.inserted = inserted
        self.ends = {*settings.stop_token_ids, *(() if settings.ignore_eos else ends)}
        self.generated: list[int] = []
        self.trust: tuple[float, ...] | None = None  # of the row, once its prompt is read
        self.chunks_read = 0  # chunks whose neighbors were returned
        self.text = TextStream(decode, prompt, settings.stop)
        self._drafts, self._proposed, self._cost = Account(), NOTHING, 0.0
        self._generator = torch.Generator().manual_seed((settings.seed + copy) % 2**63)
        self._numbers: list[float] = []  # of the next tokens; a step that fails leaves them as they are

    def add(
        self,
        token: int,
        log_probability: float,
        top: tuple[tuple[int, float], ...],
        row: Row,
        copied: tuple[CopiedFrom | None, float | None],
        chunk_length: int,
        accepted: bool,
        rejected: int,
        earned: tuple[float, ...] | None,
    ) -> GeneratedToken:
        """Append a sampled token of a row. `copied`: where from, and its share. `earned`: trust of the row."""
        trust = None
        if self.sources and earned is not None and not self.generated:
            start, stop = self.inserted
            trust = Trust.of(earned, len(self.prompt) - (stop - start))
        self.generated.append(token)
        self.trust = row.trust
        del self._numbers[:1]
        shown = "" if token in self.ends else self.text.add(token)
        finish: FinishReason | None = "stop" if token in self.ends or self.text.stopped else None
        if finish is None and len(self.generated) == self.settings.max_tokens:
            finish = "length"
        if finish:
            shown += self.text.rest()
            finish = "stop" if self.text.stopped else finish
        read = row.chunks_read(self.chunks_read, chunk_length) if self.sources else ()
        self.chunks_read = read[-1].number + 1 if read else self.chunks_read
        where, share = copied
        return GeneratedToken(
            self.number, token, shown, log_probability, finish, top, read, where, accepted, rejected, share, trust
        )

    def random(self, ahead: int) -> float:
        """Return the random number of the next token, or of the one `ahead` tokens later."""
        if not self.settings.temperature:
            return 0.0
        while len(self._numbers) <= ahead:
            self._numbers.append(torch.rand(1, generator=self._generator).item())
        return self._numbers[ahead]

    def draft(self, row: Row, room: int, costs: np.ndarray, datastore: WholeDatastore | None) -> np.ndarray:
        """Return the draft of its row, of at most `room` tokens, `costs` of 0, 1 … tokens in passes; see
        `drafts.propose`."""
        room = min(room, self.settings.max_tokens - len(self.generated) - 1)
        if room <= 0:
            return row.tokens[:0]
        searched = datastore if row.retrieve else None
        most = min(room, len(costs) - 1)
        self._proposed = propose(row.tokens, self._drafts.rates, row.neighbor_texts(), searched, most)
        num_drafted = self._drafts.worth_reading(self._proposed, costs)
        self._cost = float(costs[num_drafted])
        return self._proposed.tokens[:num_drafted]

    def learn(self, tokens: Sequence[int]) -> None:
        """Compare the tokens of a step with those that were proposed for it."""
        self._drafts.update(self._proposed, tokens, self._cost)
        self._proposed, self._cost = NOTHING, 0.0


_Text = tuple[Continuation, RetrieveNeighbors | None]


class Batch:
    """Texts that are continued together.

    Args:
        decoder: without rows.
        decode: converts tokens to text.
        eos_id: the end-of-document token.
        more_ends: other tokens that end a document.
        masked: bool [V], True for ids that are never generated; None = there are none.
    """

    def __init__(
        self,
        decoder: Decoder,
        decode: Decode,
        eos_id: int,
        more_ends: Set[int] = frozenset(),
        masked: torch.Tensor | None = None,
    ) -> None:
        self._decoder, self._decode = decoder, decode
        self._ends, self._masked = {eos_id, *more_ends}, masked
        # Texts of each row: several continuations of a prompt share its row until it was read.
        self._texts: dict[Row, list[Continuation]] = {}

    def __len__(self) -> int:
        """Number of continuations in the batch."""
        return sum(map(len, self._texts.values()))

    def add(
        self,
        prompt: np.ndarray,
        settings: GenerationSettings,
        retrieve: RetrieveNeighbors | None = None,
        *,
        copies: Iterable[tuple[int, int]] = ((0, 0),),
        sources: bool = False,
        inserted: tuple[int, int] = (0, 0),
    ) -> list[Continuation]:
        """Add continuations of a prompt; they are generated from the next step on.

        Args:
            prompt: token ids [t], the beginning-of-document token first; t ≥ 1.
            settings: length and sampling.
            retrieve: finds the neighbors of its chunks; None = retrieval OFF.
            copies: for each continuation its number, which `GeneratedToken.row` returns, and what is added to the seed.
            sources: return the neighbors that were read and the tokens that were copied.
            inserted: [start, stop) of the prompt's tokens that are passages of the datastore, see `Row`.
        """
        texts = [
            Continuation(number, copy, prompt, settings, self._decode, self._ends, sources, inserted)
            for number, copy in copies
        ]
        row = self._decoder.add(prompt, retrieve, copy_strength=settings.copy_strength, inserted=inserted)
        self._texts[row] = texts
        return list(texts)

    def remove(self, continuations: Iterable[Continuation]) -> None:
        """Remove unfinished continuations. Others are unaffected."""
        gone = set(continuations)
        for row, texts in list(self._texts.items()):
            texts[:] = [text for text in texts if text not in gone]
            if not texts:
                self._leave(row)

    def step(self) -> list[tuple[Continuation, GeneratedToken | Exception]]:
        """Return the next tokens of each continuation whose row has been read, in order; finished ones leave the batch.

        A continuation that fails leaves the batch, too; its error takes the place of a token. Others are unaffected.
        """
        texts = [(text, row.retrieve) for row, texts in self._texts.items() for text in texts]
        try:
            return self._step()
        except Exception as error:
            failure = error
        if len(texts) == 1:
            self._restart([])
            return [(texts[0][0], failure)]
        log.warning("a step of %d texts failed (%r); each takes it alone", len(texts), failure)
        new, unfinished = list[tuple[Continuation, GeneratedToken | Exception]](), list[_Text]()
        for text in texts:
            self._restart([text])
            while not (step := self.step()):  # a prompt takes several
                pass
            new += step
            unfinished += [text] * len(self)
        self._restart(unfinished)
        return new

    def _restart(self, texts: Sequence[_Text]) -> None:
        """Replace the rows by those of some continuations, which read their tokens again: a failed decoder is in no
        known state."""
        self._decoder, self._texts = self._decoder.empty(), {}
        for text, retrieve in texts:
            tokens = np.append(text.prompt, text.generated)
            settings = text.settings.copy_strength, text.inserted, len(text.generated)
            row = self._decoder.add(tokens, retrieve, text.trust, *settings)
            self._texts[row] = [text]

    def _step(self) -> list[tuple[Continuation, GeneratedToken | Exception]]:
        """Take a step of all rows. If it raises an exception, no continuation has changed."""
        # Logits [sum over rows of 1 + d, V]: a row with a draft of d tokens has those after its text, then after each
        # of the d.
        rows, logits = self._decoder.step(self._propose)
        if not rows:
            return []
        first = self._divided(rows)
        texts = {row: self._texts[row][0] for row in first}
        drawn: dict[Row, list[SampledToken]] = {row: [] for row in first}
        going = list(first)  # whose drafts are right so far
        # Each round samples one more token of the rows whose draft was right so far, in one batch. A row leaves with
        # its first token that differs from the draft, which was sampled from the right logits, or with the one after
        # the whole draft.
        for number in itertools.count():
            for row, token in zip(going, self._draw(going, number, logits, first), strict=True):
                drawn[row].append(token)
            going = [row for row in going if number < len(row.draft) and drawn[row][-1][0] == row.draft[number]]
            if not going:
                break
        sources = self._copied_from(drawn, first)
        return [
            (text, token) for row, text in texts.items() for token in self._add(row, text, drawn[row], sources[row])
        ]

    def _draw(self, rows: list[Row], number: int, logits: torch.Tensor, first: dict[Row, int]) -> list[SampledToken]:
        """Sample the token of each row after `number` tokens of its draft."""
        texts = [self._texts[row][0] for row in rows]
        settings = [text.settings for text in texts]
        # Penalties count the accepted tokens of the draft, as if they had been generated one by one.
        generated = [[*text.generated, *row.draft[:number].tolist()] for row, text in zip(rows, texts, strict=True)]
        chosen = [first[row] + number for row in rows]
        # Without drafts all rows are taken, and the logits [rows, V] need no copy.
        unchanged = logits if chosen == [*range(len(logits))] else logits[chosen]
        changed = with_penalties(unchanged, settings, [text.prompt for text in texts], generated)
        return draw(changed, unchanged, settings, [text.random(number) for text in texts], self._masked)

    def _propose(self, row: Row, room: int, num_rows: int) -> np.ndarray:
        texts = self._texts[row]
        if len(texts) > 1 or not texts[0].settings.drafts:
            return row.tokens[:0]
        # A draft makes the pass of all rows wider, and saves one of their tokens.
        return texts[0].draft(row, room, self._costs_of_drafts * num_rows, self._decoder.datastore)

    @functools.cached_property
    def _costs_of_drafts(self) -> np.ndarray:
        """See `draft_costs`. Texts without drafts need no measurement."""
        return draft_costs(self._decoder.model)

    def _add(
        self,
        row: Row,
        text: Continuation,
        drawn: Sequence[SampledToken],
        sources: Sequence[tuple[CopiedFrom | None, float | None]],
    ) -> list[GeneratedToken | Exception]:
        """Append tokens to a continuation and its row, up to its end or to what failed, which is the last item then."""
        added = list[GeneratedToken | Exception]()
        num_right, num_drafted = len(drawn) - 1, len(row.draft)
        text.learn([token for token, *_ in drawn])
        try:
            for number, (token, source) in enumerate(zip(drawn, sources, strict=True)):
                right = number < num_right
                rejected = 0 if right else num_drafted - num_right
                new = text.add(*token, row, source, self._decoder.m, right, rejected, self._decoder.trust(row))
                added.append(new)
                if new.finish_reason is not None:
                    break
            else:
                self._decoder.append(row, *(token for token, *_ in drawn))
                return added
        except Exception as error:
            added.append(error)
        self._leave(row)
        return added

    def _divided(self, rows: list[Row]) -> dict[Row, int]:
        """Give each continuation its own row; return the index of the first logits of each."""
        first, index = dict[Row, int](), 0
        for row in rows:
            own, *others = self._texts[row]
            self._texts[row], first[row] = [own], index
            for text in others:  # rows of several continuations have no draft
                copy = self._decoder.copy(row)
                self._texts[copy], first[copy] = [text], index
            index += 1 + len(row.draft)
        return first

    def _copied_from(
        self, drawn: dict[Row, list[SampledToken]], first: dict[Row, int]
    ) -> dict[Row, list[tuple[CopiedFrom | None, float | None]]]:
        """Find where the tokens of texts with `sources` were copied from, and how much of each.

        Args:
            drawn: the tokens of each row.
            first: index of the logits of the first of them.
        """
        copied: dict[Row, list[tuple[CopiedFrom | None, float | None]]]
        copied = {row: [(None, None)] * len(own) for row, own in drawn.items()}
        chosen = [row for row in drawn if self._texts[row][0].sources]
        if places := [(row, number) for row in chosen for number in range(len(drawn[row]))]:
            tokens, log_probabilities = zip(*(drawn[row][number][:2] for row, number in places), strict=True)
            rows, indices = [row for row, _ in places], [first[row] + number for row, number in places]
            origins = self._decoder.copied_from(rows, indices, tokens, log_probabilities)
            shares = self._decoder.copied_shares(indices, tokens, log_probabilities)
            for (row, number), origin, share in zip(places, origins, shares, strict=True):
                copied[row][number] = origin, share
        return copied

    def _leave(self, row: Row) -> None:
        del self._texts[row]
        self._decoder.remove(row)


def generate(
    batch: Batch,
    prompts: Sequence[np.ndarray],
    settings: GenerationSettings,
    retrieve: Sequence[RetrieveNeighbors | None] | None = None,
    *,
    n: int = 1,
    sources: bool = False,
    inserted: Sequence[tuple[int, int]] | None = None,
) -> Iterator[list[GeneratedToken]]:
    """Continue prompts; yield after every step the new tokens, in the order of their rows. A row can have several.

    Args:
        batch: an empty batch.
        prompts: token ids [t] of each prompt, the beginning-of-document token first; t ≥ 1.
        settings: length and sampling.
        retrieve: finds the neighbors of each prompt's chunks; None = retrieval OFF.
        n: continuations of each prompt.
        sources: return the neighbors that were read and the tokens that were copied.
        inserted: [start, stop) of each prompt's tokens that are passages of the datastore; None = none.

    Raises:
        Exception: of the first continuation that fails.
    """
    for index, prompt in enumerate(prompts):
        copies = [(index * n + copy, copy) for copy in range(n)]
        search, passages = retrieve[index] if retrieve else None, inserted[index] if inserted else (0, 0)
        batch.add(prompt, settings, search, copies=copies, sources=sources, inserted=passages)
    while len(batch):
        tokens = list[GeneratedToken]()
        for _, token in batch.step():
            if isinstance(token, Exception):
                raise token
            tokens.append(token)
        if tokens:
            yield sorted(tokens, key=lambda token: token.row)
