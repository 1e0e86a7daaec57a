"""Copying: next tokens that followed the same text before, mixed with those that the vocabulary predicts.

    p(w) = s_0 softmax(logits)(w) + sum over sources and lengths of s_(source, length) votes for w / all votes

There are three sources: the preceding tokens of the same document (context), the neighbors of the preceding chunk, and the whole
datastore. A position of a source votes for the token that follows it (pointer networks: Merity et al. 2017, arXiv 1609.07843; kNN-LM:
Khandelwal et al. 2020, arXiv 1911.00172). Every source votes once for each of `MATCH_LENGTHS`: at a length vote the positions at which
as many of the last tokens, or more, equal those that were read.

The shares s are a softmax of log-odds. Those of each source come from a small network, which reads how many votes there are and whether they agree,
for every source and length, and how sure the vocabulary is. It reads no activations, so it fits any model: it begins with weights that were fitted
to other text (`copy_weights.json`). Not in the paper of RETRO.

    tokens, neighbors, votes ─ counts by length ─ Evidence ─┬─ networks ─ shares ─┐
    logits ─ probability of the likeliest token ────────────┘                     ├─ mixture ─ loss
    logits ─ losses of the labels ────────────────────────────────────────────────┘

Counts are exact and need no gradient. Retrieval OFF removes the terms of neighbors and datastore: the other shares stay in
proportion. Outside of training, they are as large as they were right in the text so far (`copy_switch.py`).

Letters of the shape comments as in `retro.py`. In addition, N is a batch of texts with S positions each, Q the queries of a text, and L the
match lengths.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retro.model.copy_matches import MATCH_LENGTHS, Windows, context_matches, neighbor_matches
from retro.model.copy_sources import DatastoreVotes, Source, SourceMatches
from retro.model.copy_switch import STRENGTHS, trust_of
from retro.model.inputs import Inputs
from retro.model.loss import IGNORED_LABEL, TokenLosses, mixed_losses
from retro.model.masks import document_starts
from retro.model.network_file import NetworkFile, read_networks
from retro.model.settings import CopyHeadSettings
from retro.model.shapes import shapes_only

SOURCES = ("context", "neighbors", "datastore")
WIDTH = 16
"""Hidden units of the network of a source. 32 gain less than 0.1%."""
_FEATURES = {
    "context": 2 + 4 * len(MATCH_LENGTHS),
    "neighbors": 2 + 12 * len(MATCH_LENGTHS),
    "datastore": 2 + 12 * len(MATCH_LENGTHS),
}
"""Features that the network of a source reads. That of the context reads only its own: it is the same with retrieval OFF."""
STEP = 10.0
"""The outer weights are multiplied by it: AdamW moves each parameter by about the learning rate, too little for a log-odds."""
ALL_AGREE = 0.999
"""All votes are for one token if its share is larger."""
_TINY = torch.finfo(torch.float32).tiny


@cache
def initial_weights() -> dict[str, Tensor]:
    """The weights that every copy head begins with, by name."""
    return open_networks(Path(__file__).with_name("copy_weights.json")).weights


def open_networks(file: Path) -> NetworkFile:
    """Read networks of a file of `network_file.write_networks`.

    Raises:
        InputError: see `read_networks`.
    """
    with shapes_only():
        settings = CopyHeadSettings(context=True, neighbors=True, datastore=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in CopyHead(settings, 1).state_dict().items()}
    return read_networks(file, shapes)


class CopySource(nn.Module):
    """The network of one source: features to the log-odds of its lengths against the vocabulary.

    Each source has its own, so that one can be added or trained while the others, and retrieval OFF, stay as they are.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.zeros(WIDTH, num_features))
        self.inner_bias = nn.Parameter(torch.zeros(WIDTH))
        self.outer = nn.Parameter(torch.zeros(len(MATCH_LENGTHS), WIDTH))
        self.outer_bias = nn.Parameter(torch.zeros(len(MATCH_LENGTHS)))

    def forward(self, features: Tensor) -> Tensor:
        """Log-odds [..., L] from features, float32 [..., features]. The network of the context reads the first 34 of them."""
        read = features[..., : self.inner.shape[1]]
        return STEP * F.linear(F.gelu(F.linear(read, self.inner, self.inner_bias)), self.outer, self.outer_bias)


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
    """The networks of a model's sources, and the mixture. Computed in float32."""

    def __init__(self, settings: CopyHeadSettings, chunk_length: int) -> None:
        super().__init__()
        self.chunk_length = chunk_length
        self.context = CopySource(_FEATURES["context"]) if settings.context else None
        self.neighbors = CopySource(_FEATURES["neighbors"]) if settings.neighbors else None
        self.datastore = CopySource(_FEATURES["datastore"]) if settings.datastore else None

    @torch.no_grad()
    def initialize(self) -> None:
        """Set the weights that were fitted to other text."""
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_weights()[name])

    # --- what there is to copy ----------------------------------------------------------------------------------------

    def sources(self, inputs: Inputs) -> dict[str, Source]:
        """Matches in all sources, and votes; empty if there is nothing to copy from."""
        m = self.chunk_length
        sources: dict[str, Source] = {}
        if self.context is not None:
            sources["context"] = SourceMatches(context_matches(inputs.tokens, inputs.documents, m))
        if self.neighbors is not None and inputs.retrieves:
            windows = Windows(m, len(inputs.neighbors), inputs.neighbors.shape[1], len(inputs.tokens))
            sources["neighbors"] = SourceMatches(neighbor_matches(inputs, m), windows)
        if self.datastore is not None and inputs.votes is not None:
            sources["datastore"] = DatastoreVotes.of(inputs.votes)
        return sources

    def evidence(self, sources: dict[str, Source], labels: Tensor) -> Tensor:
        """`Evidence` of the sources about labels [B, T]: float32 [B, T, 3, L, 4]; 0 for an absent source. Without gradients."""
        absent = torch.zeros(*labels.shape, len(MATCH_LENGTHS), 4, device=labels.device)
        with torch.no_grad():
            found = [sources[name].evidence(labels) if name in sources else absent for name in SOURCES]
        return torch.stack(found, 2)

    def learns_trust(self, inputs: Inputs) -> bool:
        """Whether a text must earn trust in retrieval: outside of training, if it can copy from neighbors or the datastore."""
        return not self.training and (
            (self.neighbors is not None and inputs.retrieves)
            or (self.datastore is not None and inputs.votes is not None)
        )

    # --- shares -------------------------------------------------------------------------------------------------------

    def log_odds(self, log_top: Tensor, evidence: Tensor) -> Tensor:
        """Log-odds of the sources and lengths against the vocabulary, float32 [B, T, 3 L]; -inf where nothing votes.

        Args:
            log_top: log-probability of the vocabulary's likeliest token, float32 [B, T].
            evidence: from `evidence`.
        """
        size, agree = evidence[..., 0], evidence[..., 1]  # [B, T, 3, L]; a size is 0, or 1 and more
        votes = torch.stack((size.clamp(max=1), size / 4, agree, (agree > ALL_AGREE).float()), -1).flatten(2)
        sure = torch.stack((2 * log_top.exp() - 1, log_top.clamp(min=-4.0) / 2 + 1), -1)
        features = torch.cat((sure, votes), -1)  # [B, T, features]
        absent = size.new_zeros(*log_top.shape, len(MATCH_LENGTHS))
        networks = (self.context, self.neighbors, self.datastore)
        odds = [absent if network is None else network(features) for network in networks]
        return torch.stack(odds, 2).masked_fill(size == 0, -torch.inf).flatten(2)

    def losses(self, vocabulary: TokenLosses, labels: Tensor, evidence: Tensor) -> Tensor:
        """Losses of labels [B, T] with the shares as they are, float32 [B, T]; 0 for ignored labels.

        Args:
            vocabulary: of the labels, without gradients.
            labels: int64 [B, T].
            evidence: from `evidence`.
        """
        with torch.autocast(labels.device.type, enabled=False):
            shares = _shares(self.log_odds(vocabulary.log_top, evidence))
            return _mixed(vocabulary.nats, shares, evidence).masked_fill(labels == IGNORED_LABEL, 0.0)

    def trusted_losses(self, vocabulary: TokenLosses, evidence: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Losses with the trust that the text before each token earned, and this trust [B, T, 4] (`copy_switch.py`).

        Args:
            vocabulary: of all following tokens (`Inputs.following`).
            evidence: about these tokens, from `evidence`.
            inputs: of the model.
        """
        starts = None
        if inputs.documents is not None:
            starts = document_starts(inputs.documents, self.chunk_length, inputs.tokens.shape[1])
        with torch.autocast(evidence.device.type, enabled=False):
            odds = self.log_odds(vocabulary.log_top, evidence)
            each = [_mixed(vocabulary.nats, shares, evidence) for shares in self._by_strength(odds).unbind(-1)]
            trust = trust_of(-torch.stack(each, -1), starts)
            return _mixed(vocabulary.nats, self._trusted(odds, trust), evidence), trust

    def mix(
        self,
        logits: Tensor,
        sources: dict[str, Source],
        evidence: Tensor,
        tokens: slice = slice(None),
        trust: Tensor | None = None,
        copy_strength: Tensor | None = None,
    ) -> Tensor:
        """Log-probabilities [B, T', V] of the mixture, from the logits [B, T', V] of some tokens.

        Args:
            logits: of the vocabulary.
            sources: from `sources`, of all T tokens.
            evidence: from `evidence`, about any labels [B, T].
            tokens: T' of the T tokens.
            trust: in each strength of copying, float32 [B, T, 4], see `trusted_losses`; None = the shares as they are.
            copy_strength: factor of the odds of neighbors and datastore, float32 [B, T] or [B, 1]; None = 1. 0 is retrieval OFF.
        """
        with torch.autocast(logits.device.type, enabled=False):
            log_p = logits.float().log_softmax(-1)
            log_top = log_p.new_zeros(evidence.shape[:2])
            log_top[:, tokens] = log_p.detach().amax(-1)
            shares = self._trusted(self.log_odds(log_top, evidence), trust, copy_strength)
            by_source = shares[..., 1:].exp().unflatten(-1, (len(SOURCES), len(MATCH_LENGTHS)))
            kept, found = _kept(shares, evidence)[:, tokens, None], list[tuple[Tensor, Tensor]]()
            mixed = log_p + kept if log_p.requires_grad or kept.requires_grad else log_p.add_(kept)
            for number, name in enumerate(SOURCES):
                if name in sources:
                    candidates = sources[name].candidates(by_source[:, :, number], evidence[:, :, number, :, 0])
                    found.append((candidates[0][:, tokens], candidates[1][:, tokens]))
            return _with_copied(mixed, *(torch.cat(parts, 2) for parts in zip(*found, strict=True))) if found else mixed

    def _by_strength(self, odds: Tensor) -> Tensor:
        """Logs of the shares with each strength of copying: [B, T, 1 + 3 L, 4]."""
        moved = odds.clamp(min=STRENGTHS[-1])[..., None] + _moves(odds.device)  # [B, T, 3 L, 4]
        return F.pad(moved, (0, 0, 1, 0)).log_softmax(-2)

    def _trusted(self, odds: Tensor, trust: Tensor | None, copy_strength: Tensor | None = None) -> Tensor:
        """Logs of the shares of the vocabulary and all others, [B, T, 1 + 3 L], with trust [B, T, 4]."""
        if copy_strength is not None:
            odds = odds + copy_strength.log()[..., None].where(_of_retrieval(odds.device), 0.0)
        shares = _shares(odds)
        if trust is None:
            return shares
        mixed = self._by_strength(odds) + trust.log()[:, :, None]
        # A token that retrieval has nothing for has the shares of OFF, to the bit.
        copies = odds[..., len(MATCH_LENGTHS) :].amax(-1, keepdim=True) > -torch.inf
        return mixed.logsumexp(-1).where(copies, shares)

    # --- where tokens were copied from --------------------------------------------------------------------------------

    def origins(
        self,
        log_top: Tensor,
        labels: Tensor,
        losses: Tensor,
        sources: dict[str, Source],
        neighbor_length: int,
        trust: Tensor | None = None,
        copy_strength: Tensor | None = None,
    ) -> Origins:
        """Find where labels [B, T] were copied from.

        Args:
            log_top: see `log_odds`.
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
        with torch.autocast(losses.device.type, enabled=False):
            evidence = self.evidence(sources, labels)
            shares = self._trusted(self.log_odds(log_top, evidence), trust, copy_strength)[..., 1:]
            # Shares times votes over the probability of the label, exp(-loss). Rounded, it can exceed 1.
            parts = shares.unflatten(-1, (len(SOURCES), len(MATCH_LENGTHS))) + losses.float()[..., None, None]
            _, share, datastore = (parts.exp() * evidence[..., 2]).sum(-1).clamp(max=1.0).unbind(-1)
        source = sources.get("neighbors")
        if source is None:
            return Origins(nothing, none, none, none, datastore)
        assert isinstance(source, SourceMatches)
        matches = source.matches
        votes = (matches.following[:, None] == source.split(labels)[..., None]) & (matches.lengths >= MATCH_LENGTHS[0])
        lengths, best = matches.lengths.masked_fill(~votes, -1).long().max(2)
        num_tokens = labels.shape[1]
        lengths, best = source.join(lengths, num_tokens, fill=-1), source.join(best, num_tokens, fill=-1)
        best = best.masked_fill(lengths < 0, -1)
        positions = (best % neighbor_length + 1).where(best >= 0, none)
        return Origins(share, lengths, best.div(neighbor_length, rounding_mode="floor"), positions, datastore)


@cache
def _of_retrieval(device: torch.device) -> Tensor:
    """Which columns of log-odds are of neighbors and datastore: bool [3 L]."""
    with torch.inference_mode(False):  # kept for callers with gradients too
        return torch.arange(len(SOURCES) * len(MATCH_LENGTHS), device=device) >= len(MATCH_LENGTHS)


@cache
def _moves(device: torch.device) -> Tensor:
    """What each strength adds to log-odds, float32 [3 L, 4]."""
    with torch.inference_mode(False):
        return _of_retrieval(device)[:, None] * torch.tensor(STRENGTHS, device=device)


def _shares(odds: Tensor) -> Tensor:
    """Logs of the shares of the vocabulary and all others, [B, T, 1 + 3 L], from log-odds [B, T, 3 L]."""
    return F.pad(odds, (1, 0)).log_softmax(-1)


def _kept(shares: Tensor, evidence: Tensor) -> Tensor:
    """Log of what the vocabulary keeps, [B, T]: its own share, and that of votes for tokens that are not known."""
    unknown = (shares[..., 1:].exp() * (1 - evidence[..., 3].flatten(2))).sum(-1)
    return torch.logaddexp(shares[..., 0], unknown.clamp(min=_TINY).log())


def _with_copied(log_p: Tensor, following: Tensor, weights: Tensor) -> Tensor:
    """Add probabilities [B, T, S] of tokens [B, T, S] to log-probabilities [B, T, V], which may be changed.

    A token can occur several times. One that has no probability, since it is forbidden, gets none. Few tokens can be copied, so only their
    logarithms are computed.
    """
    copied = torch.zeros_like(log_p).scatter_add_(2, following, weights)
    # A candidate may have no probability: the smallest number instead of log 0, whose gradient would be NaN.
    added = copied.gather(2, following).clamp(min=_TINY).log()
    before = log_p.gather(2, following)
    values = torch.logaddexp(before, added).where(before > -torch.inf, before)
    if not values.requires_grad:
        return log_p.scatter_(2, following, values)
    # A token that occurs n times is written n times with the same value, so each of these has 1/n of the gradient.
    times = torch.zeros_like(log_p).scatter_add_(2, following, torch.ones_like(weights)).gather(2, following)
    return log_p.scatter(2, following, values.detach() + (values - values.detach()) / times)


def _mixed(nats: Tensor, shares: Tensor, evidence: Tensor) -> Tensor:
    """Losses [B, T] of the mixture from those of the vocabulary [B, T] and logs of shares [B, T, 1 + 3 L]."""
    copied = (shares[..., 1:].exp() * evidence[..., 2].flatten(2)).sum(-1)
    return mixed_losses(nats, _kept(shares, evidence), copied)
