"""The copy head in a decoder: mixes its votes into the logits of the next tokens, and finds what these were copied
from."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from retro.batch.inputs import Inputs
from retro.batch.loss import TokenLosses
from retro.copying.compiled_head import CompiledHead
from retro.copying.datastore import DATASTORE
from retro.copying.head import CopyHead
from retro.copying.matches import MATCH_LENGTHS
from retro.copying.neighbors import NEIGHBORS
from retro.copying.provenance import CopiedFrom
from retro.copying.rows import Row, WholeDatastore
from retro.copying.source import CopySource, StepTexts, VotesOfRows, put
from retro.copying.switch import KNOWN, faded

ComputeLosses = Callable[[Tensor], TokenLosses]
"""The best candidates int64 [1, t, C] of the sources after each token of a text → its losses [1, t]."""


class _LastStep(NamedTuple):
    """What the copy head found for the last tokens of some rows."""

    log_top: Tensor  # [N]
    log_best: Tensor  # [N, C]
    votes: dict[str, VotesOfRows]
    trust: np.ndarray  # [N, S]
    copy_strength: np.ndarray  # [N]


class StepVotes:
    """A copy head, and its votes of the last step. Letters of the shape comments as in `decoder.py`."""

    def __init__(self, head: CopyHead, device: torch.device, datastore: WholeDatastore | None) -> None:
        self._head, self._device, self._datastore = head, device, datastore
        self._compiled = CompiledHead(head)
        self._last: _LastStep | None = None
        self._retrieved: list[tuple[np.ndarray, np.ndarray]] = []  # tokens [N, S], probabilities [N, S] of each source

    def mixed(self, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """Log-probabilities of the next tokens: logits [N, V] mixed with what the copy head votes for.

        They are normalized for rows without votes too: a penalty would otherwise depend on the other rows.

        Args:
            rows: rows that were read, drafts included. N is the number of their last tokens and draft tokens.
            logits: of the vocabulary.
        """
        histories = [history for row in rows for history in row.histories()]
        rows = [row for row in rows for _ in range(1 + len(row.draft))]  # N: one for each history
        votes = self._votes(StepTexts(rows, histories, self._datastore, self._head.chunk_length, self._device))
        count = len(self._head.known)
        evidence, best = (
            np.zeros((len(rows), count, len(MATCH_LENGTHS), 4), np.float32),
            np.zeros((len(rows), count), int),
        )
        for name, of_source in votes.items():
            number = self._head.index(name)
            evidence[:, number], best[:, number] = of_source.evidence()
        trust = self._trust_now(rows, histories)
        copy_strength = np.array([row.copy_strength for row in rows], np.float32)
        log_p = logits.float().log_softmax(-1)
        log_top, log_best = log_p.amax(-1), log_p.gather(1, put(best, self._device))
        self._last = _LastStep(log_top, log_best, votes, trust, copy_strength)
        read = torch.cat((log_top[:, None], log_best), 1).cpu().numpy()  # one copy from the device
        # Loops are compiled for arrays without gaps.
        tops, bests = np.ascontiguousarray(read[:, 0]), np.ascontiguousarray(read[:, 1:])
        shares = self._compiled.shares(tops, bests, evidence, trust, copy_strength)
        log_kept = put(shares.log_kept, self._device)[:, None]
        self._retrieved = []
        if not votes:
            return log_p.add_(log_kept)
        candidates = [
            of_source.candidates(
                *(np.ascontiguousarray(table[:, number]) for table in (shares.shares, evidence[..., 0]))
            )
            for number, of_source in ((self._head.index(name), of_source) for name, of_source in votes.items())
        ]
        of_retrieval = [self._head.known[self._head.index(name)].of_retrieval for name in votes]
        self._retrieved = [table for table, retrieved in zip(candidates, of_retrieval, strict=True) if retrieved]
        following, weights = (np.concatenate(parts, 1) for parts in zip(*candidates, strict=True))
        tokens = put(following, self._device)
        before = log_p.gather(1, tokens).cpu().numpy()
        values = self._compiled.log_probabilities(before, shares.log_kept, following, weights)
        # All tokens get the vocabulary's share of their probability, and the few candidates what is copied in addition.
        return log_p.add_(log_kept).scatter_(1, tokens, put(values, self._device))

    def retrieves(self, row: Row) -> bool:
        """Whether a row copies from neighbors or datastore."""
        return row.retrieve is not None and any(source.of_retrieval for source in self._switched)

    def learns_trust(self, row: Row) -> bool:
        """Whether a row copies from a source that must earn trust."""
        return self.retrieves(row) or any(not source.of_retrieval for source in self._switched)

    @property
    def _switched(self) -> list[CopySource]:
        """The sources that must earn trust, as far as they can be searched."""
        sources = [source for source in self._head.known if source.switched and self._head.network(source) is not None]
        return [source for source in sources if source.name != DATASTORE.name or self._datastore is not None]

    def _trust_now(self, rows: Sequence[Row], histories: Sequence[np.ndarray]) -> np.ndarray:
        """Trust float32 [N, S] with which the token after each of N histories is predicted: what the prompt of its row
        earned, less with each generated token, unless the prompt is known."""
        trust = np.array([row.trust or self._head.switch.start for row in rows], np.float32)
        if self._datastore is None or self._head.network(DATASTORE) is None:
            return trust
        generated = np.zeros(len(rows), np.int64)
        for index, (row, history) in enumerate(zip(rows, histories, strict=True)):
            # A history ends before the row's last token, or in its draft.
            count = max(0, row.num_generated + len(history) - len(row.tokens))
            if count and row.retrieve is not None and not self._is_known(row, history[: max(0, len(history) - count)]):
                generated[index] = count
        return faded(trust, generated)

    def _is_known(self, row: Row, prompt: np.ndarray) -> bool:
        """Whether the last tokens of a row's prompt occur in the datastore, from one search."""
        if row.is_known is None:
            assert self._datastore is not None
            row.is_known = len(prompt) > 0 and self._datastore.longest_match(prompt[-KNOWN:]).length == KNOWN
        return row.is_known

    def earning(self, row: Row) -> np.ndarray:
        """Places [n] int64 of a row's tokens whose following tokens earn trust: all but those before inserted tokens, and
        the last one, which none follows."""
        start, stop = (max(0, border - row.dropped * self._head.chunk_length - 1) for border in row.inserted)
        places = np.arange(len(row.tokens) - 1)
        return places[(places < start) | (places >= stop)]

    def trust(self, row: Row, losses_of: ComputeLosses) -> tuple[float, ...]:
        """Trust in each expert after the tokens of a row, from the losses of the tokens after them, as far as these
        earn trust."""
        inputs = self._inputs_of(row)
        if not self._head.learns_trust(inputs):
            return self._head.switch.start
        evidence = self._head.evidence(self._head.sources(inputs), inputs.following())
        earns = put(self.earning(row), self._device)
        return tuple(self._head.trust_after(losses_of(evidence.best), evidence, earns).tolist())

    def copied_shares_of(self, row: Row, losses_of: ComputeLosses) -> Tensor:
        """As `copied_shares`, for all next tokens of a text: float32 [t].

        Args:
            row: the text. Its trust counts after all tokens.
            losses_of: losses of the tokens after its tokens.
        """
        inputs, head = self._inputs_of(row), self._head
        sources, following = head.sources(inputs), inputs.following()
        evidence = head.evidence(sources, following)
        vocabulary = losses_of(evidence.best)
        histories = [row.tokens[: at + 1] for at in range(len(row.tokens))]
        trust = put(self._trust_now([row] * len(histories), histories)[None], self._device)  # [1, t, S]
        strength = torch.full((1, 1), row.copy_strength, device=self._device)
        losses = head.losses_with(vocabulary, evidence, trust, strength)
        length = 0 if inputs.neighbors is None else inputs.neighbors.shape[-1]
        _, log_top, log_best = vocabulary
        origins = head.origins(log_top, log_best, following, losses, sources, length, trust, strength)
        return sum((origins.of(source) for source in head.known if source.of_retrieval), losses.new_zeros(()))[0]

    def _inputs_of(self, row: Row) -> Inputs:
        """A text with its neighbors and votes, as far as it has retrieval, as a batch of one on the device."""
        arrays = Inputs(row.tokens[None], **row.neighbor_inputs())
        if self._head.datastore is not None and self._datastore is not None and row.retrieve is not None:
            arrays = arrays._replace(votes=self._datastore.votes(row.tokens)[None])
        return arrays.map(lambda array: put(array, self._device))

    def copied_shares(
        self, indices: Sequence[int], tokens: Sequence[int], log_probabilities: Sequence[float]
    ) -> list[float]:
        """Find how much of the probability of the next tokens was copied from sources of retrieval, 0 to 1.

        Args:
            indices: among the N tokens of the last call of `mixed`.
            tokens: the next token of each.
            log_probabilities: of these tokens, in nats.
        """
        shares = list[float]()
        for index, token, log_probability in zip(indices, tokens, log_probabilities, strict=True):
            copied = sum(
                float(weights[index][following[index] == token].sum()) for following, weights in self._retrieved
            )
            shares.append(min(1.0, copied / math.exp(log_probability)) if copied else 0.0)
        return shares

    def copied_from(
        self, rows: Sequence[Row], indices: list[int], tokens: Sequence[int], log_probabilities: Sequence[float]
    ) -> list[CopiedFrom | None]:
        """Find which tokens of neighbors the next tokens were copied from.

        Args:
            rows: some rows of the last call of `mixed`, or copies of them.
            indices: their indices among its N tokens.
            tokens: the next token of each row.
            log_probabilities: of these tokens, in nats.

        Returns:
            the source of each token; None for a token that no neighbor votes for.
        """
        read = next((row.neighbors[-1] for row in rows if row.neighbors), None)
        if self._last is None or read is None:
            return [None] * len(tokens)
        head, last, device = self._head, self._last, self._device
        votes = {name: of_source.of_rows(indices) for name, of_source in last.votes.items()}
        trust, copy_strength = (put(table[indices][:, None], device) for table in (last.trust, last.copy_strength))
        labels, losses = put(np.array(tokens)[:, None], device), put(-np.array(log_probabilities)[:, None], device)
        log_top, log_best = (table[indices][:, None] for table in (last.log_top, last.log_best))
        length = read.tokens.shape[1]
        origins = head.origins(log_top, log_best, labels, losses, votes, length, trust, copy_strength)
        columns = (table[:, 0].tolist() for table in (origins.of(NEIGHBORS), origins.neighbors, origins.positions))
        return [
            CopiedFrom(share, row.dropped + len(row.neighbors) - 1, neighbor, position) if neighbor >= 0 else None
            for row, share, neighbor, position in zip(rows, *columns, strict=True)
        ]

    def _votes(self, texts: StepTexts) -> dict[str, VotesOfRows]:
        """The votes of each source that has some for one of the texts."""
        sources = [source for source in self._head.known if self._head.network(source) is not None]
        found = {source.name: source.of_step(texts) for source in sources}
        return {name: votes for name, votes in found.items() if votes is not None}
