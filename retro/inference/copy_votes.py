"""The copy head in a decoder: mixes its votes into the logits of the next tokens, and finds what these were copied from."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from indexing.suffixes.votes import COLUMNS
from retro.inference.rows import Row, WholeDatastore
from retro.inference.sources import CopiedFrom, Neighbors
from retro.model.copy_head import CopyHead
from retro.model.copy_matches import LONGEST, Matches, context_matches_of_last, neighbor_matches_of_last
from retro.model.copy_sources import DatastoreVotes, Source, SourceMatches
from retro.model.copy_switch import START
from retro.model.inputs import Inputs
from retro.model.loss import TokenLosses


class _Votes(NamedTuple):
    """What the copy head found for the last tokens of some rows."""

    logits: Tensor  # [N, V]
    sources: dict[str, Source]
    trust: Tensor  # [N, 1, 4]
    copy_strength: Tensor | None  # [N, 1]

    def of_rows(self, indices: list[int]) -> "_Votes":
        sources = dict[str, Source]()
        for name, source in self.sources.items():
            parts = source if isinstance(source, DatastoreVotes) else source.matches
            chosen = [part[indices] for part in parts]
            sources[name] = DatastoreVotes(*chosen) if name == "datastore" else SourceMatches(Matches(*chosen))
        copy_strength = None if self.copy_strength is None else self.copy_strength[indices]
        return _Votes(self.logits[indices], sources, self.trust[indices], copy_strength)


class CopyVotes:
    """A copy head, and its votes of the last step. Letters of the shape comments as in `decoder.py`."""

    def __init__(self, head: CopyHead, device: torch.device, datastore: WholeDatastore | None) -> None:
        self._head, self._m, self._device, self._datastore = head, head.chunk_length, device, datastore
        self._votes: _Votes | None = None

    def mixed(self, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """Log-probabilities of the next tokens: logits [N, V] mixed with what the copy head votes for.

        They are normalized for rows without votes too: a penalty would otherwise depend on the other rows.

        Args:
            rows: rows that were read, drafts included. N is the number of their last tokens and draft tokens.
            logits: of the vocabulary.
        """
        head = self._head
        histories = [history for row in rows for history in row.histories()]
        rows = [row for row in rows for _ in range(1 + len(row.draft))]
        trust = torch.tensor([[row.trust] for row in rows], device=self._device)
        strengths = [[row.copy_strength] for row in rows]
        copy_strength = torch.tensor(strengths, device=self._device) if strengths != [[1.0]] * len(rows) else None
        sources = dict[str, Source]()
        if head.context is not None:
            sources["context"] = SourceMatches(context_matches_of_last(self._put(_padded(histories))))
        if head.neighbors is not None and any(row.neighbors for row in rows):
            neighbors, lengths = map(self._put, _last_neighbors(rows))
            last = self._put(_padded([history[-LONGEST:] for history in histories]))
            sources["neighbors"] = SourceMatches(neighbor_matches_of_last(last, neighbors, lengths, self._m))
        if head.datastore is not None and self._datastore is not None and any(row.retrieve for row in rows):
            sources["datastore"] = DatastoreVotes.of(self._votes_of_last(rows, histories, self._datastore))
        self._votes = _Votes(logits, sources, trust, copy_strength)
        evidence = head.evidence(sources, torch.zeros((len(rows), 1), dtype=torch.int64, device=self._device))
        return head.mix(logits[:, None], sources, evidence, trust=trust, copy_strength=copy_strength)[:, 0]

    def trust(self, row: Row, vocabulary: TokenLosses) -> tuple[float, ...]:
        """Trust in each strength of copying after the tokens of a row, from the losses [1, t] of the tokens after them."""
        inputs = Inputs(row.tokens[None], **row.neighbor_inputs())
        if self._head.datastore is not None and self._datastore is not None:
            inputs = inputs._replace(votes=self._datastore.votes(row.tokens)[None])
        inputs = inputs.map(self._put)
        if not self._head.learns_trust(inputs):
            return START
        evidence = self._head.evidence(self._head.sources(inputs), inputs.following())
        _, trust = self._head.trusted_losses(vocabulary, evidence, inputs)
        return tuple(trust[0, -1].tolist())

    def _votes_of_last(self, rows: Sequence[Row], histories: Sequence[np.ndarray], datastore: WholeDatastore) -> Tensor:
        """The datastore's votes for the last tokens of the texts of rows with retrieval ON, [N, 1, 32]."""
        votes = np.zeros((len(rows), 1, COLUMNS), np.int64)
        voting = [index for index, row in enumerate(rows) if row.retrieve]
        votes[voting, 0] = datastore.last_votes([histories[index] for index in voting])
        return self._put(votes)

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
        if self._votes is None or read is None:
            return [None] * len(tokens)
        votes, device = self._votes.of_rows(indices), self._device
        losses = -torch.tensor(log_probabilities, device=device)[:, None]
        labels = self._put(np.array(tokens))[:, None]
        log_top, length = votes.logits.log_softmax(-1).amax(-1, keepdim=True), read.tokens.shape[1]
        origins = self._head.origins(log_top, labels, losses, votes.sources, length, votes.trust, votes.copy_strength)
        columns = (column[:, 0].tolist() for column in (origins.share, origins.neighbors, origins.positions))
        return [
            CopiedFrom(share, row.dropped + len(row.neighbors) - 1, neighbor, position) if neighbor >= 0 else None
            for row, share, neighbor, position in zip(rows, *columns, strict=True)
        ]

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._device)


def _padded(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Texts as rows that end in the last column, int64; -1 = no token."""
    width = max(map(len, texts))
    padded = np.full((len(texts), width), -1, np.int64)
    for row, text in zip(padded, texts, strict=True):
        row[width - len(text) :] = text
    return padded


def _last_neighbors(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Neighbors [N, K, R] of the last complete chunks and their lengths [N, K]; rows with fewer neighbors have lengths of 0."""
    last: list[Neighbors | None] = [row.neighbors[-1] if row.neighbors else None for row in rows]
    k = max(row.num_neighbors for row in rows)
    r = next(neighbors.tokens.shape[1] for neighbors in last if neighbors is not None)
    tokens, lengths = np.zeros((len(rows), k, r), np.int64), np.zeros((len(rows), k), np.int64)
    for row, neighbors in enumerate(last):
        if neighbors is not None:
            tokens[row, : len(neighbors.tokens)] = neighbors.tokens
            lengths[row, : len(neighbors.lengths)] = neighbors.lengths
    return tokens, lengths
