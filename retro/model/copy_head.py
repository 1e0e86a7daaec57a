"""Copying: next tokens that followed the same text before, mixed with those that the vocabulary predicts.

    p(w) = (1 - g_context - g_neighbors - g_datastore) softmax(logits)(w)
         + g_context p_context(w) + g_neighbors p_neighbors(w) + g_datastore p_datastore(w)

There are three sources: the preceding tokens of the same document (context), the neighbors of the preceding chunk, and the whole
datastore (`copy_datastore.py`). The first two are an attention over positions, and a position votes for the token that follows it
(pointer networks: Merity et al. 2017, arXiv 1609.07843; kNN-LM: Khandelwal et al. 2020, arXiv 1911.00172). The score of a position
is a learned function of its match length: how many tokens up to this position, at most 16, equal the last tokens that were read. The gates g depend on the
activations and on the matches. Not in the paper of RETRO.

    tokens, neighbors ─ match lengths ─┬─ positions counted by match length (34 numbers per token) ─ p(label) ─┐
                                       └─ longest match, agreement of its votes ─ gates ───────────────────────┴─ loss

Match lengths are exact and need no gradient, so training keeps 34 counts per token and source (for and against
the label, for each of 17 lengths) instead of an attention matrix.
Retrieval OFF removes the terms of neighbors and datastore: the other gates stay in proportion. Outside of training,
they are as strong as they were right in the text so far (`copy_switch.py`).

Letters of the shape comments as in `retro.py`. In addition, N is a batch of texts with S positions each, Q the queries of a text.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from retro.model.copy_datastore import DatastoreSource, DatastoreVotes
from retro.model.copy_matches import (
    LONGEST,
    TABLE_STEP,
    Matches,
    Windows,
    context_matches,
    count_votes,
    longest_match,
    neighbor_matches,
)
from retro.model.copy_switch import STRENGTHS, trust_of
from retro.model.inputs import Inputs
from retro.model.loss import Mixture, mixed_losses
from retro.model.masks import document_starts, some_key
from retro.model.settings import CopyHeadSettings

_SCORES = (-2.5, 4.0, 6.3, 8.0, 8.7, 9.5, 10.5, 12.5, 15.5, 17.5, 19.5, 22.0, 24.0, 26.0, 28.0, 30.0, 32.0)
_AGREED = (-5.0, -2.4, -1.2, -0.6, -0.1, 0.2, 0.4, 0.5, 0.7, 0.8, 0.9, 1.0)
_DISAGREED = (-5.0, -2.6, -1.8, -1.6, -1.4)
"""Initial tables by match length; the last number is repeated. They are near those of fitted and of trained copy heads, which
were alike for both sources and for bases with and without copying (docs/results/retrieval-gain.md)."""


class CopySource(nn.Module):
    """The attention over one source, and its gate."""

    TABLES = ("scores", "agreed", "disagreed")

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(LONGEST + 1))  # by match length
        self.disagreed = nn.Parameter(torch.zeros(LONGEST + 1))  # gate if the longest matches vote for different tokens
        self.agreed = nn.Parameter(torch.zeros(LONGEST + 1))  # gate if they vote for one token
        self.gate = nn.Parameter(torch.zeros(d_model))

    @torch.no_grad()
    def initialize(self) -> None:
        """Begin as a suffix matcher: a longer match outweighs shorter ones, and the gate opens with its length."""
        for table, first in ((self.scores, _SCORES), (self.agreed, _AGREED), (self.disagreed, _DISAGREED)):
            filled = torch.tensor(first + first[-1:] * (LONGEST + 1 - len(first)), device=table.device)
            table.copy_(filled / TABLE_STEP)
        self.gate.zero_()

    @property
    def tables(self) -> Tensor:
        """By match length, float32 [3, 17]: scores, and log-odds of the gate if the longest matches agree, and if they do not."""
        return TABLE_STEP * torch.stack((self.scores, self.agreed, self.disagreed))

    def attention(self, matches: Matches) -> Tensor:
        """Attention of queries to positions by their match lengths, float32 [N, Q, S]; 0 for a query that can read none."""
        readable = matches.lengths >= 0
        scores = (TABLE_STEP * self.scores)[matches.lengths.long().clamp(min=0)]
        return scores.masked_fill(~some_key(readable), -torch.inf).softmax(-1) * readable

    def probability(self, wrong: Tensor, right: Tensor) -> Tensor:
        """The attention to positions that vote for the label, summed: float32 [N, Q], from the counts of `count_votes`."""
        scores = TABLE_STEP * self.scores
        # A softmax over positions, but positions of equal match length have equal weights: counts of 17 lengths are enough. Less
        # the largest score, exp cannot overflow.
        weights = (scores - scores.detach().max()).exp()
        total = (wrong + right) @ weights
        return (right @ weights) / (total + (total == 0))  # a query that can read no position: 0, and finite gradients

    def log_odds(self, longest: Tensor, agree: Tensor) -> Tensor:
        """Log-odds of the gate against the vocabulary, before the term from the activations, float32 [N, Q].

        -inf for a query that can read no position. The arguments are those of `longest_match`.
        """
        row = longest.clamp(min=0)
        table = self.agreed[row].where(agree, self.disagreed[row])
        return (TABLE_STEP * table).masked_fill(longest < 0, -torch.inf)


class SourceMatches(NamedTuple):
    """What the queries of a batch can copy from one source.

    Attributes:
        source: its parameters.
        matches: its matches.
        windows: of its queries; None = one query per token.
    """

    source: CopySource
    matches: Matches
    windows: Windows | None = None

    def split(self, x: Tensor) -> Tensor:
        """Values of tokens to those of queries."""
        return x if self.windows is None else self.windows.split(x)

    def join(self, x: Tensor, num_tokens: int, fill: float = 0.0) -> Tensor:
        """Values of queries to those of tokens."""
        return x if self.windows is None else self.windows.join(x, num_tokens, fill)

    def log_odds(self, hidden: Tensor) -> Tensor:
        """Log-odds of the gate against the vocabulary, from activations [B, T, D]: float32 [N, Q]."""
        return self.source.log_odds(*longest_match(self.matches)) + self.split(hidden) @ self.source.gate

    def probability(self, labels: Tensor) -> Tensor:
        """The attention to positions that vote for the labels [B, T], summed: float32 [N, Q]."""
        return self.source.probability(*count_votes(self.matches, self.split(labels)))

    def candidates(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """What can follow each token [B, T, S], and its probability, float32 [B, T, S]."""
        weights = self.source.attention(self.matches)  # [N, Q, S]
        following = self.matches.following[:, None].expand_as(weights)
        return self.join(following, num_tokens), self.join(weights, num_tokens)

    def votes(self, labels: Tensor) -> Tensor:
        """Which positions vote for the labels [B, T]: bool [N, Q, S]."""
        return self.matches.following[:, None] == self.split(labels)[..., None]


Source = SourceMatches | DatastoreVotes


class Origins(NamedTuple):
    """Where the probability of labels [B, T] comes from, as far as it is copied from neighbors or the datastore.

    Attributes:
        share: share of the probability of a label that is copied from the neighbors, float32 [B, T], 0 to 1.
        lengths: longest match in a neighbor among those that vote for the label, int64 [B, T]; -1 = no position votes for it.
        neighbors: number of this neighbor, the first one of several, int64 [B, T]; -1 = none.
        positions: the token of this neighbor that equals the label, int64 [B, T]; -1 = none.
        datastore: share of the probability of a label that is copied from the whole datastore, float32 [B, T], 0 to 1.
    """

    share: Tensor
    lengths: Tensor
    neighbors: Tensor
    positions: Tensor
    datastore: Tensor


class CopyHead(nn.Module):
    """The sources of a model, and the mixture. Computed in float32."""

    def __init__(self, settings: CopyHeadSettings, d_model: int, chunk_length: int) -> None:
        super().__init__()
        self.chunk_length = chunk_length
        self.context = CopySource(d_model) if settings.context else None
        self.neighbors = CopySource(d_model) if settings.neighbors else None
        self.datastore = DatastoreSource(d_model) if settings.datastore else None

    def sources(self, inputs: Inputs) -> list[Source]:
        """Matches in all sources, and votes; empty if there is nothing to copy from."""
        m = self.chunk_length
        sources: list[Source] = []  # torch.compile cannot trace `list[Source]()`
        if self.context is not None:
            sources.append(SourceMatches(self.context, context_matches(inputs.tokens, inputs.documents, m)))
        if self.neighbors is not None and inputs.retrieves:
            windows = Windows(m, len(inputs.neighbors), inputs.neighbors.shape[1], len(inputs.tokens))
            sources.append(SourceMatches(self.neighbors, neighbor_matches(inputs, m), windows))
        if self.datastore is not None and inputs.votes is not None:
            sources.append(DatastoreVotes.of(self.datastore, inputs.votes))
        return sources

    def learns_trust(self, inputs: Inputs) -> bool:
        """Whether a text must earn trust in retrieval: outside of training, if it can copy from neighbors or the datastore."""
        return not self.training and (
            (self.neighbors is not None and inputs.retrieves)
            or (self.datastore is not None and inputs.votes is not None)
        )

    def mixture(self, hidden: Tensor, labels: Tensor, sources: list[Source]) -> Mixture:
        """The mixture's parameters for labels [B, T], from activations [B, T, D]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return _mixture(self._odds(hidden, sources).log_softmax(0), _copied(labels, sources))

    def losses(
        self, nats: Tensor, hidden: Tensor, labels: Tensor, sources: list[Source], inputs: Inputs
    ) -> tuple[Tensor, Tensor]:
        """Losses of labels [B, T] with the trust that the text before them earned, and this trust [B, T, 4] (`copy_switch.py`).

        Args:
            nats: losses with the vocabulary alone, float32 [B, T].
            hidden: activations [B, T, D].
            labels: the token after each one, int64 [B, T].
            sources: from `sources`.
            inputs: of the model.
        """
        starts = None
        if inputs.documents is not None:
            starts = document_starts(inputs.documents, self.chunk_length, labels.shape[1])
        with torch.autocast(hidden.device.type, enabled=False):
            odds, copied = self._odds(hidden, sources), _copied(labels, sources)
            each = [mixed_losses(nats, _mixture(shares, copied)) for shares in self._by_strength(odds, sources)]
            trust = trust_of(-torch.stack(each, -1), starts)
            return mixed_losses(nats, _mixture(self._shares(odds, sources, trust), copied)), trust

    def mix(
        self,
        logits: Tensor,
        hidden: Tensor,
        sources: list[Source],
        tokens: Tensor | slice = slice(None),
        trust: Tensor | None = None,
        copy_strength: Tensor | None = None,
    ) -> Tensor:
        """Log-probabilities [B, T', V] of the mixture, from the logits [B, T', V] of some tokens.

        Args:
            logits: of the vocabulary.
            hidden: activations of all tokens [B, T, D].
            sources: from `sources`.
            tokens: indices of T' of the T tokens.
            trust: in each strength of copying, float32 [B, T, 4], see `losses`; None = the gates as they are.
            copy_strength: factor of the odds of neighbors and datastore, float32 [B, T] or [B, 1]; None = 1. 0 is retrieval OFF.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            shares = self._shares(self._odds(hidden, sources, copy_strength), sources, trust)
            log_p = logits.float().log_softmax(-1) + shares[0][:, tokens, None]
            copied = torch.zeros_like(log_p)
            for share, source in zip(shares[1:], sources, strict=True):
                following, weights = (x[:, tokens] for x in source.candidates(hidden.shape[1]))
                copied = copied.scatter_add(2, following, weights * share[:, tokens, None].exp())
            # Most tokens are copied from nowhere: the smallest number instead of log 0, whose gradient would be NaN.
            return torch.logaddexp(log_p, copied.clamp(min=torch.finfo(torch.float32).tiny).log())

    def origins(
        self,
        hidden: Tensor,
        labels: Tensor,
        losses: Tensor,
        sources: list[Source],
        neighbor_length: int,
        trust: Tensor | None = None,
        copy_strength: Tensor | None = None,
    ) -> Origins:
        """Find where labels [B, T] were copied from.

        Args:
            hidden: activations [B, T, D].
            labels: int64 [B, T]; nothing votes for `IGNORED_LABEL`.
            losses: of the labels in nats, float32 [B, T].
            sources: from `sources`.
            neighbor_length: R.
            trust: see `mix`.
            copy_strength: see `mix`.
        """
        nothing, none = torch.zeros_like(losses, dtype=torch.float32), torch.full_like(labels, -1)
        if not sources:
            return Origins(nothing, none, none, none, nothing)
        num_tokens = labels.shape[1]
        with torch.autocast(hidden.device.type, enabled=False):
            copied = {}  # source -> share of the probability of a label
            shares = self._shares(self._odds(hidden, sources, copy_strength), sources, trust)
            for share, source in zip(shares[1:], sources, strict=True):
                votes = source.join(source.probability(labels), num_tokens)
                # Gate times votes over the probability of the label, exp(-loss). Rounded, it can exceed 1.
                copied[source.source] = (votes * (share + losses.float()).exp()).clamp(max=1.0)
        datastore = nothing if self.datastore is None else copied.get(self.datastore, nothing)
        index = next((n for n, source in enumerate(sources) if source.source is self.neighbors), None)
        if index is None:
            return Origins(nothing, none, none, none, datastore)
        source = sources[index]
        assert isinstance(source, SourceMatches)
        share = copied[source.source]
        lengths = source.matches.lengths.masked_fill(~source.votes(labels), -1).long()  # [N, Q, S]
        lengths, best = lengths.max(2)
        lengths, best = source.join(lengths, num_tokens, fill=-1), source.join(best, num_tokens, fill=-1)
        best = best.masked_fill(lengths < 0, -1)
        positions = (best % neighbor_length + 1).where(best >= 0, none)
        return Origins(share, lengths, best.div(neighbor_length, rounding_mode="floor"), positions, datastore)

    def _is_retrieval(self, source: Source) -> bool:
        """Whether retrieval OFF is without the source."""
        return source.source is not self.context

    def _odds(self, hidden: Tensor, sources: list[Source], copy_strength: Tensor | None = None) -> Tensor:
        """Log-odds of vocabulary (0) and sources, float32 [1 + sources, B, T], from activations [B, T, D]."""
        hidden = hidden.float()
        odds = [source.join(source.log_odds(hidden), hidden.shape[1], -torch.inf) for source in sources]
        if copy_strength is not None:
            added = copy_strength.log()
            odds = [
                row + added if self._is_retrieval(source) else row for row, source in zip(odds, sources, strict=True)
            ]
        return torch.stack([hidden.new_zeros(hidden.shape[:2]), *odds])

    def _by_strength(self, odds: Tensor, sources: list[Source]) -> Tensor:
        """Logs of the shares with each strength of copying: [4, 1 + sources, B, T]."""
        added = [[0.0, *(strength * self._is_retrieval(source) for source in sources)] for strength in STRENGTHS]
        return (odds.clamp(min=STRENGTHS[-1]) + odds.new_tensor(added)[..., None, None]).log_softmax(1)

    def _shares(self, odds: Tensor, sources: list[Source], trust: Tensor | None) -> Tensor:
        """Logs of the shares of vocabulary and sources: [1 + sources, B, T]."""
        gates = odds.log_softmax(0)
        if trust is None or not any(map(self._is_retrieval, sources)):
            return gates
        of_retrieval = odds[-sum(map(self._is_retrieval, sources)) :]  # they are the last ones
        copies = of_retrieval.amax(0) > -torch.inf  # elsewhere all strengths are OFF, to the bit
        shares = self._by_strength(odds, sources) + trust.log().movedim(-1, 0)[:, None]
        return shares.logsumexp(0).where(copies, gates)


def _copied(labels: Tensor, sources: list[Source]) -> Tensor:
    """Probability of labels [B, T] in each source: float32 [sources, B, T]."""
    copied = [source.join(source.probability(labels), labels.shape[1]) for source in sources]
    return torch.stack(copied) if copied else torch.zeros(0, *labels.shape, device=labels.device)


def _mixture(shares: Tensor, copied: Tensor) -> Mixture:
    """The mixture from logs of shares [1 + sources, B, T] and probabilities [sources, B, T]."""
    return Mixture(shares[0], (shares[1:].exp() * copied).sum(0))
