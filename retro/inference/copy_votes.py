"""The copy head in a decoder: mixes its votes into the logits of the next tokens, and finds what these were copied from."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from indexing.suffixes.votes import COLUMNS, KEPT
from retro.inference.compiled_head import CompiledHead
from retro.inference.rows import Row, WholeDatastore
from retro.inference.sources import CopiedFrom, Neighbors
from retro.model.copy_head import SOURCES, CopyHead
from retro.model.copy_matches import LONGEST, MATCH_LENGTHS, Matches, context_matches_of_last, neighbor_matches_of_last
from retro.model.copy_sources import DatastoreVotes, Source, SourceMatches
from retro.model.copy_switch import START
from retro.model.inputs import Inputs
from retro.model.loss import TokenLosses


class _Votes(NamedTuple):
    """What the copy head found for the last tokens of some rows."""

    log_top: Tensor  # [N]
    matches: dict[str, SourceMatches]
    votes: np.ndarray | None  # [N, 32]
    trust: np.ndarray  # [N, 4]
    copy_strength: np.ndarray  # [N]

    def of_rows(self, indices: list[int]) -> "_Votes":
        matches = {
            name: SourceMatches(Matches(*(part[indices] for part in source.matches)))
            for name, source in self.matches.items()
        }
        votes = None if self.votes is None else self.votes[indices]
        return _Votes(self.log_top[indices], matches, votes, self.trust[indices], self.copy_strength[indices])


class CopyVotes:
    """A copy head, and its votes of the last step. Letters of the shape comments as in `decoder.py`."""

    def __init__(self, head: CopyHead, device: torch.device, datastore: WholeDatastore | None) -> None:
        self._head, self._m, self._device, self._datastore = head, head.chunk_length, device, datastore
        self._compiled = CompiledHead(head)
        self._votes: _Votes | None = None
        self._copied: list[
            tuple[np.ndarray, np.ndarray]
        ] = []  # of neighbors and datastore: tokens [N, S], probabilities [N, S]

    def mixed(self, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """Log-probabilities of the next tokens: logits [N, V] mixed with what the copy head votes for.

        They are normalized for rows without votes too: a penalty would otherwise depend on the other rows.

        Args:
            rows: rows that were read, drafts included. N is the number of their last tokens and draft tokens.
            logits: of the vocabulary.
        """
        histories = [history for row in rows for history in row.histories()]
        rows = [row for row in rows for _ in range(1 + len(row.draft))]
        matches, votes = self._matches_of_last(rows, histories), self._votes_of_last(rows, histories)
        trust = np.array([row.trust for row in rows], np.float32)
        copy_strength = np.array([row.copy_strength for row in rows], np.float32)
        evidence = np.zeros((len(rows), len(SOURCES), len(MATCH_LENGTHS), 4), np.float32)
        for name, source in matches.items():
            any_label = torch.zeros((len(rows), 1), dtype=torch.int64, device=self._device)
            evidence[:, SOURCES.index(name)] = source.evidence(any_label)[:, 0].cpu().numpy()
        log_p = logits.float().log_softmax(-1)
        log_top = log_p.amax(-1)
        self._votes = _Votes(log_top, matches, votes, trust, copy_strength)
        none = np.zeros((len(rows), COLUMNS), np.int64)
        shares = self._compiled.shares(
            log_top.cpu().numpy(), evidence, none if votes is None else votes, trust, copy_strength
        )
        candidates = [] if votes is None else [(votes[:, 1 : 1 + KEPT], shares.weights)]
        for name, source in matches.items():
            tables = (table[:, None, SOURCES.index(name)] for table in (shares.shares, evidence[..., 0]))
            found = source.candidates(*map(self._put, tables))
            candidates.append((found[0][:, 0].cpu().numpy(), found[1][:, 0].cpu().numpy()))
        self._copied = candidates[:]
        if "context" in matches:  # the text itself is not retrieved
            del self._copied[int(votes is not None) + [*matches].index("context")]
        log_kept = self._put(shares.log_kept)[:, None]
        if not candidates:
            return log_p.add_(log_kept)
        following, weights = (np.concatenate(parts, 1) for parts in zip(*candidates, strict=True))
        tokens = self._put(following)
        before = log_p.gather(1, tokens).cpu().numpy()
        values = self._compiled.log_probabilities(before, shares.log_kept, following, weights)
        return log_p.add_(log_kept).scatter_(1, tokens, self._put(values))

    @property
    def retrieves(self) -> bool:
        """Whether it copies from neighbors or the whole datastore, and so learns trust."""
        return self._head.neighbors is not None or (self._head.datastore is not None and self._datastore is not None)

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

    def _matches_of_last(self, rows: Sequence[Row], histories: Sequence[np.ndarray]) -> dict[str, SourceMatches]:
        """Matches of the last tokens of the texts of rows, in their context and in their neighbors."""
        head, matches = self._head, dict[str, SourceMatches]()
        if head.context is not None:
            matches["context"] = SourceMatches(context_matches_of_last(self._put(_padded(histories))))
        if head.neighbors is not None and any(row.neighbors for row in rows):
            neighbors, lengths = map(self._put, _last_neighbors(rows))
            last = self._put(_padded([history[-LONGEST:] for history in histories]))
            matches["neighbors"] = SourceMatches(neighbor_matches_of_last(last, neighbors, lengths, self._m))
        return matches

    def _votes_of_last(self, rows: Sequence[Row], histories: Sequence[np.ndarray]) -> np.ndarray | None:
        """The datastore's votes for the last tokens of the texts of rows with retrieval ON, int64 [N, 32]; None without such rows.

        A text without tokens, as after a prompt that is given as embeddings, has none.
        """
        voting = [index for index, row in enumerate(rows) if row.retrieve and len(histories[index])]
        if self._head.datastore is None or self._datastore is None or not voting:
            return None
        found = self._datastore.last_votes([histories[index] for index in voting])
        if len(voting) == len(rows):
            return found
        votes = np.zeros((len(rows), COLUMNS), np.int64)
        votes[voting] = found
        return votes

    def copied_shares(
        self, indices: Sequence[int], tokens: Sequence[int], log_probabilities: Sequence[float]
    ) -> list[float]:
        """Find how much of the probability of the next tokens was copied from neighbors and datastore, 0 to 1.

        Args:
            indices: among the N tokens of the last call of `mixed`.
            tokens: the next token of each.
            log_probabilities: of these tokens, in nats.
        """
        shares = list[float]()
        for index, token, log_probability in zip(indices, tokens, log_probabilities, strict=True):
            copied = sum(float(weights[index][following[index] == token].sum()) for following, weights in self._copied)
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
        if self._votes is None or read is None:
            return [None] * len(tokens)
        votes, device = self._votes.of_rows(indices), self._device
        losses = -torch.tensor(log_probabilities, device=device)[:, None]
        labels, sources = self._put(np.array(tokens, np.int64))[:, None], dict[str, Source](votes.matches)
        if votes.votes is not None:
            sources["datastore"] = DatastoreVotes.of(self._put(votes.votes[:, None]))
        trust, copy_strength = self._put(votes.trust[:, None]), self._put(votes.copy_strength[:, None])
        log_top, length = votes.log_top[:, None], read.tokens.shape[1]
        origins = self._head.origins(log_top, labels, losses, sources, length, trust, copy_strength)
        columns = (column[:, 0].tolist() for column in (origins.share, origins.neighbors, origins.positions))
        return [
            CopiedFrom(share, row.dropped + len(row.neighbors) - 1, neighbor, position) if neighbor >= 0 else None
            for row, share, neighbor, position in zip(rows, *columns, strict=True)
        ]

    def _put(self, array: np.ndarray) -> Tensor:
        dtype = np.float32 if array.dtype.kind == "f" else np.int64
        return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(self._device)


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
